"""Loads of safetensors files in Hugging Face's layouts, held against the safetensors library."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from safetensors.torch import save_file
from tests.convert.states import bits, store_at
from tests.kit.models import HIDDEN, HIDDEN_TP, MLP, PARALLELISMS, build, local
from tests.kit.options import make_options
from tests.kit.places import LocalPlace, Place
from tests.kit.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import cloudckpt
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidOptionError,
    StateDictMismatchError,
    UnsupportedValueError,
)
from cloudckpt.options import MIB
from cloudckpt.testing import damage
from cloudckpt.testing.faults import Call, Fails, Faults, Rule, Tell

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64,
]  # fmt: skip
Files = dict[str, bytes]


class Net(nn.Module):
    """A model with a part that is worth loading alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)


class Tied(nn.Module):
    """A head that is tied to the embedding, as that of many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embed.weight


def made(kind: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def split(tensors: dict[str, torch.Tensor], num_files: int = 2) -> Files:
    """Return the files of a model in Hugging Face's layout."""
    if num_files == 1:
        return {SINGLE: save_bytes(tensors)}
    names = {f"model-{n + 1:05d}-of-{num_files:05d}.safetensors": list(tensors)[n::num_files] for n in range(num_files)}
    files = {file: save_bytes({name: tensors[name] for name in members}) for file, members in names.items()}
    weight_map = {name: file for file, members in names.items() for name in members}
    return files | {INDEX: json.dumps({"metadata": {}, "weight_map": weight_map}).encode()}


def put(uri: str, files: Files) -> str:
    store = store_at(uri)
    for name, body in files.items():
        damage.overwrite(store, name, body)
    return uri


def plain(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def repadded(body: bytes, num_blanks: int) -> bytes:
    """Return a file with another length of its header, so that its tensors are aligned to nothing."""
    (length,) = struct.unpack("<Q", body[:8])
    header = body[8 : 8 + length].rstrip() + b" " * num_blanks
    return struct.pack("<Q", len(header)) + header + body[8 + length :]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found = {}
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        values = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
        raw = torch.tensor([value % 2 if dtype is torch.bool else value for value in values], dtype=torch.uint8)
        found[f"layers.{number}.weight"] = raw.view(dtype).view(shape)
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=tensors(), num_files=st.integers(1, 3), num_blanks=st.integers(0, 9), turned=st.booleans())
def test_load_is_what_the_library_reads(
    content: dict[str, torch.Tensor], num_files: int, num_blanks: int, *, turned: bool
) -> None:
    """If this fails, a tensor of some dtype, shape or place in a file is loaded with other bits."""
    files = {
        name: body if name == INDEX else repadded(body, num_blanks) for name, body in split(content, num_files).items()
    }
    expected = {
        name: tensor for file, body in files.items() if file != INDEX for name, tensor in load_bytes(body).items()
    }
    uri = put(f"memory://hub-{uuid.uuid4().hex}/model", files)
    found = cloudckpt.read(uri)
    assert bits({name: found[name] for name in expected}) == bits(expected)
    assert len(found) == len(expected)
    held = {}
    for name, tensor in expected.items():
        held[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if turned:
            held[name] = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).permute([*range(tensor.ndim)][::-1])
    cloudckpt.load(held, uri, no_dist=True)
    assert bits(held) == bits(expected)
    assert cloudckpt.compare(uri, uri).num_same == len(expected)


