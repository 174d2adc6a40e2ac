"""Exports in another dtype, with a model's other files, from other sources, and by several processes at once.

The safetensors library alone says what an export holds.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save_file
from tests.convert.conftest import Root
from tests.convert.states import DiedError, Mortal, bits, contents, save, store_at
from tests.kit.options import make_options

import cloudckpt
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    InvalidOptionError,
    StateDictMismatchError,
    UnsupportedValueError,
)
from cloudckpt.options import KIB
from cloudckpt.testing import damage
from cloudckpt.testing.faults import Call, Faults, Rule, Tell, WrappedStore

INDEX = "model.safetensors.index.json"
CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.float8_e4m3fn, torch.int64, torch.int16, torch.uint8, torch.bool)


def opened(uri: str) -> dict[str, torch.Tensor]:
    """The tensors of a whole export: those of the index's files, or of its only file."""
    files = contents(uri)
    if INDEX not in files:
        return load(files["model.safetensors"])
    found: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = json.loads(files[INDEX])["weight_map"]
    for name in set(weight_map.values()):
        tensors = load(files[name])
        assert {weight_map[tensor] for tensor in tensors} == {name}
        found |= tensors
    assert found.keys() == weight_map.keys()
    return found


def assert_whole_or_unfinished(uri: str, state: dict[str, torch.Tensor]) -> bool:
    """Return True if a reader finds the export, which then has all tensors."""
    is_found = not {INDEX, "model.safetensors"}.isdisjoint(contents(uri))
    if is_found:
        assert bits(opened(uri)) == bits(state)
        assert "config.json" in contents(uri)
    return is_found


def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """By torch."""
    return tensor if dtype is None or tensor.dtype not in CAST else tensor.to(dtype)


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Some tensors of any kind, empty ones and scalars too, of which some are tied."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    state = {}
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.sampled_from([(), (0,), (3, 0), (5,), (33, 17), (3, 1001), (131, 67)]))
        dtype = draw(st.sampled_from(CAST + OTHERS))
        state[f"layers.{number}.w"] = torch.randn(shape, generator=generator).mul(50).to(dtype)
    for number in range(draw(st.integers(0, 2))):
        state[f"tied.{number}"] = state[draw(st.sampled_from(sorted(state)))]
    return state


@settings(deadline=None, max_examples=60)
@given(
    state=states(),
    dtype=st.sampled_from([None, *CAST]),
    max_shard_bytes=st.sampled_from([1, 3000, 20_000, 1 << 40]),
    order=st.sampled_from([None, *itertools.permutations(range(2)), *itertools.permutations(range(3))]),
    extensions=st.sampled_from([(), (cloudckpt.Zstandard(),)]),
)
def test_an_export_has_what_torch_casts(
    state: dict[str, torch.Tensor],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    order: tuple[int, ...] | None,
    extensions: tuple[cloudckpt.Zstandard, ...],
) -> None:
    """If this fails, an export has other values than the checkpoint, or lacks some: by its dtype, sizes or parts."""
    root = f"memory://export-{uuid.uuid4().hex}"
    save(state, f"{root}/step-1", tile_bytes=4 * KIB, extensions=extensions)
    options = make_options(read_bytes=64 * KIB, request_bytes=4 * KIB, tile_bytes=4 * KIB, connections=2)
    chosen: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "options": options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cloudckpt.convert.export_files.TILE_BYTES", 4 * KIB)  # parts that cut rows
        reports = [
            cloudckpt.export_checkpoint(f"{root}/step-1", f"{root}/hub", part=part, **chosen)
            for part in ([None] if order is None else [(rank, len(order)) for rank in order])
        ]
    assert [report.is_whole for report in reports][-1]
    assert bits(opened(f"{root}/hub")) == bits({name: cast(tensor, dtype) for name, tensor in state.items()})
    written = [name for report in reports for name in report.files]
    assert sorted(written) == sorted(contents(f"{root}/hub")), "a file was written twice, or by no part"


@pytest.mark.parametrize("extensions", [(), (cloudckpt.Zstandard(),)], ids=["plain", "compressed"])
def test_values_that_the_dtype_cannot_hold_are_named(
    root_of: Root, extensions: tuple[cloudckpt.Zstandard, ...]
) -> None:
    """If this fails, a weight becomes infinite in silence, or an error does not say which."""
    root = root_of("memory")
    save({"ok": torch.ones(2), "big": torch.tensor([1.0, 1e5]), "count": torch.tensor([10**6])}, f"{root}/a")
    for dtype in (torch.float16, "torch.float16", "float16"):
        with pytest.raises(StateDictMismatchError, match=r"'big' of .*float16 .* such as 100000\.0\. Choose another"):
            cloudckpt.export_checkpoint(f"{root}/a", f"{root}/hub", dtype=dtype)
    assert not contents(f"{root}/hub")
    options = make_options(allow_lossy_casts=True)
    cloudckpt.export_checkpoint(f"{root}/a", f"{root}/hub", dtype="float16", options=options)
    assert opened(f"{root}/hub")["big"].tolist() == [1.0, float("inf")]
    wrong: list[dict[str, Any]] = [
        {"dtype": "float8_e4m3fn"},
        {"dtype": "int8"},
        {"dtype": "bfloat16", "format": "torch"},
        {"part": (2, 2)},
        {"part": "01"},
        {"config_from": f"{root}/nothing"},
    ]
    for arguments in wrong:
        with pytest.raises(InvalidOptionError):
            cloudckpt.export_checkpoint(f"{root}/a", f"{root}/other", **arguments)
    assert not contents(f"{root}/other")


