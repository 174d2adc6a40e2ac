"""Copies that are killed and told to go on: what is there is used, if it is right and of the same source."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.convert.conftest import Root
from tests.convert.states import DiedError, Mortal, bits, contents, loaded, save, store_at
from tests.kit.options import make_options
from tests.kit.wrapped import watching

import cloudckpt
from cloudckpt.errors import InvalidOptionError
from cloudckpt.options import KIB, MIB
from cloudckpt.testing import damage
from cloudckpt.testing.faults import Call, Faults, Rule, Tell

NUM_OBJECTS = 4
OPTIONS: dict[str, Any] = {"resume": True, "connections": 1}


def state_of(fill: int) -> dict[str, Any]:
    return {f"w{number}": torch.full((20_000,), 10 * fill + number) for number in range(NUM_OBJECTS)}


def saved(uri: str, fill: int = 1, *, overwrite: bool = False) -> dict[str, Any]:
    state = state_of(fill)
    save(state, uri, tile_bytes=4 * KIB, object_bytes=KIB, overwrite=overwrite)
    return state


_OBJECTS = {"put", "complete_multipart", "copy_from"}


def died(source: str, target: str, at: int, *, after: bool, writes: set[str] = _OBJECTS, **options: Any) -> None:
    """A copy that dies there."""
    mortal = make_options(**OPTIONS, **options, wrap_store=lambda inner: Mortal(inner, at, after=after, writes=writes))
    with pytest.raises(DiedError):
        cloudckpt.copy(source, target, target_options=mortal)
    assert cloudckpt.list_checkpoints(target.rpartition("/")[0]) == []


@pytest.mark.parametrize(("one", "other"), [("memory", "path"), ("path", "s3"), ("path", "gs")])
def test_a_copy_killed_at_any_object_can_be_resumed(root_of: Root, one: str, other: str) -> None:
    """If this fails, two terabytes are copied from the beginning again; or what was copied before is not looked at."""
    source = f"{root_of(one)}/step-1"
    state = saved(source)
    for at, after in ((1, True), (2, False), (NUM_OBJECTS, True)):
        target = f"{root_of(other)}/step-1"
        died(source, target, at, after=after)
        read: set[str] = set()
        seen = watching("read_into", before=lambda call, read=read: read.add(call.key))  # type: ignore[misc]
        report = cloudckpt.copy(
            source, target, options=make_options(wrap_store=seen), target_options=make_options(**OPTIONS)
        )
        num_there = at - 1 + after
        assert report.num_reused_bytes // (report.num_bytes // NUM_OBJECTS) == num_there
        of_data = {key for key in read if key.startswith("data/")}
        assert len(of_data) == NUM_OBJECTS - num_there, "what is there already was read at the source again"
        assert bits(loaded(state, target)) == bits(state)
        cloudckpt.gc(target.rpartition("/")[0], older_than=0, dry_run=False)
        assert len([key for key in contents(target) if key.startswith("data/")]) == NUM_OBJECTS
        cloudckpt.verify(target)


@pytest.mark.parametrize(("one", "other"), [("memory", "path"), ("path", "s3")])
@pytest.mark.parametrize("how", ["bit", "short", "gone"])
def test_damaged_part_of_an_earlier_copy_is_copied_again(root_of: Root, one: str, other: str, how: str) -> None:
    """If this fails, what rotted between two tries is committed under checksums that it does not have."""
    source, target = f"{root_of(one)}/step-1", f"{root_of(other)}/step-1"
    state = saved(source)
    died(source, target, 3, after=True)
    key = min(key for key in contents(target) if key.startswith("data/"))
    if how == "bit":
        damage.flip_bit(store_at(target), key, bit=8 * 100_000)
    elif how == "short":
        damage.truncate(store_at(target), key, size_bytes=50_000)
    else:
        damage.remove(store_at(target), key)
    report = cloudckpt.copy(source, target, target_options=make_options(**OPTIONS))
    assert report.num_reused_bytes // (report.num_bytes // NUM_OBJECTS) == 2
    cloudckpt.verify(target)
    assert bits(loaded(state, target)) == bits(state)


@pytest.mark.parametrize("same", [False, True], ids=["other content", "the same content"])
def test_leftovers_of_another_save_are_not_used(root_of: Root, *, same: bool) -> None:
    """If this fails, a source that is overwritten between two tries, or another checkpoint that is copied to the same
    place, is mixed with what was copied before.
    """
    root = root_of("memory")
    source, target = f"{root}/a", f"{root_of('path')}/b"
    saved(source)
    died(source, target, 3, after=True)
    state = saved(source, 1 if same else 2, overwrite=True)
    report = cloudckpt.copy(source, target, target_options=make_options(**OPTIONS))
    assert report.num_reused_bytes == 0
    assert bits(loaded(state, target)) == bits(state)


def test_two_resumed_copies_at_once_commit_one(root_of: Root) -> None:
    """If this fails, one of two copies that take up the same objects removes them under the other's manifest."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    state = saved(source)
    died(source, target, 3, after=True)

    def other(call: Call) -> None:
        if call.key == "manifest.json" and not cloudckpt.list_checkpoints(target.rpartition("/")[0]):
            cloudckpt.copy(source, target, target_options=make_options(**OPTIONS))

    meanwhile = make_options(
        **OPTIONS, wrap_store=Faults(Rule(fault=Tell(before=other), operations={"put"}, times=None))
    )
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target, target_options=meanwhile)
    cloudckpt.verify(target)
    cloudckpt.gc(target.rpartition("/")[0], older_than=0, dry_run=False)
    assert bits(loaded(state, target)) == bits(state)


