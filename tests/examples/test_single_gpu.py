"""The researcher's recipe is interrupted by Ctrl-C and by kill -9, and ends with the losses of an undisturbed run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cloudckpt

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_STEPS = 125

_INTERRUPTED = """
import builtins, os, runpy, signal, sys
import cloudckpt
sent, when, *sys.argv = sys.argv[1:]
show = builtins.print

def print(text, **settings):
    show(text, **settings)
    if text.startswith(when + " "):  # in the main thread, after that step's loss
        signal.raise_signal(int(sent))

def on_event(event):
    if event.name + event.uri.rpartition("/")[2] == when:  # in the save's thread
        os.kill(os.getpid(), int(sent))

builtins.print = print
cloudckpt.telemetry.subscribe(on_event)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program that gets a signal at a line that it prints, or at an event of a save."""


def run(root: Path, *, sent: int = 0, when: str = "never") -> tuple[subprocess.CompletedProcess[str], dict[int, str]]:
    """Return a run of the recipe, and its losses by step."""
    command = [sys.executable, "-c", _INTERRUPTED, str(sent), when, "examples/single_gpu.py", str(root)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    return done, {int(step): loss for step, loss in found}


@pytest.mark.slow
def test_an_interrupted_run_has_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    """If this fails, the script that a researcher copies does not resume: other data, another EMA."""
    done, losses = run(tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert [*losses] == [*range(1, NUM_STEPS + 1)]
    assert done.stderr == ""

    root = tmp_path / "interrupted"
    done, after = run(root, sent=signal.SIGINT, when="step 33")
    assert done.returncode in (-signal.SIGINT, 1), done.stderr  # 1: Python 3.12
    message = f"cloudckpt: the last committed step is 30 ({root}/step-30). Start the program again to resume"
    assert done.stderr.splitlines()[-1].startswith(message if sys.version_info >= (3, 11) else "KeyboardInterrupt")
    lives = [after]
    done, after = run(root, sent=signal.SIGKILL, when="save.committingstep-70")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.startswith("starts after step 30\n")
    lives.append(after)
    done, after = run(root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("starts after step 60\n"), "step 70 was not committed"
    lives.append(after)

    for life in lives:
        assert life == {step: losses[step] for step in life}, "bit by bit: a loss is printed with all its digits"
    assert {step for life in lives for step in life} == {*losses}

    # Python's own generator, which nobody seeds here, goes on from another state than in the undisturbed run.
    ends = [folder / f"step-{NUM_STEPS}" for folder in (tmp_path / "whole", root)]
    found = cloudckpt.compare(*ends, only=lambda name: not name.startswith("random_state"))
    assert not found.differences
    assert cloudckpt.read(ends[0], include="model.ema.n_averaged")["model"]["ema"]["n_averaged"] == NUM_STEPS
    assert cloudckpt.read(ends[0], include="extra.scaler")["extra"]["scaler"]["scale"] == 2.0**15
    kept = {info.step: info.metrics for info in cloudckpt.CheckpointManager(root).steps()}
    # Retention leaves step 70 alone for a day, because the killed save was writing there.
    assert [step for step, metrics in kept.items() if "val_loss" in metrics] == [75, 100, 125], "the three best"
    assert {*kept} == {70, 75, 100, 125}
