"""Merge checkpoints into one that has the weighted mean of their tensors."""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from cloudckpt._display import transferred
from cloudckpt.convert.bodies import TensorFile, write_files
from cloudckpt.convert.conversion import Conversion, MergeReport, OnProgress, check_apart
from cloudckpt.convert.state_dicts import parse_patterns
from cloudckpt.dcp.torch_metadata import nesting_of
from cloudckpt.errors import InvalidOptionError, UnsupportedValueError, quote_names
from cloudckpt.format.build import Content
from cloudckpt.format.chunks import dtype_of
from cloudckpt.format.model import JSON_VALUE, Chunk, Manifest, StoredTensor, StoredValue
from cloudckpt.format.nesting import Nesting
from cloudckpt.inspect.comparison import compare_readers, open_reader
from cloudckpt.inspect.description import matches
from cloudckpt.options import Options
from cloudckpt.pipeline.reader import Reader
from cloudckpt.pipeline.wants import TensorBytes
from cloudckpt.tensors.tensor_bytes import bytes_view

_log = logging.getLogger("cloudckpt")
_MIN_SOURCES = 2
_BUDGET_SHARE = 6
"""A part of a float8 tensor takes six times its size: its bytes, those of one source, and its sum in float32."""


def merge(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    include: str | Sequence[str] = (),
    from_first: str | Sequence[str] = (),
    overwrite: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
    on_progress: OnProgress | None = None,
) -> MergeReport:
    """Save the weighted mean of several checkpoints as a checkpoint at `target`.

    Tensors of floating point are averaged in float32, or in float64 if the first source has them so, and have the dtype
    of the first source. All other entries must be the same in all sources: integers, Python objects, and the parts of
    quantized tensors. Tensors are streamed in at most ``options.read_bytes`` of memory for all sources. Every byte that
    is read is checked. The cut into shards makes no difference.

    Args:
        sources: URIs of checkpoints, or of safetensors files as for `load`. They have the same entries and shapes.
        target: URI of the merged checkpoint.
        weights: A number for each source. They are divided by their sum. None for equal weights.
        include: Names of entries, or patterns as for files. ``"model"`` and ``"model.*"`` take all that is below
            ``model``. Empty for all entries.
        from_first: Names of entries, or patterns, that the first source gives alone, also if the others differ. For
            example, ``"*.num_batches_tracked"`` of batch norms.
        overwrite: Replace a checkpoint at `target`.
        options: Options for the sources.
        target_options: Options for the target.
        on_progress: Called with the bytes done and their total.

    Returns:
        Counts and sizes of the merge.

    Raises:
        InvalidOptionError: There are fewer than two sources, the weights do not fit them, or `include` fits no entry.
        UnsupportedValueError: The sources differ in their entries, in a shape, or in an entry that is no float tensor,
            or a mean does not fit the dtype. The message names the entries. Nothing is committed.
        CheckpointNotFoundError: No checkpoint exists at a source.
        CorruptCheckpointError: A source is damaged.
        CheckpointChangedError: A source was replaced during the merge.
        CheckpointExistsError: A checkpoint exists at `target`.

    Example::

        sources = ["s3://bucket/run/step-100", "s3://bucket/run/step-200"]
        cloudckpt.merge(sources, "s3://bucket/mean/step-0", weights=[0.3, 0.7], include="model")

    """
    sources = [sources] if isinstance(sources, (str, os.PathLike)) else [*sources]
    if len(sources) < _MIN_SOURCES:
        raise InvalidOptionError(f"merge needs a list of two or more checkpoints, not {sources!r}")
    shares = _normalize(weights, len(sources))
    conversion = Conversion(
        sources[0],
        target,
        options=options,
        target_options=target_options,
        overwrite=overwrite,
        on_progress=on_progress,
        include=include,
    )
    readers = [open_reader(source, options or Options()) for source in sources]
    for reader in readers:
        check_apart(reader.context, conversion.target)
    first = readers[0].manifest
    names = [*conversion.selection.choose_names([*first.tensors, *first.values])]
    exempt = parse_patterns(from_first)
    shared = [name for name in names if not matches(name, exempt)]
    averaged = _choose_averaged(first, shared)
    _check_alike(
        readers,
        averaged,
        takes=lambda name: conversion.selection.takes(name) and name not in averaged and not matches(name, exempt),
    )
    values = _read_values(readers[0], [name for name in names if name in first.values])
    mean = _Mean(readers, shares, averaged, values)
    num_bytes = _save(mean, conversion, names)
    report = MergeReport(
        sources=tuple(reader.context.uri for reader in readers),
        target=conversion.target.uri,
        weights=shares,
        num_averaged=len(averaged),
        num_copied=len(names) - len(averaged),
        num_bytes=num_bytes,
        merge_s=conversion.seconds,
    )
    moved = transferred(report.num_bytes, report.merge_s)
    _log.info("merged %d checkpoints into %s%s", len(readers), report.target, moved)
    return report