def load_under_each_parallelism(root: str) -> None:
    """Load the same files into each kind of model; on one rank of the test."""
    for parallelism in PARALLELISMS:
        hidden = HIDDEN_TP if parallelism == "fsdp_tp" else HIDDEN
        expected = plain(made(lambda hidden=hidden: MLP(hidden), 1))
        training = build(parallelism, seed=2)
        cloudckpt.load(f"{root}/{hidden}", model=training.model)
        found = get_model_state_dict(training.model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0 or parallelism in {"none", "ddp"}:
            assert bits({name: found[name] for name in expected}) == bits(expected), parallelism


@pytest.mark.multirank
def test_model_under_each_parallelism_gets_its_shards(tmp_path: Path) -> None:
    """If this fails, a model under some parallelism begins to train with other weights than those of the files."""
    for hidden in (HIDDEN, HIDDEN_TP):
        put(f"{tmp_path}/{hidden}", split(plain(made(lambda hidden=hidden: MLP(hidden), 1))))
    run_ranks(load_under_each_parallelism, str(tmp_path), world_size=4)


class Wide(nn.Module):
    """Tensors that are large beside what a header and the gaps of a read take."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(512, 2560) for _ in range(4)))


def load_wide_and_tied(root: str) -> float:
    """Load a sharded model and a tied one. Returns the bytes that this rank read by those that it keeps."""
    wide = made(Wide, 2)
    fully_shard(wide)
    report = cloudckpt.load(f"{root}/wide", model=wide)
    expected = plain(made(Wide, 1))
    for name, tensor in wide.state_dict().items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name
    tied = made(Tied, 2)
    fully_shard(tied)
    cloudckpt.load(f"{root}/tied", model=tied)
    assert tied.head.weight is tied.embed.weight
    assert torch.equal(tied.head.weight.full_tensor(), made(Tied, 1).head.weight)
    return report.num_bytes_read / sum(local(tensor).nbytes for tensor in wide.state_dict().values())


@pytest.mark.multirank
def test_rank_reads_the_bytes_of_its_shards(tmp_path: Path) -> None:
    """If this fails, each rank reads the whole model, or a sharded model with tied weights cannot be loaded."""
    put(f"{tmp_path}/wide", split(plain(made(Wide, 1))))
    put(f"{tmp_path}/tied", split({n: t for n, t in plain(made(Tied, 1)).items() if n != "head.weight"}, 1))
    ratios = run_ranks(load_wide_and_tied, str(tmp_path), world_size=2)
    assert max(ratios) < 1.05


@pytest.mark.every_store
@pytest.mark.parametrize("name", ["hub", f"hub/{SINGLE}", f"hub/{INDEX}"])
def test_folder_file_and_index_load_from_each_store(place: Place, name: str) -> None:
    """If this fails, the files cannot be loaded from a store that saves and loads checkpoints."""
    expected, net = plain(made(Net, 1)), made(Net, 2)
    for file, body in split(expected, 2 if name == f"hub/{INDEX}" else 1).items():
        place.write(f"hub/{file}", body)
    report = cloudckpt.load(place.uri(name), model=net)
    assert bits(plain(net)) == bits(expected)
    assert report.uri == place.uri(name), "the file, if it is named"
    assert report.num_bytes_wanted == sum(tensor.nbytes for tensor in expected.values())
    assert bits(cloudckpt.read(place.uri(name), include="head")) == bits(
        {n: expected[n] for n in expected if "head" in n}
    )


class Hub(MemoryFileSystem):
    """A file system that tells no time of its files, as Hugging Face's hub, but their hashes if `has_hashes`."""

    protocol = "hf"
    has_hashes = False
    published: Mapping[str, str] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("hf://").strip("/")

    def info(self, path: str, **settings: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **settings)
        del found["created"]
        digest = hashlib.sha1(self.cat_file(path), usedforsecurity=False).hexdigest() if found["type"] == "file" else ""
        sha256 = self.published.get(path.rpartition("/")[2])
        found["lfs"] = None if sha256 is None else {"sha256": sha256, "size": found["size"], "pointer_size": 130}
        return found | ({"blob_id": digest} if self.has_hashes else {})


@pytest.mark.parametrize("has_hashes", [False, True])
def test_hub_that_tells_no_time_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_hashes: bool) -> None:
    """If this fails, no file of a hub can be loaded, since each answer seems to be about another write."""
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", Hub)
    monkeypatch.setattr(Hub, "has_hashes", has_hashes)
    wide, hub = plain(made(Wide, 1)), f"hf://org/{uuid.uuid4().hex}"
    Hub().pipe(f"{hub}/{SINGLE}", save_bytes(wide))
    held = made(Wide, 2)
    cloudckpt.load(hub, model=held)
    assert bits(plain(held)) == bits(wide)
    cloudckpt.import_checkpoint(hub, tmp_path / "step-1")

    def replace(call: Call) -> None:
        if call.num_bytes >= MIB:
            Hub().pipe(f"{hub}/{SINGLE}", save_bytes({name: tensor + 1 for name, tensor in wide.items()}))

    faults = Faults(Rule(fault=Tell(before=replace), operations={"read_into"}, skip=1))
    if has_hashes:
        cloudckpt.load(hub, model=held, options=make_options(wrap_store=faults))
        assert bits(plain(held)) == bits({name: tensor + 1 for name, tensor in wide.items()})


