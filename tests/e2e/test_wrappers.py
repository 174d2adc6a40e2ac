"""Tensors that consist of others: saved part by part, and the same to the bit after a load, on any number of ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from awscrt.checksums import crc32c
from tests import scaled
from tests.kit.places import LocalPlace
from tests.kit.ranks import on_ranks, run_ranks
from tests.scaled import Recipe, Rounding, assert_same_scaled, make_blank, make_scaled, shard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import cloudckpt
from cloudckpt.errors import CorruptCheckpointError, StateDictMismatchError, UnsupportedValueError

ALLOWED = [*scaled.ALLOWED, TwoTensor]


def state(*, blank: bool = False) -> dict[str, Any]:
    """Wrappers of several kinds beside plain tensors, one of them under two names."""
    wrapped = make_scaled()
    nested = TwoTensor(make_scaled(4, 4), make_scaled(4, 4, block=(2, 2)))
    if blank:
        wrapped, nested = make_blank(wrapped), TwoTensor(make_blank(nested.a), make_blank(nested.b))
    plain = torch.zeros(5) if blank else torch.arange(5.0)
    weights: dict[Any, Any] = {"w": wrapped, "param": torch.nn.Parameter(wrapped), "plain": plain}
    return {"model": weights, "list": [nested, 0 if blank else 7], "by_number": {3: make_blank(wrapped)}}


def assert_same(actual: dict[str, Any]) -> None:
    """It is `state()`."""
    expected = state()
    assert_same_scaled(actual["model"]["w"], expected["model"]["w"])
    assert_same_scaled(actual["model"]["param"].detach(), expected["model"]["w"])
    assert torch.equal(actual["model"]["plain"], torch.arange(5.0))
    assert type(actual["list"][0]) is TwoTensor
    assert_same_scaled(actual["list"][0].a, expected["list"][0].a)
    assert_same_scaled(actual["list"][0].b, expected["list"][0].b)
    assert actual["list"][1] == 7


def manifest_key(local: LocalPlace) -> str:
    """The key of the one manifest."""
    keys = local.keys()
    (key,) = [key for key in keys if key.endswith("manifest.json")]
    return key


def test_wrappers_come_back_to_the_bit(local: LocalPlace) -> None:
    """If this fails, a quantized tensor is not filled in place, or not made anew, or not stored as ordinary tensors."""
    cloudckpt.save(state(), local.uri())
    held = state(blank=True)
    into = held["model"]["w"]
    cloudckpt.load(held, local.uri())
    assert_same(held)
    assert held["model"]["w"] is into
    with torch.serialization.safe_globals(ALLOWED):
        assert_same(cloudckpt.read(local.uri()))
    assert cloudckpt.verify(local.uri()).num_tensors == 11
    parts = cloudckpt.read(local.uri(), include="model.w.scale")
    assert torch.equal(parts["model"]["w"]["scale"], make_scaled().scale)
    found = {tensor.name: tensor for tensor in cloudckpt.describe(local.uri()).tensors}
    assert found["model.w.data_"].dtype == "int16"
    manifest = json.loads(local.read(manifest_key(local)))
    begins = {name: entry["chunks"][0][3] for name, entry in manifest["tensors"].items()}
    assert begins["model.w.data_"] == begins["model.param.data_"]  # stored once


@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
@on_ranks(2)
def test_a_background_save_has_the_values_of_the_snapshot(
    uri: str, kind: AsyncCheckpointerType, local: LocalPlace
) -> None:
    """If this fails, the parts of a wrapper are not copied, so training changes what is being saved, or it is NaN."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved = {"w": make_scaled(), "sharded": shard(make_scaled(), mesh)}
    handle = cloudckpt.async_save(saved, uri, async_checkpointer_type=kind)
    handle.staged.result(60.0)
    for changed in (saved["w"], saved["sharded"]._local_tensor):
        changed.data_.fill_(-1)
        changed.scale.fill_(float("nan"))
    handle.result(60.0)
    dist.barrier()
    into = {"w": make_blank(make_scaled()), "sharded": make_blank(make_scaled())}
    cloudckpt.load(into, local.uri())
    assert_same_scaled(into["w"], make_scaled())
    assert_same_scaled(into["sharded"], make_scaled())


