"""Times of commits: drawn, read from the heads of manifests, and the order that they give to checkpoints."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import torch
from awscrt.checksums import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.clock import set_time, set_time_in_new_process
from tests.kit.in_memory import Memory, state_of
from tests.kit.wrapped import FaultyStore, permanent, transient

import cloudckpt
from cloudckpt import CheckpointManager, Options
from cloudckpt._clock import datetime_of
from cloudckpt.errors import AccessDeniedError, ObjectNotFoundError
from cloudckpt.stores import open_store
from cloudckpt.stores.base import ObjectInfo, Store
from cloudckpt.stores.memory import MemoryStore

BEGIN_NS = 1_795_403_713_000_000_000
SECOND = datetime(2026, 11, 23, 3, 15, 13, tzinfo=timezone.utc)
_names = itertools.count()


@pytest.fixture(autouse=True)
def _one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose clock stands still, as that of Amazon S3 does for a second."""
    monkeypatch.setattr(MemoryStore, "now", lambda *_: SECOND)


def save(uri: str, fill: float = 1.0, **keywords: Any) -> None:
    cloudckpt.save({"w": torch.full((3,), fill)}, uri, **keywords)


def names(root: str) -> list[str]:
    """Return them in the order of every public list, the oldest first."""
    listed = [info.name for info in cloudckpt.list_checkpoints(root)]
    newest = cloudckpt.latest(root)
    assert (newest and newest.name) == (listed[-1] if listed else None)
    assert [one.name for one in cloudckpt.list_checkpoints(root, all=True)] == listed
    return listed


def manifest_at(store: Store, key: str = "manifest.json") -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(store.read(key, max_bytes=1 << 20))
    return manifest


