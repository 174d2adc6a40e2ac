"""Code of the user that raises, with exceptions of every class, wherever this package calls it from its threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tests.kit.in_memory import Memory
from tests.kit.options import make_options
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

import cloudckpt
from cloudckpt.background import in_flight
from cloudckpt.options import KIB

WAIT_S = 60.0
ERRORS = [
    ValueError("by the test"),
    MemoryError("by the test"),
    SystemExit("by the test"),
    KeyboardInterrupt("by the test"),
    GeneratorExit("by the test"),
    CheckpointException("by the test", {0: (ValueError("by the test"), None)}),  # type: ignore[dict-item]
]
every_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Each test ends without a save, and with no thread that it began."""
    before = set(threading.enumerate())
    for error in ERRORS:  # which each test that raises it makes longer to print
        error.__traceback__ = error.__context__ = error.__cause__ = None
    yield
    with contextlib.suppress(CheckpointException):
        cloudckpt.close(WAIT_S)
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread


def state_of(fill: float) -> dict[str, Any]:
    return {"w": torch.full((50_000,), fill)}


def options_of(**settings: Any) -> cloudckpt.Options:
    return make_options(part_bytes=64 * KIB, tile_bytes=64 * KIB, connections=2, **settings)


class Raises:
    """Raises an error once, at the event of one name or at any call."""

    def __init__(self, error: BaseException, event: str | None = None) -> None:
        self._error = error
        self._event = event
        self.has_raised = False

    def __call__(self, *args: Any) -> None:
        if not self.has_raised and (self._event is None or args[0].name == self._event):
            self.has_raised = True
            raise self._error


def assert_ends(memory: Memory, error: BaseException, begin: Callable[[], Any]) -> bool:
    """Assert that the save ends, and tells of `error` unless it is committed. Returns True if it is committed."""
    try:
        handle = begin()
        outcome = handle.exception(WAIT_S) if isinstance(handle, cloudckpt.AsyncSave) else None
    except BaseException as raised:  # noqa: BLE001  # of every class
        outcome = raised
    is_committed = "manifest.json" in memory.all_keys()
    if outcome is None:
        assert is_committed
    else:
        assert "by the test" in str(outcome), outcome
        assert isinstance(outcome, (CheckpointException, cloudckpt.CloudckptError, type(error)))
    if is_committed:
        found = state_of(0.0)
        cloudckpt.load(found, memory.uri())
        assert all(bool((tensor == 1.0).all()) for tensor in found.values())
    # Nothing is left in the way of the next save.
    in_flight.wait_for_previous()
    in_flight.forget(in_flight.find_unreported())
    cloudckpt.async_save(state_of(2.0), memory.uri("next")).result(WAIT_S)
    return is_committed


SAVES = pytest.mark.parametrize("save", [cloudckpt.save, cloudckpt.async_save])
TOLD = ("save.begun", "save.staged", "save.committed", "save.done")
"""Events whose listeners decide nothing."""
ASKED = ("save.set_up", "save.part_uploaded", "save.completing", "save.object_uploaded", "save.written")
"""Events whose listeners can end a save."""


@every_error
@SAVES
@pytest.mark.parametrize("event", [*TOLD, *ASKED, "save.committing"])
def test_a_listener_that_raises_ends_no_wait(
    memory: Memory, save: Callable[..., Any], event: str, error: BaseException
) -> None:
    """If this fails, `sys.exit()` in a listener leaves whoever asks the handle waiting for ever."""
    raises = Raises(error, event)
    is_committed = assert_ends(
        memory, error, lambda: save(state_of(1.0), memory.uri(), options=options_of(on_event=raises))
    )
    assert raises.has_raised or (save is cloudckpt.save and event == "save.staged")
    if event in ASKED:
        assert not is_committed
    elif isinstance(error, Exception) and event != "save.committing":
        assert is_committed


@pytest.mark.parametrize("error", [SystemExit("by the test"), KeyboardInterrupt("by the test")])
def test_an_exit_of_the_main_thread_is_raised(memory: Memory, error: BaseException) -> None:
    """If this fails, Ctrl-C that comes while a listener runs in the main thread is lost."""
    with pytest.raises(type(error), match="by the test"):
        cloudckpt.save(state_of(1.0), memory.uri(), options=options_of(on_event=Raises(error, "save.begun")))


@every_error
def test_a_subscriber_that_raises_changes_nothing_in_the_background(memory: Memory, error: BaseException) -> None:
    """If this fails, telemetry decides whether there is a checkpoint."""

    def raise_in_threads(_: cloudckpt.Event) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise error

    stop = cloudckpt.telemetry.subscribe(raise_in_threads)
    try:
        cloudckpt.async_save(state_of(1.0), memory.uri(), options=options_of()).result(WAIT_S)
    finally:
        stop()


@every_error
@pytest.mark.parametrize("operation", ["list", "create_multipart", "upload_part", "complete_multipart", "put"])
def test_a_store_that_raises_fails_the_save(memory: Memory, operation: str, error: BaseException) -> None:
    """If this fails, an exit in the code of a `wrap_store` is a save that never ends, or a lie."""
    memory.at().fail(operation, error=lambda: error)
    assert_ends(memory, error, lambda: cloudckpt.async_save(state_of(1.0), memory.uri(), options=options_of()))


class Stager(AsyncStager):
    """Does not stage, in one of three ways."""

    should_synchronize_after_execute = False  # type: ignore[assignment]

    def __init__(self, error: BaseException, how: str) -> None:
        self._error = error
        self._how = how

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        del state_dict
        if self._how == "raises":
            raise self._error
        future: Future[dict[str, Any]] = Future()
        if self._how == "fails":
            threading.Thread(target=future.set_exception, args=(self._error,)).start()
        return future


