"""`Options.progress`: a bar in a terminal, nothing in a log, and no effect on the save or load."""

from __future__ import annotations

import importlib.util
import io
import logging
import re
import sys
import threading
import types
from typing import Any

import pytest
import torch
from tests.kit.in_memory import Memory, assert_holds, loaded, state_of

import cloudckpt
from cloudckpt import Options
from cloudckpt.telemetry.subscribers import is_watched

SHOWN = Options(progress=True)


class Terminal(io.StringIO):
    """Stands for a terminal, or for a log."""

    def __init__(self, *, is_terminal: bool = True, is_broken: bool = False) -> None:
        super().__init__()
        self._is_terminal, self._is_broken = is_terminal, is_broken

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        if self._is_broken:
            raise OSError(5, "the terminal is gone")
        return super().write(text)

    def lines(self) -> list[str]:
        """The last state of each line."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())
        return [line.rstrip().rpartition("\r")[2] for line in plain.split("\n") if line.strip()]


@pytest.fixture(autouse=True)
def _terminal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    for name in ("RANK", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)


def open_terminal(monkeypatch: pytest.MonkeyPatch, **settings: bool) -> Terminal:
    terminal = Terminal(**settings)
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_bar_of_a_save_and_a_load_ends_full(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a user in front of a terminal sees no bar, or one that stands still before the end."""
    terminal = open_terminal(monkeypatch)
    state: dict[str, Any] = {"w": torch.zeros(2**20)}
    cloudckpt.save(state, memory.uri("step-1"), options=SHOWN)
    cloudckpt.load(state, memory.uri("step-1"), options=SHOWN)
    with cloudckpt.CheckpointManager(memory.root, async_=False, options=SHOWN) as manager:
        manager.restore(state)
        manager.save(2, state)
    cloudckpt.async_save(state, memory.uri("step-3"), options=SHOWN).result()
    cloudckpt.save(state, memory.uri("step-4"))
    bars = [re.sub(r" ━+ (\S+ MB) .*", r", \1", line) for line in terminal.lines()]
    assert bars == [f"{what}, 4.2/4.2 MB" for what in ("save step-1", "load step-1", "load step-1", "save step-2")]
    assert not is_watched()


def test_failed_save_raises_its_error_and_ends_the_bar(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a bar swallows the error of a save, or leaves the terminal without a cursor."""
    cloudckpt.save(state_of(), memory.uri())
    terminal = open_terminal(monkeypatch)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.save(state_of(2.0), memory.uri(), options=SHOWN)
    assert terminal.getvalue().rpartition("\x1b[?25")[2].startswith("h"), "the cursor is shown again"
    assert "save" not in terminal.getvalue().rpartition("\x1b[2K")[2], "its line is cleared"
    assert not is_watched()


@pytest.mark.parametrize("where", ["a log", "another rank", "no stderr", "a command in a notebook"])
def test_bar_is_no_part_of_a_log(memory: Memory, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """If this fails, the log of a job has a line for each state of a bar, or one bar for each rank."""
    terminal = open_terminal(monkeypatch, is_terminal=where != "a log")
    if where == "another rank":
        monkeypatch.setenv("RANK", "1")
    if where == "a command in a notebook":
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    if where == "no stderr":
        monkeypatch.setattr(sys, "stderr", None)
    cloudckpt.save(state_of(), memory.uri(), no_dist=True, options=SHOWN)
    assert_holds(loaded(memory.uri(), options=SHOWN), 1.0)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("what", ["a terminal that is gone", "no rich"])
def test_bar_that_cannot_be_shown_changes_nothing(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """If this fails, a bar fails a save, or a user who asked for it is not told why there is none."""
    caplog.set_level(logging.WARNING, "cloudckpt")
    open_terminal(monkeypatch, is_broken=what != "no rich")
    if what == "no rich":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else name)
    cloudckpt.save(state_of(), memory.uri(), options=SHOWN)
    assert_holds(loaded(memory.uri(), options=SHOWN), 1.0)
    messages = [record.getMessage() for record in caplog.records]
    if what == "no rich":
        (words,) = messages
        assert words.startswith("Options.progress needs rich: install cloudckpt with its extra 'cli'")
    else:
        assert set(messages) <= {"no progress bar is shown", "the progress bar could not be ended"}
        assert messages
    assert not is_watched()


class Notebook:
    """Stands for the output of a cell: the last state of each display."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[list[tuple[str, str]]] = []
        display = types.SimpleNamespace(display=self._display)
        monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def _display(self, shown: Any, *, display_id: bool) -> Any:
        assert display_id
        states = [(repr(shown), shown._repr_html_())]
        self.states.append(states)
        return types.SimpleNamespace(update=lambda now: states.append((repr(now), now._repr_html_())))


def test_bar_of_a_notebook_ends_as_one_line(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a notebook has no bar, needs widgets for it, or keeps one that stands still for ever."""
    monkeypatch.setattr(sys, "stderr", None)
    notebook = Notebook(monkeypatch)
    state: dict[str, Any] = {"w": torch.zeros(2**20)}
    cloudckpt.save(state, memory.uri("<b>"), options=SHOWN)
    cloudckpt.load(state, memory.uri("<b>"), options=SHOWN)
    cloudckpt.async_save(state, memory.uri("step-2"), options=SHOWN).result()
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.async_save(state, memory.uri("step-2"), options=SHOWN).result()
    cloudckpt.close()
    for states in notebook.states:
        assert states[0][0].endswith(": planning")
        assert "<progress></progress>" in states[0][1]
    last = [re.sub(r" in [\d.]+ m?s, [\d.]+ [MG]B/s", "", states[-1][0]) for states in notebook.states]
    behind = "save step-2 in the background:"
    assert last == ["save <b>: 4.0 MiB", "load <b>: 4.0 MiB", f"{behind} 4.0 MiB", f"{behind} not finished"]
    assert not any(tag in states[-1][1] for states in notebook.states for tag in ("<progress", "<b>"))
    assert not is_watched()


def test_bar_counts_its_own_load_alone(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the bar of a load is full once another load of the same checkpoint has ended."""
    notebook, state = Notebook(monkeypatch), state_of()
    cloudckpt.save(state, memory.uri())

    def load_beside(event: cloudckpt.Event) -> None:
        if event.name == "load.planned":
            other = threading.Thread(target=lambda: loaded(memory.uri(), options=SHOWN))
            other.start()
            other.join()
            raise LookupError("this load fails, the other does not")

    with pytest.raises(cloudckpt.errors.CloudckptError, match="LookupError"):
        cloudckpt.load(state, memory.uri(), options=Options(progress=True, on_event=load_beside))
    mine, others = (states[-1][0] for states in notebook.states)
    assert mine.endswith(": not finished")
    assert " KiB in " in others or " B in " in others