def _model_folder(path: Path) -> Path:
    """The folder of a model: what it needs beside its weights, its weights in several formats, and more."""
    for name in (
        "config.json", "tokenizer.json", "merges.txt", "tokenizer.model", "modeling_x.py", "chat_template.jinja",
        "empty.txt", "model.safetensors", INDEX, "pytorch_model.bin", "training_args.bin", "optimizer.pt", "x.gguf",
        ".gitattributes", "manifest.json", "original/params.json",
    ):  # fmt: skip
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("" if name == "empty.txt" else f"{name} of the base")
    return path


@pytest.mark.parametrize("kind", ["path", "s3"])
def test_files_of_the_model_are_copied_along(
    root_of: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """If this fails, an export lacks its tokenizer, gets other weights beside its own, or loses a file of the user."""
    root, base = root_of(kind), _model_folder(tmp_path / "base")
    save({"w": torch.ones(3), "v": torch.zeros(3)}, f"{root}/a")
    damage.overwrite(store_at(f"{root}/hub"), "merges.txt", b"mine")
    report = cloudckpt.export_checkpoint(f"{root}/a", f"{root}/hub", config_from=base)
    along = {"config.json", "tokenizer.json", "tokenizer.model", "modeling_x.py", "chat_template.jinja", "empty.txt"}
    assert set(report.files) == along | {"model.safetensors"}
    found = contents(f"{root}/hub")
    assert found.pop("merges.txt") == b"mine"
    assert "hub/merges.txt exists already" in caplog.text
    assert found.keys() == set(report.files)
    assert all(found[name] == (base / name).read_bytes() for name in along)
    again = cloudckpt.export_checkpoint(
        f"{root}/a", f"{root}/hub", config_from=f"{root}/hub", overwrite=True, max_shard_bytes=12
    )
    assert (len(again.files), len(contents(f"{root}/hub"))) == (3, 10)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_config_of_another_dtype_than_the_export_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    """If this fails, an export in bfloat16 is opened in float32 by its own config.json, without a word."""
    save({"w": torch.ones(3)}, f"{tmp_path}/a")
    config = tmp_path / "base" / "config.json"
    config.parent.mkdir()
    config.write_text(f'{{"{key}": "float32"}}')
    for dtype in (None, "float32"):
        cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / f"hub-{dtype}", dtype=dtype, config_from=config.parent)
    assert "config.json" not in caplog.text
    cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / "hub", dtype="bfloat16", config_from=config.parent)
    assert "config.json says dtype float32, and this export has bfloat16" in caplog.text
    assert 'pass dtype="bfloat16" to from_pretrained' in caplog.text


def test_weights_of_other_names_than_those_of_the_config_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, transformers opens an export with random weights, because it finds none of its names."""
    save({"model": {"bert.w": torch.ones(3), "head.w": torch.ones(1)}}, f"{tmp_path}/a")
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    save_file({"bert.w": torch.zeros(3), "bert.v": torch.zeros(3)}, base / "model.safetensors")
    cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / "fits", config_from=base, strip_prefix="model")
    assert "other names" not in caplog.text
    cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / "other", config_from=base)
    told = f"the weights in {base} have other names, such as bert.v, and this export has model.bert.w: "
    assert told in caplog.text
    assert "pass strip_prefix" in caplog.text
    caplog.clear()
    (base / "model.safetensors").write_text("a pointer of Git LFS")
    cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / "unknown", config_from=base)
    assert "other names" not in caplog.text


def test_a_hint_at_include_names_what_it_leaves_out(tmp_path: Path) -> None:
    """If this fails, who follows the hint exports a model without its head, which has a "model" of its own."""
    wrapped = {"model": {"w": torch.ones(2)}, "lm_head": {"weight": torch.ones(2)}}
    save({"accelerator": {"models": [wrapped], "optimizers": [{"x": torch.ones(1)}]}}, f"{tmp_path}/a")
    with pytest.raises(InvalidOptionError) as caught:
        cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / "hub", include="model", strip_prefix="model")
    near = "accelerator.models.0"
    assert f"(did you mean {near!r}, or '{near}.model' without '{near}.lm_head'?)" in str(caught.value)


def test_links_of_a_hubs_cache_are_followed_and_others_are_refused(tmp_path: Path) -> None:
    """If this fails, a snapshot's config is left out without a word, or any file of the machine is copied along."""
    model = tmp_path / "models--org--name"
    snapshot = model / "snapshots" / "1"
    for folder in (snapshot, model / "blobs"):
        folder.mkdir(parents=True)
    (model / "blobs" / "x").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/x")
    save({"w": torch.ones(3)}, f"{tmp_path}/a")
    cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / "hub", config_from=snapshot)
    assert (tmp_path / "hub" / "config.json").read_text() == "{}"
    (tmp_path / "secret").write_text("secret")
    (snapshot / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(cloudckpt.CloudckptError, match=r"vocab\.txt"):
        cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / "other", config_from=snapshot)
    assert not contents(str(tmp_path / "other"))


