"""Threads for store calls."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import pytest

from cloudckpt._workers import Workers, each_done

_TIMEOUT_S = 60


def test_every_item_is_done_and_given_back_once():
    """A lost item would leave a tensor unfilled; a second one would finish it twice."""
    done = each_done(range(100), lambda _: None, num_threads=4, name="t", on_failure=lambda: None)
    assert sorted(done) == list(range(100))


def test_tasks_run_in_no_more_threads_than_allowed_and_carry_the_name():
    """More threads than connections would only wait for each other; unnamed ones cannot be told apart in a profile."""
    names = set()
    with Workers(3, name="cloudckpt-test") as workers:
        for _ in range(50):
            workers.submit(lambda: names.add(threading.current_thread().name))
    assert names <= {"cloudckpt-test-0", "cloudckpt-test-1", "cloudckpt-test-2"}


def test_the_first_failure_stops_what_has_not_begun_and_unblocks_what_waits():
    """A failed read must end a load at once, not after every other range was fetched or has timed out."""
    released = threading.Event()
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            raise ValueError("broken")
        assert released.wait(_TIMEOUT_S)  # as a call that waits for its next try

    with pytest.raises(ValueError, match="broken"):
        list(each_done(range(50), work, num_threads=2, name="t", on_failure=released.set))
    assert len(begun) < 50


def test_closing_the_iterator_early_ends_the_threads():
    """A planner that raises while items are finished must not leave threads writing into tensors."""
    before = threading.active_count()
    done = each_done(range(100), lambda _: None, num_threads=4, name="t", on_failure=lambda: None)
    with contextlib.closing(done):
        next(done)
    assert threading.active_count() == before


@pytest.mark.parametrize("how", ["cloudckpt.async_save(sd, uri)", "dcp.async_save(sd, storage_writer=W(uri))"])
def test_a_background_save_outlives_the_end_of_the_script(tmp_path, how):
    """A thread pool of the standard library refuses work at exit, so the last checkpoint of a script would be lost."""
    script = f"""
import torch, warnings, cloudckpt, torch.distributed.checkpoint as dcp
from cloudckpt import ObjectStoreWriter as W
warnings.filterwarnings("ignore")
uri = {str(tmp_path / "c")!r}
sd = {{f"w{{i}}": torch.full((1 << 20,), float(i)) for i in range(8)}}
{how}
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=_TIMEOUT_S)
    assert (tmp_path / "c" / "manifest.json").exists()
