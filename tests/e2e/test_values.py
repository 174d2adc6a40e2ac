"""Every kind of tensor and value comes back as it went, to the bit, into the memory that was given."""

from __future__ import annotations

import collections
import datetime as dt
import math
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.kit.models import assert_same
from tests.kit.options import make_options
from tests.kit.places import LocalPlace, Place
from tests.tensors.test_values import described
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.options import MIB

MIGRATING = Path(__file__).parents[2] / "docs" / "migrating.md"

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {  # torch itself cannot fill or copy tensors of these
        dtype
        for name in (
            "bits1x8",
            "bits2x4",
            "bits4x2",
            "bits8",
            "bits16",
            "quint8",
            "qint8",
            "qint32",
            "quint4x2",
            "quint2x4",
        )
        if (dtype := getattr(torch, name, None)) is not None
    }
    - {getattr(torch, f"{sign}int{bits}") for sign in ("u", "") for bits in range(1, 8)},
    key=str,
)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A tensor with every bit random, NaNs, infinities and subnormals included; for bool, random truth."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    num_bytes = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)


def bits_of(tensor: Tensor) -> bytes:
    """The elements' bytes in row-major order."""
    contiguous = tensor.contiguous()
    return (
        bytes(contiguous.view(torch.uint8).reshape(-1).tolist())
        if contiguous.ndim
        else bytes(contiguous.reshape(1).view(torch.uint8).tolist())
    )


def test_every_dtype_keeps_its_bits(local: LocalPlace) -> None:
    """If this fails, values of a type are rounded, reinterpreted, shifted by others, or cannot be saved at all."""
    assert len(DTYPES) >= 21
    wanted = [(dtype, shape) for dtype in DTYPES for shape in [(5, 7), (), (0, 3)]]
    saved = {f"{dtype} {shape}": random_bits(dtype, shape) for dtype, shape in wanted}
    cloudckpt.save(dict(saved), local.uri())
    loaded = {f"{dtype} {shape}": random_bits(dtype, shape, seed=1) for dtype, shape in wanted}
    cloudckpt.load(loaded, local.uri())
    for name, tensor in saved.items():
        assert loaded[name].dtype == tensor.dtype
        assert bits_of(loaded[name]) == bits_of(tensor), name


STRIDED = {
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "every other": torch.arange(20.0)[::2],
    "column": torch.arange(12.0).reshape(3, 4)[:, 1],
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugated": torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj(),
    "negated": torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj().imag,
    "middle of a storage": torch.arange(100.0)[13:57],
    "needs grad": torch.arange(4.0, requires_grad=True),
}


def test_strided_tensors_are_saved_by_value(place: Place) -> None:
    """If this fails, views are saved with the elements of the storage under them in the wrong order."""
    cloudckpt.save(dict(STRIDED), place.uri())
    loaded: dict[str, Any] = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in STRIDED.items()}
    cloudckpt.load(loaded, place.uri())
    assert_same(loaded, {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in STRIDED.items()})


def test_strided_targets_are_filled_where_they_are(place: Place) -> None:
    """If this fails, a load writes past a view's elements, or into a copy that is thrown away."""
    cloudckpt.save({"matrix": torch.arange(12.0).reshape(3, 4), "row": torch.arange(5.0)}, place.uri())
    storage = torch.full((4, 6), -1.0)
    line = torch.full((10,), -1.0)
    cloudckpt.load({"matrix": storage.t()[1:4, :], "row": line[::2]}, place.uri())
    assert_same(storage[:, 1:4], torch.arange(12.0).reshape(3, 4).t())
    assert (storage[:, 0] == -1).all()
    assert (storage[:, 4:] == -1).all()
    assert_same(line[::2], torch.arange(5.0))
    assert (line[1::2] == -1).all()


def test_entries_may_have_any_name(place: Place) -> None:
    """If this fails, a name that means something to a format or a store loses or swaps its tensor."""
    names = [
        "__metadata__",
        "a/b",
        "../up",
        "é\u2013\U0001f600",
        '"quoted"',
        "",
        " ",
        "x\ny",
        "a" * 3000,
        "A",
        "a",
        "0",
        "0/0",
        "a:0",
    ]
    saved: dict[str, Any] = {name: torch.full((n + 1,), float(n)) for n, name in enumerate(names)}
    saved |= {f"object {name}": n for n, name in enumerate(names)}
    cloudckpt.save(dict(saved), place.uri())
    loaded = {name: torch.zeros_like(value) if isinstance(value, Tensor) else None for name, value in saved.items()}
    cloudckpt.load(loaded, place.uri())
    assert_same(loaded, saved)


@pytest.mark.every_store
def test_many_parts_and_objects_make_one_checkpoint(place: Place) -> None:
    """If this fails, tensors beyond one part or one object are cut, shifted or left out."""
    generator = torch.Generator().manual_seed(0)
    options = make_options(
        part_bytes=5 * MIB, object_bytes=8 * MIB, tile_bytes=64 * 1024, request_bytes=128 * 1024, read_bytes=1 * MIB
    )
    saved = {f"t{n}": torch.rand(n * 700_001, generator=generator) for n in range(1, 6)}
    saved |= {"strided": torch.rand(1500, 1000, generator=generator).t(), "tiny": torch.rand(3, generator=generator)}
    cloudckpt.save(dict(saved), place.uri(), options=options)
    assert len(place.data_keys()) > 3
    loaded = {name: torch.zeros(tensor.shape) for name, tensor in saved.items()}
    cloudckpt.load(loaded, place.uri(), options=options)
    assert_same(loaded, saved)


