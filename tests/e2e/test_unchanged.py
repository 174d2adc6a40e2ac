"""Saves that name what has not changed in the checkpoint before them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.clock import set_time
from tests.kit.models import assert_same
from tests.kit.options import make_options
from tests.kit.places import LocalPlace, Place
from tests.kit.ranks import RankError, run_ranks
from tests.kit.wrapped import FaultyStore, permanent, watching
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cloudckpt
from cloudckpt.commit.attempts import new_attempt_id
from cloudckpt.commit.log import resolve
from cloudckpt.commit.references import claim_key
from cloudckpt.errors import CheckpointNotFoundError, CommitUnknownError, InvalidOptionError
from cloudckpt.format.codec import encode
from cloudckpt.format.model import REFERENCES_VERSION, Manifest
from cloudckpt.io.client import open_client
from cloudckpt.options import KIB, Options

OPTIONS = make_options(unchanged="reference", part_bytes=64 * KIB, tile_bytes=4 * KIB)
FROZEN_BYTES = 40_000


def state_of(step: int, *, num_frozen: int = 1) -> dict[str, Any]:
    """A state of which most stays as it is."""
    frozen = {f"frozen.{i}": torch.full((FROZEN_BYTES // 4,), float(i)) for i in range(num_frozen)}
    return {**frozen, "trained": torch.full((100,), float(step)), "step": step}


def load(uri: str | Path, like: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint, loaded into tensors of other values."""
    state = {name: torch.full_like(v, -1) if isinstance(v, torch.Tensor) else None for name, v in like.items()}
    cloudckpt.load(state, str(uri))
    return state


def manifest_at(uri: str | Path) -> Manifest:
    return resolve(open_client(uri, Options())).manifest


def save(root: object, step: int, state: dict[str, Any], **settings: Any) -> cloudckpt.SaveReport:
    report = cloudckpt.save(state, f"{root}/step-{step}", **{"options": OPTIONS, **settings}).report
    assert report is not None
    return report


def data_in(place: Place) -> list[str]:
    """Return the keys of all objects but manifests."""
    return [key for key in place.keys() if "/manifest" not in key]  # noqa: SIM118  # a method of the place


def claims_in(place: Place) -> list[str]:
    return [key for key in place.keys() if key.endswith(".claim")]  # noqa: SIM118  # a method of the place


@pytest.mark.every_store
def test_only_what_changed_is_sent(place: Place) -> None:
    """If this fails, a frozen tensor is sent with each save, or a load gives another value than was saved."""
    first = save(place.root, 0, state_of(0))
    for step in (1, 2, 3):
        report = save(place.root, step, state_of(step), base=f"{place.root}/step-{step - 1}")
        assert report.num_bytes_unchanged == FROZEN_BYTES
        assert report.num_bytes < first.num_bytes - FROZEN_BYTES
        assert_same(load(f"{place.root}/step-{step}", state_of(step)), state_of(step))
        cloudckpt.verify(f"{place.root}/step-{step}")
    # Each names the first step itself, so the others may go.
    assert {stored.folder for stored in manifest_at(f"{place.root}/step-3").objects} == {"", "step-0"}
    for step in (0, 1, 2):
        cloudckpt.delete(f"{place.root}/step-{step}")
    cloudckpt.gc(place.root, older_than=0, dry_run=False)
    assert_same(load(f"{place.root}/step-3", state_of(3)), state_of(3))
    cloudckpt.delete(f"{place.root}/step-3")
    for _ in range(3):
        cloudckpt.gc(place.root, older_than=0, dry_run=False)
    assert place.keys() == []


def test_the_manager_compares_with_the_newest_step(tmp_path: Path) -> None:
    """If this fails, saves send all, in the first process or after a restart, or retention removes their data."""
    for first in (0, 3):  # the second process restores
        with cloudckpt.CheckpointManager(tmp_path, keep_last=1, options=OPTIONS) as manager:
            restored = manager.restore(load_like := {**state_of(-1)})
            assert (restored is None) == (first == 0)
            if restored is not None:
                assert_same(load_like, state_of(2))
            for step in range(first, first + 3):
                handle = manager.save(step, state_of(step))
                assert isinstance(handle, cloudckpt.AsyncSave)
                report = handle.result(60).report
                assert report is not None
                assert report.num_bytes_unchanged == (FROZEN_BYTES if step else 0)
    assert [info.name for info in cloudckpt.list_checkpoints(tmp_path)] == ["step-5"]
    assert_same(load(tmp_path / "step-5", state_of(5)), state_of(5))


