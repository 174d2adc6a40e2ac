"""An object that cannot be had at the nearer place is read from the copy of the same save, and from nothing else."""

from __future__ import annotations

import functools
import json
import logging
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.options import make_options
from tests.kit.oracles import signed
from tests.kit.ranks import on_ranks
from tests.kit.wrapped import Call, FaultyStore
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from cloudckpt.errors import CorruptCheckpointError, StoreError, StoreTimeoutError
from cloudckpt.options import Options

NUM_TENSORS = 4
LENGTH = 3000


def options_of(**settings: Any) -> Options:
    """Options that put each tensor into an object of its own."""
    return make_options(tile_bytes=4096, object_bytes=8192, part_bytes=8192, **settings)


def state_of(seed: int, *, shape: tuple[int, ...] = (LENGTH,)) -> dict[str, Any]:
    """Tensors of numbers that no other seed has."""
    return {f"t{number}": torch.full(shape, seed * 100.0 + number) for number in range(NUM_TENSORS)}


def failing(parts: Sequence[str], error: Callable[[], Exception]) -> Callable[[Any], FaultyStore]:
    """Wrap stores on which the calls for objects with these `parts` in their keys fail."""

    def find_error(call: Call) -> Exception | None:
        return error() if any(part in call.key for part in parts) else None

    return functools.partial(FaultyStore, find_error=find_error)


def eio() -> StoreError:
    return StoreError("read_into: Input/output error", key="near", operation="read_into")


def timeout() -> StoreTimeoutError:
    return StoreTimeoutError("the store did not answer", key="near", operation="read_into")


@pytest.fixture
def near(tmp_path: Path) -> Path:
    cloudckpt.save(state_of(1), tmp_path / "near", no_dist=True, options=options_of())
    return tmp_path / "near"


@pytest.fixture
def far(near: Path, tmp_path: Path) -> Path:
    cloudckpt.copy(near, tmp_path / "far")
    return tmp_path / "far"


def objects_of(place: Path) -> list[Path]:
    """The data objects in the order of the manifest, which has one for each tensor."""
    manifest = json.loads(max(place.glob("manifest*.json")).read_bytes())
    keys = [stored["key"] for stored in manifest["objects"]]
    return [place / keys[manifest["tensors"][f"t{number}"]["chunks"][0][2]] for number in range(NUM_TENSORS)]


def load(
    near: Path, far: Path, *, options: Options | None = None, far_options: Options | None = None, **settings: Any
) -> tuple[dict[str, Any], cloudckpt.LoadReport]:
    state = {name: torch.full_like(tensor, -1.0) for name, tensor in state_of(1).items()}
    reader = cloudckpt.ObjectStoreReader(
        near, options=options or options_of(), _copy=(str(far), far_options or options_of()), **settings
    )
    return state, cloudckpt.load(state, storage_reader=reader, no_dist=True)


