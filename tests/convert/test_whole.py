"""Exports to and imports from ``torch.save`` files and torch's own DCP format."""

from __future__ import annotations

import collections
import io
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.convert.conftest import Root
from tests.convert.states import bits, blank, contents, loaded, save, small, store_at, torch_saved
from tests.kit.options import make_options
from tests.kit.wrapped import watching
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

import cloudckpt
from cloudckpt.testing import damage
from cloudckpt.testing.faults import Call, Faults, Rule, Tell

KINDS = ["path", "s3"]


@pytest.mark.parametrize("kind", KINDS)
def test_torch_load_reads_an_export(root_of: Root, kind: str) -> None:
    """If this fails, the file does not open with ``weights_only=True``, or is another state dict than was saved."""
    root = root_of(kind)
    state = small()
    save(state, f"{root}/step-1")
    report = cloudckpt.export_checkpoint(f"{root}/step-1", f"{root}/out/model.pt", format="torch")
    files = contents(f"{root}/out")
    assert (report.files, set(files)) == (("model.pt",), {"model.pt"})
    assert (report.num_tensors, report.num_values, report.num_bytes) == (6, 3, len(files["model.pt"]))
    assert bits(torch.load(io.BytesIO(files["model.pt"]), weights_only=True)) == bits(state)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.export_checkpoint(f"{root}/step-1", f"{root}/out/model.pt", format="torch")
    options: dict[str, Any] = {"format": "torch", "include": "model.*", "strip_prefix": "model.", "overwrite": True}
    cloudckpt.export_checkpoint(f"{root}/step-1", f"{root}/out/model.pt", **options)
    found = torch.load(io.BytesIO(contents(f"{root}/out")["model.pt"]), weights_only=True)
    assert bits(found) == bits(state["model"])


class Moments(NamedTuple):
    """The state of a functional optimizer."""

    mu: Any
    count: int


def test_an_export_of_named_tuples_needs_no_class(tmp_path: Path) -> None:
    """If this fails, the file opens with the reader's consent to run code alone, where the class is known."""
    save({"moments": [Moments({"w": torch.ones(2)}, 3)]}, str(tmp_path / "a"))
    cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / "a.pt", format="torch")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    (moments,) = found["moments"]
    assert type(moments) is tuple
    assert (moments[0]["w"].tolist(), moments[1]) == ([1.0, 1.0], 3)


@pytest.mark.parametrize("format_", ["safetensors", "torch", "dcp"])
def test_a_conversion_counts_its_requests(tmp_path: Path, format_: Any) -> None:
    """If this fails, `ConversionReport.num_requests` lacks those of the loads, saves and files within."""
    calls: list[Call] = []
    options = make_options(wrap_store=watching(before=calls.append))
    both: dict[str, Any] = {"options": options, "target_options": options, "format": format_}
    save({"w": torch.ones(300)}, str(tmp_path / "a"))
    source = tmp_path / ("file.pt" if format_ == "torch" else "files.safetensors")
    if format_ == "dcp":
        dcp.save({"w": torch.ones(300)}, checkpoint_id=source, no_dist=True)
        both["allow_pickle"] = True
    else:
        report = cloudckpt.export_checkpoint(tmp_path / "a", source, **both)
        assert report.num_requests == len(calls)
        calls.clear()
    report = cloudckpt.import_checkpoint(source, tmp_path / "b", **both)
    # Not counted are the probe, which the process makes once, and looks that explain or check.
    assert 0.7 * len(calls) <= report.num_requests < len(calls)


def test_torch_makes_its_own_format_of_an_export(tmp_path: Path) -> None:
    """If this fails, there is no way back to torch's own checkpoints, or it changes what was saved."""
    state = small()
    save(state, str(tmp_path / "a"))
    cloudckpt.export_checkpoint(tmp_path / "a", tmp_path / "a.pt", format="torch")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "dcp")
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert bits(found) == bits(state)
    cloudckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "back", format="dcp", allow_pickle=True)
    assert bits(loaded(state, str(tmp_path / "back"))) == bits(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_torch_save_is_imported(root_of: Root, kind: str) -> None:
    """If this fails, what was saved with ``torch.save`` cannot be moved here, or changes on the way."""
    root = root_of(kind)
    state = small()
    damage.overwrite(store_at(f"{root}/old"), "model.pt", torch_saved(state))
    report = cloudckpt.import_checkpoint(f"{root}/old/model.pt", f"{root}/step-1", format="torch")
    assert (report.num_tensors, report.num_values) == (6, 3)
    assert bits(loaded(state, f"{root}/step-1")) == bits(state)
    options: dict[str, Any] = {"format": "torch", "include": "model.*", "add_prefix": "old."}
    cloudckpt.import_checkpoint(f"{root}/old/model.pt", f"{root}/step-2", **options)
    expected = {f"old.model.{name}": tensor for name, tensor in state["model"].items()}
    assert bits(loaded(expected, f"{root}/step-2")) == bits(expected)


class _Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (collections.deque, ([1],))


def test_an_import_of_a_pickle_needs_consent(tmp_path: Path) -> None:
    """If this fails, an import runs whatever the file says."""
    torch.save({"w": torch.ones(2), "x": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(cloudckpt.errors.UnsafePickleError, match=r"uses .*deque.*allow_pickle"):
        cloudckpt.import_checkpoint(tmp_path / "evil.pt", tmp_path / "step-1", format="torch")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "old", no_dist=True)
    with pytest.raises(cloudckpt.errors.UnsafePickleError):
        cloudckpt.import_checkpoint(tmp_path / "old", tmp_path / "step-1", format="dcp")
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match="import"):
        cloudckpt.export_checkpoint(tmp_path / "old", tmp_path / "out")
    assert not (tmp_path / "step-1").exists()
    cloudckpt.import_checkpoint(tmp_path / "evil.pt", tmp_path / "step-1", format="torch", allow_pickle=True)
    cloudckpt.import_checkpoint(tmp_path / "old", tmp_path / "step-2", format="dcp", allow_pickle=True)


@pytest.mark.parametrize("format_", ["torch", "dcp"])
def test_a_file_that_is_replaced_while_it_is_saved_is_noticed(tmp_path: Path, format_: Any) -> None:
    """If this fails, an import commits tensors of two models: a local file is mapped into memory, and read late."""
    (tmp_path / "old").mkdir()
    if format_ == "torch":
        source = name = tmp_path / "old" / "state.pt"
        torch.save({"w": torch.ones(5000)}, source)
    else:
        source = tmp_path / "old"
        dcp.save({"w": torch.ones(5000)}, checkpoint_id=source, no_dist=True)
        name = source / "__0_0.distcp"

    def overwrite(_: Any) -> None:
        with name.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"otherend")

    faults = Faults(Rule(fault=Tell(before=overwrite), operations={"put"}, times=1))
    with pytest.raises(cloudckpt.errors.CheckpointChangedError, match="was replaced"):
        cloudckpt.import_checkpoint(
            source,
            tmp_path / "step-1",
            format=format_,
            allow_pickle=True,
            target_options=make_options(wrap_store=faults),
        )
    assert not contents(str(tmp_path / "step-1"))