def put_cache(root: Path, files: Files) -> str:
    """Lay the files out as a snapshot of Hugging Face's cache, which links to blobs that are named by their SHA-256."""
    model = root / "models--org--name"
    snapshot = model / "snapshots" / "1f2e"
    for folder in (snapshot, model / "blobs"):
        folder.mkdir(parents=True)
    for name, body in files.items():
        sha = (hashlib.sha256 if name.endswith(".safetensors") else hashlib.sha1)(body).hexdigest()
        (model / "blobs" / sha).write_bytes(body)
        (snapshot / name).symlink_to(f"../../blobs/{sha}")
    return str(snapshot)


DOWNLOADED_S = 1732795200.5


def put_download(root: Path, files: Files) -> str:
    """Lay the files out as `hf download --local-dir` does."""
    notes = root / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for name, body in files.items():
        (root / name).write_bytes(body)
        os.utime(root / name, (DOWNLOADED_S, DOWNLOADED_S))
        (notes / f"{name}.metadata").write_text(f"1f2e\n{hashlib.sha256(body).hexdigest()}\n{DOWNLOADED_S}\n")
    return str(root)


def put_hub(_root: Path, files: Files) -> str:
    uri = f"hf://org/{uuid.uuid4().hex}"
    Hub().pipe({f"{uri}/{name}": body for name, body in files.items()})
    return uri