@pytest.fixture
def large(root_of: Root, tmp_path: Path) -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
    """A root with a checkpoint, its tensors, and arguments of an export to several files."""
    state = {f"w{number}": torch.full((1000,), float(number)) for number in range(6)}
    root = root_of("memory")
    save(state, f"{root}/a")
    (tmp_path / "config.json").write_text("{}")
    return root, state, {"max_shard_bytes": 8000, "config_from": tmp_path, "options": make_options(connections=1)}


@pytest.mark.parametrize("part", [None, (0, 2), (1, 2)])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [8000, 1 << 40])
def test_an_export_that_is_killed_is_whole_or_has_no_index(
    large: tuple[str, dict[str, torch.Tensor], dict[str, Any]],
    part: tuple[int, int] | None,
    max_shard_bytes: int,
    *,
    after: bool,
) -> None:
    """If this fails, a reader finds an export that lacks a file, or a part that died cannot be run again."""
    root, state, arguments = large
    arguments["max_shard_bytes"] = max_shard_bytes
    for at in itertools.count(1):
        hub, has_died = f"{root}/hub-{at}", False
        if part is not None:
            cloudckpt.export_checkpoint(f"{root}/a", hub, part=(1 - part[0], 2), **arguments)
        mortal = make_options(wrap_store=lambda store, at=at: Mortal(store, at, after=after), connections=1)
        try:
            cloudckpt.export_checkpoint(f"{root}/a", hub, part=part, target_options=mortal, **arguments)
        except DiedError:
            has_died = True
        is_whole = assert_whole_or_unfinished(hub, state)
        if not has_died:
            assert is_whole
            assert at > 5
            return
        again = cloudckpt.export_checkpoint(f"{root}/a", hub, part=part, overwrite=part is None, **arguments)
        assert again.is_whole
        assert assert_whole_or_unfinished(hub, state)


def test_parts_at_once_make_one_whole_export(
    large: tuple[str, dict[str, torch.Tensor], dict[str, Any]],
) -> None:
    """If this fails, parts that run at once hinder each other, no part writes the index, or one does too early."""
    root, state, arguments = large
    seen: list[set[str]] = []
    tell = Rule(
        fault=Tell(before=lambda _: seen.append(set(contents(f"{root}/hub")))),
        operations={"put"},
        key=re.escape(INDEX),
        times=None,
    )
    options, begin = make_options(wrap_store=Faults(tell)), threading.Barrier(4)
    reports: list[cloudckpt.ConversionReport] = []

    def run(rank: int) -> None:
        begin.wait()
        report = cloudckpt.export_checkpoint(
            f"{root}/a", f"{root}/hub", part=(rank, 4), target_options=options, **arguments
        )
        reports.append(report)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 4
    assert any(report.is_whole for report in reports)
    assert assert_whole_or_unfinished(f"{root}/hub", state)
    shards = {f"model-{number:05d}-of-00003.safetensors" for number in range(1, 4)}
    assert seen
    assert all(shards | {"config.json"} <= names for names in seen)


def test_a_part_believes_no_file_of_another_export(
    large: tuple[str, dict[str, torch.Tensor], dict[str, Any]],
) -> None:
    """If this fails, the index names files of an earlier export, with the weights of another step."""
    root, state, arguments = large
    hub, newer = f"{root}/hub", {name: tensor + 10 for name, tensor in state.items()}
    save(newer, f"{root}/b")
    cloudckpt.export_checkpoint(f"{root}/a", hub, **arguments)
    before = contents(hub)
    for rank in range(2):
        with pytest.raises(cloudckpt.CheckpointExistsError, match="model-0000"):
            cloudckpt.export_checkpoint(f"{root}/b", hub, part=(rank, 2), **arguments)
    assert contents(hub) == before
    arguments["overwrite"] = True
    for source, expected in (("a", state), ("b", newer)):
        first = cloudckpt.export_checkpoint(f"{root}/{source}", hub, part=(1, 2), **arguments)
        assert not first.is_whole
        assert INDEX not in contents(hub), "it would name files of two exports"
        second = cloudckpt.export_checkpoint(f"{root}/{source}", hub, part=(0, 2), **arguments)
        assert second.is_whole
        assert assert_whole_or_unfinished(hub, expected)
    renamed = {"include": "w[0-3]", "max_shard_bytes": 8000, "overwrite": True}
    cloudckpt.export_checkpoint(f"{root}/a", hub, part=(0, 1), **renamed)
    assert set(contents(hub)) == {*(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)), INDEX, "config.json"}


