"""Compare two checkpoints by value. Their ranks and shards may differ."""

from __future__ import annotations

import io
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from cloudckpt._display import Rows, find_shown_begin, with_short_repr
from cloudckpt.errors import InvalidOptionError
from cloudckpt.format.model import ITEMSIZE_BYTES, Manifest, StoredTensor, StoredWrapper
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.safetensors_files import find_source
from cloudckpt.pipeline.wanted_items import TensorBytes
from cloudckpt.tensors.tensor_bytes import dtype_of
from cloudckpt.tensors.values import load_stored
from cloudckpt.uri import parse_location

BATCH_BYTES = 64 * MIB
_MAX_TEXT_CHARS = 4096

Kind = Literal["added", "removed", "type", "dtype", "shape", "values"]
SLICE_ELEMENTS = 1 << 20


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One entry that is not the same in both checkpoints."""

    name: str
    """Name of the entry."""
    kind: Kind
    """``"added"``: only the second has it. ``"removed"``: only the first has it. ``"type"``: it is a tensor in only
    one, or it is a wrapper, and its class or its metadata differs. ``"dtype"``, ``"shape"``, ``"values"``: these
    differ. Only tensors of one dtype and shape are compared by value."""
    before: str
    """Description of the entry in the first checkpoint: dtype and shape of a tensor, or the ``repr`` of a value; empty
    if the checkpoint lacks the entry. A long value is cut to 4,096 characters around the first difference."""
    after: str
    """Description of the entry in the second checkpoint; empty if the checkpoint lacks the entry."""
    num_elements: int = 0
    """Number of elements of the tensor, if values differ."""
    num_different: int = 0
    """Number of elements whose values differ by more than the tolerances."""
    max_absolute: float = 0.0
    """Largest ``|after - before|``; infinite if only one of the two is NaN or infinite."""
    max_relative: float = 0.0
    """Largest difference as a share of the larger of the two magnitudes: from 0 to 2."""
    where: str = ""
    """Place of the first difference in a value that is no tensor, such as ``[1][0]``."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences of the second of two checkpoints from the first. `compare` returns it."""

    before: str
    """URI of the first checkpoint."""
    after: str
    """URI of the second checkpoint."""
    differences: tuple[Difference, ...]
    """The differences, one for each entry that differs, sorted by name."""
    num_same: int
    """Number of entries that are the same in both."""
    num_bytes_compared: int
    """Number of bytes that were read from each checkpoint and compared."""

    @property
    def is_same(self) -> bool:
        """True if there is no difference."""
        return not self.differences