@pytest.mark.parametrize("kind", [put_cache, put_download, put_hub])
def test_verify_compares_files_with_the_hash_that_the_hub_has_published(
    kind: Callable[[Path, Files], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If this fails, a damaged download of a model is called whole, or nothing can prove a good one."""
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", Hub)
    monkeypatch.setattr(Hub, "published", {name: hashlib.sha256(body).hexdigest() for name, body in WHOLE.items()})
    uri = kind(tmp_path, WHOLE)
    options = make_options(read_bytes=8192, request_bytes=4096, tile_bytes=4096, connections=2)
    report = cloudckpt.verify(uri, options=options)
    assert report.num_bytes == sum(len(body) for name, body in WHOLE.items() if name != INDEX)
    assert (report.uri, report.num_objects, report.num_tensors) == (uri, 2, len(plain(made(Net, 1))))
    assert cloudckpt.verify(f"{uri}/{FIRST}", options=options).num_objects == 1
    damaged = WHOLE[FIRST][:-1] + bytes([WHOLE[FIRST][-1] ^ 1])
    if kind is put_hub:
        Hub().pipe(f"{uri}/{FIRST}", damaged)
    else:
        Path(uri, FIRST).write_bytes(damaged)  # through the link
        os.utime(Path(uri, FIRST), (DOWNLOADED_S, DOWNLOADED_S))  # a drive that loses a bit keeps the time
    with pytest.raises(CorruptCheckpointError, match=f"{FIRST} has another SHA-256.*Download it again") as caught:
        cloudckpt.verify(uri, options=options)
    assert len(caught.value.problems) == 1


def test_a_hash_of_before_the_last_write_proves_no_damage(tmp_path: Path) -> None:
    """If this fails, a file that a user has changed is called damaged, or no copy of a download can be proven."""
    uri = put_download(tmp_path, WHOLE)
    os.utime(tmp_path / FIRST)
    assert cloudckpt.verify(uri).num_objects == 2, "a copy, which is the same"
    changed = save_bytes({name: tensor + 1 for name, tensor in load_bytes(WHOLE[FIRST]).items()})
    (tmp_path / FIRST).write_bytes(changed)
    os.utime(tmp_path / FIRST, (DOWNLOADED_S + 1.5, DOWNLOADED_S + 1.5))
    with pytest.raises(CheckpointNotFoundError, match=f"not proven: .*{FIRST} has another SHA-256.*changed on purpose"):
        cloudckpt.verify(uri)
    os.utime(tmp_path / FIRST, (DOWNLOADED_S + 0.5, DOWNLOADED_S + 0.5))  # as huggingface_hub compares them
    with pytest.raises(CorruptCheckpointError, match=f"{FIRST} has another SHA-256"):
        cloudckpt.verify(uri)


def test_verify_says_nothing_of_files_whose_hash_is_unknown(tmp_path: Path) -> None:
    """If this fails, `verify` calls files whole that it could not compare with anything."""
    uri = put_download(tmp_path / "a", WHOLE)
    (tmp_path / "a" / ".cache" / "huggingface" / "download" / f"{FIRST}.metadata").write_text("1f2e\n")
    with pytest.raises(CheckpointNotFoundError, match=f"no checksums.*'{FIRST}'.*import"):
        cloudckpt.verify(uri)


@pytest.mark.parametrize("missing", ["head.weight", "embed.weight"])
def test_tied_name_that_the_file_lacks_is_filled(tmp_path: Path, missing: str) -> None:
    """If this fails, what save_pretrained writes of a tied model cannot be loaded, since it has one of two names."""
    expected = plain(made(Tied, 1))
    put(str(tmp_path), split({name: tensor for name, tensor in expected.items() if name != missing}, 1))
    for strict in (None, True, False):
        tied = made(Tied, 2)
        cloudckpt.load(tmp_path, model=tied, strict=strict)
        assert bits(plain(tied)) == bits(expected)
        assert tied.head.weight is tied.embed.weight
    apart = made(Tied, 2)
    apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())
    with pytest.raises(StateDictMismatchError, match=re.escape(missing)):
        cloudckpt.load(tmp_path, model=apart)


def test_part_is_loaded_under_another_name(tmp_path: Path) -> None:
    """If this fails, an encoder cannot be taken out of a file, or a whole file cannot become a part of a model."""
    expected = made(Net, 1)
    put(str(tmp_path), split(plain(expected)))
    encoder = made(Net, 2).encoder
    cloudckpt.load(tmp_path, model=encoder, rename={"encoder": "model"})
    assert bits(plain(encoder)) == bits(plain(expected.encoder))
    outer = nn.ModuleDict({"backbone": made(Net, 3), "value": nn.Linear(8, 1)})
    before = plain(outer["value"])
    cloudckpt.load(tmp_path, model=outer, rename={"": "model.backbone"}, strict=False)
    assert bits(plain(outer["backbone"])) == bits(plain(expected))
    assert bits(plain(outer["value"])) == bits(before)


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_the_advised_rename_confuses_no_layers(tmp_path: Path, num_layers: int) -> None:
    """If this fails, a user who loads the inner model of a file's model follows advice that swaps its layers."""
    whole, inner = (
        nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))}) for _ in "ab"
    )
    files = nn.ModuleDict({"model": whole, "head": nn.Linear(4, 2)})
    save_file(files.state_dict(), tmp_path / SINGLE)
    with pytest.raises(StateDictMismatchError, match="pass rename=") as caught:
        cloudckpt.load(tmp_path, model=inner)
    assert str(caught.value).endswith("pass rename={'model': 'model'}")
    cloudckpt.load(tmp_path, model=inner, rename={"model": "model"})
    assert bits(inner.state_dict()) == bits(whole.state_dict())


