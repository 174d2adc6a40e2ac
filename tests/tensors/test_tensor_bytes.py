"""The conversion of a tensor before its bytes are taken."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.background.stager import PinnedStager
from cloudckpt.errors import UnsupportedValueError
from cloudckpt.tensors.tensor_bytes import (
    bytes_view,
    extent_bytes,
    memory_address,
    plain_tensor,
    view_memory,
    viewable_address,
)

URI = "memory://tests/checkpoint"


def test_freed_memory_is_refused_by_name() -> None:
    """If this fails, a model that FSDP has put away is saved as whatever happens to lie in memory."""
    freed = torch.ones(8)[5:]
    freed.untyped_storage().resize_(0)
    assert memory_address(freed) == 0
    assert viewable_address(freed) == 0
    with pytest.raises(UnsupportedValueError, match=r"'w' .* memory was freed"):
        plain_tensor(freed, "w", uri=URI)


SHORT = {
    "whole": lambda: torch.ones(8),
    "part": lambda: torch.ones(16)[8:],
    "strided": lambda: torch.ones(4, 4)[:, 1],
    "transposed": lambda: torch.ones(2, 4).t(),
    "expanded": lambda: torch.ones(2).expand(3, 2),
}


@pytest.mark.parametrize("kind", SHORT)
def test_a_tensor_that_goes_beyond_its_storage_is_refused_by_name(kind: str) -> None:
    """If this fails, a storage that was made smaller lets a save read, and a load write, memory of something else."""
    tensor = SHORT[kind]()
    assert memory_address(tensor) == tensor.data_ptr()
    held_bytes = tensor.storage_offset() * 4 + extent_bytes(tensor)
    tensor.untyped_storage().resize_(held_bytes)  # as much as it needs
    assert memory_address(tensor) == tensor.data_ptr()
    tensor.untyped_storage().resize_(held_bytes - 1)
    assert memory_address(tensor) == 0
    assert viewable_address(tensor) == 0
    with pytest.raises(UnsupportedValueError, match=rf"'w' .* needs {held_bytes} bytes .* resized to {held_bytes - 1}"):
        plain_tensor(tensor, "w", uri=URI)
    with (
        contextlib.closing(PinnedStager()) as stager,
        pytest.raises(UnsupportedValueError, match=r"'model\.w'.* was resized"),
    ):
        stager.begin({"model": {"v": torch.ones(2), "w": tensor}}).completed.result(60)


@pytest.mark.parametrize("way", ["save", "async_save", "torch", "load"])
def test_no_way_in_or_out_goes_beyond_a_storage(tmp_path: Path, way: str) -> None:
    """If this fails, one of the ways to save or load does not look before it reads or writes."""
    uri = str(tmp_path / "c")
    cloudckpt.save({"w": torch.ones(4, 4)}, uri, no_dist=True)
    short = torch.ones(4, 4)
    state = {"w": short, "v": torch.ones(3)}
    short.untyped_storage().resize_(20)
    with pytest.raises((UnsupportedValueError, CheckpointException), match=r"'w'.*was resized to 20"):  # noqa: PT012  # one of several calls
        if way == "save":
            cloudckpt.save(state, uri + "2", no_dist=True)
        elif way == "torch":
            dcp.save(state, storage_writer=cloudckpt.ObjectStoreWriter(uri + "2"), no_dist=True)
        elif way.startswith("load"):
            cloudckpt.load({"w": short}, uri, no_dist=True)
        else:
            cloudckpt.async_save(state, uri + "2", no_dist=True).result(60)
    assert not (tmp_path / "c2" / "manifest.json").exists()


LIES_OTHERWISE = {
    "strided": lambda: torch.ones(4, 4)[:, 1],
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "empty": lambda: torch.ones(0, 3),
}


@pytest.mark.parametrize("kind", LIES_OTHERWISE)
def test_memory_that_does_not_hold_the_values_one_after_the_other_has_no_address(kind: str) -> None:
    """If this fails, a save sends other bytes than the tensor's, or a load fills memory that is not the tensor's."""
    assert viewable_address(LIES_OTHERWISE[kind]()) == 0


def test_a_view_of_memory_is_writable_and_keeps_the_tensor() -> None:
    """If this fails, a save reads memory that was freed, and a load writes there."""
    tensor = torch.arange(6, dtype=torch.int16)
    wanted, tensor_lives = bytes(bytes_view(tensor)), weakref.ref(tensor)
    view = view_memory(viewable_address(tensor), tensor.nbytes, tensor)
    view[0] = wanted[0]
    del tensor
    assert tensor_lives() is not None
    assert bytes(view[2:]) == wanted[2:]
    del view
    assert tensor_lives() is None


def test_conjugates_and_negatives_are_resolved() -> None:
    """If this fails, the imaginary part of some tensors changes its sign in a checkpoint."""
    values = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    for lazy in (values.conj(), values.conj().imag, torch._neg_view(torch.ones(2)), values.conj().t()):
        resolved = plain_tensor(lazy, "w", uri=URI)
        assert not resolved.is_conj()
        assert not resolved.is_neg()
        assert torch.equal(resolved, lazy)
        assert bytes(bytes_view(resolved.contiguous())) == lazy.clone().numpy().tobytes()


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.empty(3, device="meta"), "meta tensor"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "jagged|layout"),
    ],
    ids=["meta", "sparse", "nested"],
)
def test_tensor_without_plain_memory_is_refused_by_name(tensor: torch.Tensor, says: str) -> None:
    """If this fails, the user sees a NotImplementedError that names neither the tensor nor what to do."""
    with pytest.raises(UnsupportedValueError, match=says) as caught:
        plain_tensor(tensor, "model.odd", uri=URI)
    assert "'model.odd'" in str(caught.value)
    assert caught.value.uri == URI