@pytest.mark.parametrize(("one", "other"), [("memory", "path"), ("gs", "gs")])
def test_a_complete_copy_is_not_made_again(root_of: Root, one: str, other: str) -> None:
    """If this fails, a job that is begun again after its copy was committed fails at it, or copies all once more."""
    source, target = f"{root_of(one)}/a", f"{root_of(other)}/b"
    saved(source)
    done = cloudckpt.copy(source, target)
    before, calls = contents(target), list[Call]()
    watching = Faults(Rule(fault=Tell(before=calls.append), times=None))
    seen: list[tuple[int, int]] = []
    again = cloudckpt.copy(
        source,
        target,
        overwrite=True,
        target_options=make_options(resume=True, wrap_store=watching),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert (done.was_there, again.was_there) == (False, True)
    assert again.attempt == done.attempt
    assert again.num_reused_bytes == again.num_bytes == done.num_bytes
    assert seen[-1] == (done.num_bytes, done.num_bytes)
    assert sum(call.num_bytes for call in calls if call.operation == "read_into") == done.num_bytes
    assert contents(target) == before


@pytest.mark.parametrize("what", ["other source", "same source again", "same save again", "unreadable"])
def test_resumed_copy_leaves_another_checkpoint_alone(root_of: Root, what: str) -> None:
    """If this fails, ``resume`` says of another checkpoint that it is the copy, or replaces it unasked."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    saved(source)
    if what.endswith("source") or what == "same source again":
        cloudckpt.copy(source, target, target_options=make_options(**OPTIONS))
        saved(source, 2 if what.startswith("other") else 1, overwrite=True)
    else:
        saved(target, 2 if what.startswith("other") else 1)
    if what == "unreadable":
        damage.flip_bit(store_at(target), "manifest.json", bit=800)
    before = contents(target)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target, target_options=make_options(**OPTIONS))
    assert contents(target) == before
    report = cloudckpt.copy(source, target, overwrite=True, target_options=make_options(**OPTIONS))
    assert (report.was_there, report.num_reused_bytes) == (False, 0)
    assert cloudckpt.compare(source, target).is_same


def test_a_damaged_complete_copy_is_named_or_replaced(root_of: Root) -> None:
    """If this fails, the repeated command says that all is well of a copy that cannot be loaded any more."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    state = saved(source)
    cloudckpt.copy(source, target, target_options=make_options(**OPTIONS))
    key = min(key for key in contents(target) if key.startswith("data/"))
    damage.flip_bit(store_at(target), key, bit=8 * 20_000)
    before = contents(target)
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=re.escape(key)):
        cloudckpt.copy(source, target, target_options=make_options(**OPTIONS))
    assert contents(target) == before
    report = cloudckpt.copy(source, target, overwrite=True, target_options=make_options(**OPTIONS))
    assert (report.was_there, report.num_reused_bytes) == (False, 0)
    assert bits(loaded(state, target)) == bits(state)
    cloudckpt.verify(target)


