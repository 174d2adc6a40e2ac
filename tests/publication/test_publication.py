"""Versions that are published and pulled in one process."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit.options import make_options
from tests.publication.weights import Policy, bits_of, train
from torch import nn

import cloudckpt
from cloudckpt.commit.log import resolve
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptCheckpointError,
    InvalidOptionError,
    StateDictMismatchError,
    StoreError,
    UnsupportedFormatError,
    UnsupportedValueError,
)
from cloudckpt.io.client import open_client
from cloudckpt.options import Options
from cloudckpt.stores import open_store
from cloudckpt.testing.damage import flip_bit
from cloudckpt.testing.faults import Fails, Faults, Rule, Tell
from cloudckpt.uri import parse_location


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}/policy"


def publish(publisher: cloudckpt.Publisher, model: nn.Module, *versions: int) -> list[Any]:
    """Train and publish, and return the states."""
    states = []
    for version in versions:
        train(model, version)
        publisher.publish(model=model, version=version)
        states.append(copy.deepcopy(model.state_dict()))
    return states


def folders(root: str) -> list[int]:
    """The versions that are committed."""
    found = cloudckpt.list_checkpoints(root)
    return sorted(int(info.uri.rpartition("-")[2]) for info in found)


def test_each_version_is_exact_and_read_in_the_least_bytes(root: str) -> None:
    """If this fails, a reader gets other bits than were published, or reads more than it lacks."""
    model, follower, late = Policy(1, size=64), Policy(2, size=64), Policy(3, size=64)
    publisher = cloudckpt.Publisher(root, anchor_every=5)
    assert repr(publisher) == f"<Publisher of {root}: nothing published>"
    whole_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    for version in range(0, 36, 3):
        train(model, version)
        report = publisher.publish(model=model, version=version)
        is_anchor = version % 15 == 0
        assert (report.version, report.is_anchor) == (version, is_anchor)
        assert f"num_bytes={report.num_bytes:_}" in repr(report)
        assert f"version={version}, is_anchor={is_anchor}" in repr(report)
        assert repr(publisher) == f"<Publisher of {root}: version {version}, anchor {version - version % 15}>"
        assert bool(report.num_bytes_unchanged) != is_anchor
        assert (report.num_bytes > 0.5 * whole_bytes) == is_anchor
        weights = cloudckpt.pull(root, model=follower)
        assert (weights.version, weights.num_versions_read) == (version, 1)
        assert weights.starts_at_anchor == (version == 0)  # later anchors have the difference, too
        assert bits_of(follower) == bits_of(model)
    assert cloudckpt.pull(root, model=follower).num_versions_read == 0
    weights = cloudckpt.pull(root, model=late)
    assert (weights.starts_at_anchor, weights.num_versions_read) == (True, 2)
    assert bits_of(late) == bits_of(model)
    assert folders(root) == [*range(15, 36, 3)]
    for version in folders(root):
        cloudckpt.verify(f"{root}/version-{version}")


def test_a_reader_that_lags_reads_the_differences_since(root: str) -> None:
    """If this fails, a reader that missed a version reads all of the model again."""
    model, lagging = Policy(1), Policy(2)
    publisher = cloudckpt.Publisher(root)
    states = publish(publisher, model, 1, 2, 3, 4)
    for version, state in enumerate(states[:3], start=1):
        lagging.load_state_dict(state)
        weights = cloudckpt.pull(root, model=lagging)
        assert (weights.starts_at_anchor, weights.num_versions_read) == (False, 4 - version)
        assert bits_of(lagging) == bits_of(model)
    lagging.load_state_dict(states[0])
    assert cloudckpt.pull(root, model=lagging, version=3).version == 3
    assert bits_of(lagging) == bits_of(with_state(states[2]))


def with_state(state: Any) -> Policy:
    model = Policy()
    model.load_state_dict(state)
    return model


def test_a_wrong_base_is_found_before_anything_is_written(root: str) -> None:
    """If this fails, a difference is added to bits that it was not made for."""
    model, reading = Policy(1), Policy(2)
    publisher = cloudckpt.Publisher(root)
    publish(publisher, model, 1)
    cloudckpt.pull(root, model=reading)
    publish(publisher, model, 2)
    with torch.no_grad():
        reading.norm.weight[3] += 1e-7
    before = bits_of(reading)
    # No anchor can be had, so that the pull ends before it writes.
    cloudckpt.delete(f"{root}/version-1")
    gone = r"version 1, which it needs, is gone\. .*start at the anchor.* publish with a new Publisher"
    with pytest.raises(CheckpointChangedError, match=gone):
        cloudckpt.pull(root, model=reading)
    assert bits_of(reading) == before
    publish(cloudckpt.Publisher(root), model, 3)
    assert cloudckpt.pull(root, model=reading).starts_at_anchor
    assert bits_of(reading) == bits_of(model)


def data_keys(root: str, version: int) -> list[str]:
    return [stored.key for stored in resolve(open_client(f"{root}/version-{version}", Options())).manifest.objects]


def test_a_damaged_difference_is_found_before_anything_is_written(root: str) -> None:
    """If this fails, damage in the bucket reaches a model, and only the end of the pull tells."""
    model, reading = Policy(1), Policy(2)
    publisher = cloudckpt.Publisher(root)
    publish(publisher, model, 1)
    cloudckpt.pull(root, model=reading)
    publish(publisher, model, 2)
    before = bits_of(reading)
    place = parse_location(f"{root}/version-2")
    (key,) = data_keys(root, 2)
    store = open_store(place, Options())
    (size_bytes,) = (info.size_bytes for info in store.list(key))
    flip_bit(store, key, bit=8 * size_bytes - 1)
    with pytest.raises(CorruptCheckpointError, match="version-2"):
        cloudckpt.pull(root, model=reading)
    assert bits_of(reading) == before


def test_the_state_is_compared_at_the_end(root: str) -> None:
    """If this fails, a model that changed while it was published gives readers bits that were never a state."""
    model = Policy(1)

    def change(event: cloudckpt.Event) -> None:
        if event.name == "save.set_up":
            with torch.no_grad():
                model.norm.weight[0] += 1

    publisher = cloudckpt.Publisher(root, options=Options(on_event=change))
    publish(publisher, model, 1)
    with pytest.raises(CorruptCheckpointError, match=r"'model\.norm\.weight' are not what was published"):
        cloudckpt.pull(root, model=Policy(2))


@pytest.mark.parametrize("held", ["the version before", "another state", "the version before, damaged"])
def test_a_difference_that_is_read_early_is_used_only_where_it_fits(root: str, held: str) -> None:
    """If this fails, a difference that is read while the model is compared reaches a model of another state."""
    model, reading = Policy(1), Policy(2)
    publisher = cloudckpt.Publisher(root)
    publish(publisher, model, 1)
    if held != "another state":
        cloudckpt.pull(root, model=reading)
    publish(publisher, model, 2)
    if held.endswith("damaged"):
        (key,) = data_keys(root, 2)
        flip_bit(open_store(parse_location(f"{root}/version-2"), Options()), key, bit=9)
        before = bits_of(reading)
        with pytest.raises(CorruptCheckpointError, match="version-2"):
            cloudckpt.pull(root, model=reading, newer_than=1)
        assert bits_of(reading) == before
        return
    weights = cloudckpt.pull(root, model=reading, newer_than=1)
    assert weights.starts_at_anchor == (held == "another state")
    assert bits_of(reading) == bits_of(model)


@pytest.mark.parametrize("num_damaged", [1, 2], ids=["its difference", "both"])
def test_damage_in_the_difference_of_an_anchor_leaves_its_whole_tensors(root: str, num_damaged: int) -> None:
    """If this fails, readers of the version before get nothing, though the whole tensors lie beside the difference."""
    model, reading = Policy(1, size=128), Policy(2, size=128)
    options = make_options(tile_bytes=4096)  # so that the two have checksums of their own
    publisher = cloudckpt.Publisher(root, anchor_every=2, options=options)
    publish(publisher, model, 1, 2)
    cloudckpt.pull(root, model=reading)
    before = bits_of(reading)
    publish(publisher, model, 3, 4)
    manifest = resolve(open_client(f"{root}/version-3", Options())).manifest
    store = open_store(parse_location(f"{root}/version-3"), Options())
    for name in ["delta.model.up.weight[0:256,0:128]", "model.up.weight"][:num_damaged]:
        (chunk,) = manifest.tensors[name].chunks
        flip_bit(store, manifest.objects[chunk.object_index].key, bit=4 * (chunk.begin + chunk.end))
    if num_damaged == 2:
        with pytest.raises(CorruptCheckpointError, match=r"version-3/.*They hold 'model\.up\.weight'"):
            cloudckpt.pull(root, model=reading)
        return
    weights = cloudckpt.pull(root, model=reading)
    assert (weights.starts_at_anchor, weights.num_versions_read) == (True, 2)
    assert before != bits_of(reading) == bits_of(model)


@pytest.mark.parametrize("change", ["name", "shape", "dtype"])
def test_a_model_of_another_form_is_refused(root: str, change: str) -> None:
    """If this fails, a difference is added to another tensor, or a cast hides that the bits are not the same."""
    publish(cloudckpt.Publisher(root), Policy(1), 1)
    reading = Policy(2, size=8 if change == "shape" else 16)
    if change == "name":
        reading.more = nn.Linear(2, 2)
    if change == "dtype":
        reading.norm.bfloat16()
    before = bits_of(reading)
    first = {
        "name": r"'model\.more\.bias', .* is no such tensor there, and float32 \[2\] in",
        "shape": r"'model\.embed\..* is bfloat16 \[\d+, 16\] there, and bfloat16 \[\d+, 8\] in",
        "dtype": r"'model\.norm\.bias', .* is float32 \[16\] there, and bfloat16 \[16\] in",
    }[change]
    with pytest.raises(StateDictMismatchError, match=rf"{first} the model\. Nothing was changed"):
        cloudckpt.pull(root, model=reading)
    assert bits_of(reading) == before


@pytest.mark.parametrize("fails", ["manifest", "safetensors"])
def test_after_a_failure_comes_an_anchor(root: str, fails: str) -> None:
    """If this fails, a version is the difference to one that nobody can read."""
    model, reading = Policy(1), Policy(2)
    faults = Faults(Rule(fault=Fails(cloudckpt.errors.AccessDeniedError), operations={"put"}, key=fails, skip=2))
    publisher = cloudckpt.Publisher(root, options=make_options(wrap_store=faults))
    publish(publisher, model, 1, 2)
    with pytest.raises(StoreError):
        publish(publisher, model, 3)
    assert cloudckpt.pull(root, model=reading).version == 2
    publish(publisher, model, 4, 5)
    cloudckpt.pull(root, model=reading, version=4)
    weights = cloudckpt.pull(root, model=with_state(Policy(5).state_dict()), version=4)
    assert (weights.starts_at_anchor, weights.num_versions_read) == (True, 1)
    cloudckpt.pull(root, model=reading)
    assert bits_of(reading) == bits_of(model)


def test_an_unknown_outcome_is_not_taken_for_another_publisher(root: str) -> None:
    """If this fails, a lost answer ends a publisher for good."""
    model, reading = Policy(1), Policy(2)

    def interrupt(event: cloudckpt.Event) -> None:
        if event.name == "save.committed" and event.uri.endswith("version-2"):
            raise KeyboardInterrupt

    publisher = cloudckpt.Publisher(root, options=Options(on_event=interrupt))
    publish(publisher, model, 1)
    with pytest.raises(CommitUnknownError):
        publish(publisher, model, 2)
    assert folders(root) == [1, 2]
    publish(publisher, model, 3, 4)
    cloudckpt.pull(root, model=reading)
    assert bits_of(reading) == bits_of(model)


def test_numbers_rise(root: str) -> None:
    """If this fails, a restarted run publishes below what readers have, and they never see it."""
    model = Policy(1)
    publisher = cloudckpt.Publisher(root)
    publish(publisher, model, 7)
    for again in (publisher, cloudckpt.Publisher(root)):
        for version in (7, 6, 0):
            with pytest.raises(CheckpointExistsError, match=r"has version 7\. Pass a higher number"):
                again.publish(model=model, version=version)
    publish(publisher, model, 8)
    with pytest.raises(InvalidOptionError):
        publisher.publish(model=model, version=-1)


def test_numbers_of_other_types_are_versions(root: str) -> None:
    """If this fails, a step that is a number of numpy or torch cannot be published or pulled."""
    publisher, model = cloudckpt.Publisher(root), Policy(1)
    for version in (np.int64(3), torch.tensor(4)):
        train(model, 1)
        publisher.publish(model=model, version=version)  # type: ignore[arg-type]  # an annotation cannot say __index__
    assert cloudckpt.pull(root, model=Policy(2), version=np.int64(3)).version == 3  # type: ignore[call-overload]
    weights = cloudckpt.pull(root, model=Policy(2), newer_than=torch.tensor(3))  # type: ignore[arg-type]
    assert type(weights.version) is int
    for wrong in (True, 5.0, "5"):
        with pytest.raises(InvalidOptionError, match="version must be an integer"):
            publisher.publish(model=model, version=wrong)  # type: ignore[arg-type]


def test_another_publisher_ends_this_one(root: str) -> None:
    """If this fails, a run that was restarted and its old self publish by turns, unnoticed."""
    model, other_model = Policy(1), Policy(2)
    old, new = cloudckpt.Publisher(root), cloudckpt.Publisher(root)
    publish(old, model, 1, 2)
    publish(new, other_model, 3)
    for version in (4, 5):
        with pytest.raises(CheckpointExistsError, match=r"another publisher has taken .* over"):
            publish(old, model, version)
    publish(new, other_model, 6)
    reading = Policy(3)
    cloudckpt.pull(root, model=reading)
    assert bits_of(reading) == bits_of(other_model)


def test_pinned_versions_stay_readable(root: str) -> None:
    """If this fails, an evaluation that pinned a version finds it gone, or without its anchor."""
    model = Policy(1)
    publisher = cloudckpt.Publisher(root, anchor_every=3, keep_chains=1, pinned=lambda version: version == 4)
    states = publish(publisher, model, *range(12))
    assert folders(root) == [3, 4, 5, 9, 10, 11]
    reading = Policy(2)
    cloudckpt.pull(root, model=reading, version=4)
    assert bits_of(reading) == bits_of(with_state(states[4]))
    with pytest.raises(CheckpointNotFoundError, match="no version 7, or retention has removed it"):
        cloudckpt.pull(root, model=reading, version=7)
    # A new publisher counts what it finds.
    publish(cloudckpt.Publisher(root, anchor_every=3, keep_chains=1), model, *range(12, 15))
    assert folders(root) == [12, 13, 14]


def test_pinned_without_an_answer_removes_nothing(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a function that forgets its return unpins all versions, and they are deleted."""
    publisher = cloudckpt.Publisher(root, anchor_every=1, keep_chains=1, pinned=lambda _version: None)  # type: ignore[arg-type,return-value]  # the mistake
    publish(publisher, Policy(1), 1, 2)
    assert folders(root) == [1, 2]
    assert "pinned must return True or False, not None" in caplog.text