def test_a_manager_that_did_not_restore_compares_as_well(tmp_path: Path) -> None:
    """If this fails, a job that loads by other means sends all of its frozen tensors once more."""
    save(tmp_path, 0, state_of(0))
    with cloudckpt.CheckpointManager(tmp_path, options=OPTIONS, async_=False) as manager:
        result: Any = manager.save(1, state_of(1))
    assert result.report.num_bytes_unchanged == FROZEN_BYTES


def test_retention_removes_what_no_step_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, data of a removed step stays for ever, once the last step that named it is removed, too."""

    def run(*steps: int, frozen: float) -> None:
        with cloudckpt.CheckpointManager(tmp_path, keep_last=1, options=OPTIONS, async_=False) as manager:
            manager.restore({"trained": torch.zeros(100)})
            for step in steps:
                manager.save(step, {**state_of(step), "frozen.0": torch.full((FROZEN_BYTES // 4,), frozen)})

    run(0, 1, frozen=1.0)
    assert len(list((tmp_path / "step-0").rglob("*.safetensors"))) == 1  # step-1 names it
    run(2, 3, frozen=2.0)
    (data,) = (tmp_path / "step-2" / "data").rglob("*.safetensors")
    other = tmp_path / "other" / "step-7" / data.relative_to(tmp_path / "step-2")
    other.parent.mkdir(parents=True)
    other.write_bytes(b"of a save that is running")
    for path in tmp_path.rglob("*"):
        os.utime(path, (time.time() - 2 * 86_400,) * 2)
    set_time(monkeypatch, ahead_s=2 * 86_400)
    run(4, frozen=2.0)  # one: to this clock, the files of the file system's are two days old at once
    assert not list((tmp_path / "step-0").rglob("*.safetensors"))
    assert other.exists()  # another run's
    assert len(list((tmp_path / "step-2").rglob("*.safetensors"))) == 1
    assert_same(load(tmp_path / "step-4", state_of(4))["frozen.0"], torch.full((FROZEN_BYTES // 4,), 2.0))


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one bit": lambda tensor: tensor.index_fill(0, torch.tensor([7]), 1e-45),
    "the sign of a zero": lambda tensor: -tensor,
    "its dtype, not its bytes": lambda tensor: tensor.view(torch.int32),
    "its shape, not its bytes": lambda tensor: tensor.view(-1, 1),
    "its length": lambda tensor: tensor[:-1].clone(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_sent(tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """If this fails, a changed tensor is taken for an unchanged one, and its old value is loaded."""
    tensor = torch.zeros(10_000)
    save(tmp_path, 0, {"tensor": tensor, "other": torch.ones(5)})
    changed = {"tensor": change(tensor), "other": torch.ones(5)}
    assert save(tmp_path, 1, changed, base=tmp_path / "step-0").num_bytes_unchanged in (0, 20)
    found = load(tmp_path / "step-1", changed)
    assert found["tensor"].dtype is changed["tensor"].dtype
    assert_same(found, changed)
    assert torch.equal(torch.signbit(found["tensor"].float()), torch.signbit(changed["tensor"].float()))


def test_two_names_that_change_places_are_sent(tmp_path: Path) -> None:
    """If this fails, blocks are compared by their bytes alone, and a name gets the tensor of another one."""
    one, two = torch.ones(10_000), torch.full((10_000,), 2.0)
    save(tmp_path, 0, {"a": one, "b": two})
    assert save(tmp_path, 1, {"a": two, "b": one}, base=tmp_path / "step-0").num_bytes_unchanged == 0
    assert_same(load(tmp_path / "step-1", {"a": one, "b": one}), {"a": two, "b": one})


def test_tensors_that_lie_in_any_way_are_compared(tmp_path: Path) -> None:
    """If this fails, a strided, tied, empty or scalar tensor is left out of the comparison, or is compared wrongly."""
    base = torch.arange(10_000.0).view(100, 100)
    tied = torch.ones(5_000)

    def make() -> dict[str, Any]:
        return {
            "strided": base.t(),
            "part": base[:, :50],
            "expanded": torch.ones(1).expand(3_000),
            "tied.0": tied,
            "tied.1": tied,
            "half": torch.full((3_000,), 0.5, dtype=torch.bfloat16),
            "complex": torch.full((3_000,), 1 + 2j),
            "scalar": torch.tensor(3.0),
            "empty": torch.empty(0),
        }

    save(tmp_path, 0, make())
    report = save(tmp_path, 1, make(), base=tmp_path / "step-0")
    assert (report.num_bytes, report.num_objects) == (0, 0)
    assert_same(load(tmp_path / "step-1", make()), make())
    # One of two tied tensors is another one now.
    state = {**make(), "tied.1": torch.zeros(5_000)}
    save(tmp_path, 2, state, base=tmp_path / "step-1")
    assert_same(load(tmp_path / "step-2", state), state)
    # And tied again.
    save(tmp_path, 3, make(), base=tmp_path / "step-2")
    assert_same(load(tmp_path / "step-3", make()), make())
    cloudckpt.verify(tmp_path / "step-3")


def test_an_overwrite_does_not_refer_to_what_it_replaces(tmp_path: Path) -> None:
    """If this fails, an overwritten step loses data that it names in its own folder."""
    save(tmp_path, 0, state_of(0))
    save(tmp_path, 1, state_of(1), base=tmp_path / "step-0")  # names step-0
    report = save(tmp_path, 0, state_of(2), base=tmp_path / "step-1", overwrite=True)
    assert report.num_bytes_unchanged == 0
    for step, expected in ((0, state_of(2)), (1, state_of(1))):
        assert_same(load(tmp_path / f"step-{step}", expected), expected)
    assert {stored.folder for stored in manifest_at(tmp_path / "step-0").objects} == {""}


def test_an_object_that_mostly_changed_is_not_kept_for_a_small_part(tmp_path: Path) -> None:
    """If this fails, each step of a run keeps all data of older ones for a few bytes, and retention frees nothing."""
    small, large = torch.ones(2_000), torch.zeros(20_000)
    save(tmp_path, 0, {"small": small, "large": large})
    assert save(tmp_path, 1, {"small": small, "large": large + 1}, base=tmp_path / "step-0").num_bytes_unchanged == 0
    assert not list(tmp_path.rglob("*.claim"))
    tied = {f"tied.{i}": small for i in range(8)}
    save(tmp_path / "tied", 0, {**tied, "large": large})
    report = save(tmp_path / "tied", 1, {**tied, "large": large + 1}, base=tmp_path / "tied" / "step-0")
    assert report.num_bytes_unchanged == 0
    # What was unchanged got an object of its own, which the next save can name.
    report = save(tmp_path, 2, {"small": small, "large": large + 2}, base=tmp_path / "step-1")
    assert report.num_bytes_unchanged == small.nbytes
    assert_same(load(tmp_path / "step-2", {"small": small, "large": large}), {"small": small, "large": large + 2})


@given(st.data())
@settings(max_examples=10)
def test_each_step_of_any_run_is_what_was_saved(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """If this fails, some order of saves, overwrites, deletions and gc loses or mixes tensors."""
    root = tmp_path_factory.mktemp("run")
    draw = random.Random(data.draw(st.integers(0, 2**32 - 1)))
    state = {f"t{i}": torch.full((draw.randrange(1, 3_000),), 0.0) for i in range(4)}
    saved: dict[int, dict[str, Any]] = {}
    for moment in range(data.draw(st.integers(2, 7))):
        for name in data.draw(st.lists(st.sampled_from(sorted(state)), max_size=3)):
            state = {**state, name: state[name] + 1}
        step = data.draw(st.integers(0, 3))
        bases = sorted(saved.keys() - {step})
        base = data.draw(st.sampled_from(bases)) if bases else None
        save(root, step, state, overwrite=True, base=None if base is None else root / f"step-{base}")
        saved[step] = dict(state)
        if data.draw(st.booleans()) and saved.keys() - {step}:
            gone = data.draw(st.sampled_from(sorted(saved.keys() - {step})))
            cloudckpt.delete(root / f"step-{gone}")
            del saved[gone]
        if moment % 2:
            cloudckpt.gc(root, older_than=0, dry_run=False)
        for known, expected in saved.items():
            assert_same(load(root / f"step-{known}", expected), expected, f"step-{known} at {moment}")


def save_sharded(root: str) -> list[int]:
    """On each rank: a model of which one layer changes, sharded, and then whole on every rank."""
    unsent = []
    for kind in ("fsdp2", "replicated"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 4))
        if kind == "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        for step in range(3):
            with torch.no_grad():
                model[1].weight.fill_(step)
            base = f"{root}/{kind}/step-{step - 1}" if step else None
            uri = f"{root}/{kind}/step-{step}"
            state = {"model": get_model_state_dict(model)}
            if step == 1:
                report = cloudckpt.async_save(state, uri, base=base, options=OPTIONS).result(60).report
            else:
                report = cloudckpt.save(state, uri, base=base, options=OPTIONS).report
            assert report is not None
            unsent.append(report.num_bytes_unchanged)
        with torch.no_grad():
            model[1].weight.fill_(-1)
            model[0].weight.fill_(-1)
        cloudckpt.load({"model": get_model_state_dict(model)}, f"{root}/{kind}/step-2")
        weight = model[1].weight
        assert bool((weight.full_tensor() if kind == "fsdp2" else weight).eq(2).all())
    return unsent


def test_each_rank_compares_its_shards(local: LocalPlace) -> None:
    """If this fails, ranks send shards that have not changed, or the coordinator mixes the ranks' answers."""
    per_rank = run_ranks(save_sharded, local.root, world_size=2)
    own_bytes = sum(p.nbytes for p in [*nn.Linear(128, 128).parameters(), nn.Linear(128, 4).bias])
    together = [sum(of_ranks) for of_ranks in zip(*per_rank, strict=True)]
    small_bytes = own_bytes - 128 * 128 * 4
    # Whole tensors: the small ones lie in an object that mostly changes, until they get one of their own.
    assert together == [0, own_bytes, own_bytes, 0, own_bytes - small_bytes, own_bytes]
    # Another number of ranks finds the replicated tensors, and reads all.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 4))
    expected = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.fill_(-1)
    cloudckpt.load({"model": model.state_dict()}, f"{local.root}/fsdp2/step-2")
    assert torch.equal(model[0].weight, expected)


