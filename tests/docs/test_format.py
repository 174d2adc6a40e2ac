"""``docs/format.md``: true of what cloudckpt writes, manifests and fences, and enough to read it with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from tests.docs.independent_reader import ELEMENT_BYTES, TAGS, Checkpoint, FormatError, crc32c, entries_of
from tests.docs.tables import ROOT
from tests.kit.options import make_options
from tests.kit.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from cloudckpt.format.model import ITEMSIZE_BYTES, SAFETENSORS_TAG

FORMAT = (ROOT / "docs" / "format.md").read_text()
(FENCE,) = re.findall(r'^\{"format":"cloudckpt-fence".*\}$', FORMAT, re.MULTILINE)
TILE_BYTES = 4096


def pattern(dtype_name: str, *shape: int) -> torch.Tensor:
    """A tensor whose bytes count up."""
    dtype = getattr(torch, dtype_name)
    raw = torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64) * 41 % 253
    return (raw % 2 if dtype is torch.bool else raw).to(torch.uint8).view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def single(name: str = "weight") -> dict[str, Any]:
    """A small state dict of every kind of entry."""
    return {
        name: pattern("float32", 3, 4),
        "half": pattern("bfloat16", 5),
        "lr": 0.1,
        "nested": {"deep": [torch.ones(2)]},
    }


def save(state_dict: dict[str, Any], directory: Path, **keywords: Any) -> Checkpoint:
    cloudckpt.save(
        state_dict, directory, options=make_options(tile_bytes=TILE_BYTES, part_bytes=TILE_BYTES), **keywords
    )
    return Checkpoint(directory)


def sharded() -> dict[str, torch.Tensor]:
    return {
        "rows": pattern("float32", 7, 5),
        "columns": pattern("bfloat16", 60, 90),
        "few_rows": pattern("int64", 1, 3),
        "shared": pattern("float64", 3),
    }


def save_sharded(directory: str) -> None:
    """On each rank."""
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": Shard(0), "columns": Shard(1), "few_rows": Shard(0)}
    state = {
        name: distribute_tensor(tensor, line, [placements[name]]) if name in placements else tensor
        for name, tensor in sharded().items()
    }
    options = make_options(tile_bytes=TILE_BYTES, part_bytes=TILE_BYTES)
    cloudckpt.save(dict(state), directory, options=options)


def sealed(members: dict[str, Any]) -> bytes:
    """A manifest or a fence of these members, with a right checksum."""
    body = json.dumps({name: value for name, value in members.items() if name != "crc32c"}, separators=(",", ":"))[:-1]
    return f'{body},"crc32c":"{crc32c(body.encode()):08x}"}}'.encode()


def rewritten(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest's members and give it a right checksum again."""
    path = directory / "manifest.json"
    members = json.loads(path.read_bytes())
    change(members)
    path.write_bytes(sealed(members))


def fence(**changes: object) -> bytes:
    """The document's fence, changed and sealed anew."""
    return sealed({**json.loads(FENCE), **changes})


def test_the_oracle_knows_every_dtype() -> None:
    """If this fails, a dtype was added to the code and not to the document, or got another size."""
    assert ELEMENT_BYTES == ITEMSIZE_BYTES
    assert TAGS == SAFETENSORS_TAG