def test_a_part_that_cannot_write_the_index_removes_no_other_one(
    large: tuple[str, dict[str, torch.Tensor], dict[str, Any]],
) -> None:
    """If this fails, an export that a part reported as whole loses its index, because another part failed."""
    root, state, arguments = large
    hub = f"{root}/hub"
    whole: list[bool] = []

    class Overtaken(WrappedStore):
        def put(self, key: str, *args: Any, **kwargs: Any) -> Any:
            if key == INDEX:
                whole.append(cloudckpt.export_checkpoint(f"{root}/a", hub, part=(0, 2), **arguments).is_whole)
                raise AccessDeniedError("denied", key=key, operation="put")
            return self.inner.put(key, *args, **kwargs)

    cloudckpt.export_checkpoint(f"{root}/a", hub, part=(0, 2), **arguments)
    with pytest.raises(AccessDeniedError):
        cloudckpt.export_checkpoint(
            f"{root}/a", hub, part=(1, 2), target_options=make_options(wrap_store=Overtaken), **arguments
        )
    assert whole == [True]
    assert assert_whole_or_unfinished(hub, state)


def test_a_step_that_refers_to_another_is_exported(root_of: Root) -> None:
    """If this fails, a step whose unchanged tensors are in an earlier step's objects cannot be exported."""
    root, options = root_of("path"), make_options(unchanged="reference", part_bytes=64 * KIB, tile_bytes=4 * KIB)
    state = {"same": torch.arange(50_000.0), "new": torch.zeros(3)}
    with cloudckpt.CheckpointManager(root, options=options) as manager:
        for step in (1, 2):
            state["new"] = torch.full((3,), float(step))
            manager.save(step, {"model": state})
    uri = f"{root}/step-2"
    manifest = json.loads((Path(uri) / "manifest.json").read_text())
    assert "step-1" in json.dumps(manifest["objects"]), "it refers to no other step"
    for part in ((1, 2), (0, 2)):
        cloudckpt.export_checkpoint(uri, f"{root}-hub", include="model", strip_prefix="model", part=part)
    assert bits(opened(f"{root}-hub")) == bits(state)


@pytest.mark.parametrize("part", [None, (0, 1)])
def test_safetensors_files_are_exported_again(root_of: Root, tmp_path: Path, part: tuple[int, int] | None) -> None:
    """If this fails, published weights cannot be cast or cut anew, or files that change meanwhile are mixed."""
    root, source = root_of("path"), tmp_path / "source"
    source.mkdir()
    state = {f"w{number}": torch.full((1000,), number + 0.5) for number in range(4)}
    save_file(state, source / "model.safetensors")
    arguments: dict[str, Any] = {"dtype": "bfloat16", "max_shard_bytes": 4000, "part": part}
    cloudckpt.export_checkpoint(source, f"{root}/hub", **arguments)
    assert bits(opened(f"{root}/hub")) == bits({name: tensor.bfloat16() for name, tensor in state.items()})
    cloudckpt.export_checkpoint(source / "model.safetensors", f"{root}/one.safetensors", include="w1")
    assert bits(load(contents(root)["one.safetensors"])) == bits({"w1": state["w1"]})

    def replace(_call: Call) -> None:
        save_file({name: tensor + 1 for name, tensor in state.items()}, source / "model.safetensors")

    faults = Faults(Rule(fault=Tell(before=replace), operations={"put"}, key="00002"))
    with pytest.raises(CheckpointChangedError):
        cloudckpt.export_checkpoint(
            source, f"{root}/mixed", target_options=make_options(wrap_store=faults), **arguments
        )
    assert INDEX not in contents(f"{root}/mixed")
    assert part is not None or not contents(f"{root}/mixed")


def test_a_dtype_that_torch_lacks_is_not_exported_as_bytes(tmp_path: Path) -> None:
    """If this fails, an export has a tensor of another shape and dtype, which the load warns of."""
    body = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body + b"ab")
    with pytest.raises(UnsupportedValueError, match=r"'w \(F4\)'"):
        cloudckpt.export_checkpoint(tmp_path / "model.safetensors", tmp_path / "hub")