def test_a_base_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    """If this fails, a mistyped base costs a whole save without a word, or the error does not say what to do."""
    cloudckpt.save(state_of(0), tmp_path / "plain")
    save(tmp_path, 0, state_of(0))
    save(tmp_path / "elsewhere", 0, state_of(0))
    with pytest.raises(CheckpointNotFoundError, match=f"no checkpoint at {tmp_path}/step-9 to refer to"):
        save(tmp_path, 1, state_of(1), base=tmp_path / "step-9")
    with pytest.raises(InvalidOptionError, match=r"plain, which has no hashes .*Options\(unchanged='reference'\)"):
        save(tmp_path, 1, state_of(1), base=tmp_path / "plain")
    with pytest.raises(InvalidOptionError, match="others in its folder"):
        save(tmp_path, 1, state_of(1), base=tmp_path / "elsewhere" / "step-0")
    with pytest.raises(InvalidOptionError, match="others in its folder"):
        save(tmp_path, 0, state_of(1), base=tmp_path / "step-0", overwrite=True)
    other_tiles = make_options(unchanged="reference", tile_bytes=8 * KIB)
    with pytest.raises(InvalidOptionError, match=r"tile_bytes=4096\), and this save has 8192"):
        save(tmp_path, 1, state_of(1), base=tmp_path / "step-0", options=other_tiles)
    (tmp_path / "newest").symlink_to(tmp_path / "step-0")
    with pytest.raises(InvalidOptionError, match="by their own names"):
        save(tmp_path, 1, state_of(1), base=tmp_path / "newest")
    (tmp_path / "newest").unlink()
    with pytest.raises(InvalidOptionError, match="base cannot be used with extensions"):
        save(tmp_path, 1, state_of(1), base=tmp_path / "step-0", options=Options(extensions=[cloudckpt.Zstandard()]))
    writer = cloudckpt.ObjectStoreWriter(tmp_path / "step-1")
    with pytest.raises(InvalidOptionError, match="belong to the writer"):
        cloudckpt.save(state_of(1), storage_writer=writer, base=tmp_path / "step-0")
    with pytest.raises(InvalidOptionError, match="unchanged"):
        Options(unchanged="reference", extensions=[cloudckpt.Zstandard()])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "plain", "step-0"]
    assert not list(tmp_path.rglob("*.claim"))


