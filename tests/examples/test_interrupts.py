"""A notebook's kernel that is interrupted in the middle of a save or load, as its user does."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

WAIT_S = 30.0
SETUP = """
import signal, threading
import torch, cloudckpt
from cloudckpt.stores.base import ForwardingStore

model = torch.nn.Linear(64, 64)
held, is_interrupted = [], threading.Event()


class Gate(ForwardingStore):
    def around(self, call, action):
        if held and call.num_bytes > 1000:
            print(held.pop())
            is_interrupted.wait()
        return action()


def interrupt(*of):
    is_interrupted.set()
    signal.default_int_handler(*of)


def hold(is_awaited=False):
    is_interrupted.clear()
    held.append("the store holds a request")
    if not is_awaited:  # ipykernel sets a handler of its own for each cell
        signal.signal(signal.SIGINT, interrupt)


advanced = cloudckpt.AdvancedOptions(wrap_store=Gate)
options = cloudckpt.Options(progress=True, advanced=advanced)
"""


class Notebook:
    """A kernel, and what its cells show."""

    def __init__(self, manager: KernelManager, client: Any) -> None:
        self._manager = manager
        self._client = client

    def run(self, code: str) -> tuple[str, list[str]]:
        """Run a cell, and interrupt it once the store holds a request; return its last line and its last bars."""
        sent = self._client.execute(code)
        bars: dict[str, str] = {}
        printed = last = ""
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=WAIT_S)
            except queue.Empty:
                pytest.fail(f"the cell does not end: {code}")
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and "the store holds a request" in content["text"]:  # of a thread, so of any cell
                self._manager.interrupt_kernel()
            elif message["parent_header"].get("msg_id") != sent:
                continue
            elif kind == "stream":
                printed += content["text"]  # the kernel may send a line and its end in two messages
                last = (printed.strip().splitlines() or [""])[-1]
            elif kind in ("display_data", "update_display_data"):
                bars[content["transient"]["display_id"]] = content["data"]["text/html"]
            elif kind == "error":
                last = content["traceback"][-1].splitlines()[-1]
            elif kind == "status" and content["execution_state"] == "idle":
                return last, list(bars.values())


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        notebook = Notebook(manager, client)
        assert notebook.run(SETUP) == ("", [])
        yield notebook
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def expected(words: str, error: str = "KeyboardInterrupt") -> str:
    return f"cloudckpt: {words}" if sys.version_info >= (3, 11) else f"{error}: "


def test_save_that_a_user_interrupts_can_be_repeated(notebook: Notebook, tmp_path: Path) -> None:
    """If this fails, the next cell hangs or fails, a bar stays half full, or the last line says nothing."""
    save = f"cloudckpt.save({str(tmp_path / 'c')!r}, model=model, options=options)"
    last, bars = notebook.run(f"hold(); {save}")
    assert last == expected(f"the save to {tmp_path / 'c'} was interrupted. You can repeat it")
    assert bars == ["<div>save c: not finished </div>"]
    last, bars = notebook.run(f"_ = {save}; print(len(cloudckpt.list_checkpoints({str(tmp_path)!r})))")
    assert last == "1"
    assert "<progress" not in bars[0]


def test_load_that_a_user_interrupts_can_be_repeated(notebook: Notebook, tmp_path: Path) -> None:
    """If this fails, nobody hears that a model holds a part of a checkpoint, or the next load fails."""
    notebook.run(f"cloudckpt.save({str(tmp_path / 'c')!r}, model=model)")
    load = f"cloudckpt.load({str(tmp_path / 'c')!r}, model=model, options=options)"
    last, bars = notebook.run(f"hold(); {load}")
    assert last == expected(f"the load from {tmp_path / 'c'} was interrupted, and has filled only a part. Repeat it")
    assert bars == ["<div>load c: not finished </div>"]
    last, bars = notebook.run(f"print({load}.num_bytes_wanted)")
    assert last == "16640"
    assert "<progress" not in bars[0]


@pytest.mark.parametrize("wait", ["await handle", "handle.result()", "handle.exception()"])
def test_wait_for_a_save_that_a_user_interrupts_is_not_its_end(wait: str, notebook: Notebook, tmp_path: Path) -> None:
    """If this fails, a user does not learn that the save continues, or it does not."""
    begin = f"handle = cloudckpt.async_save({str(tmp_path / 'c')!r}, model=model, options=options)"
    last, _ = notebook.run(f"hold(is_awaited={wait == 'await handle'}); {begin}; {wait}")
    words = f"the save to {tmp_path / 'c'} continues in the background, and result() waits for it"
    assert last == expected(words, "CancelledError" if wait == "await handle" else "KeyboardInterrupt")
    last, _ = notebook.run("is_interrupted.set(); print(f'{handle.result().report.num_bytes > 0} {handle}')")
    assert last == f"True <AsyncSave to {tmp_path / 'c'}: committed>"


def test_bar_of_a_background_save_ends_in_the_cell_that_runs_then(notebook: Notebook, tmp_path: Path) -> None:
    """If this fails, a notebook that is executed by a program shows a bar for ever, for a save that is committed."""
    notebook.run(
        "opened = threading.Event()\nheld_back = cloudckpt.Options(progress=True, on_event=lambda event: "
        "event.name == 'save.committing' and opened.wait())"
    )
    _, (begun,) = notebook.run(
        f"handle = cloudckpt.async_save({str(tmp_path / 'c')!r}, model=model, options=held_back)"
    )
    assert begun.startswith("<div>save c in the background: ")
    _, bars = notebook.run("opened.set(); handle.result(); print(handle)")
    assert len(bars) == 1
    assert bars[0].startswith("<div>save c in the background: ")
    assert "<progress" not in bars[0]