@pytest.mark.multirank
def test_chunks_of_two_ranks_make_whole_tensors(tmp_path: Path) -> None:
    """If this fails, a reader that follows the document mixes up shards, or safetensors opens none of them."""
    run_ranks(save_sharded, str(tmp_path / "c"), world_size=2)
    checkpoint = Checkpoint(tmp_path / "c")
    assert checkpoint.manifest["world_size"] == 2
    assert {name: checkpoint.tensor(name) for name in checkpoint.tensors} == {
        name: bytes_of(tensor) for name, tensor in sharded().items()
    }
    keys = [stored["key"] for stored in checkpoint.manifest["objects"]]
    attempt = re.escape(checkpoint.manifest["attempt"])
    assert all(re.fullmatch(rf"data/{attempt}/[01]-[0-9]+\.safetensors", key) for key in keys)
    assert re.fullmatch(r"[0-9]{8}T[0-9]{9}Z-[0-9a-f]{12}", checkpoint.manifest["attempt"])
    assert max(stored["size"] for stored in checkpoint.manifest["objects"]) > TILE_BYTES, "nothing has two tiles"
    names = {name for index in range(len(keys)) for name in entries_of(checkpoint.object_bytes(index))}
    assert {"rows[0:4,0:5]", "rows[4:7,0:5]", "columns[0:60,0:45]", "columns[0:60,45:90]", "shared"} <= names

    whole = sharded()
    num_entries = 0
    for path in (tmp_path / "c" / "data").rglob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(path).items():
            fqn, _, ranges = name.partition("[")
            block = whole[fqn]
            for dim, bounds in enumerate(ranges.removesuffix("]").split(",") if ranges else []):
                low, high = map(int, bounds.split(":"))
                block = block.narrow(dim, low, high - low)
            assert torch.equal(tensor.view(torch.uint8), block.contiguous().view(torch.uint8)), name
            num_entries += 1
    assert num_entries >= 6


def test_the_manifest_with_the_highest_number_is_read(tmp_path: Path) -> None:
    """If this fails, an overwrite commits elsewhere than the document says, or leaves what it replaced."""
    directory = tmp_path / "c"
    save({"x": torch.tensor([1.0])}, directory)
    save({"x": torch.tensor([2.0])}, directory, overwrite=True)
    checkpoint = save({"x": torch.tensor([3.0])}, directory, overwrite=True)
    assert [path.name for path in directory.glob("manifest*")] == ["manifest.2.json"]
    assert np.frombuffer(checkpoint.tensor("x"), "<f4").tolist() == [3.0]
    kept = {path.relative_to(directory).as_posix() for path in directory.rglob("*.safetensors")}
    assert kept == {stored["key"] for stored in checkpoint.manifest["objects"]}