def rewrite(store: Store, **changes: Any) -> None:
    """Change members of a manifest, None to leave one out, and give it a right checksum."""
    members = {**manifest_at(store), **changes}
    kept = {key: value for key, value in members.items() if value is not None and key != "crc32c"}
    body = json.dumps(kept, separators=(",", ":")).encode()[:-1]
    document = body + b',"crc32c":"%08x"}' % crc32c(body)
    store.put("manifest.json", [memoryview(document)], crc32c=crc32c(document))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["step-9", "step-10", "b", "a"]), st.integers(-5, 5), st.booleans()),
        min_size=1,
        max_size=7,
    )
)
def test_the_order_is_that_of_the_commits(history: list[tuple[str, int, bool]]) -> None:
    """If this fails, a job goes on from an older checkpoint where two were committed within a second of the store."""
    root = f"memory://order-{next(_names)}"
    expected: list[str] = []
    now_ns = BEGIN_NS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStore, "now", lambda *_: SECOND)
        for number, (name, seconds, in_new_process) in enumerate(history):
            now_ns += seconds * 10**9
            (set_time_in_new_process if in_new_process else set_time)(patch, now_ns)
            cloudckpt.latest(root)  # as a job that resumes
            save(f"{root}/{name}", float(number), overwrite=True)
            expected = [*(other for other in expected if other != name), name]
            assert names(root) == expected
    state = {"w": torch.zeros(3)}
    cloudckpt.load_latest(state, root)
    assert state["w"].tolist() == [len(history) - 1] * 3


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([-(50 * 365 * 86_400), -3600, -30, 0, 30, 3600, 50 * 365 * 86_400]), max_size=6))
def test_saves_that_read_nothing_are_in_order_with_any_clock(seconds_ahead: list[int]) -> None:
    """If this fails, `latest` names an older checkpoint because another machine's clock was ahead, or is behind."""
    root = f"memory://unread-{next(_names)}"
    with pytest.MonkeyPatch.context() as patch:
        for number, ahead_s in enumerate(seconds_ahead):
            moment = SECOND + timedelta(seconds=60 * number)
            patch.setattr(MemoryStore, "now", lambda *_, moment=moment: moment)
            own_ns = BEGIN_NS + (60 * number + ahead_s) * 10**9
            set_time_in_new_process(patch, max(own_ns, 0))
            save(f"{root}/{'afedcb'[number]}")
        assert names(root) == ["afedcb"[number] for number in range(len(seconds_ahead))]
        for info in cloudckpt.list_checkpoints(root):
            assert timedelta(0) <= info.committed_at - SECOND < timedelta(minutes=len(seconds_ahead))


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_own_clock_counts_if_the_store_has_no_times(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """If this fails, checkpoints on a file system that gives files the year 1970 are from that year."""
    monkeypatch.setattr(MemoryStore, "now", lambda *_: datetime.fromtimestamp(0, timezone.utc))
    set_time(monkeypatch, BEGIN_NS + ahead_s * 10**9)
    save(memory.uri("a"))
    assert manifest_at(memory.at("a"))["committed_at_ns"] == BEGIN_NS + ahead_s * 10**9


def test_upload_of_hours_is_committed_at_the_own_time(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a long save counts as older than what was committed meanwhile: S3 shows when an upload began."""
    set_time(monkeypatch, BEGIN_NS + 3 * 3600 * 10**9)
    real_s = time.monotonic
    monkeypatch.setattr("cloudckpt.pipeline.draft.time.monotonic", lambda: real_s() + hours_passed * 3600)
    hours_passed = 0
    listed = FaultyStore.list

    def list_later(self: FaultyStore, prefix: str = "") -> Iterator[ObjectInfo]:
        nonlocal hours_passed
        hours_passed = 3 if prefix.startswith("data/") else hours_passed
        return listed(self, prefix)

    monkeypatch.setattr(FaultyStore, "list", list_later)
    save(memory.uri("a"))
    assert manifest_at(memory.at("a"))["committed_at_ns"] == BEGIN_NS + 3 * 3600 * 10**9


def test_a_manager_takes_the_later_of_one_second(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, retention removes the later of two steps, or a restart takes the older one."""
    begun_ns = BEGIN_NS

    def manager() -> CheckpointManager:
        return CheckpointManager(memory.root, keep_last=1, async_=False, no_dist=True)

    for step in (10, 9, 7, 8):
        begun_ns -= 60 * 10**9
        set_time_in_new_process(monkeypatch, begun_ns)
        one = manager()
        one.restore(state_of())
        one.save(step, state_of(float(step)))
        one.wait(60)
        assert [info.step for info in one.steps()] == [step]
        assert [one.name for one in cloudckpt.list_checkpoints(memory.root, all=True) if one.state == "committed"] == [
            f"step-{step}"
        ]
    restored = manager().restore(state_of())
    assert restored is not None
    assert restored.step == 8


def test_manifests_without_a_time_have_that_of_the_store(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a run that began with format 1.0 loses its order, or cannot be listed."""
    set_time(monkeypatch, BEGIN_NS)  # that of the machine may be more than a day ahead of the clock below
    moments = {"step-9": 2, "step-10": 1, "step-8": 1}
    for name, minute in moments.items():
        save(memory.uri(name))
        monkeypatch.setattr(MemoryStore, "now", lambda *_, minute=minute: SECOND + timedelta(minutes=minute))
        rewrite(memory.at(name), version=[1, 0], committed_at_ns=None)
    assert names(memory.root) == ["step-8", "step-10", "step-9"]
    # The writer's clock is behind that of the store; it has listed them.
    set_time(monkeypatch, BEGIN_NS - 3600 * 10**9)
    save(memory.uri("step-7"))
    assert names(memory.root)[-1] == "step-7"


def denied() -> AccessDeniedError:
    return AccessDeniedError("no", key="memory://x", operation="read_into")


def gone() -> ObjectNotFoundError:
    return ObjectNotFoundError("gone", key="memory://x", operation="read_into")


@pytest.mark.parametrize(
    ("error", "times", "expected"),
    [
        (denied, 1, "error"),
        (lambda: permanent("read_into"), 1, "error"),
        (gone, 1, "manifest"),
        (gone, 2, "manifest"),
        (gone, 99, "store"),
        (lambda: transient("read_into"), 1, "error"),
    ],
)
def test_a_damaged_head_gives_the_time_of_the_store(
    memory: Memory, error: Callable[[], Exception], times: int, expected: str
) -> None:
    """If this fails, one answer without sense hides a checkpoint or puts it elsewhere in the order for good."""
    save(memory.uri("step-1"))
    manager = CheckpointManager(memory.root, options=Options(retries=0))

    def look() -> datetime:
        found = manager.latest()
        assert found is not None
        return found.committed_at

    committed_at = datetime_of(manifest_at(memory.at("step-1"))["committed_at_ns"])
    store = memory.at("step-1")
    store.fail("read_into", key_part="manifest", error=error, times=times)
    if expected == "error":
        with pytest.raises(cloudckpt.errors.StoreError):
            look()
    else:
        assert look() == (SECOND if expected == "store" else committed_at)
    if times < 99:
        assert look() == committed_at, "a failure is remembered"


def test_copies_keep_the_order() -> None:
    """If this fails, a job that resumes from a copied run takes the checkpoint that was copied last."""
    root = f"memory://copies-{next(_names)}"
    for name in ("step-10", "step-9", "b", "a"):
        save(f"{root}/here/{name}")
    rewrite(open_store(f"{root}/here/step-10", Options()), version=[1, 0], committed_at_ns=None)
    order = names(f"{root}/here")
    for name in sorted(order):
        cloudckpt.copy(f"{root}/here/{name}", f"{root}/there/{name}")
        resumed = Options(resume=True)
        assert cloudckpt.copy(f"{root}/here/{name}", f"{root}/there/{name}", target_options=resumed).was_there
    assert names(f"{root}/there") == order
    copied = manifest_at(open_store(f"{root}/there/step-10", Options()))
    assert (copied["version"], datetime_of(copied["committed_at_ns"])) == ([1, 4], SECOND)
