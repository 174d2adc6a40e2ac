"""Errors, and that they arrive on other ranks as they left."""

from __future__ import annotations

import inspect
import pickle
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt import errors
from cloudckpt._messages import MAX_MESSAGE_CHARS
from cloudckpt.commit.commit import OvertakenError
from cloudckpt.dcp.ranks.failures import failure_of
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointError,
    CheckpointNotFoundError,
    CloudckptError,
    CommitUnknownError,
    InterruptedReadError,
    RankLostError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
    make_picklable,
)

CLASSES = [getattr(errors, name) for name in errors.__all__]


def made(kind: type[CloudckptError], message: str = "what failed, on what, and what to do") -> CloudckptError:
    """An error of this class, with all that it wants to know."""
    values: dict[str, Any] = {
        "key": "s3://bucket/key",
        "operation": "put",
        "ranks": (1, 2),
        "received_bytes": 17,
        "uri": "s3://bucket/run",
    }
    wanted = inspect.signature(kind.__init__).parameters
    return kind(message, **{name: value for name, value in values.items() if name in wanted})


@pytest.mark.parametrize("kind", [*CLASSES, OvertakenError], ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[CloudckptError]) -> None:
    """If this fails, an error on one rank leaves the others hanging, or loses what it says."""
    error = made(kind)
    error.__cause__ = ValueError("the SDK's own")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is kind
        assert str(copy) == str(error)
        assert copy.args == error.args
        assert {k: v for k, v in vars(copy).items() if not k.startswith("__")} == vars(error)


class _Unpicklable(Exception):  # noqa: N818
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code} {reason}")


def test_unpicklable_error_travels_as_its_text() -> None:
    """If this fails, an SDK's error on one rank hangs all the others (and they never learn why)."""
    ours, builtin = made(AccessDeniedError), ValueError("x")
    assert make_picklable(ours) is ours
    assert make_picklable(builtin) is builtin
    replaced = make_picklable(_Unpicklable(403, reason="Forbidden"))
    assert type(replaced) is CloudckptError
    assert str(replaced) == "_Unpicklable: 403 Forbidden"


def failed_with(**causes: BaseException) -> CheckpointException:
    """Return what torch raises when these ranks fail ('rank_3' is rank 3)."""
    trace = traceback.extract_stack()
    return CheckpointException("write", {int(name[5:]): (cause, trace) for name, cause in causes.items()})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_failure_is_also_its_cause(kind: type[CloudckptError]) -> None:
    """If this fails, `except CheckpointExistsError` around a save does not catch what it names."""
    cause = made(kind)
    failure = failure_of(failed_with(rank_0=cause, rank_2=made(kind)), subject="saving s3://bucket/run", is_alone=False)
    assert isinstance(failure, CheckpointException)
    assert isinstance(failure, kind)
    assert failure.failures[0][0] is cause
    assert vars(cause).items() <= vars(failure).items()
    for copy in (pickle.loads(pickle.dumps(failure)), failure):
        assert type(copy).__name__ == kind.__name__
        assert isinstance(copy, (kind, CheckpointException))
        assert sorted(copy.failures) == [0, 2]
        assert str(copy) == str(failure)
        place = "" if kind is RankLostError else "saving s3://bucket/run failed on ranks 0, 2: "
        assert str(copy) == f"{place}{cause}"
        assert repr(copy) == f"{kind.__name__}({str(copy)!r})", "without the frames of the ranks"