OTHERS: dict[str, tuple[Any, str]] = {
    "a plain tensor": (torch.zeros(8, 6), r"'w' was saved as a tests\.scaled\.Scaled, and a Tensor is to take it"),
    "a value": (1, r"'w' was saved as a tests\.scaled\.Scaled, and a int is to take it"),
    "another class": (
        TwoTensor(torch.zeros(8, 6), torch.zeros(8, 6)),
        r"'w' was saved with class .*Scaled, not .*TwoT",
    ),
    "another shape": (make_blank(make_scaled(9)), r"'w' was saved with shape \[8, 6\], not \[9, 6\]"),
    "other blocks": (
        make_blank(make_scaled(block=(2, 2))),
        r"'w' was saved with metadata\.block \[1, 6\], not \[2, 2\]",
    ),
    "other metadata": (
        make_blank(make_scaled(recipe=Recipe(Rounding.DOWN))),
        r"saved with metadata\.recipe.*, not .*DOWN",
    ),
}


@pytest.mark.parametrize("strict", [None, False])
@pytest.mark.parametrize("other", OTHERS)
def test_unlike_wrapper_is_refused(local: LocalPlace, other: str, strict: bool | None) -> None:  # noqa: FBT001
    """If this fails, quantized bits are loaded as values, or under another scale: wrong weights without an error."""
    value, message = OTHERS[other]
    cloudckpt.save({"w": make_scaled()}, local.uri())
    with pytest.raises(StateDictMismatchError, match=message):
        cloudckpt.load({"w": value}, local.uri(), strict=strict)


def test_a_plain_tensor_is_not_loaded_into_a_wrapper(local: LocalPlace) -> None:
    """If this fails, a wrapper keeps its old parts, and the load says that all is well."""
    cloudckpt.save({"w": torch.zeros(8, 6)}, local.uri())
    with pytest.raises(StateDictMismatchError, match=r"'w' was saved as a plain tensor or value, and a tests\.scaled"):
        cloudckpt.load({"w": make_scaled()}, local.uri())
    with pytest.raises(StateDictMismatchError, match=r"'v\.data_' is not in it"):
        cloudckpt.load({"v": make_scaled()}, local.uri())


def test_metadata_that_cannot_be_stored_is_refused_by_name(local: LocalPlace) -> None:
    """If this fails, a wrapper is saved without a part of its metadata, or the error names neither it nor a way out."""
    for bad in (object(), [{"a": object()}], torch.zeros(2), lambda: None, "\ud800"):
        with pytest.raises(
            UnsupportedValueError, match=r"cannot save 'model\.w' .*(its metadata|surrogate).*dequantize"
        ):
            cloudckpt.save({"model": {"w": make_scaled(recipe=bad)}}, local.uri())
    assert local.keys() == []


class Breaking(scaled.Scaled):
    """Fails in the way that the test asks for."""

    extra = None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self.recipe == "raises":
            raise RuntimeError("boom")
        return ["data_", "scale", str(self.recipe)], None


@pytest.mark.parametrize("how", ["raises", "extra", "absent"])
def test_a_class_that_cannot_be_taken_apart_is_refused_by_name(local: LocalPlace, how: str) -> None:
    """If this fails, an error of a user's class names no tensor, or a part without data is found after the upload."""
    honest = make_scaled()
    broken = Breaking(honest.data_, honest.scale, honest.block, how)
    with pytest.raises(UnsupportedValueError, match=r"cannot save 'model\.w' .*a Breaking.*dequantize"):
        cloudckpt.save({"model": {"w": broken}}, local.uri())
    assert local.keys() == []


@pytest.mark.parametrize("other", [torch.ones(2), 5, TwoTensor(torch.ones(2), torch.ones(2))], ids=type)
def test_two_entries_of_one_name_are_refused(local: LocalPlace, other: Any) -> None:
    """If this fails, the class of one of them is lost, and both are read as dictionaries of parts."""
    with pytest.raises(UnsupportedValueError, match=r"two entries .*'a\.b': \['a'\]\['b'\] and \['a\.b'\]"):
        cloudckpt.save({"a": {"b": make_scaled()}, "a.b": other}, local.uri())
    assert local.keys() == []