def test_a_failed_removal_fails_no_version(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a publisher without the right to delete publishes nothing, or says nothing."""
    faults = Faults(Rule(fault=Fails(cloudckpt.errors.AccessDeniedError), operations={"delete"}, times=None))
    publisher = cloudckpt.Publisher(root, anchor_every=1, keep_chains=1, options=make_options(wrap_store=faults))
    publish(publisher, Policy(1), 1, 2, 3)
    assert folders(root) == [1, 2, 3]
    assert "were not removed" in caplog.text


def test_a_root_that_is_none_is_named(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a reader looks for versions inside one, or a run loads a version in place of its newest step."""
    publish(cloudckpt.Publisher(root), Policy(1), 8)
    with pytest.raises(CheckpointNotFoundError, match=rf"pass the folder of versions, '{root}', and version=8$"):
        cloudckpt.pull(f"{root}/version-8", model=Policy(2))
    with pytest.raises(CheckpointNotFoundError, match=r"the name of a step, which cloudckpt\.load takes"):
        cloudckpt.pull(f"{root}/step-8", model=Policy(2))
    assert "has steps of a run" not in caplog.text
    cloudckpt.save(f"{root}/step-9", model=Policy(1))
    publish(cloudckpt.Publisher(root), Policy(1), 9, 10)
    (told,) = [message for message in caplog.messages if "has steps of a run" in message]
    assert "such as step-9. Publish under a root of its own" in told


def test_a_reader_waits_for_the_next_version(root: str) -> None:
    """If this fails, a rollout worker polls by itself, or gets the version that it has."""
    model, reading = Policy(1), Policy(2)
    publisher = cloudckpt.Publisher(root)
    with pytest.raises(CheckpointNotFoundError, match="has no version") as caught:
        cloudckpt.pull(root, model=reading)
    assert "after" not in str(caught.value), "this pull did not wait"
    publish(publisher, model, 1)
    assert cloudckpt.pull(root, model=reading, newer_than=0).version == 1
    with pytest.raises(CheckpointNotFoundError, match="no version above 1") as caught:
        cloudckpt.pull(root, model=reading, newer_than=1, timeout_s=1e-9)
    assert str(caught.value) == f"after 1e-09 s, {root} has no version above 1"
    assert repr(caught.value) == f"CheckpointNotFoundError({str(caught.value)!r})"
    looks = Rule(fault=Tell(before=lambda _call: publish(publisher, model, 2)), operations={"list_directories"}, skip=1)
    options = make_options(wrap_store=Faults(looks))
    assert cloudckpt.pull(root, model=reading, newer_than=1, timeout_s=60, options=options).version == 2
    assert bits_of(reading) == bits_of(model)
    with pytest.raises(InvalidOptionError, match="newer_than"):
        cloudckpt.pull(root, model=reading, newer_than=1, version=2)


@pytest.mark.parametrize(
    "wrong", [{"version": None}, {"newer_than": "latest"}, {"newer_than": -1}, {"timeout_s": float("nan")}]
)
def test_wrong_arguments_of_a_pull_are_refused(root: str, wrong: dict[str, Any]) -> None:
    """If this fails, a pull waits for ever, or its error does not name the argument."""
    with pytest.raises(InvalidOptionError, match=next(iter(wrong))):
        cloudckpt.pull(root, model=Policy(1), **wrong)


@pytest.mark.parametrize(
    "settings", [{"anchor_every": 1}, {"max_copy_bytes": 1000}], ids=["no differences", "no room for a copy"]
)
def test_without_a_copy_all_versions_are_anchors(root: str, settings: dict[str, int]) -> None:
    """If this fails, a publisher keeps more memory than it was given, or versions need what nobody has kept."""
    model = Policy(1)
    publisher = cloudckpt.Publisher(root, **settings)
    publish(publisher, model, 1, 2)
    assert publisher.copy_bytes == 0
    weights = cloudckpt.pull(root, model=Policy(2))
    assert (weights.starts_at_anchor, weights.num_versions_read) == (True, 1)


def test_the_copy_is_counted(root: str) -> None:
    """If this fails, `copy_bytes` does not tell what a publisher takes; tied weights take it once."""
    model = Policy(1)
    publisher = cloudckpt.Publisher(root)
    publish(publisher, model, 1)
    assert publisher.copy_bytes == sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def test_tensors_that_change_a_lot_are_sent_whole(root: str) -> None:
    """If this fails, new weights cost twice their bytes."""
    model, reading = Policy(1), Policy(2)
    publisher = cloudckpt.Publisher(root)
    publish(publisher, model, 1)
    cloudckpt.pull(root, model=reading)
    model.load_state_dict(Policy(7).state_dict())
    report = publisher.publish(model=model, version=2)
    assert report.num_bytes_unchanged == 0
    assert cloudckpt.pull(root, model=reading).starts_at_anchor
    assert bits_of(reading) == bits_of(model)
    publish(publisher, model, 3)
    assert not cloudckpt.pull(root, model=reading).starts_at_anchor
    assert bits_of(reading) == bits_of(model)


def untie(model: Policy) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach() + 1)