def test_names_that_differ_are_told_together(tmp_path: Path) -> None:
    """If this fails, a wrong model is found out one name at a time, or the advice leads to another error."""
    named = plain(made(Net, 1))
    put(str(tmp_path), split({f"net.{name}": tensor for name, tensor in named.items()} | {"extra": torch.ones(2)}))
    with pytest.raises(StateDictMismatchError) as failure:
        cloudckpt.load(tmp_path, model=made(Net, 2))
    advised = re.search(r"rename=(\{.*?\})", str(failure.value))
    assert advised is not None
    assert advised[1] == "{'net': 'model'}"
    net = made(Net, 2)
    cloudckpt.load(tmp_path, model=net, rename={"net": "model"})
    assert bits(plain(net)) == bits(named)
    del named["head.bias"]
    put(f"{tmp_path}/other", split(named | {"unknown.weight": torch.ones(2)}))
    with pytest.raises(StateDictMismatchError, match=r"head\.bias.*unknown\.weight"):
        cloudckpt.load(tmp_path / "other", model=made(Net, 2))
    with pytest.raises(StateDictMismatchError, match="optimizer"):
        cloudckpt.load(tmp_path / "other", model=net, optimizer=torch.optim.AdamW(net.parameters()))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_rounded_only_when_asked(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a model loses digits that nobody gave up, or cannot be loaded although it keeps them all."""
    caplog.set_level(logging.INFO, "cloudckpt")
    content = {"weight": torch.randn(16, 8).to(stored), "bias": torch.randn(16).to(stored)}
    put(f"{tmp_path}/hub", split(content, 1))
    layer = nn.Linear(8, 16, dtype=wanted)
    before = bits(plain(layer))
    expected = bits({name: tensor.to(wanted) for name, tensor in content.items()})
    if torch.promote_types(stored, wanted) == wanted:  # it holds each value of both
        cloudckpt.load(tmp_path / "hub", model=layer)
    else:
        with pytest.raises(StateDictMismatchError) as caught:
            cloudckpt.load(tmp_path / "hub", model=layer)
        shown = f"{stored} → {wanted} (2 of them, such as ".replace("torch.", "")
        assert shown in str(caught.value)
        assert "allow_lossy_casts='rounding'" in str(caught.value)
        assert bits(plain(layer)) == before
        cloudckpt.load(tmp_path / "hub", model=layer, options=make_options(allow_lossy_casts="rounding"))
    assert bits(plain(layer)) == expected
    assert sum("in another dtype" in record.message for record in caplog.records) == (stored is not wanted)


def test_files_are_rounded_as_a_checkpoint_is(tmp_path: Path) -> None:
    """If this fails, who asks for rounding gets infinities, or what a checkpoint would not give."""
    content = {"weight": torch.tensor([[1.0, 1e30]]), "bias": torch.randn(1)}
    put(f"{tmp_path}/hub", split(content, 1))
    cloudckpt.save(content, tmp_path / "step-1", no_dist=True)
    options, answers = make_options(allow_lossy_casts="rounding"), []
    for uri, rename in ((tmp_path / "hub", None), (tmp_path / "step-1", {"": "model"})):
        layer = nn.Linear(2, 1, dtype=torch.float16)
        with pytest.raises(StateDictMismatchError, match=r"weight.* such as 1"):
            cloudckpt.load(uri, model=layer, rename=rename, options=options)
        cloudckpt.load(uri, model=layer, rename=rename, options=make_options(allow_lossy_casts=True))
        answers.append(bits(plain(layer)))
    assert answers[0] == answers[1] == bits({name: tensor.half() for name, tensor in content.items()})


def test_dtype_that_torch_lacks_hinders_only_what_wants_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, one tensor of a new dtype keeps all others from being loaded, or is loaded as another one."""
    header = {
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "new": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [8, 11]},
    }
    text = json.dumps(header).encode()
    put(f"{tmp_path}/hub", {SINGLE: struct.pack("<Q", len(text)) + text + struct.pack("<ff", 1.0, 2.0) + b"abc"})
    held = {"w": torch.zeros(2)}
    cloudckpt.load(held, tmp_path / "hub", no_dist=True)
    assert held["w"].tolist() == [1.0, 2.0]
    assert "new (F6_E2M3)" in caplog.text
    with pytest.raises(StateDictMismatchError, match="new"):
        cloudckpt.load({"new": torch.zeros(4)}, tmp_path / "hub", no_dist=True)
    with pytest.raises(UnsupportedValueError, match="F6_E2M3"):
        cloudckpt.import_checkpoint(tmp_path / "hub", tmp_path / "step-1")