def _normalize(weights: Sequence[float] | None, num_sources: int) -> tuple[float, ...]:
    if weights is None:
        return (1 / num_sources,) * num_sources
    numbers = list(weights)
    if len(numbers) != num_sources:
        raise InvalidOptionError(f"there are {num_sources} checkpoints to merge, and {len(numbers)} weights: {weights}")
    if not all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers) or not sum(numbers):
        raise InvalidOptionError(f"weights must be finite numbers, and their sum not 0, not {weights!r}")
    total = math.fsum(numbers)
    return tuple(float(number) / total for number in numbers)


def _choose_averaged(first: Manifest, names: Iterable[str]) -> frozenset[str]:
    """Return the names of the tensors to average: those of floating point that stand for themselves."""
    parts = {f"{name}.{part}" for name, wrapper in first.wrappers.items() for part in wrapper.tensors}
    return frozenset(
        name
        for name in names
        if name in first.tensors and name not in parts and dtype_of(first.tensors[name].dtype).is_floating_point
    )


def _check_alike(readers: Sequence[Reader], averaged: frozenset[str], *, takes: Callable[[str], bool]) -> None:
    """Raise `UnsupportedValueError`, which names all entries that the sources cannot be merged in.

    `takes` returns True for the names of the entries that must be the same.
    """
    first = readers[0]
    for reader in readers[1:]:
        problems = [
            f"{difference.name!r} ({difference.kind})"
            for difference in compare_readers([first, reader], only=takes).differences
        ]
        for name in sorted(averaged):
            tensor, own = reader.manifest.tensors.get(name), first.manifest.tensors[name]
            if tensor is None:
                problems.append(f"{name!r} (removed)")
            elif tensor.shape != own.shape:
                problems.append(f"{name!r} (shape: {list(own.shape)} and {list(tensor.shape)})")
            elif not dtype_of(tensor.dtype).is_floating_point:
                problems.append(f"{name!r} (dtype: {own.dtype} and {tensor.dtype})")
        if problems:
            raise UnsupportedValueError(
                f"{reader.context.uri} cannot be merged with {first.context.uri}, because they differ in "
                f"{quote_names(problems)}. Only float tensors of one shape are averaged, and all else must be the "
                "same. Choose what to merge with include, such as include='model', or take such entries from the first "
                "one with from_first",
                uri=reader.context.uri,
            )


def _read_values(reader: Reader, names: Sequence[str]) -> dict[str, bytes]:
    contents: dict[str, bytearray] = {name: bytearray() for name in names}
    reader.read_bytes([], values={name: content.extend for name, content in contents.items()})
    return {name: bytes(content) for name, content in contents.items()}


