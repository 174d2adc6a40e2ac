"""Exports to safetensors files and imports of them, held against the safetensors library and torch's own reader."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from tests.convert.conftest import Root
from tests.convert.states import bits, contents, loaded, save, small, store_at
from tests.kit.options import make_options
from tests.kit.ranks import run_ranks
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cloudckpt
from cloudckpt.options import GIB, KIB, MIB
from cloudckpt.testing import damage
from cloudckpt.testing.faults import Call, Fails, Faults, Rule, Tell, WrappedStore

KNOWN = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
]  # fmt: skip
INDEX = "model.safetensors.index.json"


def _tensors(dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    """One of each kind, with every bit pattern that there is: NaN payloads and signed zeros among them."""
    generator = torch.Generator().manual_seed(11)
    found = {}
    for number, dtype in enumerate(dtypes):
        itemsize = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * itemsize,), generator=generator)
        found[f"layers.{number}.weight"] = raw.to(torch.uint8).view(dtype).view(2, 3)
    return found


@pytest.mark.parametrize(("kind", "max_shard_bytes"), [("path", 60), ("s3", 60), ("gs", 1 << 40)])
def test_the_library_reads_an_export(root_of: Root, tmp_path: Path, kind: str, max_shard_bytes: int) -> None:
    """If this fails, an export does not open elsewhere, or has other weights than the checkpoint."""
    root = root_of(kind)
    tensors = _tensors(KNOWN) | {"scalar": torch.tensor(-0.0), "empty": torch.empty(0, 4, dtype=torch.int16)}
    save(tensors, f"{root}/step-1")
    report = cloudckpt.export_checkpoint(f"{root}/step-1", f"{root}/export", max_shard_bytes=max_shard_bytes)
    files = contents(f"{root}/export")
    assert set(files) == set(report.files)
    assert sum(map(len, files.values())) == report.num_bytes
    for name, body in files.items():
        (tmp_path / name).write_bytes(body)
    found = {}
    for name in files:
        if name != INDEX:
            with safe_open(tmp_path / name, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}
            found |= load_file(tmp_path / name)
    assert bits(found) == bits(tensors)
    if max_shard_bytes == 60:
        index = json.loads(files[INDEX])
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
        assert index["weight_map"].keys() == tensors.keys()
        num_files = len(files) - 1
        assert sorted(set(index["weight_map"].values())) == [
            f"model-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)
        ]
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / file)
    else:
        assert set(files) == {"model.safetensors"}


def _save_sharded(uri: str, extensions: tuple[cloudckpt.Zstandard, ...]) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    state = {}
    for number, placements in enumerate(
        [
            (Shard(0), Shard(1)),
            (Shard(1), Shard(0)),
            (Shard(0), Shard(0)),
            (Replicate(), Shard(1)),
            (Shard(1), Replicate()),
        ]
    ):
        for name, tensor in _full(number).items():
            state[name] = distribute_tensor(tensor, mesh, placements)
    state["alone"] = torch.full((3,), 7.0)
    assert rank in range(4)
    cloudckpt.save(state, uri, options=make_options(tile_bytes=4 * KIB, object_bytes=20 * KIB, extensions=extensions))


def _full(number: int) -> dict[str, torch.Tensor]:
    shapes = {"even": (128, 64), "uneven": (131, 67), "few": (3, 1001), "cube": (5, 33, 17)}
    return {
        f"{name}.{number}": torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape) + number
        for name, shape in shapes.items()
    }


@pytest.mark.multirank
@pytest.mark.parametrize("extensions", [(), (cloudckpt.Zstandard(),)], ids=["plain", "compressed"])
def test_an_export_of_shards_is_that_of_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extensions: tuple[cloudckpt.Zstandard, ...]
) -> None:
    """If this fails, what several ranks saved comes out scrambled."""
    monkeypatch.setattr("cloudckpt.convert.export_files.TILE_BYTES", 4 * KIB)  # parts that cut rows
    run_ranks(_save_sharded, str(tmp_path / "step-1"), extensions, world_size=4)
    options = make_options(read_bytes=64 * KIB, request_bytes=4 * KIB, tile_bytes=4 * KIB, connections=2)
    cloudckpt.export_checkpoint(tmp_path / "step-1", tmp_path / "export", options=options)
    expected = {name: tensor for number in range(5) for name, tensor in _full(number).items()}
    assert bits(load_file(tmp_path / "export" / "model.safetensors")) == bits(
        expected | {"alone": torch.full((3,), 7.0)}
    )


def test_names_are_chosen_and_shortened(tmp_path: Path) -> None:
    """If this fails, a model cannot be taken out of a checkpoint of training."""
    state = small()
    save(state, f"{tmp_path}/step-1")
    report = cloudckpt.export_checkpoint(
        tmp_path / "step-1", tmp_path / "export", include="model.*", strip_prefix="model."
    )
    assert bits(load_file(tmp_path / "export" / "model.safetensors")) == bits(state["model"])
    assert (report.num_tensors, report.num_values, report.left_out) == (5, 0, ())
    for wrong in ({"include": ["model.*", "modle.*"]}, {"strip_prefix": "module."}, {"max_shard_bytes": 0}):
        with pytest.raises(cloudckpt.errors.InvalidOptionError):
            cloudckpt.export_checkpoint(tmp_path / "step-1", tmp_path / "other", **wrong)
    save({"a": torch.ones(1), "p.a": torch.ones(2)}, f"{tmp_path}/twice")
    with pytest.raises(cloudckpt.errors.UnsupportedValueError, match=r"'a' and 'p\.a'"):
        cloudckpt.export_checkpoint(tmp_path / "twice", tmp_path / "other", strip_prefix="p.")
    assert not (tmp_path / "other").exists()


def test_values_that_safetensors_cannot_hold_are_named(tmp_path: Path) -> None:
    """If this fails, values are lost in silence, or a tensor comes out as bytes of another type."""
    save(small(), f"{tmp_path}/step-1")
    with pytest.raises(cloudckpt.errors.UnsupportedValueError, match=r"'optim\.lr'") as caught:
        cloudckpt.export_checkpoint(tmp_path / "step-1", tmp_path / "export")
    assert "skip_non_tensors" in str(caught.value)
    report = cloudckpt.export_checkpoint(tmp_path / "step-1", tmp_path / "export", skip_non_tensors=True)
    assert set(report.left_out) == {"optim.lr", "step", "optim.state.1.step"}
    save({"ok": torch.ones(2), "wave": torch.ones(2, dtype=torch.complex64)}, f"{tmp_path}/complex")
    with pytest.raises(cloudckpt.errors.UnsupportedValueError, match=r"'wave \(complex64\)'"):
        cloudckpt.export_checkpoint(tmp_path / "complex", tmp_path / "complex-export")
    assert not (tmp_path / "complex-export").exists()


def test_an_earlier_export_is_kept_without_overwrite(tmp_path: Path) -> None:
    """If this fails, an export overwrites a model, or leaves files of an older one beside it."""
    target = tmp_path / "export.safetensors"
    target.mkdir()
    save({f"w{i}": torch.full((10,), i) for i in range(6)}, f"{tmp_path}/large")
    save({"w": torch.ones(3)}, f"{tmp_path}/small")
    cloudckpt.export_checkpoint(tmp_path / "large", target, max_shard_bytes=100)
    (target / "config.json").write_text("{}")
    before = contents(str(target))
    with pytest.raises(cloudckpt.CheckpointExistsError, match="model-00001"):
        cloudckpt.export_checkpoint(tmp_path / "small", target)
    assert contents(str(target)) == before
    cloudckpt.export_checkpoint(tmp_path / "small", target, overwrite=True)
    assert set(contents(str(target))) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("failing", ["put", "read_into"])
def test_an_export_that_fails_leaves_nothing(root_of: Root, failing: str) -> None:
    """If this fails, a half of a model lies where a whole one is expected."""
    source, target = f"{root_of('path')}/a", root_of("memory")
    save({f"w{i}": torch.full((1000,), i) for i in range(6)}, source)
    faults = Faults(Rule(fault=Fails(cloudckpt.errors.AccessDeniedError), operations={failing}, skip=2, times=None))
    options = {"target_options" if failing == "put" else "options": make_options(wrap_store=faults, connections=1)}
    with pytest.raises(cloudckpt.errors.AccessDeniedError):
        cloudckpt.export_checkpoint(source, target, max_shard_bytes=8000, **options)
    assert contents(target) == {}


def test_the_index_comes_last(root_of: Root) -> None:
    """If this fails, who looks meanwhile finds an index of files that are not there."""
    source, target = f"{root_of('path')}/a", root_of("memory")
    save({f"w{i}": torch.full((1000,), i) for i in range(6)}, source)
    seen: list[str] = []
    faults = Faults(Rule(fault=Tell(before=lambda call: seen.append(call.key)), operations={"put"}, times=None))
    cloudckpt.export_checkpoint(source, target, max_shard_bytes=8000, target_options=make_options(wrap_store=faults))
    assert seen[-1] == INDEX


@pytest.mark.parametrize("num_removed", range(4))
def test_an_earlier_export_loses_its_index_before_any_shard(root_of: Root, num_removed: int) -> None:
    """If this fails, an export that dies while it removes an earlier one leaves an index of shards that are gone."""
    source, target = f"{root_of('path')}/a", root_of("memory")
    save({f"w{i}": torch.full((1000,), i) for i in range(20)}, source)
    cloudckpt.export_checkpoint(source, target, max_shard_bytes=4000)
    calls: list[list[str]] = []

    class Dying(WrappedStore):
        def delete(self, keys: Iterable[str]) -> None:
            calls.append(list(keys))
            for key in calls[-1]:
                if len([name for name in contents(target) if name]) <= 21 - num_removed:
                    raise cloudckpt.errors.AccessDeniedError("dead", key=key, operation="delete")
                self.inner.delete([key])

    options = make_options(wrap_store=Dying)
    with pytest.raises(cloudckpt.errors.AccessDeniedError):
        cloudckpt.export_checkpoint(source, target, max_shard_bytes=4000, overwrite=True, target_options=options)
    assert calls[0] == [INDEX], "with others, a store would remove them in any order"
    left = set(contents(target))
    assert len(left) == 21 - num_removed
    assert (INDEX in left) == (num_removed == 0)


_MEASURED = """
import resource, sys
import cloudckpt
from cloudckpt.options import MIB, AdvancedOptions, Options
def convert(name, options):
    cloudckpt.copy(f"{sys.argv[1]}/{name}", f"{sys.argv[1]}/{name}-copy", options=options)
    yield
    cloudckpt.export_checkpoint(f"{sys.argv[1]}/{name}", f"{sys.argv[1]}/{name}-export", options=options)
    yield
    source, target = (f"{sys.argv[1]}/{name}{end}" for end in ("", "-cast"))
    cloudckpt.export_checkpoint(source, target, dtype="bfloat16", options=options)
    yield
    cloudckpt.import_checkpoint(f"{sys.argv[1]}/{name}-export", f"{sys.argv[1]}/{name}-import", options=options)
    yield
    both = [f"{sys.argv[1]}/{name}-half"] * 2
    cloudckpt.merge(both, f"{sys.argv[1]}/{name}-mean", options=options)
    yield
