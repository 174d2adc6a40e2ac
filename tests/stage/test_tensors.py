"""What becomes of a tensor before its bytes are taken."""

from __future__ import annotations

import pytest
import torch
from tests.stage.samples import DTYPES

from cloudckpt._stage.tensors import address_of, as_carrier, bytes_view, plain, quick_view
from cloudckpt.errors import UnsupportedValueError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

URI = "memory://tests/checkpoint"


def test_plain_shares_memory() -> None:
    """If this fails, every save copies every tensor."""
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    found = plain(parameter, "w", uri=URI)
    assert found.data_ptr() == parameter.data_ptr()
    assert not found.requires_grad


@pytest.mark.parametrize("begin", [0, 5], ids=["whole", "part"])
def test_freed_memory_is_refused_by_name(begin: int) -> None:
    """If this fails, a model that FSDP has put away is saved as whatever happens to lie in memory."""
    freed = torch.ones(8)[begin:]
    assert address_of(freed) == freed.data_ptr()
    freed.untyped_storage().resize_(0)
    assert address_of(freed) == 0
    assert quick_view(freed) is None
    with pytest.raises(UnsupportedValueError, match=r"'w' .* memory was freed"):
        plain(freed, "w", uri=URI)
    assert plain(torch.ones(0, 3), "w", uri=URI).shape == (0, 3)  # which never had any


def test_conjugates_and_negatives_are_resolved() -> None:
    """If this fails, the imaginary part of some tensors changes its sign in a checkpoint."""
    values = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    for lazy in (values.conj(), values.conj().imag, torch._neg_view(torch.ones(2)), values.conj().t()):
        resolved = plain(lazy, "w", uri=URI)
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
def test_what_has_no_plain_memory_is_refused_by_name(tensor: torch.Tensor, says: str) -> None:
    """If this fails, the user sees a NotImplementedError that names neither the tensor nor what to do."""
    with pytest.raises(UnsupportedValueError, match=says) as caught:
        plain(tensor, "model.odd", uri=URI)
    assert "'model.odd'" in str(caught.value)
    assert caught.value.uri == URI


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_refused_by_name() -> None:
    """If this fails, quantized weights are saved without their scales."""
    with pytest.raises(UnsupportedValueError, match="int_repr"):
        plain(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "q", uri=URI)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_carriers_keep_shape_strides_and_bits(dtype: torch.dtype) -> None:
    """If this fails, copies of some type are impossible, or go through a conversion."""
    tensor = torch.zeros(24 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(4, 6)[::2, 1:].t()
    carrier = as_carrier(tensor)
    assert (carrier.shape, carrier.stride(), carrier.data_ptr()) == (tensor.shape, tensor.stride(), tensor.data_ptr())
    assert carrier.element_size() == tensor.element_size()
