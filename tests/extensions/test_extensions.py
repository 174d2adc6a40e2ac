"""Stream extensions by way of `Options(extensions=…)`: compression, ciphers, and chains of them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.extensions.ciphers import Miscounting, Xor
from tests.kit.options import make_options
from torch.distributed.checkpoint._extension import ZStandard as TorchsZstandard

import cloudckpt
from cloudckpt import Options, Zstandard
from cloudckpt.tensors.extensions import ReadTransforms

SMALL = {"tile_bytes": 4096, "part_bytes": 16384}


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """The one that uploads would end only after this one."""
    yield
    cloudckpt.close()


def state_of(fill: float) -> dict[str, Any]:
    weight = torch.full((64, 100), fill)
    return {
        "weight": weight,
        "tied": weight,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(fill),
        "half": torch.full((33,), fill, dtype=torch.bfloat16),
        "strided": torch.full((8, 6), fill).t(),
        "value": ["text", fill],
        "blob": io.BytesIO(b"bytes" * int(fill)),
    }


def loaded_from(uri: Any, **more: Any) -> dict[str, Any]:
    state = state_of(0.0)
    cloudckpt.load(state, uri, no_dist=True, **more)
    return state


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        elif isinstance(value, io.BytesIO):
            assert found[name].getvalue() == value.getvalue()
        else:
            assert found[name] == value, name


def manifest_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
    return found


def test_compressed_checkpoints_load_without_a_word(tmp_path: Path) -> None:
    """If this fails, a compressed checkpoint loses values, or needs options to be loaded."""
    uri = tmp_path / "c"
    cloudckpt.save(state_of(3.0), uri, no_dist=True, options=make_options(extensions=[Zstandard()], **SMALL))
    assert_equal(loaded_from(uri), state_of(3.0))
    manifest = manifest_of(uri)
    assert {tuple(entry["transforms"]) for entry in manifest["tensors"].values()} == {("stream.zstd/1",)}
    assert {tuple(entry["transforms"]) for entry in manifest["values"].values()} == {("stream.zstd/1", "value.json/1")}
    assert sum(stored["size"] for stored in manifest["objects"]) < 20_000  # of 55,000 that the tensors have
    assert cloudckpt.verify(uri).num_tensors == 6


def test_a_chain_is_undone_from_its_end(tmp_path: Path) -> None:
    """If this fails, a cipher behind a compressor cannot be read, or compresses what is encrypted already."""
    uri, chain = tmp_path / "c", [Zstandard(), Xor(0x5A)]
    options = make_options(extensions=chain, **SMALL)
    cloudckpt.async_save(state_of(2.0), uri, no_dist=True, options=options).result(120)
    assert_equal(loaded_from(uri, options=Options(extensions=chain)), state_of(2.0))
    assert_equal(loaded_from(uri, options=Options(extensions=chain[1:])), state_of(2.0))
    (transforms,) = {tuple(entry["transforms"]) for entry in manifest_of(uri)["tensors"].values()}
    assert transforms == ("tests.xor/1", "stream.zstd/1")  # in the order to undo them, as the format has it
    assert sum(path.stat().st_size for path in uri.rglob("*.safetensors")) < 20_000


def test_an_unknown_extension_is_named_before_anything_is_read(tmp_path: Path) -> None:
    """If this fails, a user learns from a stack trace, or from wrong weights, that an extension is missing."""
    cloudckpt.save(state_of(2.0), tmp_path / "c", no_dist=True, options=Options(extensions=[Xor(7)]))
    read: list[Any] = []
    with pytest.raises(dcp.api.CheckpointException, match=r"'tests.xor/1'.*extension in the options") as raised:
        loaded_from(tmp_path / "c", options=Options(on_event=read.append))
    assert isinstance(raised.value, cloudckpt.errors.UnsupportedFormatError)
    assert not [event for event in read if event.name == "load.range_read"]
    with pytest.raises(cloudckpt.errors.UnsupportedFormatError, match=r"'w' of u.*'stream.zstd/2'.*newer"):
        ReadTransforms(None).check(["stream.zstd/2"], fqn="w", uri="u")


@pytest.mark.parametrize("more", [True, False])
def test_a_decoder_that_miscounts_is_caught(tmp_path: Path, more: Any) -> None:
    """If this fails, an extension that loses or adds bytes gives tensors that are shifted, without an error."""
    cloudckpt.save({"w": torch.ones(500)}, tmp_path / "c", no_dist=True, options=Options(extensions=[Xor(7)]))
    options = Options(extensions=[Miscounting(7, more=more)])
    words = f"'w' of .* unpacks to {'more' if more else 'fewer'} than the 2000 bytes"
    with pytest.raises(dcp.api.CheckpointException, match=words):
        cloudckpt.load({"w": torch.zeros(500)}, tmp_path / "c", no_dist=True, options=options)


def test_torchs_own_keywords_and_classes_work_as_well(tmp_path: Path) -> None:
    """If this fails, code that uses torch's FileSystemWriter with extensions cannot move to our writer as it is."""
    writer = cloudckpt.ObjectStoreWriter(tmp_path / "c", _extensions=[TorchsZstandard()])
    dcp.save(state_of(2.0), storage_writer=writer, no_dist=True)
    state = state_of(0.0)
    dcp.load(state, storage_reader=cloudckpt.ObjectStoreReader(tmp_path / "c"), no_dist=True)
    assert_equal(state, state_of(2.0))
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match="given twice"):
        cloudckpt.ObjectStoreWriter("x", _extensions=[TorchsZstandard()], options=Options(extensions=[Zstandard()]))


def test_checkpoint_compressed_by_torch_is_read_with_consent(tmp_path: Path) -> None:
    """If this fails, compressed checkpoints of torch's own writer, or with users' extensions, cannot be taken over."""
    for name, extension in (("zstd", TorchsZstandard()), ("xor", Constant(7))):
        writer = dcp.FileSystemWriter(tmp_path / name, _extensions=[extension])
        dcp.save({"w": torch.arange(50.0)}, storage_writer=writer, no_dist=True)
        state = {"w": torch.zeros(50)}
        options = Options(extensions=[Constant(7)])
        cloudckpt.load(state, tmp_path / name, no_dist=True, allow_pickle=True, options=options)
        assert torch.equal(state["w"], torch.arange(50.0))


class Constant(Xor):
    """Its class knows its key, which torch's reader needs."""

    @staticmethod
    def from_descriptor(version: str) -> Constant:
        return Constant(7)


def test_memory_for_what_unpacks_is_bounded_by_the_manifest(tmp_path: Path) -> None:
    """If this fails, a few bytes in a bucket can ask for all memory: a value unpacks to more than `read_bytes`."""
    options = Options(extensions=[Zstandard()])
    cloudckpt.save({"v": io.BytesIO(bytes(3 << 20))}, tmp_path / "c", no_dist=True, options=options)
    few = make_options(read_bytes=2 << 20, request_bytes=1 << 20)
    with pytest.raises(dcp.api.CheckpointException, match=r"'v' of .* unpacks to more than"):
        cloudckpt.load({"v": io.BytesIO()}, tmp_path / "c", no_dist=True, options=few)