def test_a_planner_of_torch_leaves_no_wrapper_out_silently(local: LocalPlace) -> None:
    """If this fails, a wrapper keeps its old values after a load with torch's planner, which says that all is well."""
    cloudckpt.save({"w": make_scaled(), "v": torch.ones(2)}, local.uri())
    for into in (make_blank(make_scaled()), torch.zeros(8, 6)):
        with pytest.raises(CheckpointException, match=r"leaves 'w' out of the load of .*cloudckpt\.load"):
            dcp.load(
                {"w": into},
                storage_reader=cloudckpt.ObjectStoreReader(local.uri()),
                planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
            )


def test_entries_that_are_renamed_stay_wrappers(local: LocalPlace, tmp_path: Path) -> None:
    """If this fails, an import with a prefix keeps the bits of a quantized tensor, and loses what they mean."""
    torch.save({"w": make_scaled(), "v": torch.ones(2)}, tmp_path / "state.pt")
    with torch.serialization.safe_globals(ALLOWED):
        cloudckpt.import_checkpoint(tmp_path / "state.pt", local.uri(), format="torch", add_prefix="model", include="w")
        assert_same_scaled(cloudckpt.read(local.uri())["model.w"], make_scaled())


def test_other_metadata_is_a_difference(local: LocalPlace) -> None:
    """If this fails, two checkpoints are called the same whose equal bits stand for other values."""
    uris = [f"{local.root}/{name}" for name in ("one", "other", "plain")]
    parts = {"data_": make_scaled().data_, "scale": make_scaled().scale}
    for uri, value in zip(uris, (make_scaled(), make_scaled(recipe=Recipe(Rounding.DOWN)), parts), strict=True):
        cloudckpt.save({"w": value}, uri)
    assert cloudckpt.compare(uris[0], uris[0]).is_same
    for other in uris[1:]:
        (difference,) = cloudckpt.compare(uris[0], other).differences
        assert (difference.name, difference.kind) == ("w", "type")
        assert "NEAREST" in difference.before
        assert "NEAREST" not in difference.after