def test_a_tensor_that_the_index_does_not_name_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a tensor that other programs load from these files is left out without a word."""
    (tmp_path / "hub").mkdir()
    save_file({"w": torch.ones(2), "unlisted": torch.ones(2)}, tmp_path / "hub" / "a.safetensors")
    index = json.dumps({"weight_map": {"w": "a.safetensors"}}).encode()
    put(f"{tmp_path}/hub", {INDEX: index})
    assert [*cloudckpt.read(tmp_path / "hub")] == ["w"]
    assert "its index does not name, left out: 'unlisted'" in caplog.text


def header_of(members: dict[str, Any]) -> bytes:
    text = json.dumps(members).encode()
    return struct.pack("<Q", len(text)) + text


WHOLE = split(plain(made(Net, 1)))
FIRST = "model-00001-of-00002.safetensors"
OVERLAPPING = header_of({
    name: {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]} for name, at in (("a", 0), ("b", 4))
}) + bytes(12)  # fmt: skip
NO_SUCH = WHOLE[INDEX].replace(b"00001-of", b"00003-of")
DAMAGES: dict[str, tuple[Files, type[Exception], str]] = {
    "cut": ({FIRST: WHOLE[FIRST][:-1]}, CorruptCheckpointError, FIRST),
    "cut in the header": ({FIRST: WHOLE[FIRST][:40]}, CorruptCheckpointError, FIRST),
    "longer": ({FIRST: WHOLE[FIRST] + b"x"}, CorruptCheckpointError, FIRST),
    "empty": ({FIRST: b""}, CorruptCheckpointError, FIRST),
    "header too long": ({FIRST: struct.pack("<Q", 10**8 + 1) + bytes(100)}, CorruptCheckpointError, FIRST),
    "lying shape": (
        {FIRST: WHOLE[FIRST].replace(b'"shape":[16,8]', b'"shape":[16,9]')}, CorruptCheckpointError, FIRST
    ),
    "overlap": ({FIRST: OVERLAPPING}, CorruptCheckpointError, FIRST),
    "tensor elsewhere": (
        {INDEX: WHOLE[INDEX].replace(b'"head.bias": "model-00002', b'"head.bias": "model-00001')},
        CorruptCheckpointError,
        r"head\.bias",
    ),
    "index lies of a file": ({INDEX: NO_SUCH}, CorruptCheckpointError, "00003-of"),
    "index leads out": (
        {INDEX: json.dumps({"weight_map": {"w": "../other/x.safetensors"}}).encode()}, CorruptCheckpointError, "other"
    ),
    "index is none": ({INDEX: b"{"}, CorruptCheckpointError, INDEX),
    "two models": ({SINGLE: WHOLE[FIRST]}, UnsupportedValueError, SINGLE),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_nothing_is_loaded(tmp_path: Path, name: str) -> None:
    """If this fails, a model has a mixture of old and new weights, or those of another file."""
    changed, error, named = DAMAGES[name]
    put(str(tmp_path), WHOLE | changed)
    net = made(Net, 2)
    before = plain(net)
    with pytest.raises(error, match=named):
        cloudckpt.load(tmp_path, model=net)
    assert bits(plain(net)) == bits(before)


@pytest.mark.parametrize("operation", ["head", "read_into", "read"])
def test_refusal_is_no_absence(tmp_path: Path, operation: str) -> None:
    """If this fails, a job without a permission is told that there is no model, and may begin without one."""
    put(str(tmp_path), WHOLE)
    faults = Faults(Rule(fault=Fails(AccessDeniedError), operations={operation}, times=None))
    with pytest.raises(AccessDeniedError):
        cloudckpt.load(tmp_path, model=made(Net, 2), options=make_options(wrap_store=faults))


@pytest.mark.parametrize("kind", ["same size", "longer", "gone"])
@pytest.mark.parametrize("times", [1, None])
def test_file_that_is_replaced_during_the_load_is_noticed(tmp_path: Path, kind: str, times: int | None) -> None:
    """If this fails, a model is a mixture of two."""
    old, new = plain(made(Wide, 1)), plain(made(Wide, 3))
    put(str(tmp_path), {SINGLE: save_bytes(old)})
    numbers = iter(range(1, 99))

    def replace(call: Call) -> None:
        if call.num_bytes < MIB:  # the header
            return
        metadata = None if kind == "same size" else {"more": "x" * 64 * next(numbers)}
        Path(tmp_path, SINGLE).unlink(missing_ok=True)
        if kind != "gone":
            save_file(new, tmp_path / SINGLE, metadata=metadata)

    faults = Faults(Rule(fault=Tell(before=replace), operations={"read_into"}, skip=1, times=times, key=SINGLE))
    options = make_options(wrap_store=faults, connections=1)
    wide = made(Wide, 2)
    if kind == "gone":
        with pytest.raises((CheckpointChangedError, CheckpointNotFoundError)):
            cloudckpt.load(tmp_path, model=wide, options=options)
    elif times == 1:
        cloudckpt.load(tmp_path, model=wide, options=options)
        assert bits(plain(wide)) == bits(new)
    else:
        with pytest.raises(CheckpointChangedError):
            cloudckpt.load(tmp_path, model=wide, options=options)


def test_checkpoint_beside_files_is_the_one_that_counts(tmp_path: Path) -> None:
    """If this fails, a run that resumes gets the weights of an export in the folder, which may be older."""
    net = made(Net, 5)
    cloudckpt.save(tmp_path / "step-1", model=net)
    put(f"{tmp_path}/step-1", WHOLE)
    other = made(Net, 2)
    cloudckpt.load(tmp_path / "step-1", model=other)
    assert bits(plain(other)) == bits(plain(net))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="safetensors"):
        cloudckpt.load(tmp_path / "empty", model=other)


def test_verify_and_copy_of_files_without_checksums_advise_an_import(local: LocalPlace) -> None:
    """If this fails, files without checksums are called verified, or a command says that there is nothing."""
    uri = put(local.uri("hub"), WHOLE)
    with pytest.raises(CheckpointNotFoundError, match=r"no checksums.*import"):
        cloudckpt.verify(uri)
    with pytest.raises(CheckpointNotFoundError, match=r"cloudckpt import .*, with checksums"):
        cloudckpt.copy(uri, local.uri("copy"))
    found = cloudckpt.describe(uri)
    assert {one.name: one.shape for one in found.tensors} == {n: tuple(t.shape) for n, t in plain(made(Net, 1)).items()}
    put(local.uri("other"), split(plain(made(Net, 1)) | {"head.bias": torch.zeros(4)}, 1))
    assert [one.name for one in cloudckpt.compare(uri, local.uri("other")).differences] == ["head.bias"]


def test_model_on_the_meta_device_is_told_what_to_do(tmp_path: Path) -> None:
    """If this fails, a model without memory fails with an error of torch's, or is called loaded."""
    put(str(tmp_path), WHOLE)
    with torch.device("meta"):
        net = Net()
    with pytest.raises(InvalidOptionError, match="to_empty"):
        cloudckpt.load(tmp_path, model=net)
    net.to_empty(device="cpu")
    cloudckpt.load(tmp_path, model=net)
    assert bits(plain(net)) == bits(plain(made(Net, 1)))
