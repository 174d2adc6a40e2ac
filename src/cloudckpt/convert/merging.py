"""Merge checkpoints into one that has the weighted mean of their tensors."""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from cloudckpt._display import transferred
from cloudckpt._keywords import suggest_keywords
from cloudckpt._messages import join_first
from cloudckpt.convert.bodies import TensorFile, write_files
from cloudckpt.convert.state_dicts import parse_patterns, require_matches
from cloudckpt.convert.transfer import WIDE_FLOATS, MergeReport, OnProgress, Transfer, check_apart
from cloudckpt.dcp.renaming import common_prefixes, is_below
from cloudckpt.dcp.torch_metadata import nesting_of
from cloudckpt.errors import Hint, InvalidOptionError, InvalidURIError, UnsupportedValueError
from cloudckpt.format.build import Content
from cloudckpt.format.model import JSON_VALUE, Chunk, Manifest, StoredTensor, StoredValue, refuse_differences
from cloudckpt.format.nesting import Nesting
from cloudckpt.inspect.comparison import compare_readers, open_reader
from cloudckpt.inspect.description import matches
from cloudckpt.options import Options
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.wanted_items import TensorBytes
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.tensor_bytes import bytes_view, dtype_of
from cloudckpt.uri import STEP_FOLDER, Location

_log = logging.getLogger("cloudckpt")
_MIN_SOURCES = 2
_MAX_SHOWN = 5
_BUDGET_SHARE = 6
"""Shares of ``options.read_bytes``. The means have one."""
_SCRATCH_SHARES = 5
"""Shares of the budget beside that of the means. A bfloat16 tensor needs three: for a source's bytes, and the sum."""
_SLICE_ELEMENTS = 1 << 16
"""Elements that are widened and added at once. The copies in a wider dtype take so little memory."""
_SLOT_ELEMENTS = 64
"""Scratch memory is for a multiple of so many elements, so that all that is in it is aligned."""
_ZERO = 1e-9
"""A smaller sum, beside that of the absolute weights, is 0 up to the rounding of decimal fractions."""