def compare(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    only: Callable[[str], bool] | None = None,
    options: Options | None = None,
    options_after: Options | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints entry by entry, element by element.

    Elements are equal if both are NaN, or if ``|after - before| <= atol + rtol * |before|``. The cut into shards makes
    no difference. Every byte is checked as in a load. Values that are no tensors are equal if their bytes are equal, or
    if they load without running code and compare equal. Takes the memory of two loads (`Options.read_bytes`), and 64
    MiB for each checkpoint. A transformed chunk and a value are held whole.

    Args:
        before: URI of the first checkpoint.
        after: URI of the second checkpoint.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        only: Returns True for the names to compare. None for all.
        options: Options for `before`, and for `after` unless `options_after` is given.
        options_after: Options for `after`, if it is on another store.
        on_progress: Called with the bytes done and their total.

    Returns:
        The differences of `after` from `before`, by name.

    Raises:
        InvalidOptionError: A tolerance is negative or not finite.
        CheckpointNotFoundError: No checkpoint exists at one of the URIs.
        CorruptCheckpointError: Stored bytes have changed since the save.
        StoreError: A request failed.

    Example::

        found = cloudckpt.compare("s3://bucket/run/step-100", "s3://bucket/run/step-200", rtol=1e-5)
        for difference in found.differences:
            print(difference.name, difference.kind, difference.max_absolute)

    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not 0 <= value < math.inf:
            raise InvalidOptionError(f"{name} must be a number from 0 on, not {value!r}")
    readers = [open_reader(before, options or Options()), open_reader(after, options_after or options or Options())]
    comparison = compare_readers(readers, rtol=rtol, atol=atol, only=only or (lambda _: True), on_progress=on_progress)
    for reader in readers:
        reader.check_unchanged()
    return comparison


def open_reader(uri: str | os.PathLike[str], options: Options) -> CheckpointReader:
    """Return a reader of the checkpoint at `uri`, or of safetensors files there. Raises the errors of `load`."""
    context, resolved = find_source(Context(parse_location(uri), options, rank=0))
    return CheckpointReader(context, resolved.manifest)


def compare_readers(
    readers: Sequence[CheckpointReader],
    *,
    only: Callable[[str], bool],
    rtol: float = 0.0,
    atol: float = 0.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare the checkpoints of two readers, as `compare`, but do not check if they were replaced meanwhile."""
    comparer = _Comparer(readers, only)
    for batch in _batches(comparer.ranges()):
        memory = [_read_ranges(reader, batch) for reader in readers]
        for tensor_range, first, second in zip(batch, *memory, strict=True):
            comparer.compare_range(tensor_range, first, second, rtol=rtol, atol=atol)
        del memory, first, second  # free this memory before the next batch takes as much
        if on_progress is not None:
            on_progress(comparer.num_compared, comparer.num_bytes)
    return comparer.make_comparison()


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorRange:
    """Bytes ``[begin, end)`` of a tensor in row-major order, or a value, that both checkpoints have."""

    name: str
    begin: int
    end: int
    dtype: str = ""
    """Empty for a value."""


def _read_ranges(reader: CheckpointReader, ranges: Sequence[_TensorRange]) -> list[Any]:
    """Read the ranges of one checkpoint into new memory: tensors, and binary files for values."""
    values = {tensor_range.name: io.BytesIO() for tensor_range in ranges if not tensor_range.dtype}
    tensors = [
        TensorBytes(
            name=tensor_range.name,
            begin=tensor_range.begin,
            end=tensor_range.end,
            buffer=torch.empty(tensor_range.end - tensor_range.begin, dtype=torch.uint8, device="cpu"),
        )
        for tensor_range in ranges
        if tensor_range.dtype
    ]
    reader.read_bytes(tensors, values={name: file.write for name, file in values.items()})
    buffers = (tensor.buffer for tensor in tensors)
    return [
        next(buffers).view(dtype_of(tensor_range.dtype)) if tensor_range.dtype else values[tensor_range.name]
        for tensor_range in ranges
    ]


def _batches(ranges: Iterable[_TensorRange]) -> Iterator[list[_TensorRange]]:
    """Group ranges into batches of at most `BATCH_BYTES`, or of one range."""
    batch: list[_TensorRange] = []
    num_bytes = 0
    for tensor_range in ranges:
        if batch and num_bytes + tensor_range.end - tensor_range.begin > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(tensor_range)
        num_bytes += tensor_range.end - tensor_range.begin
    if batch:
        yield batch


class _Comparer:
    """Compares the entries of two manifests, and collects the differences."""

    def __init__(self, readers: Sequence[CheckpointReader], only: Callable[[str], bool]) -> None:
        self._first, self._second = (reader.manifest for reader in readers)
        self._uris = [reader.context.uri for reader in readers]
        self._differences: dict[str, Difference] = {}
        self._tallies: dict[str, Tally] = {}
        names = dict.fromkeys((*self._first.tensors, *self._first.values, *self._second.tensors, *self._second.values))
        self._names = [name for name in names if only(name)]
        self._comparable = [name for name in self._names if self._is_comparable(name)]
        self.num_bytes = sum(self._bytes_of(name) for name in self._comparable)
        self.num_compared = 0
        for name in filter(only, dict.fromkeys((*self._first.wrappers, *self._second.wrappers))):
            texts = [_wrapper_text(manifest.wrappers.get(name)) for manifest in (self._first, self._second)]
            if texts[0] != texts[1]:
                self._names.append(name)
                self._differ(name, "type", *_shorten(*texts))

    def ranges(self) -> Iterator[_TensorRange]:
        """Yield every range that has to be read."""
        for name in self._comparable:
            tensor, num_bytes = self._first.tensors.get(name), self._bytes_of(name)
            if tensor is None:
                yield _TensorRange(name=name, begin=0, end=num_bytes)
                continue
            self._tallies[name] = Tally()
            range_bytes = BATCH_BYTES // ITEMSIZE_BYTES[tensor.dtype] * ITEMSIZE_BYTES[tensor.dtype]
            for begin in range(0, num_bytes, range_bytes):
                yield _TensorRange(name=name, begin=begin, end=min(begin + range_bytes, num_bytes), dtype=tensor.dtype)

    def compare_range(self, tensor_range: _TensorRange, before: Any, after: Any, *, rtol: float, atol: float) -> None:
        """Compare a range that was read from both checkpoints."""
        if tensor_range.dtype:
            self._tallies[tensor_range.name].add(before, after, rtol=rtol, atol=atol)
        else:
            are_json = [manifest.values[tensor_range.name].is_json for manifest in (self._first, self._second)]
            where, texts = compare_values(before.getvalue(), after.getvalue(), are_json=are_json)
            if where is not None:
                self._differ(tensor_range.name, "values", *texts, where=where)
        self.num_compared += tensor_range.end - tensor_range.begin

    def make_comparison(self) -> Comparison:
        """Return the comparison, after the last range."""
        for name, tally in self._tallies.items():
            if tally.num_different:
                text = _tensor_text(self._first.tensors[name])
                self._differences[name] = Difference(
                    name=name,
                    kind="values",
                    before=text,
                    after=text,
                    num_elements=tally.num_elements,
                    num_different=tally.num_different,
                    max_absolute=tally.max_absolute,
                    max_relative=tally.max_relative,
                )
        return Comparison(
            before=self._uris[0],
            after=self._uris[1],
            differences=Rows(self._differences[name] for name in sorted(self._differences)),
            num_same=len(self._names) - len(self._differences),
            num_bytes_compared=self.num_compared,
        )

    def _is_comparable(self, name: str) -> bool:
        """Return True if the bytes must be read. Otherwise, note the difference in the manifests."""
        texts = [_text_of(manifest, name) for manifest in (self._first, self._second)]
        first, second = self._first.tensors.get(name), self._second.tensors.get(name)
        if not texts[0] or not texts[1]:
            self._differ(name, "removed" if texts[0] else "added", *texts)
        elif (first is None) != (second is None):
            self._differ(name, "type", *texts)
        elif first is not None and second is not None and first.shape != second.shape:
            self._differ(name, "shape", *texts)
        elif first is not None and second is not None and first.dtype != second.dtype:
            self._differ(name, "dtype", *texts)
        else:
            return True
        return False

    def _differ(self, name: str, kind: Kind, before: str, after: str, *, where: str = "") -> None:
        self._differences[name] = Difference(name=name, kind=kind, before=before, after=after, where=where)

    def _bytes_of(self, name: str) -> int:
        tensor = self._first.tensors.get(name)
        if tensor is not None:
            return math.prod(tensor.shape) * ITEMSIZE_BYTES[tensor.dtype]
        value = self._first.values[name]
        return value.end - value.begin


def _text_of(manifest: Manifest, name: str) -> str:
    tensor = manifest.tensors.get(name)
    if tensor is not None:
        return _tensor_text(tensor)
    return "a value" if name in manifest.values else ""


def _wrapper_text(wrapper: StoredWrapper | None) -> str:
    return "" if wrapper is None else f"{wrapper.kind} {list(wrapper.shape)} {wrapper.context}"


def _tensor_text(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


class Tally:
    """Differences of one tensor, added up range by range."""

    def __init__(self) -> None:
        self.num_elements = self.num_different = 0
        self.max_absolute = self.max_relative = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor, *, rtol: float, atol: float) -> None:
        """Add a flat range of both tensors, of one length and dtype. Takes memory for a million more elements."""
        self.num_elements += len(before)
        if torch.equal(before.view(torch.uint8), after.view(torch.uint8)):
            return
        for first, second in zip(before.split(SLICE_ELEMENTS), after.split(SLICE_ELEMENTS), strict=True):
            self._add_slice(first, second, rtol=rtol, atol=atol)

    def _add_slice(self, before: torch.Tensor, after: torch.Tensor, *, rtol: float, atol: float) -> None:
        wide = _widen(before), _widen(after)
        if wide[0] is None or wide[1] is None:  # torch cannot calculate with this dtype: compare bits
            rows = [values.view(torch.uint8).view(len(before), -1) for values in (before, after)]
            num_different = int((rows[0] != rows[1]).any(dim=1).sum())
            self._note(num_different, math.inf if num_different else 0.0, 0.0)
            return
        is_same = wide[0] == wide[1]
        x, y = (values if values.is_complex() else values.double() for values in wide)
        distance = (y - x).abs()
        is_near = (distance <= atol + rtol * x.abs()) & distance.isfinite() & bool(atol or rtol)
        is_same |= (x.isnan() & y.isnan()) | is_near
        if bool(is_same.all()):
            return
        distance = distance[~is_same]
        larger = torch.maximum(x.abs(), y.abs())[~is_same]
        self._note(len(distance), _largest(distance), _largest(distance / larger, otherwise=2.0))

    def _note(self, num_different: int, absolute: float, relative: float) -> None:
        self.num_different += num_different
        self.max_absolute = max(self.max_absolute, absolute)
        self.max_relative = max(self.max_relative, relative)


def _widen(tensor: torch.Tensor) -> Any:
    """Convert to a dtype that holds every value and that torch calculates with; None if there is none."""
    dtype = tensor.dtype
    try:
        if dtype.is_complex:
            return tensor.to(torch.complex128)
        if dtype.is_floating_point:
            return tensor.to(torch.float64)
        if dtype is torch.uint64:
            return tensor.view(torch.int64)  # equal values stay equal; distances are wrong for numbers above 2 ** 63
        return tensor.to(torch.int64)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _largest(numbers: torch.Tensor, *, otherwise: float = math.inf) -> float:
    """Return the largest number; `otherwise` if one is NaN."""
    largest = float(numbers.max())
    return otherwise if math.isnan(largest) else largest


def compare_values(before: bytes, after: bytes, *, are_json: Sequence[bool]) -> tuple[str | None, tuple[str, str]]:
    """Compare two values by their stored bytes.

    Returns the place of the first difference, None if there is none, and a text for each value for a `Difference`.

    Args:
        before: The bytes of the first.
        after: The bytes of the second.
        are_json: True for each of the two that is tagged JSON, False for each that is a pickle.

    """
    if before == after and are_json[0] == are_json[1]:
        return None, ("", "")
    try:
        values = [
            load_stored(content, is_json=is_json, map_location="cpu")
            for content, is_json in zip((before, after), are_json, strict=True)
        ]
    except Exception:  # noqa: BLE001  # a bucket can hold anything
        return "", (f"{len(before)} bytes", f"{len(after)} other bytes, which cannot be compared safely")
    where = _find_difference(*values)
    return where, ("", "") if where is None else _shorten(repr(values[0]), repr(values[1]))


def _shorten(*texts: str) -> tuple[str, str]:
    """Cut two long texts to the characters around their first difference."""
    begin = find_shown_begin(*texts, max_chars=_MAX_TEXT_CHARS)
    return _cut(texts[0], begin), _cut(texts[1], begin)


def _cut(text: str, begin: int) -> str:
    num_after = len(text) - begin - _MAX_TEXT_CHARS
    before = f"[{begin:,} characters] … " if begin else ""
    after = f" … [{num_after:,} characters]" if num_after > 0 else ""
    return before + text[begin : begin + _MAX_TEXT_CHARS] + after


def _find_difference(first: Any, second: Any) -> str | None:
    """Return the place of the first difference, such as ``[1][0]``; "" for the whole, None if both are equal."""
    pairs = _pair_up(first, second)
    if pairs is None:
        return None if _is_equal(first, second) else ""
    below = ((key, _find_difference(*pair)) for key, *pair in pairs)
    return next((f"[{key!r}]{where}" for key, where in below if where is not None), None)


def _pair_up(first: Any, second: Any) -> list[tuple[Any, Any, Any]] | None:
    """Return the elements of two containers with the same keys, or of the same length; None for all else."""
    if type(first) is not type(second):
        return None
    if isinstance(first, dict) and first.keys() == second.keys():
        return [(key, first[key], second[key]) for key in first]
    if isinstance(first, (list, tuple, deque)) and len(first) == len(second):
        return list(zip(range(len(first)), first, second, strict=True))
    return None


def _is_equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or isinstance(first, (dict, list, tuple, deque)):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(_bits(first), _bits(second))
    if isinstance(first, (np.ndarray, np.generic)):
        first, second = ((array.dtype, array.shape, array.tobytes()) for array in (first, second))
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    return bool(first == second)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