def change_tensor(**members: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["tensors"]["weight"].update(members)


def change_chunk(position: int, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["tensors"]["weight"]["chunks"][0].__setitem__(position, value)


def change_object(**members: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["objects"][0].update(members)


def move_chunk(manifest: dict[str, Any]) -> None:
    chunk = manifest["tensors"]["weight"]["chunks"][0]
    chunk[3] += 1
    chunk[4] += 1


def overlap_chunks(manifest: dict[str, Any]) -> None:
    """Twelve elements in all, of which four come twice."""
    ((_, _, index, begin, _),) = manifest["tensors"]["weight"]["chunks"]
    chunks = [[[0, 0], [2, 4], index, begin, begin + 32], [[1, 0], [1, 4], index, begin, begin + 16]]
    manifest["tensors"]["weight"]["chunks"] = chunks


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "1 another format": lambda manifest: manifest.update(format="other"),
    "1 newer major version": lambda manifest: manifest.update(version=[3, 0]),
    "1 no version": lambda manifest: manifest.pop("version"),
    "2 no objects": lambda manifest: manifest.pop("objects"),
    "3 tile of no multiple of 64": lambda manifest: manifest.update(tile_bytes=4097),
    "3 negative time": lambda manifest: manifest.update(committed_at_ns=-1),
    "3 time after 2262": lambda manifest: manifest.update(committed_at_ns=2**63),
    "3 world size": lambda manifest: manifest.update(world_size=0),
    "4 key outside": change_object(key="../other/data/x/0-0.safetensors"),
    "4 key that climbs": change_object(key="data/../../x.safetensors"),
    "4 key with a backslash": change_object(key="data/x\\y/0-0.safetensors"),
    "4 folder in version 1": change_object(folder="c"),
    "4 folder that climbs": lambda manifest: (
        manifest.update(version=[2, 0]),
        manifest["objects"][0].update(folder=".."),
    ),
    "4 key twice": lambda manifest: manifest["objects"].append(dict(manifest["objects"][0])),
    "5 negative size": change_object(size=-1),
    "5 tiles missing": change_object(crc32c=""),
    "5 no base64": change_object(crc32c="?" * 8),
    "6 dtype": change_tensor(dtype="float33"),
    "6 too many dimensions": change_tensor(shape=[1] * 65, chunks=[]),
    "6 too large": change_tensor(shape=[2**40, 2**40], chunks=[]),
    "7 dimensions": change_chunk(0, [0]),
    "7 chunk beyond the tensor": change_chunk(0, [1, 0]),
    "8 object that is not there": change_chunk(2, 7),
    "8 range beyond the object": change_chunk(4, 10**9),
    "8 value beyond the object": lambda manifest: manifest["values"]["lr"].update(end=10**9),
    "9 length": change_chunk(4, 1),
    "9 alignment": move_chunk,
    "10 volume": change_tensor(chunks=[]),
    "10 overlap": overlap_chunks,
    "11 tensor and value": lambda manifest: manifest["values"].update(weight=manifest["values"]["lr"]),
    "11 nesting of nothing": lambda manifest: manifest["nesting"].update(nothing=["nothing"]),
    "11 empty path": lambda manifest: manifest["nesting"].update(weight=[]),
    "11 typed nesting of nothing": lambda manifest: manifest.update(typed_nesting={"nothing": [[0]]}),
    "11 two keys at once": lambda manifest: manifest.update(typed_nesting={"weight": [[0, 1]]}),
    "11 keys within keys": lambda manifest: manifest.update(empty_mappings=[[[[[1]]]]]),
    "11 negative index": lambda manifest: manifest.update(empty_mappings=[["a", -1]]),
    "11 empty path of a tuple": lambda manifest: manifest.update(tuples=[[[], None]]),
    "11 negative index of a tuple": lambda manifest: manifest.update(tuples=[[["a", -1], None]]),
    "2 class of a tuple": lambda manifest: manifest.update(tuples=[[["a"], 1]]),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_refused_by_both_readers(tmp_path: Path, rule: str) -> None:
    """If this fails, cloudckpt trusts a manifest that breaks a documented rule, or the rule says something else."""
    save(single(), tmp_path / "c")
    rewritten(tmp_path / "c", BROKEN[rule])
    with pytest.raises(FormatError):
        Checkpoint(tmp_path / "c")
    with pytest.raises((cloudckpt.errors.InvalidManifestError, cloudckpt.errors.UnsupportedFormatError)):
        cloudckpt.load({"half": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "c")


def test_an_object_beside_the_checkpoint_is_found_by_both_readers(tmp_path: Path) -> None:
    """If this fails, a reference means something else than the document says."""
    save(single(), tmp_path / "held")
    save(single(), tmp_path / "c")

    def refer(manifest: dict[str, Any]) -> None:
        objects = Checkpoint(tmp_path / "held").manifest["objects"]
        manifest.update(version=[2, 0], objects=[{**stored, "folder": "held"} for stored in objects])

    rewritten(tmp_path / "c", refer)
    shutil.rmtree(tmp_path / "c" / "data")
    state = {name: torch.zeros_like(held) for name, held in single().items() if isinstance(held, torch.Tensor)}
    cloudckpt.load(state, tmp_path / "c")
    checkpoint = Checkpoint(tmp_path / "c")
    assert {name: bytes_of(tensor) for name, tensor in state.items()} == {
        name: checkpoint.tensor(name) for name in state
    }


def test_unknown_members_are_ignored(tmp_path: Path) -> None:
    """If this fails, what a later minor version adds makes today's readers refuse the checkpoint."""

    def add(manifest: dict[str, Any]) -> None:
        manifest.update(version=[1, 7], later={"a": 1})
        manifest["objects"][0]["later"] = "x"
        manifest["tensors"]["weight"].update(later=None)
        manifest["tensors"]["weight"]["chunks"][0].append("later")
        manifest["values"]["lr"]["later"] = []

    save(single(), tmp_path / "c")
    rewritten(tmp_path / "c", add)
    expected = bytes_of(pattern("float32", 3, 4))
    assert Checkpoint(tmp_path / "c").tensor("weight") == expected
    state: dict[str, Any] = {"weight": torch.zeros(3, 4), "lr": 0.0}
    cloudckpt.load(state, tmp_path / "c")
    assert bytes_of(state["weight"]) == expected
    assert state["lr"] == 0.1


def example_at(directory: Path) -> Path:
    """The document's example, built from the bytes in the document."""
    (manifest,) = re.findall(r"```json\n(.*?)\n```", FORMAT, re.DOTALL)
    objects = re.findall(r"^`step-100/(data/[^`]*)`.*?```hexdump\n(.*?)\n```", FORMAT, re.DOTALL | re.MULTILINE)
    assert len(objects) == 2
    (directory / "manifest.json").write_text(manifest)
    for key, dump in objects:
        rows = (re.match(r"[0-9a-f]{8}: ((?:[0-9a-f]{2} ?){1,16})", line) for line in dump.splitlines())
        (directory / key).parent.mkdir(parents=True, exist_ok=True)
        (directory / key).write_bytes(b"".join(bytes.fromhex(row[1]) for row in rows if row))
    return directory


def test_the_example_is_a_checkpoint(tmp_path: Path) -> None:
    """If this fails, the bytes in the document are not what a reader meets."""
    directory = example_at(tmp_path)
    checkpoint = Checkpoint(directory)
    assert np.frombuffer(checkpoint.tensor("model.weight"), "<f4").tolist() == list(range(1, 9))
    assert checkpoint.nested() == {"model": {"weight": "model.weight", "bias": "model.bias"}, "step": "step"}
    state = {
        "model": {"weight": torch.zeros(2, 4), "bias": torch.zeros(3, dtype=torch.bfloat16)},
        "step": torch.tensor(0),
    }
    cloudckpt.load(state, directory)
    assert state["model"]["weight"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert state["model"]["bias"].tolist() == [1, 2, 3]
    assert state["step"].item() == 100


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint with the number 0."""
    cloudckpt.save({"weight": torch.arange(3.0)}, tmp_path / "c")
    return tmp_path / "c"


def loads(directory: Path) -> bool:
    state = {"weight": torch.zeros(3)}
    cloudckpt.load(state, directory)
    return state["weight"].tolist() == [0, 1, 2]


def test_the_documents_fence_is_one(directory: Path) -> None:
    """If this fails, the fence in the document is not one, or too long, or has another checksum."""
    assert sealed(json.loads(FENCE)) == FENCE.encode()
    assert len(fence(keeps=10**18 - 1)) <= 128
    assert (directory / "manifest.json").stat().st_size > 128
    (directory / "manifest.json").rename(directory / "manifest.3.json")
    (directory / "manifest.4.json").write_text(FENCE)
    assert loads(directory)
    assert len(Checkpoint(directory).tensor("weight")) == 12


@pytest.mark.parametrize("number", [1, 7])
def test_a_fence_keeps_a_checkpoint_or_ends_it(directory: Path, number: int) -> None:
    """If this fails, what gc fenced off is lost, or what was deleted is read."""
    path = directory / f"manifest.{number}.json"
    path.write_bytes(fence(keeps=0))
    assert loads(directory)
    assert Checkpoint(directory).manifest["world_size"] == 1
    (info,) = cloudckpt.list_checkpoints(directory.parent)
    committed_at_ns = Checkpoint(directory).manifest["committed_at_ns"]
    assert info.committed_at.timestamp() == pytest.approx(committed_at_ns / 1e9, abs=1e-5)
    path.write_bytes(fence(keeps=None))
    with pytest.raises(FormatError, match="deleted"):
        Checkpoint(directory)
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        loads(directory)
    assert cloudckpt.latest(directory.parent) is None


def test_remains_of_gc_and_delete_match_the_document(directory: Path) -> None:
    """If this fails, the independent reader, and so the document, does not understand what cloudckpt writes."""
    stray = directory / "data" / "20200101T000000000Z-000000000000" / "0-0.safetensors"
    stray.parent.mkdir()
    stray.write_bytes(b"x")
    cloudckpt.gc(directory, older_than=0, dry_run=False)
    assert not stray.exists()
    document = (directory / "manifest.1.json").read_bytes()
    assert list(json.loads(document)) == ["format", "version", "id", "keeps", "crc32c"]
    assert sealed(json.loads(document)) == document
    assert len(Checkpoint(directory).tensor("weight")) == 12
    cloudckpt.delete(directory)
    with pytest.raises(FormatError, match="deleted"):
        Checkpoint(directory)
    assert [path.name for path in directory.iterdir()] == ["manifest.2.json"]