list(convert("small", None))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
options = Options(read_bytes=64 * MIB, advanced=AdvancedOptions(request_bytes=16 * MIB))
for _ in convert("large", options):
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_a_tensor_larger_than_the_memory_is_copied_and_converted(tmp_path: Path) -> None:
    """If this fails, a tensor has to fit into memory to be copied, exported, imported or merged."""
    for name, num_bytes in (("small", 4000), ("large", GIB // 2)):
        save({"w": torch.zeros(num_bytes // 4)}, f"{tmp_path}/{name}")
        save({"w": torch.zeros(num_bytes // 2, dtype=torch.bfloat16)}, f"{tmp_path}/{name}-half")
    script = tmp_path / "measured.py"
    script.write_text(_MEASURED)
    answer = subprocess.run([sys.executable, script, tmp_path], check=True, timeout=300, capture_output=True, text=True)
    assert all(int(line) < 64 * MIB + 32 * MIB for line in answer.stdout.split()), answer.stdout
    assert cloudckpt.verify(tmp_path / "large-import").num_bytes > GIB // 2


@pytest.mark.parametrize(("kind", "layout"), [("path", "folder"), ("s3", "index"), ("gs", "file")])
def test_an_import_has_the_tensors_that_the_library_wrote(
    root_of: Root, tmp_path: Path, kind: str, layout: str
) -> None:
    """If this fails, a model of Hugging Face's cannot be loaded, or is another one."""
    root = root_of(kind)
    tensors = _tensors(KNOWN) | {
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 4),
        "w": torch.zeros(2).to(torch.complex64),
    }
    source = f"{root}/hub"
    if layout == "file":
        source += "/weights.safetensors"
        _put(source, _saved(tensors, tmp_path))
    else:
        names = list(tensors)
        files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, members in files.items():
            _put(f"{source}/{file}", _saved({name: tensors[name] for name in members}, tmp_path))
        _put(f"{source}/config.json", b"{}")
        if layout == "index":
            weight_map = {name: file for file, members in files.items() for name in members}
            _put(f"{source}/{INDEX}", json.dumps({"weight_map": weight_map}).encode())
            source += f"/{INDEX}"
    report = cloudckpt.import_checkpoint(source, f"{root}/step-1", add_prefix="model.")
    assert report.num_tensors == len(tensors)
    expected = {f"model.{name}": tensor for name, tensor in tensors.items()}
    assert bits(loaded(expected, f"{root}/step-1")) == bits(expected)
    cloudckpt.verify(f"{root}/step-1")
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.import_checkpoint(source, f"{root}/step-1")


def _saved(tensors: dict[str, torch.Tensor], tmp_path: Path) -> bytes:
    save_file(tensors, tmp_path / "made.safetensors", metadata={"format": "pt"})
    return (tmp_path / "made.safetensors").read_bytes()


def _put(uri: str, body: bytes) -> None:
    folder, _, name = uri.rpartition("/")
    damage.overwrite(store_at(folder), name, body)


def _header(members: Any) -> bytes:
    text = json.dumps(members).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "too few"),
        (b"\xff" * 100, "header would have"),
        (_header([]), "not that of a safetensors"),
        (_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), "it was cut"),
        (_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + bytes(4), "4 bytes"),
        (_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + bytes(8), "back to back"),
        (_header({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}) + bytes(1), "impossible"),
        (_header({"a": {"dtype": "U8", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 1]}}) + bytes(1), "1 bytes"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(tmp_path: Path, body: bytes, what: str) -> None:
    """If this fails, a file that was cut or made up becomes a checkpoint, or takes memory without a bound."""
    (tmp_path / "x.safetensors").write_bytes(body)
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=what):
        cloudckpt.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()


def test_file_of_another_format_or_none_is_named(tmp_path: Path) -> None:
    """If this fails, a user who imports a file of torch.save is told to import it, or two sentences run together."""
    (tmp_path / "w.pt").write_bytes(b"of torch.save")
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match=r"w\.pt is no \.safetensors file\. .*format='torch'"):
        cloudckpt.import_checkpoint(tmp_path / "w.pt", tmp_path / "step-1")
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match=r"no such object\. Check the URI$"):
        cloudckpt.import_checkpoint(tmp_path / "none.safetensors", tmp_path / "step-1")


def test_ambiguous_sources_are_refused(tmp_path: Path) -> None:
    """If this fails, one of two tensors of a name is taken, or a model with a hole in it."""
    hub = tmp_path / "hub"
    hub.mkdir()
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.import_checkpoint(hub, tmp_path / "step-1")
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, hub / f"{name}.safetensors")
    with pytest.raises(cloudckpt.errors.UnsupportedValueError, match="'w' is in"):
        cloudckpt.import_checkpoint(hub, tmp_path / "step-1")
    for weight_map, error in (
        ({"w": "c.safetensors"}, cloudckpt.CorruptCheckpointError),
        ({"w": "a.safetensors", "v": "b.safetensors"}, cloudckpt.CorruptCheckpointError),
        ({"w": "../a.safetensors"}, cloudckpt.CorruptCheckpointError),
        ({}, cloudckpt.CorruptCheckpointError),
        ([], cloudckpt.CorruptCheckpointError),
    ):
        (hub / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(error):
            cloudckpt.import_checkpoint(hub, tmp_path / "step-1")
    (hub / INDEX).write_text(json.dumps({"weight_map": {"w": "b.safetensors"}}))
    cloudckpt.import_checkpoint(hub, tmp_path / "step-1")
    writer = HuggingFaceStorageWriter(str(tmp_path / "shards"), save_distributed=True)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    with pytest.raises(cloudckpt.errors.UnsupportedValueError, match="shards"):
        cloudckpt.import_checkpoint(tmp_path / "shards", tmp_path / "step-2")


@pytest.mark.parametrize("kind", ["path", "s3"])
def test_a_file_that_is_replaced_meanwhile_is_noticed(root_of: Root, tmp_path: Path, kind: str) -> None:
    """If this fails, an import holds tensors of two models. The new file has the size and the time of the old one."""
    source = f"{root_of(kind)}/w.safetensors"
    _put(source, _saved({"w": torch.ones(1000)}, tmp_path))
    other = _saved({"w": torch.zeros(1000)}, tmp_path)
    written = Path(source).stat() if kind == "path" else None

    def replace(_call: Call) -> None:
        _put(source, other)
        if written is not None:
            os.utime(source, ns=(written.st_atime_ns, written.st_mtime_ns))

    faults = Faults(Rule(fault=Tell(before=replace), operations={"read_into"}, skip=1, times=None))
    with pytest.raises(cloudckpt.errors.CheckpointChangedError):
        cloudckpt.import_checkpoint(source, tmp_path / "step-1", options=make_options(wrap_store=faults))
    assert not contents(str(tmp_path / "step-1"))


class _Tied(torch.nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(30, 8)
        self.head = torch.nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        torch.nn.init.constant_(self.embed.weight, fill)


@pytest.mark.parametrize(("how", "is_tied"), [("by itself", True), ("told", False)])
def test_tied_tensors_that_a_file_has_once_get_their_names_back(tmp_path: Path, how: str, *, is_tied: bool) -> None:
    """If this fails, a model whose head is tied to its embedding cannot be loaded from an import, as its head is not
    there; or the import stores it twice.
    """
    model = _Tied(2.0)
    tie = None
    if how == "told":  # as `save_pretrained` does it: nothing in the file says so
        save_file({"embed.weight": model.embed.weight.detach()}, tmp_path / "model.safetensors")
        tie = {"head.weight": "embed.weight"}
    else:
        save_model(model, str(tmp_path / "model.safetensors"))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 1
    report = cloudckpt.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "a", add_prefix="model.", tie=tie)
    assert report.num_tensors == 2
    assert report.num_bytes < 2 * 30 * 8 * 4
    into = _Tied(0.0)
    if not is_tied:
        into.head.weight = torch.nn.Parameter(torch.zeros(30, 8))
    cloudckpt.load(tmp_path / "a", model=into, no_dist=True)
    assert torch.equal(into.embed.weight, torch.full((30, 8), 2.0))
    assert torch.equal(into.head.weight, torch.full((30, 8), 2.0))
    cloudckpt.load(tmp_path / "a", model={"embed": torch.nn.Embedding(30, 8)}, strict=False, no_dist=True)
    cloudckpt.verify(tmp_path / "a")
    cloudckpt.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "b", tie=tie)
    for uri, model, rename in (
        (tmp_path / "b", into, {"": "model"}),
        (tmp_path / "a", torch.nn.Sequential(into), {"model": "model.0"}),
    ):
        with pytest.raises(cloudckpt.errors.StateDictMismatchError, match=re.escape(f"{rename=}")):
            cloudckpt.load(uri, model=model, strict=False, no_dist=True)
        cloudckpt.load(uri, model=model, rename=rename, no_dist=True)


REVISION = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"


def _hub(root: Path, *, is_absolute: bool = False) -> Path:
    """Return a snapshot of a model with two files and their index, as `huggingface_hub` lays it out."""
    model = root / "hub" / "models--org--name"
    snapshot, blobs = model / "snapshots" / REVISION, model / "blobs"
    for folder in (snapshot, blobs, model / "refs", model / ".no_exist" / REVISION):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    (model / ".no_exist" / REVISION / "model.safetensors").touch()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for number, (tensor, name) in enumerate(names.items()):
        save_file({tensor: torch.full((4,), float(number))}, blobs / f"sha-{tensor}")
        (snapshot / name).symlink_to(blobs / f"sha-{tensor}" if is_absolute else f"../../blobs/sha-{tensor}")
    (blobs / "sha-index").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (snapshot / INDEX).symlink_to(blobs / "sha-index" if is_absolute else "../../blobs/sha-index")
    torch.save({"a": torch.zeros(4)}, blobs / "sha-bin")
    (snapshot / "pytorch_model.bin").symlink_to("../../blobs/sha-bin")
    return snapshot


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_snapshot_is_imported(tmp_path: Path, *, is_absolute: bool) -> None:
    """If this fails, a model that `from_pretrained` has downloaded cannot be imported from where it is."""
    snapshot = _hub(tmp_path, is_absolute=is_absolute)
    (tmp_path / "elsewhere").symlink_to(snapshot)
    one = snapshot / "model-00001-of-00002.safetensors"
    for number, (source, names) in enumerate(
        [(snapshot, "ab"), (snapshot / INDEX, "ab"), (one, "a"), (tmp_path / "elsewhere", "ab")]
    ):
        cloudckpt.import_checkpoint(source, tmp_path / str(number))
        found = {name: torch.full((4,), 9.0) for name in names}
        cloudckpt.load(found, tmp_path / str(number), no_dist=True)
        assert {name: value.tolist() for name, value in found.items()} == {
            name: [float(position)] * 4 for position, name in enumerate(names)
        }
    cloudckpt.import_checkpoint(snapshot / "pytorch_model.bin", tmp_path / "bin", format="torch")


def _to_another_model(snapshot: Path) -> str:
    other = snapshot.parents[2] / "models--other" / "blobs"
    other.mkdir(parents=True)
    save_file({"c": torch.ones(1)}, other / "x")
    return str(other / "x")


def _to_blobs_elsewhere(snapshot: Path) -> str:
    outside = snapshot.parents[3] / "secrets"
    outside.mkdir()
    save_file({"c": torch.ones(1)}, outside / "x")
    blobs = snapshot.parents[1] / "blobs"
    for blob in blobs.iterdir():
        blob.rename(outside / blob.name)
    blobs.rmdir()
    blobs.symlink_to(outside)
    return "../../blobs/x"


def _to_the_layout_itself(snapshot: Path) -> str:
    save_file({"c": torch.ones(1)}, snapshot.parents[1] / "refs" / "x")
    return "../../refs/x"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (_to_another_model, "leads out of .*models--other"),
        (_to_blobs_elsewhere, "leads out of .*secrets"),
        (_to_the_layout_itself, "leads out of .*refs"),
        (lambda _: "../../blobs/gone", "symbolic link leads to .*blobs/gone, which does not exist"),
        (lambda _: "model-00003.safetensors", "symbolic links"),
    ],
    ids=["other model", "blobs are a link", "refs", "dangling", "loop"],
)
def test_other_links_are_refused_by_name(tmp_path: Path, target: Callable[[Path], str], reason: str) -> None:
    """If this fails, a hub cache can lead to any file, or a model is imported without the tensors behind a link."""
    snapshot = _hub(tmp_path)
    link = snapshot / "model-00003.safetensors"
    link.symlink_to(target(snapshot))
    (snapshot / INDEX).unlink()
    for source in (link, snapshot):
        with pytest.raises(cloudckpt.CloudckptError, match=reason):
            cloudckpt.import_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_neighbours_by_chance_in_two_files_are_read_apart(tmp_path: Path) -> None:
    """If this fails, a tensor gets the bytes of another file that lie where its own lie."""
    (tmp_path / "files").mkdir()
    for number, name in enumerate("ab"):
        values = {f"{name}{part}": torch.full((4,), 10.0 * number + at) for at, part in enumerate("xy")}
        save_file(values, tmp_path / "files" / f"{name}.safetensors")
    cloudckpt.import_checkpoint(tmp_path / "files", tmp_path / "imported", include=["ax", "by"])
    found = cloudckpt.read(tmp_path / "imported")
    assert {name: float(value[0]) for name, value in found.items()} == {"ax": 0.0, "by": 11.0}


def test_a_tensor_called_pt_gets_no_second_name(tmp_path: Path) -> None:
    """If this fails, an import adds a tensor "format" to each model that has one called "pt"."""
    save_file({"pt": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    cloudckpt.import_checkpoint(tmp_path / "a.safetensors", tmp_path / "imported")
    assert [*cloudckpt.read(tmp_path / "imported")] == ["pt"]


@pytest.mark.parametrize(("kind", "suffix"), [("safetensors", "safetensors"), ("torch", "pt")])
def test_export_replaces_the_file_of_its_own_name_alone(tmp_path: Path, kind: Any, suffix: str) -> None:
    """If this fails, an export to a name with brackets removes another file that the name matches as a pattern."""
    cloudckpt.save({"w": torch.ones(2)}, tmp_path / "saved", no_dist=True)
    (tmp_path / "out").mkdir()
    other, mine = (tmp_path / "out" / f"{name}.{suffix}" for name in ("m1", "m[1]"))
    other.write_bytes(b"another model")
    mine.write_bytes(b"an earlier export")
    cloudckpt.export_checkpoint(tmp_path / "saved", mine, format=kind, overwrite=True)
    assert other.read_bytes() == b"another model"
    assert mine.stat().st_size > 100