class Module:
    """Has no state."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        raise self._error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


class SavePlanner(DefaultSavePlanner):
    """Raises in one of its steps."""

    def __init__(self, error: BaseException, step: str) -> None:
        super().__init__()
        setattr(self, step, Raises(error))


@every_error
@pytest.mark.parametrize(
    "step", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data", "state_dict"]
)
def test_a_planner_or_object_that_raises_fails_the_save(memory: Memory, step: str, error: BaseException) -> None:
    """If this fails, a planner that exits is a save that never ends."""
    state, planner = state_of(1.0), None
    if step == "state_dict":
        state["module"] = Module(error)
    else:
        planner = SavePlanner(error, step)
    options = options_of()
    assert not assert_ends(
        memory, error, lambda: cloudckpt.async_save(state, memory.uri(), planner=planner, options=options)
    )


@every_error
@pytest.mark.parametrize("how", ["raises", "fails"])
def test_a_stager_that_raises_fails_the_save(memory: Memory, how: str, error: BaseException) -> None:
    """If this fails, a stager that exits is a save that never ends."""
    stager = Stager(error, how)
    assert not assert_ends(
        memory, error, lambda: cloudckpt.async_save(state_of(1.0), memory.uri(), async_stager=stager)
    )


def test_a_stager_whose_future_is_cancelled_fails_the_save(memory: Memory) -> None:
    """If this fails, a stager whose future is cancelled is a save that never ends."""
    future: Future[dict[str, Any]] = Future()
    stager = Stager(ValueError(), "waits")
    stager.stage = lambda _: future  # type: ignore[method-assign]
    handle = cloudckpt.async_save(state_of(1.0), memory.uri(), async_stager=stager)
    assert future.cancel()
    assert "CancelledError" in str(handle.exception(WAIT_S))


@every_error
@pytest.mark.parametrize("name", ["staged", "committed"])
def test_a_callback_of_a_future_that_raises_changes_nothing(memory: Memory, name: str, error: BaseException) -> None:
    """If this fails, a callback that exits ends the thread that copies, or the one that saves."""
    gate, begun, called = threading.Event(), threading.Event(), threading.Event()

    def hold(event: cloudckpt.Event) -> None:
        if event.name == "save.set_up":
            begun.set()
            assert gate.wait(WAIT_S)

    options = options_of(on_event=hold, async_overlap=True)
    stager = Stager(error, "waits")
    staged: Future[dict[str, Any]] = Future()
    stager.stage = lambda _: staged  # type: ignore[method-assign]
    handle = cloudckpt.async_save(state_of(1.0), memory.uri(), options=options, async_stager=stager)
    for raises in (Raises(error), lambda _: called.set()):
        getattr(handle, name).add_done_callback(raises)
    setter = threading.Thread(target=staged.set_result, args=(state_of(1.0),))
    setter.start()
    setter.join()
    gate.set()
    handle.result(WAIT_S)
    in_flight.wait_for_previous()
    assert called.is_set()
    assert in_flight.find_unreported() is None


@every_error
@pytest.mark.parametrize("event", ["load.begun", "load.planned", "load.range_read", "load.done"])
def test_a_listener_of_a_load_that_raises_ends_it(memory: Memory, event: str, error: BaseException) -> None:
    """If this fails, a load never ends, or reports success without the values."""
    cloudckpt.save(state_of(1.0), memory.uri())
    state = state_of(0.0)
    try:
        cloudckpt.load(state, memory.uri(), options=options_of(on_event=Raises(error, event)))
    except BaseException as raised:  # noqa: BLE001  # of every class
        assert "by the test" in str(raised)  # noqa: PT017
    else:
        assert all(bool((tensor == 1.0).all()) for tensor in state.values())


class LoadPlanner(DefaultLoadPlanner):
    """Raises in one of its steps."""

    def __init__(self, error: BaseException, step: str) -> None:
        super().__init__()
        setattr(self, step, Raises(error))


@every_error
@pytest.mark.parametrize(
    "step", ["read_into", "list", "create_local_plan", "finish_plan", "resolve_tensor", "commit_tensor"]
)
def test_a_store_or_planner_that_raises_fails_the_load(memory: Memory, step: str, error: BaseException) -> None:
    """If this fails, a load never ends, or reports success without the values."""
    cloudckpt.save(state_of(1.0), memory.uri())
    planner = None
    if step in ("read_into", "list"):
        memory.at().fail(step, error=lambda: error, times=100)
    else:
        planner = LoadPlanner(error, step)
    with pytest.raises((CheckpointException, type(error)), match="by the test"):
        cloudckpt.load(state_of(0.0), memory.uri(), planner=planner, options=options_of())


@every_error
@pytest.mark.parametrize("where", ["retention.removed", "retention.failed", "list", "put", "delete"])
def test_an_error_ends_one_retention_run_and_not_the_next(memory: Memory, where: str, error: BaseException) -> None:
    """If this fails, `close` waits for ever for a thread that is gone, or nothing is ever removed any more."""
    raises = Raises(error, where)
    manager = cloudckpt.CheckpointManager(memory.root, keep_last=1, options=options_of(on_event=raises))
    manager.save(0, state_of(0.0))
    manager.wait()
    if "." not in where:
        memory.at("step-0").fail(where, error=lambda: error)
    if where == "retention.failed":
        memory.at("step-0").fail("delete")
        memory.at("step-0").fail("delete", error=lambda: error)
    manager.save(1, state_of(1.0))
    manager.wait()
    if where not in ("retention.removed", "retention.failed"):
        assert manager.retention is not None
        assert all("by the test" in each.reason for each in manager.retention.failed)
        assert manager.retention.failed
    manager.save(2, state_of(2.0))
    manager.close()
    assert [info.step for info in manager.steps()] == [2]