@suggest_keywords
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

    Float tensors of 16 bits or more are averaged in float32, or in float64 if the first source has them so, and have
    the dtype of the first source. All other entries must be the same in all sources: integers, Python objects, floats
    of 8 bits, which need their scales, and the parts of quantized tensors. Tensors are streamed in at most
    ``options.read_bytes`` of memory for all sources. Every byte that is read is checked. The cut into shards makes no
    difference.

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
        InvalidOptionError: There are fewer than two sources, the weights do not fit them, or a pattern of `include` or
            `from_first` fits no entry.
        UnsupportedValueError: The sources differ in their entries, in a shape, or in an entry that is no float tensor,
            or a mean does not fit the dtype. The message names the entries. Nothing is committed.
        CheckpointNotFoundError: No checkpoint exists at a source.
        CorruptCheckpointError: A source is damaged.
        CheckpointChangedError: A source was replaced during the merge.
        CheckpointExistsError: A checkpoint exists at `target`.
        InvalidURIError: `target` would be a step of the run whose steps are merged.

    Example::

        sources = ["s3://bucket/run/step-100", "s3://bucket/run/step-200"]
        cloudckpt.merge(sources, "s3://bucket/mean/step-0", weights=[0.3, 0.7], include="model")

    """
    sources = [sources] if isinstance(sources, (str, os.PathLike)) else [*sources]
    if len(sources) < _MIN_SOURCES:
        raise InvalidOptionError(f"merge needs a list of two or more checkpoints, not {sources!r}")
    shares = _normalize(weights, len(sources))
    transfer = Transfer(
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
        refuse_differences(reader.manifest, uri=reader.context.uri)
        check_apart(reader.context, transfer.target)
    _refuse_step_of_run(transfer.target.location, [reader.context.location for reader in readers])
    first = readers[0].manifest
    names = [*transfer.selection.choose_names([*first.tensors, *first.values])]
    exempt = parse_patterns(from_first)
    in_any = dict.fromkeys(name for reader in readers for name in [*reader.manifest.tensors, *reader.manifest.values])
    require_matches("from_first", exempt, list(in_any), uri=" and ".join(reader.context.uri for reader in readers))
    shared = [name for name in names if not matches(name, exempt)]
    averaged = _choose_averaged(first, shared)
    _check_alike(
        readers,
        names,
        averaged,
        exempt,
        takes=lambda name: transfer.selection.takes(name) and name not in averaged and not matches(name, exempt),
    )
    values = _read_values(readers[0], [name for name in names if name in first.values])
    mean = _Mean(readers, shares, averaged, values)
    num_bytes = _save(mean, transfer, names)
    report = MergeReport(
        sources=tuple(reader.context.uri for reader in readers),
        target=transfer.target.uri,
        weights=shares,
        num_averaged=len(averaged),
        num_copied=len(names) - len(averaged),
        num_bytes=num_bytes,
        merge_s=transfer.seconds,
    )
    moved = transferred(report.num_bytes, report.merge_s)
    _log.info("merged %d checkpoints into %s%s", len(readers), report.target, moved)
    return report


def _refuse_step_of_run(target: Location, sources: Iterable[Location]) -> None:
    """Refuse a target that a restore of the run whose steps are merged would take for the newest step."""
    runs = {source.parent for source in sources if STEP_FOLDER.fullmatch(source.name)}
    if STEP_FOLDER.fullmatch(target.name) and target.parent in runs:
        raise InvalidURIError(
            f"{target.uri} would be the newest step of the run whose steps are merged, and its next restore would take "
            f"the mean. Choose a place outside the run, such as {target.parent.uri}-mean/{target.name}"
        )


def _normalize(weights: Sequence[float] | None, num_sources: int) -> tuple[float, ...]:
    if weights is None:
        return (1 / num_sources,) * num_sources
    numbers = list(weights) if isinstance(weights, Iterable) else [weights]
    if len(numbers) != num_sources:
        raise InvalidOptionError(f"there are {num_sources} checkpoints to merge, and {len(numbers)} weights: {weights}")
    is_finite = all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers)
    if not is_finite or abs(sum(numbers)) <= _ZERO * sum(map(abs, numbers)):
        raise InvalidOptionError(f"weights must be finite numbers, and their sum not 0, not {weights!r}")
    total = math.fsum(numbers)
    return tuple(float(number) / total for number in numbers)


def _choose_averaged(first: Manifest, names: Iterable[str]) -> frozenset[str]:
    """Return the names of the tensors to average: floats of 16 bits or more that are no part of a wrapper."""
    parts = {f"{name}.{part}" for name, wrapper in first.wrappers.items() for part in wrapper.tensors}
    return frozenset(
        name
        for name in names
        if name in first.tensors and name not in parts and first.tensors[name].dtype in WIDE_FLOATS
    )


def _check_alike(
    readers: Sequence[CheckpointReader],
    names: Collection[str],
    averaged: frozenset[str],
    exempt: Sequence[str],
    *,
    takes: Callable[[str], bool],
) -> None:
    """Raise `UnsupportedValueError`, which names all entries of `names` that the sources cannot be merged in.

    `takes` returns True for the names of the entries that must be the same.
    """
    first = readers[0]
    kinds: dict[str, str] = {}
    uris: dict[str, None] = {}
    for reader in readers[1:]:
        problems: dict[str, str] = {
            difference.name: difference.kind for difference in compare_readers([first, reader], only=takes).differences
        }
        for name in sorted(averaged):
            tensor, first_tensor = reader.manifest.tensors.get(name), first.manifest.tensors[name]
            if tensor is None:
                problems[name] = "removed"
            elif tensor.shape != first_tensor.shape:
                problems[name] = f"shape: {list(first_tensor.shape)} and {list(tensor.shape)}"
            elif tensor.dtype not in WIDE_FLOATS:
                problems[name] = f"dtype: {first_tensor.dtype} and {tensor.dtype}"
        kinds = problems | kinds
        uris |= dict.fromkeys([reader.context.uri] if problems else [])
    if kinds:
        texts = [f"{name!r} ({kind})" for name, kind in kinds.items()]
        raise UnsupportedValueError(
            f"{' and '.join(uris)} cannot be merged with {first.context.uri}, because they differ in "
            f"{join_first(texts, _MAX_SHOWN, separator=', ')}. Only float tensors of one shape and at least 16 "
            "bits are averaged, and all else must be the same",
            uri=next(iter(uris)),
            hint=_advise(
                names, kinds, averaged, exempt, among=[*first.manifest.tensors, *first.manifest.values, *kinds]
            ),
        )


def _advise(
    names: Collection[str],
    different: Collection[str],
    averaged: frozenset[str],
    exempt: Sequence[str],
    *,
    among: Sequence[str],
) -> Hint | None:
    """Return the advice to leave out what is `different` of the chosen `names`, or to take it from the first source.

    Returns None if nothing that can be averaged is alike.
    """
    alike = common_prefixes([name for name in names if name not in different], among)
    means = [prefix for prefix in alike if any(is_below(name, prefix) for name in averaged)]
    if not means:  # they are of different models
        return None
    of_model = [prefix for prefix in means if is_below(prefix, "model")]
    from_first = Hint(
        advice="{option} to take it from the first one",
        option="from_first",
        value=_code_of([*exempt, *common_prefixes(different, among)]),
    )
    return Hint(
        advice="To merge the rest alone, {option}",
        option="include",
        value=_code_of(of_model or means),
        other=from_first,
    )


def _code_of(names: Sequence[str]) -> str:
    return "…" if not 0 < len(names) <= _MAX_SHOWN else repr(names[0] if len(names) == 1 else [*names])


def _read_values(reader: CheckpointReader, names: Sequence[str]) -> dict[str, bytes]:
    contents: dict[str, bytearray] = {name: bytearray() for name in names}
    reader.read_bytes([], values={name: content.extend for name, content in contents.items()})
    return {name: bytes(content) for name, content in contents.items()}


class _Mean:
    """The entries of the merged checkpoint. Several threads read it."""

    def __init__(
        self,
        readers: Sequence[CheckpointReader],
        weights: Sequence[float],
        averaged: frozenset[str],
        values: Mapping[str, bytes],
    ) -> None:
        self.readers = readers
        self.values = values
        self.averaged = averaged
        self._scratch = Arena(budget_bytes=_SCRATCH_SHARES * (readers[0].context.options.read_bytes // _BUDGET_SHARE))
        self._weighted = [(reader, weight) for reader, weight in zip(readers, weights, strict=True) if weight]

    @property
    def first(self) -> Manifest:
        """The manifest of the first source, whose entries the merged checkpoint has."""
        return self.readers[0].manifest

    def read_bytes(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all buffers."""
        for tensor_bytes in wanted:
            if (content := self.values.get(tensor_bytes.name)) is not None:
                bytes_view(tensor_bytes.buffer)[:] = content[tensor_bytes.begin : tensor_bytes.end]
            elif tensor_bytes.name in self.averaged:
                self._average(tensor_bytes)
            else:
                self.readers[0].read_bytes([tensor_bytes])

    def stop(self) -> None:
        """Let the reads in flight end soon."""
        for reader in self.readers:
            reader.context.stop()

    def _average(self, piece: TensorBytes) -> None:
        dtype = dtype_of(self.first.tensors[piece.name].dtype)
        begin, end = piece.begin // dtype.itemsize, piece.end // dtype.itemsize
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        dtypes = [dtype_of(reader.manifest.tensors[piece.name].dtype) for reader, _ in self._weighted]
        num_slots = -(-(end - begin) // _SLOT_ELEMENTS) * _SLOT_ELEMENTS
        sum_bytes = num_slots * wide.itemsize
        mean = piece.buffer.view(dtype)
        is_finite = True
        with self._scratch.lend(sum_bytes + num_slots * max(each.itemsize for each in dtypes)) as scratch:
            total = scratch[: (end - begin) * wide.itemsize].view(wide).zero_()
            for (reader, weight), source_dtype in zip(self._weighted, dtypes, strict=True):
                source_begin, source_end = begin * source_dtype.itemsize, end * source_dtype.itemsize
                buffer = scratch[sum_bytes : sum_bytes + source_end - source_begin]
                reader.read_bytes([TensorBytes(name=piece.name, begin=source_begin, end=source_end, buffer=buffer)])
                source = buffer.view(source_dtype)
                is_finite = is_finite and _is_finite(source)
                for part, values in zip(total.split(_SLICE_ELEMENTS), source.split(_SLICE_ELEMENTS), strict=True):
                    part.add_(values.to(wide), alpha=weight)
            mean.copy_(total)
        if is_finite and not _is_finite(mean):
            raise UnsupportedValueError(
                f"the mean of {piece.name!r} does not fit its dtype, {dtype}. Choose other weights, or make the first "
                "checkpoint one that has it in a wider dtype",
                uri=self.readers[0].context.uri,
            )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no element is infinite or NaN. It takes a tenth of the time of `torch.isfinite`."""
    return all(math.isfinite(bound) for bound in torch.aminmax(tensor))


def _save(mean: _Mean, transfer: Transfer, names: Sequence[str]) -> int:
    """Write and commit the merged checkpoint. Returns the size of its objects."""
    first = mean.first
    tied_names: defaultdict[Any, list[str]] = defaultdict(list)  # of tensors that share their bytes
    for name in names:
        tied_names[_storage_key(mean, name)].append(name)
    shapes = {
        name: ("uint8", (len(mean.values[name]),))
        if name in mean.values
        else (first.tensors[name].dtype, first.tensors[name].shape)
        for name, *_ in tied_names.values()
    }

    def check_unchanged() -> None:
        for reader in mean.readers:
            reader.check_unchanged()

    draft, files, receipts = write_files(
        transfer,
        shapes,
        mean,
        {name: name for name in shapes},
        budget_bytes=transfer.source.options.read_bytes // _BUDGET_SHARE,
        stop_reading=mean.stop,
        check_unchanged=check_unchanged,
    )
    tensors, values = _locate_entries(mean, files, list(tied_names.values()))
    draft.commit(
        Content(
            objects=[receipts],
            tensors={name: tensors[name] for name in names if name in tensors},
            values={name: values[name] for name in names if name in values},
            nesting=_nesting_of(first, frozenset(names)),
        )
    )
    return sum(receipt.size_bytes for receipt in receipts)


def _storage_key(mean: _Mean, name: str) -> Any:
    """Return a key that two names have in common only if they share their bytes in each source read for them."""
    if name in mean.first.values:
        return name
    readers = mean.readers if name in mean.averaged else mean.readers[:1]
    stored = [reader.manifest.tensors[name] for reader in readers]
    return tuple((tensor.dtype, tensor.shape, tuple(tensor.chunks)) for tensor in stored)


def _locate_entries(
    mean: _Mean, files: Sequence[TensorFile], tied_names: Sequence[Sequence[str]]
) -> tuple[dict[str, StoredTensor], dict[str, StoredValue]]:
    """Return the stored tensors and values of the merged checkpoint, with their locations in `files`."""
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
        paths = [nesting.typed.get(name, path) for name, path in nesting.items() if name in names]
        nesting.empty = []
        nesting.tuples = {
            path: kind for path, kind in nesting.tuples.items() if any(entry[: len(path)] == path for entry in paths)
        }
        nesting.wrappers = {
            name: wrapper
            for name, wrapper in nesting.wrappers.items()
            if all(f"{name}.{part}" in names for part in wrapper.tensors)
        }
    return nesting