def test_a_run_heals_after_damage(tmp_path: Path) -> None:
    """If this fails, each save after a damaged step names the damaged data again, and no step of the run loads."""
    with cloudckpt.CheckpointManager(tmp_path, options=OPTIONS, async_=False) as manager:
        for step in range(3):
            manager.save(step, state_of(step))
        (own,) = (tmp_path / "step-2" / "data").rglob("*.safetensors")
        own.write_bytes(bytes(own.stat().st_size))
        restored = manager.restore(state_of(-1))
        assert restored is not None
        assert restored.step == 1
        manager.save(2, state_of(2))
        manager.save(3, state_of(3))
    for name, step in (("step-2-again-1", 2), ("step-3", 3)):
        assert_same(load(tmp_path / name, state_of(step)), state_of(step))
        assert "step-2" not in {stored.folder for stored in manifest_at(tmp_path / name).objects}


def test_an_overwritten_step_whose_data_is_claimed_can_be_removed(tmp_path: Path) -> None:
    """If this fails, retention takes data that another step uses for a save that is running, and keeps the step."""
    save(tmp_path, 0, state_of(0))
    save(tmp_path, 1, state_of(1), base=tmp_path / "step-0")
    save(tmp_path, 0, state_of(5), overwrite=True)
    with cloudckpt.CheckpointManager(tmp_path, keep_last=1, options=OPTIONS, async_=False) as manager:
        manager.restore(state_of(5))
        manager.save(2, state_of(2))
        manager.wait()
        assert manager.retention is not None
        assert (manager.retention.failed, len(manager.retention.removed)) == ((), 2)
    assert_same(load(tmp_path / "step-2", state_of(2)), state_of(2))