def tie(model: Policy) -> None:
    model.head.weight = model.embed.weight


def to_float16(model: Policy) -> None:
    model.up.weight = nn.Parameter(model.up.weight.detach().view(torch.float16))


@pytest.mark.parametrize("first", [lambda _: None, untie], ids=["tied", "untied"])
@pytest.mark.parametrize("then", [untie, tie, to_float16])
def test_a_model_that_takes_another_form_is_published_whole(root: str, first: Any, then: Any) -> None:
    """If this fails, nobody can read a version after weights were untied or cast, until the next anchor."""
    model = Policy(1, size=64)
    first(model)
    publisher = cloudckpt.Publisher(root)
    publish(publisher, model, 1)
    then(model)
    publish(publisher, model, 2, 3)
    reading = copy.deepcopy(model)
    untie(reading)
    for parameter in reading.parameters():
        nn.init.zeros_(parameter)
    cloudckpt.pull(root, model=reading)
    assert bits_of(reading) == bits_of(model)


def test_a_reader_that_ties_other_tensors_is_told(root: str) -> None:
    """If this fails, a reader whose tied weights cannot have two values is told of damage, and pulls for ever."""
    model, reading = Policy(1), Policy(2)
    untie(model)
    publisher = cloudckpt.Publisher(root)
    for version in (1, 2):  # an anchor, and a difference
        train(model, version)
        publisher.publish(model=model, version=version)
        before = bits_of(reading)
        with pytest.raises(StateDictMismatchError, match=r"ties 'model\.embed\.weight' and 'model\.head\.weight'"):
            cloudckpt.pull(root, model=reading)
        assert bits_of(reading) == before
        reading = Policy(2)
        untie(reading)
        cloudckpt.pull(root, model=reading)
        tie(reading)