def assert_first(state: dict[str, Any]) -> None:
    for name, tensor in state_of(1).items():
        assert torch.equal(state[name], tensor), name


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [remove, cut, damage])
def test_object_that_is_not_whole_nearby_is_read_from_the_copy(
    near: Path, far: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, one lost file of a fast tier costs all steps since the last one in the bucket."""
    victim = objects_of(near)[2]
    harm(victim)
    state, report = load(near, far)
    assert_first(state)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"reading the copy of {victim} in {far}" in warning
    assert "older" not in warning
    assert (report.uri, report.num_objects_of_copy) == (str(near), 1)


@pytest.mark.parametrize("error", [eio, timeout])
def test_device_that_fails_is_not_asked_again_for_what_it_could_not_give(
    near: Path, far: Path, error: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a dying drive ends a restore that the bucket could serve, or each of its objects is waited for."""
    raised: list[Exception] = []

    def fail() -> Exception:
        raised.append(error())
        return raised[-1]

    wrap_store = failing([path.name for path in objects_of(near)], fail)
    options = options_of(wrap_store=wrap_store, retries=0, connections=1)
    state, report = load(near, far, options=options)
    assert_first(state)
    assert report.num_objects_of_copy == NUM_TENSORS
    assert len(raised) == (1 if error is timeout else NUM_TENSORS)
    assert "reading the copy" in caplog.text


def test_copy_is_not_asked_while_the_nearer_place_is_whole(near: Path) -> None:
    """If this fails, a restore from a fast tier waits for the bucket, or fails with it."""
    state, report = load(near, Path("/proc/no-such-place"))
    assert_first(state)
    assert report.num_objects_of_copy == 0


def overwritten(near: Path, far: Path) -> None:
    del near
    cloudckpt.save(state_of(2), far, no_dist=True, overwrite=True, options=options_of())


def saved_apart(near: Path, far: Path) -> None:
    """The same values in another save."""
    del near
    shutil.rmtree(far)
    cloudckpt.save(state_of(1), far, no_dist=True, options=options_of())


def edited(near: Path, far: Path) -> None:
    """The same save, but for one chunk."""
    del near
    (path,) = far.glob("manifest*.json")
    manifest = json.loads(path.read_bytes())
    del manifest["crc32c"]
    chunks = [manifest["tensors"][name]["chunks"] for name in ("t2", "t3")]
    chunks[0][0][2], chunks[1][0][2] = chunks[1][0][2], chunks[0][0][2]
    path.write_bytes(signed(json.dumps(manifest, separators=(",", ":")).encode()))


def absent(near: Path, far: Path) -> None:
    del near
    shutil.rmtree(far)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("change", [overwritten, saved_apart, edited, absent])
def test_other_save_at_the_place_of_the_copy_is_never_read(
    near: Path,
    far: Path,
    change: Callable[[Path, Path], None],
    caplog: pytest.LogCaptureFixture,
    *,
    verify: bool,
) -> None:
    """If this fails, weights of two saves are mixed (G4)."""
    change(near, far)
    victim = objects_of(near)[2]
    victim.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{victim.name} is missing, and with it 't2'"):
        load(near, far, options=options_of(verify=verify), far_options=options_of(verify=verify))
    why = "no checkpoint is committed" if change is absent else "holds another save"
    assert re.search(f"the copy in {far} is of no use: .*{why}", caplog.text)


def test_damage_is_not_seen_without_verification_and_a_lost_object_is(near: Path, far: Path) -> None:
    """If this fails, ``verify=False`` means something else with a copy than without one."""
    damage(objects_of(near)[1])
    remove(objects_of(near)[2])
    state, report = load(near, far, options=options_of(verify=False))
    assert torch.equal(state["t2"], state_of(1)["t2"])
    assert not torch.equal(state["t1"], state_of(1)["t1"])
    assert report.num_objects_of_copy == 1


def test_trouble_at_either_place_is_not_taken_for_damage(near: Path, far: Path) -> None:
    """If this fails, a bucket that does not answer for a minute makes a job resume from an older step."""
    victim, its_copy = objects_of(near)[2], objects_of(far)[2]
    options = options_of(wrap_store=failing([victim.name], eio), retries=0)
    remove(its_copy)
    with pytest.raises(StoreError, match="Input/output error"):
        load(near, far, options=options)
    remove(victim)
    unanswered = options_of(wrap_store=failing(["manifest"], timeout), retries=0)
    with pytest.raises(StoreTimeoutError):
        load(near, far, far_options=unanswered)


def unreadable(path: Path) -> None:
    path.write_bytes(b"{}" * 200)


@pytest.mark.parametrize("harm", [remove, unreadable])
def test_manifest_that_is_not_whole_nearby_is_that_of_the_copy(
    near: Path, far: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, one damaged manifest in a fast tier costs a step that the bucket has whole."""
    harm(near / "manifest.json")
    remove(objects_of(far)[0])
    with pytest.raises(CorruptCheckpointError, match=str(far)):
        load(near, far)
    shutil.rmtree(far)
    cloudckpt.save(state_of(1), far, no_dist=True, options=options_of())
    state, report = load(near, far)
    assert_first(state)
    assert report.uri == str(far)
    assert f"reading the copy in {far}" in caplog.text


def test_trouble_with_both_manifests_is_raised_before_absence(near: Path, far: Path) -> None:
    """If this fails, a step that a bucket may well have counts as damaged because a tier has lost it."""
    remove(near / "manifest.json")
    unanswered = options_of(wrap_store=failing(["manifest"], timeout), retries=0)
    with pytest.raises(StoreTimeoutError):
        load(near, far, far_options=unanswered)


def test_step_that_is_removed_during_the_load_is_read_on_from_the_copy(near: Path, far: Path) -> None:
    """If this fails, the retention of a tier ends a restore from it."""

    def begin(event: cloudckpt.Event) -> None:
        if event.name == "load.reading":
            shutil.rmtree(near)

    state, report = load(near, far, options=options_of(on_event=begin))
    assert_first(state)
    assert report.num_objects_of_copy == NUM_TENSORS


def test_renamed_load_reads_from_the_copy(near: Path, far: Path) -> None:
    """If this fails, a copy is refused because the load sees the checkpoint under other names."""
    remove(objects_of(near)[2])
    state = {"u2": torch.zeros(LENGTH)}
    reader = cloudckpt.ObjectStoreReader(near, rename={"t2": "u2"}, _copy=(str(far), options_of()))
    cloudckpt.load(state, storage_reader=pickle.loads(pickle.dumps(reader)), no_dist=True)
    assert torch.equal(state["u2"], state_of(1)["t2"])


def test_value_that_is_believed_only_after_a_look_is_read_from_the_copy(tmp_path: Path) -> None:
    """If this fails, large values and extensions' chunks of a lost object are damage although the copy has them."""
    state = {"t": torch.zeros(10), "text": "x" * (17 << 20)}
    cloudckpt.save(state, tmp_path / "near", no_dist=True)
    cloudckpt.copy(tmp_path / "near", tmp_path / "far")
    for path in (tmp_path / "near" / "data").glob("*/*"):
        path.unlink()
    loaded = {"t": torch.ones(10), "text": ""}
    reader = cloudckpt.ObjectStoreReader(tmp_path / "near", _copy=(str(tmp_path / "far"), Options()))
    cloudckpt.load(loaded, storage_reader=reader, no_dist=True)
    assert loaded["text"] == state["text"]


@st.composite
def harms(draw: st.DrawFn) -> dict[int, Callable[[Path], None]]:
    """Harms by the numbers of objects."""
    return draw(st.dictionaries(st.integers(0, NUM_TENSORS - 1), st.sampled_from([remove, cut, damage])))


@settings(max_examples=12)
@given(nearby=harms(), farther=harms(), wanted=st.sets(st.integers(0, NUM_TENSORS - 1), min_size=1))
def test_load_succeeds_exactly_if_each_wanted_object_is_whole_somewhere(
    nearby: dict[int, Callable[[Path], None]], farther: dict[int, Callable[[Path], None]], wanted: set[int]
) -> None:
    """If this fails, a whole step is refused, or a wrong value loads (G4)."""
    with tempfile.TemporaryDirectory() as folder:
        near, far = Path(folder) / "near", Path(folder) / "far"
        cloudckpt.save(state_of(1), near, no_dist=True, options=options_of())
        cloudckpt.copy(near, far)
        for place, drawn in ((near, nearby), (far, farther)):
            for number, harm in drawn.items():
                harm(objects_of(place)[number])
        state = {f"t{number}": torch.full((LENGTH,), -1.0) for number in wanted}
        reader = cloudckpt.ObjectStoreReader(near, options=options_of(), _copy=(str(far), options_of()))
        lost = wanted & nearby.keys() & farther.keys()
        if lost:
            with pytest.raises(CorruptCheckpointError, match="|".join(f"'t{number}'" for number in lost)):
                cloudckpt.load(state, storage_reader=reader, no_dist=True)
            return
        report = cloudckpt.load(state, storage_reader=reader, no_dist=True)
        for number in wanted:
            assert torch.equal(state[f"t{number}"], state_of(1)[f"t{number}"])
        assert report.num_objects_of_copy == len(wanted & nearby.keys())


@on_ranks(2)
def test_reshard_over_places_that_ranks_see_differently(tmp_path: Path) -> None:
    """If this fails, a tier of which one host has lost its disk loads wrong shards, or leaves a rank waiting."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    whole = torch.arange(64 * 60, dtype=torch.float32).view(64, 60)
    near = tmp_path / f"host-{rank}"
    cloudckpt.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, tmp_path / "host-0", options=options_of())
    if rank == 0:
        cloudckpt.copy(tmp_path / "host-0", tmp_path / "far")
    dist.barrier()
    target = distribute_tensor(torch.zeros(64, 60), mesh, [Shard(1)])
    reader = cloudckpt.ObjectStoreReader(near, options=options_of(), _copy=(str(tmp_path / "far"), options_of()))
    report = cloudckpt.load({"w": target}, storage_reader=reader)
    assert torch.equal(target.to_local(), whole[:, 30 * rank : 30 * rank + 30])
    assert bool(report.num_objects_of_copy) == bool(rank)