@pytest.mark.parametrize("trouble", ["is damaged", "was saved without hashes", "is gone"])
def test_a_manager_goes_on_without_its_base(tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a run ends because an older step was damaged or removed, or sends all without a word."""
    with cloudckpt.CheckpointManager(tmp_path, options=OPTIONS, async_=False) as manager:
        manager.save(0, state_of(0))
        path = tmp_path / "step-0" / "manifest.json"
        if trouble == "is damaged":
            path.write_bytes(path.read_bytes()[:-40] + b" " * 40)
        elif trouble == "is gone":
            cloudckpt.delete(tmp_path / "step-0")
        else:
            path.write_bytes(encode(msgspec.structs.replace(manifest_at(tmp_path / "step-0"), is_referable=False)))
        manager.save(1, state_of(1))
    assert any("is saved whole, because" in record.message and "step-0" in record.message for record in caplog.records)
    assert_same(load(tmp_path / "step-1", state_of(1)), state_of(1))
    assert manifest_at(tmp_path / "step-1").version < REFERENCES_VERSION


def test_data_that_is_missing_in_the_base_is_sent(tmp_path: Path) -> None:
    """If this fails, a checkpoint is committed that names an object which is not there, or cut."""
    save(tmp_path, 0, state_of(0, num_frozen=3))
    (data,) = (tmp_path / "step-0" / "data").rglob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    report = save(tmp_path, 1, state_of(1, num_frozen=3), base=tmp_path / "step-0")
    assert report.num_bytes_unchanged == 0
    assert_same(load(tmp_path / "step-1", state_of(1, num_frozen=3)), state_of(1, num_frozen=3))


@pytest.mark.parametrize("async_", [True, False])
def test_data_that_vanishes_from_the_base_during_the_save_is_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, async_: bool
) -> None:
    """If this fails, a save is lost, or names what is gone, because an older step was removed beside it."""
    save(tmp_path, 0, state_of(0))
    (data,) = (tmp_path / "step-0" / "data").rglob("*.safetensors")

    def remove(event: cloudckpt.Event) -> None:
        if event.name == "save.written":
            data.unlink(missing_ok=True)

    arguments: dict[str, Any] = {
        "base": tmp_path / "step-0",
        "options": dataclasses.replace(OPTIONS, on_event=remove),
    }
    target = tmp_path / "step-1"
    if async_:
        report = cloudckpt.async_save(state_of(1), target, **arguments).result(60).report
    else:
        report = cloudckpt.save(state_of(1), target, **arguments).report
    assert report is not None
    assert report.num_bytes_unchanged == 0
    assert report.num_bytes > FROZEN_BYTES
    assert_same(load(target, state_of(1)), state_of(1))
    assert manifest_at(target).version < REFERENCES_VERSION
    assert not [*tmp_path.rglob("*.claim")]
    assert len([*target.rglob("*.safetensors")]) == len(manifest_at(target).objects), "the first try has left data"
    told = [record.message for record in caplog.records if "again, whole" in record.message]
    assert len(told) == 1
    assert str(data) in told[0]


def test_damage_in_the_base_is_found_and_named(tmp_path: Path) -> None:
    """If this fails, a flipped byte of a shared object loads, or the error sends the reader to the wrong folder."""
    save(tmp_path, 0, state_of(0))
    save(tmp_path, 1, state_of(1), base=tmp_path / "step-0")
    (data,) = (tmp_path / "step-0" / "data").rglob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[2_000] ^= 1
    data.write_bytes(content)
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=r"step-0/data/.*frozen\.0"):
        load(tmp_path / "step-1", state_of(1))


@pytest.mark.parametrize("operation", ["put", "list", "head", "delete"])
def test_a_save_that_fails_leaves_no_claim(local: LocalPlace, operation: str) -> None:
    """If this fails, a claim of a failed save keeps data for a day, or a failure loses what was there."""
    save(local.root, 0, state_of(0))
    before = data_in(local)
    for nth in range(12):
        stores: list[FaultyStore] = []

        def wrap(inner: Any, nth: int = nth, stores: list[FaultyStore] = stores) -> FaultyStore:
            stores.append(FaultyStore(inner))
            if len(stores) == 1:  # that of the checkpoint's own folder
                stores[0].fail(operation, skip=nth, times=1, error=lambda: permanent(operation))
            return stores[-1]

        options = make_options(unchanged="reference", tile_bytes=4 * KIB, part_bytes=64 * KIB, wrap_store=wrap)
        try:
            save(local.root, 1, state_of(1), base=f"{local.root}/step-0", options=options)
        except CommitUnknownError:  # the manifest may be there, and need its claim
            for step in (0, 1):
                with contextlib.suppress(CheckpointNotFoundError):
                    assert_same(load(f"{local.root}/step-{step}", state_of(step)), state_of(step))
            with contextlib.suppress(CheckpointNotFoundError):
                cloudckpt.delete(f"{local.root}/step-1")
        except CheckpointException:
            left = [key for key in claims_in(local) if key.endswith("/step-1.claim")]
            assert left == [] or operation == "delete"
            assert_same(load(f"{local.root}/step-0", state_of(0)), state_of(0))
        else:
            assert_same(load(f"{local.root}/step-1", state_of(1)), state_of(1))
            cloudckpt.delete(f"{local.root}/step-1")
        for _ in range(2):
            cloudckpt.gc(local.root, older_than=0, dry_run=False)
        assert data_in(local) == before


def save_and_die(root: str, event: str, nth: int) -> None:
    """Die at the `nth` event of that name."""
    seen = 0

    def die(found: cloudckpt.Event) -> None:
        nonlocal seen
        seen += found.name == event
        if found.name == event and seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    options = make_options(unchanged="reference", part_bytes=64 * KIB, tile_bytes=4 * KIB, on_event=die)
    save(root, 1, state_of(1), base=f"{root}/step-0", options=options)


EVENTS = ["save.set_up", "save.planned", "save.part_uploaded", "save.written", "save.committing", "save.committed"]


@pytest.mark.faults
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("is_deleted", [False, True], ids=["base stays", "base is deleted"])
def test_a_death_at_each_step_loses_and_leaves_nothing(local: LocalPlace, event: str, *, is_deleted: bool) -> None:
    """If this fails, a killed save leaves a claim for ever, or a checkpoint whose data is removed."""
    save(local.root, 0, state_of(0))
    with pytest.raises(RankError):
        run_ranks(save_and_die, local.root, event, 1, world_size=1)
    is_committed = event == "save.committed"
    if is_deleted:
        cloudckpt.delete(f"{local.root}/step-0")
    for _ in range(3):
        cloudckpt.gc(local.root, older_than=0, dry_run=False)
    if not is_deleted:
        assert_same(load(f"{local.root}/step-0", state_of(0)), state_of(0))
    if is_committed:
        assert_same(load(f"{local.root}/step-1", state_of(1)), state_of(1))
        return
    with pytest.raises(CheckpointNotFoundError):
        load(f"{local.root}/step-1", state_of(1))
    assert claims_in(local) == []
    if is_deleted:
        assert data_in(local) == []


def test_the_claim_comes_before_the_second_look(local: LocalPlace) -> None:
    """If this fails, a deletion between look and claim removes data that the save names."""
    save(local.root, 0, state_of(0))
    deleted: list[str] = []

    def delete_base(call: Any) -> None:
        if call.key.endswith(".claim") and not deleted:
            deleted.append(call.key)
            cloudckpt.delete(f"{local.root}/step-0")

    options = make_options(
        unchanged="reference", part_bytes=64 * KIB, tile_bytes=4 * KIB, wrap_store=watching("put", before=delete_base)
    )
    with pytest.raises(CheckpointException, match="being replaced or removed"):
        save(local.root, 1, state_of(1), base=f"{local.root}/step-0", options=options)
    assert deleted
    assert claims_in(local) == []


def test_a_removal_spares_a_claim_that_is_being_put(tmp_path: Path) -> None:
    """If this fails, a save fails that refers to a step which retention removes at that moment."""
    save(tmp_path, 0, state_of(0))
    holder = open_client(f"{tmp_path}/step-0", OPTIONS).store
    claim, data = claim_key(new_attempt_id(), "step-1"), f"data/{new_attempt_id()}/rank-0"
    claim_id, _ = holder.create_multipart(claim), holder.create_multipart(data)
    cloudckpt.delete(tmp_path / "step-0")
    assert [(upload.key, upload.upload_id) for upload in holder.list_uploads()] == [(claim, claim_id)]


def test_a_planner_of_ones_own_is_not_compared(tmp_path: Path) -> None:
    """If this fails, the hash of a tensor that a planner computes stands for another computation of it."""

    class Twice(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
            return super().transform_object(write_item, object)

    save(tmp_path, 0, state_of(0), planner=Twice())
    assert not manifest_at(tmp_path / "step-0").is_referable


def test_a_save_without_the_option_keeps_no_hashes(tmp_path: Path) -> None:
    """If this fails, every save pays for hashes, and every overwrite for a look at claims."""
    cloudckpt.save(state_of(0), tmp_path / "step-0")
    manifest = manifest_at(tmp_path / "step-0")
    assert not manifest.is_referable
    assert not any(tensor.xxh3_128s for tensor in manifest.tensors.values())
