"""One answer that lacks what is there, at either end of a copy or conversion: it changes nothing but the requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors_bytes
from tests.convert.conftest import Root
from tests.convert.states import bits, contents, loaded, save, store_at, torch_saved
from tests.kit.options import make_options
from tests.kit.wrapped import Lies

import cloudckpt
from cloudckpt.testing import damage

_TARGETS = {"torch": "model.pt", "safetensors": "model.safetensors"}


@pytest.mark.parametrize(("nth", "times"), [(1, 1), (2, 1), (1, 99)], ids=["first", "second", "all"])
@pytest.mark.parametrize("format_", [*_TARGETS])
def test_an_export_leaves_alone_what_a_listing_lacks(root_of: Root, format_: Any, nth: int, times: int) -> None:
    """If this fails, an export without overwrite has replaced somebody's file."""
    root, name = root_of("memory"), _TARGETS[format_]
    save({"w": torch.ones(100)}, f"{root}/step-1")
    damage.overwrite(store_at(f"{root}/out"), name, b"precious")
    lies = Lies(name, "list", nth=nth, times=times)
    where = f"{root}/out/{name}" if format_ == "torch" else f"{root}/out"
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.export_checkpoint(
            f"{root}/step-1", where, format=format_, target_options=make_options(wrap_store=lies)
        )
    assert lies.num_told
    assert contents(f"{root}/out")[name] == b"precious"


def test_an_export_over_an_earlier_one_removes_what_one_listing_lacks(root_of: Root) -> None:
    """If this fails, the index of the earlier export names files that are gone."""
    root = root_of("memory")
    save({"a": torch.ones(40), "b": torch.zeros(40)}, f"{root}/step-1")
    cloudckpt.export_checkpoint(f"{root}/step-1", f"{root}/out", max_shard_bytes=100)
    lies = Lies("index.json", "list")
    cloudckpt.export_checkpoint(
        f"{root}/step-1", f"{root}/out", overwrite=True, target_options=make_options(wrap_store=lies)
    )
    assert (lies.num_told, set(contents(f"{root}/out"))) == (1, {"model.safetensors"})


@pytest.mark.parametrize("nth", [1, 2])
def test_an_import_has_every_file_though_a_listing_lacks_one(root_of: Root, nth: int) -> None:
    """If this fails, a model is imported without some of its tensors."""
    root = root_of("memory")
    state = {f"t{i}": torch.full((100,), float(i)) for i in range(2)}
    for name, tensor in state.items():
        damage.overwrite(store_at(f"{root}/old"), f"{name}.safetensors", safetensors_bytes({name: tensor}))
    lies = Lies("t1.safetensors", "list", nth=nth)
    report = cloudckpt.import_checkpoint(f"{root}/old", f"{root}/step-1", options=make_options(wrap_store=lies))
    assert (lies.num_told, report.num_tensors) == (1, 2)
    assert bits(loaded(state, f"{root}/step-1")) == bits(state)


@pytest.mark.parametrize("more_bytes", [-1000, 1000])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("format_", [*_TARGETS])
def test_an_import_survives_one_head_with_another_size(root_of: Root, format_: Any, more_bytes: int, nth: int) -> None:
    """If this fails, a file that nobody touched is called short, or replaced."""
    root, name, state = root_of("memory"), _TARGETS[format_], {"w": torch.arange(5000.0)}
    body = torch_saved(state) if format_ == "torch" else safetensors_bytes(state)
    damage.overwrite(store_at(f"{root}/old"), name, body)
    lies = Lies(name, "head", nth=nth, more_bytes=more_bytes)
    source = f"{root}/old/{name}" if format_ == "torch" else f"{root}/old"
    cloudckpt.import_checkpoint(source, f"{root}/step-1", format=format_, options=make_options(wrap_store=lies))
    assert lies.num_told == 1
    assert bits(loaded(state, f"{root}/step-1")) == bits(state)
