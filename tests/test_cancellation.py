"""What a save and its handle tell each other: decided once, whoever comes first."""

from __future__ import annotations

import threading

import pytest

from cloudckpt.cancellation import Cancellation
from cloudckpt.errors import SaveCancelledError

WAIT_S = 60.0


def test_a_save_is_cancelled_or_committed_and_never_both() -> None:
    """If this fails, `cancel` says yes to a checkpoint that is committed in the same instant."""
    outcomes = set()
    for _ in range(300):
        cancellation = Cancellation("s3://bucket/run")
        start = threading.Barrier(2)
        cancelled: list[bool] = []

        def cancel(asked: Cancellation, start: threading.Barrier, to: list[bool]) -> None:
            start.wait(WAIT_S)
            to.append(asked.cancel())

        thread = threading.Thread(target=cancel, args=(cancellation, start, cancelled))
        thread.start()
        start.wait(WAIT_S)
        try:
            cancellation.seal(commits=True)
            is_committed = True
        except SaveCancelledError:
            is_committed = False
        thread.join(WAIT_S)
        assert cancelled == [not is_committed]
        outcomes.add(is_committed)
    print(outcomes)  # mostly both


def test_what_a_stopped_save_raises_is_that_it_was_cancelled() -> None:
    """If this fails, whoever cancels is told of a store's error that came of it."""
    cancellation = Cancellation("s3://bucket/run", rank=3)
    stopped: list[SaveCancelledError] = []

    def work() -> None:
        with cancellation.stopping(stopped.append):
            assert cancellation.cancel()
            raise OSError("the connection was let go")

    with pytest.raises(SaveCancelledError, match=r"s3://bucket/run was cancelled by rank 3 ") as caught:
        work()
    assert caught.value.ranks == (3,)
    assert len(stopped) == 1
    with pytest.raises(SaveCancelledError):
        cancellation.enter("uploading")
    assert cancellation.progress(staged_bytes=0).phase == "staging"
    assert cancellation.cancel([5])
    with pytest.raises(SaveCancelledError, match="ranks 3, 5"):
        cancellation.check()