def blank(values: Any) -> Any:
    """The same nesting, with None for each value."""
    if isinstance(values, dict):
        return {name: blank(value) for name, value in values.items()}
    return [blank(value) for value in values] if isinstance(values, list) else None


def of_a_program() -> dict[str, Any]:
    """Return what schedulers, samplers, random generators and data loaders hold."""
    return {
        "weight": torch.ones(3),
        "random": (random.getstate(), np.random.RandomState(0).get_state(), torch.get_rng_state()),
        "numpy": {
            "generator": np.random.PCG64(1).state,
            "twister": np.random.MT19937(1).state,
            "best": np.float32(0.5),
        },
        "array": np.arange(6, dtype="u2").reshape(2, 3),
        "order": [np.int64(4), 5],
        "names": np.array(["a", "bcd"]),
        "token": b"",
        "tokens": [b"", b"x", bytearray()],
        "huge": 2**5000,
        "seen": frozenset({1, "a"}),
        "place": urlsplit("s3://bucket/run"),
        "places": (1, {"of": [urlsplit("memory://run")]}),
        "nothing": (frozenset(), set(), (), "", range(0)),
        "queue": collections.deque([1, (2,)], maxlen=5),
        "counts": (collections.defaultdict(int, {"a": 1}), collections.Counter("aab"), collections.OrderedDict(b=1)),
        "begun": dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc),
        "path": Path("runs/1"),
    }


@pytest.mark.parametrize("way", ["save", "async_save", "torch"])
def test_plain_values_come_back_without_consent(tmp_path: Path, way: str) -> None:
    """If this fails, what a program has beside its tensors saves without a word, and does not load."""
    state, uri = of_a_program(), f"memory://values-{way}/{tmp_path.name}"
    loaded = blank(state) | {"weight": torch.zeros(3)}
    if way == "torch":
        cloudckpt.enable()
        try:
            dcp.save(state, checkpoint_id=uri)
            dcp.load(loaded, checkpoint_id=uri)
        finally:
            cloudckpt.disable()
    else:
        saved = cloudckpt.save(state, uri) if way == "save" else cloudckpt.async_save(state, uri)
        if isinstance(saved, cloudckpt.AsyncSave):
            saved.result(60)
        cloudckpt.load(loaded, uri)
    assert described(loaded) == described(state)


@pytest.mark.filterwarnings("ignore:.* unpickling it could run any code, so a load refuses it")
def test_torchs_own_calls_can_be_given_consent(tmp_path: Path) -> None:
    """If this fails, what `dcp.load` refuses under `enable` cannot be had by what the error advises."""
    uri, state = f"memory://consent/{tmp_path.name}", {"kind": np.ma.array([1])}
    loaded: dict[str, Any] = {"kind": None}
    cloudckpt.enable()
    try:
        dcp.save(state, checkpoint_id=uri)
        with pytest.raises(CheckpointException, match="allow_pickle=True"):
            dcp.load(loaded, checkpoint_id=uri)
        cloudckpt.enable(allow_pickle=True)
        dcp.load(loaded, checkpoint_id=uri)
    finally:
        cloudckpt.disable()
    assert isinstance(loaded["kind"], np.ma.MaskedArray)


def _nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(2)


NOT_DENSE = {
    "COO": (lambda: torch.eye(4).to_sparse(), "a sparse tensor", r"to_dense\(\)"),
    "CSR": (lambda: torch.eye(4).to_sparse_csr(), "a sparse tensor", r"to_dense\(\)"),
    "CSC": (lambda: torch.eye(4).to_sparse_csc(), "a sparse tensor", r"to_dense\(\)"),
    "BSR": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "a sparse tensor", r"to_dense\(\)"),
    "BSC": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), "a sparse tensor", r"to_dense\(\)"),
    "strided": (lambda: _nested(torch.strided), "a nested tensor", r"unbind\(\)"),
    "jagged": (lambda: _nested(torch.jagged), "a nested tensor", r"unbind\(\)"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
        "a quantized tensor",
        r"int_repr\(\)",
    ),
    "MKL-DNN": (lambda: torch.ones(4, 4).to_mkldnn(), "an MKL-DNN tensor", r"to_dense\(\)"),
    "meta": (lambda: torch.empty(4, device="meta"), "a tensor on the meta device", r"to_empty\(\)"),
    "fake": (_fake, "a tensor whose class", "plain tensor"),
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
        "a tensor whose class",
        "plain tensor",
    ),
    "lazy": (torch.nn.UninitializedParameter, "an uninitialised parameter", "[Rr]un the module once"),
}


@pytest.mark.filterwarnings("ignore")  # torch calls half of them experimental
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_tensors_that_are_not_dense_are_refused_as_documented(local: LocalPlace, kind: str) -> None:
    """If this fails, such a tensor is saved as something else, or the error names neither it nor the way out."""
    made, row, advice = NOT_DENSE[kind]
    documented = next(line for line in MIGRATING.read_text().splitlines() if line.startswith(f"| {row}"))
    assert kind in documented
    for state in ({"model": {"bad": made(), "good": torch.ones(2)}}, {"model": {"bad": [made()], "good": 1}}):
        with pytest.raises(cloudckpt.errors.UnsupportedValueError, match=rf"cannot save 'model\.bad.*{advice}"):
            cloudckpt.save(state, local.uri())
        with pytest.raises(cloudckpt.errors.UnsupportedValueError, match=r"'model\.bad"):
            cloudckpt.async_save(state, local.uri()).result(60.0)
    assert local.keys() == []