def test_failure_is_told_once_and_names_ranks_only_where_there_are_several() -> None:
    """If this fails, a user of one process reads of ranks, or one error of all ranks is repeated for each."""
    missing = CheckpointNotFoundError(
        "no checkpoint is committed at s3://bucket/run: check the URI", uri="s3://bucket/run"
    )
    denied = AccessDeniedError("s3://bucket/run/data: denied", key="s3://bucket/run/data", operation="put")

    def text_of(*causes: BaseException, subject: str = "loading s3://bucket/run", is_alone: bool = False) -> str:
        failures: Any = {rank: (cause, None) for rank, cause in enumerate(causes)}
        return str(failure_of(CheckpointException("read", failures), subject=subject, is_alone=is_alone))

    assert text_of(missing, is_alone=True) == str(missing)
    assert text_of(missing, subject="pulling from s3://bucket/run", is_alone=True) == str(missing)
    base = CheckpointNotFoundError("s3://bucket/base has no checkpoint", uri="s3://bucket/base")
    assert text_of(base, is_alone=True) == f"loading s3://bucket/run failed: {base}"
    assert text_of(denied, is_alone=True) == f"loading s3://bucket/run failed: {denied}"
    assert text_of(OSError("gone"), is_alone=True) == "loading s3://bucket/run failed: OSError: gone"
    assert text_of(missing, missing) == f"loading s3://bucket/run failed on ranks 0-1: {missing}"
    lost = RankLostError("loading model of s3://bucket/run failed: rank 1 died", uri="s3://bucket/run", ranks=(1,))
    assert text_of(lost) == text_of(lost, is_alone=True) == str(lost)
    lines = text_of(missing, denied).splitlines()
    assert lines[0] == "loading s3://bucket/run failed on ranks 0-1:"
    assert lines[1:] == [f"[rank 0] CheckpointNotFoundError: {missing}", f"[rank 1] AccessDeniedError: {denied}"]
    failures: Any = {0: (denied, None)}
    earlier = failure_of(
        CheckpointException("write", failures), subject="the background save to s3://bucket/run", is_alone=True
    )
    assert text_of(earlier, subject="saving s3://bucket/next", is_alone=True) == (
        "saving s3://bucket/next did not begin, because an earlier save failed: the background save to s3://bucket/run "
        "failed: s3://bucket/run/data: denied"
    )


@pytest.mark.parametrize(
    ("causes", "common"),
    [
        ([TransientStoreError, InterruptedReadError], TransientStoreError),
        ([InterruptedReadError, StoreTimeoutError], TransientStoreError),
        ([ThrottledError, AccessDeniedError], StoreError),
        ([AccessDeniedError, CheckpointNotFoundError], CloudckptError),
        ([CommitUnknownError, OvertakenError], CommitUnknownError),
    ],
)
def test_ranks_that_failed_alike_fail_as_what_they_have_in_common(
    causes: list[type[CloudckptError]], common: type[CloudckptError]
) -> None:
    """If this fails, ``except TransientStoreError`` misses a dead store because two ranks noticed it differently."""
    for kinds in (causes, causes[::-1]):
        stack = traceback.StackSummary()
        failures: Any = {rank: (made(kind), stack) for rank, kind in enumerate(kinds)}
        failure = failure_of(CheckpointException("write", failures), subject="saving s3://bucket/run", is_alone=False)
        assert isinstance(failure, common)
        assert next(kind for kind in type(failure).__mro__ if kind in CLASSES) is common


@given(
    st.lists(
        st.text(max_size=50)
        | st.tuples(st.text(min_size=1, max_size=5), st.integers(1, 20_000)).map(lambda p: p[0] * p[1]),
        max_size=3,
    )
)
def test_messages_are_bounded_and_move_no_cursor(foreign: list[str]) -> None:
    """If this fails, a name in a manifest floods a log, or writes to the terminal of who reads the error."""
    error = CheckpointError(f"Loading {' '.join(foreign)} failed: do that", uri="s3://bucket/run")
    text = str(error)
    assert len(text) < 11 * MAX_MESSAGE_CHARS  # an escaped character takes up to ten
    if all(one.isprintable() for each in foreign for one in each):
        assert len(text) < MAX_MESSAGE_CHARS + 100
    assert all(one.isprintable() or one == "\n" for one in text)
    assert text.startswith("Loading ")
    assert text.endswith(" failed: do that")
    assert str(pickle.loads(pickle.dumps(error))) == text