@pytest.mark.parametrize("kind", ["s3", "gs"])
@pytest.mark.parametrize("part_bytes", [5 * MIB, 7 * MIB], ids=["the same parts", "other parts"])
def test_an_upload_killed_half_way_is_continued(root_of: Root, kind: str, part_bytes: int) -> None:
    """If this fails, an object of many gigabytes is sent from its beginning again, also where the next copy would send
    other parts; or it is finished with something else.
    """
    source, target = f"{root_of('path')}/a", f"{root_of(kind)}/b"
    state = {"w": torch.arange(4 * MIB)}
    save(state, source)
    died(source, target, 4, after=False, writes={"upload_part"}, part_bytes=5 * MIB)
    sent: list[int] = []
    counting = watching("upload_part", before=lambda call: sent.append(call.num_bytes))
    options = make_options(resume=True, connections=1, part_bytes=part_bytes, wrap_store=counting)
    report = cloudckpt.copy(source, target, target_options=options)
    assert report.num_reused_bytes == 15 * MIB
    assert sum(sent) == report.num_bytes - 15 * MIB
    cloudckpt.verify(target)
    assert bits(loaded(state, target)) == bits(state)


def test_overtaken_copy_changes_nothing(root_of: Root) -> None:
    """If this fails, a process that was cut off, and then goes on, damages the copy that was made in its place and used
    what it had sent; or makes one of its own that is none.

    The first copy is stopped at each of its steps, a second one runs from beginning to end, and the first goes on.
    """
    source = f"{root_of('path')}/a"
    state = saved(source)
    for step in itertools.count():
        target = f"{root_of('memory')}/{step}"
        count, outcomes = itertools.count(), list[object]()

        def copy(target: str = target, outcomes: Any = outcomes, **more: Any) -> None:
            try:
                outcomes.append(cloudckpt.copy(source, target, target_options=make_options(**OPTIONS, **more)))
            except cloudckpt.CloudckptError as error:
                outcomes.append(error)

        def come_between(_: cloudckpt.Event, step: int = step, count: Any = count, copy: Any = copy) -> None:
            if next(count) == step:
                copy()

        copy(on_event=come_between)
        assert any(not isinstance(outcome, Exception) for outcome in outcomes)
        assert bits(loaded(state, target)) == bits(state)
        cloudckpt.verify(target)
        if len(outcomes) == 1:
            break
    assert step > NUM_OBJECTS


def test_leftovers_of_a_copy_are_marked(root_of: Root) -> None:
    """If this fails, what was written for another purpose is taken for the same bytes."""
    source, target = f"{root_of('memory')}/a", f"{root_of('memory')}/b"
    saved(source)
    died(source, target, 3, after=True)
    attempts = {key.split("/")[1] for key in contents(target)}
    assert all(re.fullmatch(r".*-r0-c[0-9a-f]{32}", attempt) for attempt in attempts)


@pytest.mark.parametrize("call", ["save", "async_save", "import", "manager"])
def test_resume_of_a_save_is_refused(call: str, tmp_path: Path) -> None:
    """If this fails, somebody takes a save that is tried again for one that sends only what is missing."""
    options, target = cloudckpt.Options(resume=True), tmp_path / "run"
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")

    def manage() -> None:
        with cloudckpt.CheckpointManager(target, options=options) as manager:
            manager.save(1, state_of(1))

    calls = {
        "save": lambda: cloudckpt.save(state_of(1), target, options=options),
        "async_save": lambda: cloudckpt.async_save(state_of(1), target, options=options),
        "import": lambda: cloudckpt.import_checkpoint(
            tmp_path / "w.safetensors", target, format="safetensors", target_options=options
        ),
        "manager": manage,
    }
    with pytest.raises(InvalidOptionError, match=r"applies to copies: pass it as target_options of cloudckpt\.copy"):
        calls[call]()
    assert not target.exists()