class _Mean:
    """The entries of the merged checkpoint. Several threads read it."""

    def __init__(
        self, readers: Sequence[Reader], weights: Sequence[float], averaged: frozenset[str], values: Mapping[str, bytes]
    ) -> None:
        self.readers = readers
        self.values = values
        self._weighted = [(reader, weight) for reader, weight in zip(readers, weights, strict=True) if weight]
        self._averaged = averaged

    @property
    def first(self) -> Manifest:
        """The manifest of the first source, which says what the merged checkpoint consists of."""
        return self.readers[0].manifest

    def read_bytes(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all buffers."""
        for piece in wanted:
            if (content := self.values.get(piece.name)) is not None:
                bytes_view(piece.buffer)[:] = content[piece.begin : piece.end]
            elif piece.name in self._averaged:
                self._average(piece)
            else:
                self.readers[0].read_bytes([piece])

    def stop(self) -> None:
        """Let the reads in flight end soon."""
        for reader in self.readers:
            reader.context.stop()

    def _average(self, piece: TensorBytes) -> None:
        dtype = dtype_of(self.first.tensors[piece.name].dtype)
        begin, end = piece.begin // dtype.itemsize, piece.end // dtype.itemsize
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total = torch.zeros(end - begin, dtype=wide, device="cpu")
        is_finite = True
        for reader, weight in self._weighted:
            source_dtype = dtype_of(reader.manifest.tensors[piece.name].dtype)
            buffer = torch.empty((end - begin) * source_dtype.itemsize, dtype=torch.uint8, device="cpu")
            source_begin, source_end = begin * source_dtype.itemsize, end * source_dtype.itemsize
            reader.read_bytes([TensorBytes(name=piece.name, begin=source_begin, end=source_end, buffer=buffer)])
            block = buffer.view(source_dtype).to(wide)
            is_finite = is_finite and bool(block.isfinite().all())
            total.add_(block, alpha=weight)
        mean = piece.buffer.view(dtype)
        mean.copy_(total)
        if is_finite and not mean.to(wide).isfinite().all():
            raise UnsupportedValueError(
                f"the mean of {piece.name!r} does not fit its dtype, {dtype}. Choose other weights, or make the first "
                "checkpoint one that has it in a wider dtype",
                uri=self.readers[0].context.uri,
            )


def _save(mean: _Mean, conversion: Conversion, names: Sequence[str]) -> int:
    """Write and commit the merged checkpoint. Returns the size of its objects."""
    first = mean.first
    names_of: defaultdict[Any, list[str]] = defaultdict(list)  # tensors that share their bytes in all sources
    for name in names:
        names_of[_bytes_of(mean.readers, name)].append(name)
    shapes = {
        tied[0]: ("uint8", (len(mean.values[tied[0]]),))
        if tied[0] in mean.values
        else (first.tensors[tied[0]].dtype, first.tensors[tied[0]].shape)
        for tied in names_of.values()
    }

    def check_unchanged() -> None:
        for reader in mean.readers:
            reader.check_unchanged()

    draft, files, receipts = write_files(
        conversion,
        shapes,
        mean,
        {name: name for name in shapes},
        budget_bytes=conversion.source.options.read_bytes // _BUDGET_SHARE,
        stop_reading=mean.stop,
        check_unchanged=check_unchanged,
    )
    tensors, values = _place(mean, files, list(names_of.values()))
    draft.commit(
        Content(
            objects=[receipts],
            tensors={name: tensors[name] for name in names if name in tensors},
            values={name: values[name] for name in names if name in values},
            nesting=_nesting_of(first, frozenset(names)),
        )
    )
    return sum(receipt.size_bytes for receipt in receipts)


def _bytes_of(readers: Sequence[Reader], name: str) -> Any:
    """Return what is equal for two names only if they share their bytes in each source."""
    if name in readers[0].manifest.values:
        return name
    stored = [reader.manifest.tensors[name] for reader in readers]
    return tuple((tensor.dtype, tensor.shape, tuple(tensor.chunks)) for tensor in stored)


def _place(
    mean: _Mean, files: Sequence[TensorFile], tied_names: Sequence[Sequence[str]]
) -> tuple[dict[str, StoredTensor], dict[str, StoredValue]]:
    """Return where each entry is stored."""
    first = mean.first
    names_of = {tied[0]: tied for tied in tied_names}
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredValue] = {}
    for number, file in enumerate(files):
        for entry, begin in zip(file.entries, file.layout.begins, strict=True):
            end = begin + entry.num_bytes
            if entry.fqn in mean.values:
                transforms = [JSON_VALUE] if first.values[entry.fqn].is_json else []
                values[entry.fqn] = StoredValue(object_index=number, begin=begin, end=end, transforms=transforms)
                continue
            chunk = Chunk((0,) * len(entry.shape), entry.shape, number, begin, end)
            for name in names_of[entry.fqn]:
                tensors[name] = StoredTensor(
                    dtype=first.tensors[name].dtype,
                    shape=entry.shape,
                    chunks=[chunk],
                    requires_grad=first.tensors[name].requires_grad,
                )
    return tensors, values


def _nesting_of(first: Manifest, names: frozenset[str]) -> Nesting | None:
    """Return the nesting of the first source, without that of entries that are left out."""
    nesting = nesting_of(first)
    if nesting is not None and names != first.tensors.keys() | first.values.keys():
        kept = [nesting.typed.get(name, path) for name, path in nesting.items() if name in names]
        nesting.empty = []
        nesting.tuples = {
            path: kind for path, kind in nesting.tuples.items() if any(one[: len(path)] == path for one in kept)
        }
        nesting.wrappers = {
            name: wrapper
            for name, wrapper in nesting.wrappers.items()
            if all(f"{name}.{part}" in names for part in wrapper.tensors)
        }
    return nesting