@pytest.mark.parametrize("view", [lambda: torch.zeros(1).expand(9), lambda: torch.zeros(9).to(torch.complex64).conj()])
def test_a_view_that_cannot_be_written_to_is_refused(root: str, view: Any) -> None:
    """If this fails, a difference changes one element many times, or a copy, and the pull speaks of damage."""
    model, reading = nn.Module(), nn.Module()
    model.register_buffer("mask", view().clone().resolve_conj())
    reading.register_buffer("mask", view())
    cloudckpt.Publisher(root).publish(model=model, version=1)
    with pytest.raises(UnsupportedValueError, match=r"cannot pull 'model\.mask' of .*Pull into a clone\(\) of it"):
        cloudckpt.pull(root, model=reading)


class WithViews(nn.Module):
    """Buffers that are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(20, 20)
        self.register_buffer("whole", whole)
        self.register_buffer("turned", whole.t())
        self.register_buffer("part", whole[3:5])
        self.register_buffer("bits", whole.view(torch.int32))


def test_views_of_one_memory_change_once(root: str) -> None:
    """If this fails, a difference is added once for each view of a memory, and no reader gets the version."""
    model, reading = WithViews(), WithViews()
    publisher = cloudckpt.Publisher(root)
    for version in range(1, 4):
        model.whole[4, version] += 1
        publisher.publish(model=model, version=version)
        weights = cloudckpt.pull(root, model=reading)
        assert weights.starts_at_anchor == (version == 1)
        assert bits_of(reading) == bits_of(model)


class WithState(Policy):
    """A model that has a Python object in its state."""

    note = "a"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def test_a_model_with_python_objects_is_published_whole(root: str) -> None:
    """If this fails, a reader keeps an old object beside new tensors."""
    model, reading = WithState(1), WithState(2)
    publisher = cloudckpt.Publisher(root)
    for note in ("b", "c"):
        model.note = note
        publisher.publish(model=model, version=ord(note))
        cloudckpt.pull(root, model=reading)
        assert reading.note == note
    assert bits_of(reading)[0] == bits_of(model)[0]


def test_an_anchor_is_a_checkpoint(root: str, tmp_path: Path) -> None:
    """If this fails, other calls cannot read an anchor."""
    model, reading = Policy(1), Policy(2)
    publish(cloudckpt.Publisher(root), model, 1)
    cloudckpt.load(f"{root}/version-1", model=reading)
    assert bits_of(reading) == bits_of(model)
    cloudckpt.export_checkpoint(f"{root}/version-1", tmp_path / "hub", include="model")


CALLS: dict[str, Callable[[str, Path, nn.Module], object]] = {
    "load": lambda root, _, model: cloudckpt.load(f"{root}/version-2", model=model),
    "not strict": lambda root, _, model: cloudckpt.load(f"{root}/version-2", model=model, strict=False),
    "load_latest": lambda root, _, model: cloudckpt.load_latest(root, model=model),
    "dict": lambda root, _, model: cloudckpt.load({"model": model.state_dict()}, f"{root}/version-2", no_dist=True),
    "read": lambda root, *_: cloudckpt.read(f"{root}/version-2"),
    "export": lambda root, hub, _: cloudckpt.export_checkpoint(f"{root}/version-2", hub, skip_non_tensors=True),
    "torch": lambda root, hub, _: cloudckpt.export_checkpoint(f"{root}/version-2", hub, format="torch"),
    "merge": lambda root, hub, _: cloudckpt.merge([f"{root}/version-1", f"{root}/version-2"], hub),
}


@pytest.mark.parametrize("call", CALLS)
def test_differences_are_not_taken_for_weights(call: str, root: str, tmp_path: Path) -> None:
    """If this fails, a program gets differences in place of weights, or advice that fails, too."""
    publisher, model, reading = cloudckpt.Publisher(root), Policy(1), Policy(2)
    publish(publisher, model, 1, 2)
    before = bits_of(reading)
    with pytest.raises(UnsupportedValueError) as caught:
        CALLS[call](root, tmp_path / "hub", reading)
    told = f"{root}/version-2 is version 2 of a publication, and has differences alone. cloudckpt.pull({root!r}, model="
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith(f"Or take the anchor, {root}/version-1, which has whole tensors")
    assert bits_of(reading) == before


def test_other_checkpoints_are_no_versions(root: str) -> None:
    """If this fails, a checkpoint of another kind is pulled as a version, or published over."""
    model = Policy(1)
    cloudckpt.save(f"{root}/version-3", model=model)
    for act in (
        lambda: cloudckpt.pull(root, model=model),
        lambda: cloudckpt.Publisher(root).publish(model=model, version=4),
    ):
        with pytest.raises(UnsupportedFormatError, match="is no published version"):
            act()


@pytest.mark.parametrize(
    "settings", [{"anchor_every": 0}, {"keep_chains": 0}, {"max_copy_bytes": -1}, {"anchor_every": None}]
)
def test_wrong_settings_are_refused(root: str, settings: dict[str, Any]) -> None:
    """If this fails, a publisher begins that cannot go on."""
    with pytest.raises(InvalidOptionError, match=next(iter(settings))):
        cloudckpt.Publisher(root, **settings)
    with pytest.raises(InvalidOptionError, match="publication"):
        cloudckpt.Publisher(root, options=Options(metadata={"publication": 1}))


def test_a_path_is_a_root(tmp_path: Path) -> None:
    """If this fails, publication works on buckets alone."""
    model, reading = Policy(1), Policy(2)
    publisher = cloudckpt.Publisher(tmp_path, anchor_every=2, keep_chains=1)
    for version in range(4):
        publish(publisher, model, version)
        cloudckpt.pull(tmp_path, model=reading)
        assert bits_of(reading) == bits_of(model)
    assert folders(str(tmp_path)) == [2, 3]


def test_versions_that_are_pinned_come_as_a_function(tmp_path: Path) -> None:
    """If this fails, a list of versions is accepted, and no version is ever removed."""
    with pytest.raises(InvalidOptionError, match=r"pinned must be a function that takes a version's number, not \[2\]"):
        cloudckpt.Publisher(tmp_path / "policy", pinned=[2])