def test_no_code_that_a_checkpoint_names_is_imported(
    local: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, whoever can write to the bucket can choose code that a reader runs."""
    cloudckpt.save({"w": make_scaled()}, local.uri())
    (tmp_path / "chosen_by_a_bucket.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedValueError, match=r"does not allow tests\.scaled\.Scaled.*add_safe_globals"):
        cloudckpt.read(local.uri())
    key = manifest_key(local)
    honest = local.read(key)
    modules = set(sys.modules)
    for text, other in (
        (b"tests.scaled.Scaled", b"chosen_by_a_bucket.Scaled"),
        (b"tests.scaled.Scaled", b"tests.scaled.Recipe"),  # allowed, and no tensor
        (b"tests.scaled.Recipe", b"os.system"),
        (b"tests.scaled.Recipe", b"tests.scaled.Scaled"),  # allowed, and no dataclass
        (b'"NEAREST"', b'"__class__"'),
        (b'"dtype":"bfloat16"', b'"dtype":"nn"'),
        (b'{"float":"-inf"}', b'{"later":[1]}'),
        (b'{"float":"-inf"}', b"{}"),
    ):
        body = honest[: honest.rindex(b',"crc32c"')].replace(text, other)
        local.write(key, body + b',"crc32c":"%08x"}' % crc32c(body))
        with (
            torch.serialization.safe_globals(ALLOWED),
            pytest.raises(UnsupportedValueError, match=r"'w' of .*which is not made here"),
        ):
            cloudckpt.read(local.uri())
    assert set(sys.modules) == modules


def test_a_manifest_whose_wrappers_contradict_it_is_refused(local: LocalPlace) -> None:
    """If this fails, a damaged or a hostile manifest fails somewhere within a load, or not at all."""
    cloudckpt.save({"w": make_scaled(), "v": 1}, local.uri())
    key = manifest_key(local)
    honest = local.read(key)
    for text, other in (
        (b'["data_","scale"]', b'["data_","zero"]'),
        (b'["data_","scale"]', b"[]"),
        (b'"shape":[8,6],"stride"', b'"shape":[8,-6],"stride"'),
        (b'"stride":[6,1]', b'"stride":[6]'),
        (b'"wrappers":{"w":', b'"wrappers":{"v":'),
    ):
        assert text in honest
        body = honest[: honest.rindex(b',"crc32c"')].replace(text, other)
        local.write(key, body + b',"crc32c":"%08x"}' % crc32c(body))
        with pytest.raises(CorruptCheckpointError, match=r"contradicts itself: .*wrapper"):
            cloudckpt.load({"w": make_scaled(), "v": 1}, local.uri())


BLOCKS = {"rows": (1, 12), "blocks": (2, 2), "whole": (24, 12)}


def save_shards(root: str) -> None:
    """Save each on this rank's mesh, cut by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, block in BLOCKS.items():
        cloudckpt.save({"w": shard(make_scaled(24, 12, block=block), mesh)}, f"{root}/{name}")
    cloudckpt.save({"w": shard(make_scaled(0, 12), mesh)}, f"{root}/empty")


def load_shards(root: str, dim: int) -> None:
    """Load each as this number of ranks has it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, block in BLOCKS.items():
        whole = make_scaled(24, 12, block=block)
        wanted, into = shard(whole, mesh, dim)._local_tensor, shard(make_blank(whole), mesh, dim)
        cloudckpt.load({"w": into}, f"{root}/{name}")
        assert_same_scaled(into._local_tensor, wanted)
    if dist.get_world_size() == 4:
        uneven = make_scaled(6, 4)  # the last rank has no row
        cloudckpt.save({"w": shard(uneven, mesh)}, f"{root}/uneven")
        into = shard(make_blank(uneven), mesh)
        cloudckpt.load({"w": into}, f"{root}/uneven")
        if into._local_tensor.numel():
            assert_same_scaled(into._local_tensor, shard(uneven, mesh)._local_tensor)


@pytest.mark.multirank
def test_shards_of_wrappers_load_on_other_ranks(local: LocalPlace) -> None:
    """If this fails, the scales of a quantized tensor are not those of its rows after a load on other ranks."""
    run_ranks(save_shards, local.root, world_size=2)
    with torch.serialization.safe_globals(ALLOWED):
        for name, block in BLOCKS.items():
            whole = make_scaled(24, 12, block=block)
            into = {"w": make_blank(whole)}
            cloudckpt.load(into, f"{local.root}/{name}")
            assert_same_scaled(into["w"], whole)
            assert_same_scaled(cloudckpt.read(f"{local.root}/{name}")["w"], whole)
        assert cloudckpt.read(f"{local.root}/empty")["w"].shape == (0, 12)
    run_ranks(load_shards, local.root, 0, world_size=2)
    run_ranks(load_shards, local.root, 0, world_size=4)
    run_ranks(load_shards, local.root, 1, world_size=3)


def save_quantized_apart(uri: str) -> str:
    """Each rank has quantized its own rows, with a scale of its own. First, only one of them has quantized."""
    with pytest.raises(
        CheckpointException, match=r"'w' is a wrapper of class tests\.scaled\.Scaled on rank.*on all ranks"
    ):
        cloudckpt.save({"w": torch.zeros(8, 6) if dist.get_rank() else make_scaled()}, uri)
    mesh = init_device_mesh("cpu", (2,))
    whole = shard(make_scaled(24, 12, block=(24, 12)), mesh)
    whole._local_tensor.scale = whole._local_tensor.scale + dist.get_rank()  # type: ignore[attr-defined]  # of a Scaled
    with pytest.raises(CheckpointException) as caught:
        cloudckpt.save({"w": whole}, uri)
    return str(caught.value)


@pytest.mark.multirank
def test_a_scale_of_each_rank_is_refused(local: LocalPlace) -> None:
    """If this fails, the scale of one rank is saved for the rows of all: wrong weights."""
    for message in run_ranks(save_quantized_apart, local.uri(), world_size=2):
        assert "'w.scale' differs between the ranks" in message
    assert local.keys() == []
