"""Export a checkpoint as files that other programs read."""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from cloudckpt.commit.log import holds_torch_checkpoint, resolve
from cloudckpt.convert.bodies import CheckpointReader, FileBody, TensorsBody
from cloudckpt.convert.endpoints import check_apart, folder_and_name
from cloudckpt.convert.files import Files
from cloudckpt.convert.reports import (
    Conversion,
    ConversionReport,
    Format,
    OnProgress,
    Progress,
    build_report,
)
from cloudckpt.convert.safetensors_source import INDEX_NAME
from cloudckpt.convert.state_dicts import choose_names, flatten_entries, load_whole, parse_patterns, quote_names
from cloudckpt.errors import CheckpointNotFoundError, Hint, InvalidOptionError, UnsupportedValueError
from cloudckpt.format.model import ITEMSIZE_BYTES, SAFETENSORS_TAG, Manifest
from cloudckpt.format.safetensors import Entry, Layout, lay_out, pack, sort_for_storage
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")

_SINGLE_NAME = "model.safetensors"
_SAFETENSORS_PATTERNS = (_SINGLE_NAME, "model-?????-of-?????.safetensors", INDEX_NAME)
_RESERVED_NAME = "__metadata__"
_TORCH_METADATA = ".metadata"
_TILE_BYTES = MIB
_MAX_SHARD_BYTES = 5_000_000_000  # as huggingface_hub's


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """Arguments of `export_checkpoint`, checked."""

    source: Location
    target: Location
    options: Options
    target_options: Options
    include: tuple[str, ...]
    strip_prefix: str
    max_shard_bytes: int
    skip_non_tensors: bool
    overwrite: bool
    allow_pickle: bool


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Format = "safetensors",  # noqa: A002  # the common word for it
    include: str | Sequence[str] = (),
    strip_prefix: str = "",
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    skip_non_tensors: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
    on_progress: OnProgress | None = None,
) -> ConversionReport:
    """Write the checkpoint at `source` as files that other programs read, to `target` on any store.

    - ``"safetensors"``: a folder in Hugging Face's layout. Several files have an index, which is written last. Tensors
      of any size are streamed in at most ``options.read_bytes`` of memory. Tied tensors are written once for each name.
    - ``"torch"``: one file of ``torch.save`` with the nested state dict. Takes memory for the state dict, and as much
      room in the folder for temporary files.
    - ``"dcp"``: a folder in torch's own format, for ``dcp.load`` with a ``FileSystemReader``. Takes as much.

    Every byte that is read is checked, sharded tensors are put together, and all bits are those of the save. After an
    error, no index and no single file exists. `target` may hold other files.

    Args:
        source: URI of the checkpoint.
        target: URI of the folder, or of the file for ``"torch"``.
        format: One of the three formats.
        include: Patterns of names, as of files (``"model.*"``). Empty for all entries.
        strip_prefix: Prefix to remove from names. Makes the state dict of ``"torch"`` and ``"dcp"`` flat.
        max_shard_bytes: Largest size of a safetensors file, unless one tensor is larger.
        skip_non_tensors: Leave Python objects out of safetensors files, which cannot hold them.
        overwrite: Remove the files of an earlier export before the first new one is written.
        allow_pickle: Consent to run code from the checkpoint, as in `load`.
        options: Options for the source.
        target_options: Options for the target.
        on_progress: Called with the bytes done and their total.

    Raises:
        UnsupportedValueError: The format cannot hold some entries, which the message names.
        CheckpointExistsError: Files of an earlier export exist.
        InvalidOptionError: An argument is wrong, or matches no entry.
        CloudckptError: The source cannot be read, as in `load`.

    """
    begun_s = time.monotonic()
    if format not in _EXPORTERS:
        raise InvalidOptionError(f"format must be one of {', '.join(map(repr, _EXPORTERS))}, not {format!r}")
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise InvalidOptionError(f"max_shard_bytes must be a positive whole number, not {max_shard_bytes!r}")
    options, target_options = options or Options(), target_options or Options()
    plan = ExportPlan(
        source=parse_location(source),
        target=parse_location(target),
        options=options,
        target_options=target_options,
        include=parse_patterns(include),
        strip_prefix=strip_prefix,
        max_shard_bytes=max_shard_bytes,
        skip_non_tensors=skip_non_tensors,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
    )
    check_apart(plan.source, plan.target, options, target_options)
    report = build_report(
        plan.source, plan.target, format, _EXPORTERS[format](plan, Progress(on_progress)), begun_s=begun_s
    )
    _log.info("exported %s", report)
    return report


def export_safetensors(plan: ExportPlan, progress: Progress) -> Conversion:
    """Export as safetensors files, streamed."""
    source = Context(plan.source, plan.options, rank=0)
    target = Context(plan.target, plan.target_options, rank=0)
    manifest = _read_manifest(source)
    names = choose_names(
        [*manifest.tensors, *manifest.values],
        include=plan.include,
        strip_prefix=plan.strip_prefix,
        uri=source.uri,
    )
    left_out = tuple(fqn for fqn in names if fqn in manifest.values)
    _check_values(left_out, plan)
    fqns = {name: fqn for fqn, name in names.items() if fqn in manifest.tensors}
    entries = _entries(manifest, fqns, source.uri)
    shards = split_into_shards(entries, max_shard_bytes=plan.max_shard_bytes)
    files = Files(
        target,
        progress,
        patterns=_SAFETENSORS_PATTERNS,
        entries=(INDEX_NAME, _SINGLE_NAME),  # an earlier export had one of these
        overwrite=plan.overwrite,
        tile_bytes=_TILE_BYTES,
    )
    files.check()
    index = build_index(shards)
    progress.expect(sum(shard.layout.size_bytes for shard in shards) + (len(index) if len(shards) > 1 else 0))
    files.clear([*(shard.name for shard in shards), *([INDEX_NAME] if len(shards) > 1 else [])])
    # One half is for the parts that are sent. The other is for what is read beside them: the rest of tiles, gaps, and
    # chunks that can only be unpacked whole.
    budget_bytes = plan.options.read_bytes // 2
    reader = CheckpointReader(
        source, manifest, budget_bytes=budget_bytes // target.connections, kept_bytes=budget_bytes
    )
    try:
        if len(shards) == 1:
            (shard,) = shards
            size_bytes = shard.layout.size_bytes
            body_in = functools.partial(_body_of, shard, fqns, reader)
            files.upload_only(shard.name, body_in, size_bytes=size_bytes, budget_bytes=budget_bytes)
        else:
            with files.upload(budget_bytes=budget_bytes) as submit:
                for shard in shards:
                    submit(shard.name, functools.partial(_body_of, shard, fqns, reader))
    except BaseException:
        reader.stop()
        raise
    if len(shards) > 1:
        files.put_last(INDEX_NAME, index)
    return Conversion(num_tensors=len(fqns), num_values=0, files=files.written, left_out=left_out)


def _read_manifest(source: Context) -> Manifest:
    try:
        return resolve(source.store, source.retrier).manifest
    except CheckpointNotFoundError as error:
        if holds_torch_checkpoint(source.store, source.retrier):
            raise CheckpointNotFoundError(
                f"{source.uri} holds a checkpoint of torch's own writer, which cannot be read in pieces. Import it "
                "first: cloudckpt import --format dcp",
                uri=source.uri,
            ) from error
        raise


def _check_values(fqns: tuple[str, ...], plan: ExportPlan) -> None:
    if fqns and not plan.skip_non_tensors:
        raise UnsupportedValueError(
            f"safetensors files hold tensors alone, and of {plan.source.uri} these are Python objects: "
            f"{quote_names(sorted(fqns))}",
            uri=plan.source.uri,
            hint=Hint(
                advice="Leave them out with {option}, include only names of tensors, or export in the format 'torch'.",
                option="skip_non_tensors",
                value="True",
            ),
        )


def _entries(manifest: Manifest, fqns: dict[str, str], uri: str) -> list[Entry]:
    """Return the tensors of the files under their new names. Raises `UnsupportedValueError` for a dtype or a name."""
    unknown = {
        fqn: manifest.tensors[fqn].dtype for fqn in fqns.values() if manifest.tensors[fqn].dtype not in SAFETENSORS_TAG
    }
    if unknown:
        raise UnsupportedValueError(
            f"safetensors files that every reader can open have no dtype for "
            f"{quote_names([f'{fqn} ({dtype})' for fqn, dtype in unknown.items()])} of {uri}. Convert them before "
            "they are saved, leave them out with include, or export in the format 'torch'",
            uri=uri,
        )
    if _RESERVED_NAME in fqns:
        raise UnsupportedValueError(
            f"no tensor of a safetensors file can be called {_RESERVED_NAME!r}, as one of {uri} is", uri=uri
        )
    entries = []
    for name, fqn in fqns.items():
        tensor = manifest.tensors[fqn]
        num_bytes = ITEMSIZE_BYTES[tensor.dtype]
        for length in tensor.shape:
            num_bytes *= length
        entries.append(Entry(fqn=name, dtype=tensor.dtype, shape=tensor.shape, offsets=None, num_bytes=num_bytes))
    return entries


def _body_of(shard: Shard, fqns: dict[str, str], reader: CheckpointReader, arena: Arena) -> TensorsBody:
    layout = shard.layout
    return TensorsBody(
        layout.header,
        [fqns[entry.fqn] for entry in shard.entries],
        layout.begins,
        size_bytes=layout.size_bytes,
        reader=reader,
        arena=arena,
    )


def export_torch(plan: ExportPlan, progress: Progress) -> Conversion:
    """Export as one file of ``torch.save``."""
    folder, name = folder_and_name(plan.target)
    target = Context(folder, plan.target_options, rank=0)
    files = Files(
        target, progress, patterns=(_escape(name),), entries=(name,), overwrite=plan.overwrite, tile_bytes=_TILE_BYTES
    )
    files.check()
    state_dict, done = _load(plan)
    with tempfile.TemporaryDirectory(prefix="cloudckpt-export-") as scratch:
        path = Path(scratch, "state.pt")
        torch.save(state_dict, path)
        size_bytes = path.stat().st_size
        progress.expect(size_bytes)
        files.clear([name])
        files.upload_only(
            name,
            lambda arena: FileBody(path, arena, size_bytes=size_bytes),
            size_bytes=size_bytes,
            budget_bytes=plan.options.read_bytes,
        )
    return Conversion(num_tensors=done[0], num_values=done[1], files=files.written)


def export_dcp(plan: ExportPlan, progress: Progress) -> Conversion:
    """Export in torch's own DCP format."""
    target = Context(plan.target, plan.target_options, rank=0)
    files = Files(
        target,
        progress,
        patterns=(_TORCH_METADATA, "__*_*.distcp"),
        entries=(_TORCH_METADATA,),
        overwrite=plan.overwrite,
        tile_bytes=_TILE_BYTES,
    )
    files.check()
    state_dict, done = _load(plan)
    with tempfile.TemporaryDirectory(prefix="cloudckpt-export-") as scratch:
        _check_nesting(state_dict, plan)
        dcp_save(state_dict, storage_writer=_Writer(scratch, sync_files=False), no_dist=True)
        sizes = {path.name: path.stat().st_size for path in sorted(Path(scratch).iterdir())}
        progress.expect(sum(sizes.values()))
        files.clear(sizes)
        with files.upload(budget_bytes=plan.options.read_bytes) as submit:
            for name, size_bytes in sizes.items():
                if name != _TORCH_METADATA:
                    path = Path(scratch, name)
                    submit(name, functools.partial(FileBody, path, size_bytes=size_bytes))
        files.put_last(_TORCH_METADATA, Path(scratch, _TORCH_METADATA).read_bytes())
    return Conversion(num_tensors=done[0], num_values=done[1], files=files.written)


class _Writer(FileSystemWriter):
    """A writer that pickles no `Path`: an older Python cannot read one of Python 3.13."""

    def storage_meta(self) -> StorageMeta:
        """Return torch's value with a string for the path."""
        return StorageMeta(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)


def _check_nesting(state_dict: dict[str, Any], plan: ExportPlan) -> None:
    """Warn of empty containers that torch's planners drop, such as the ``state`` of SGD.

    Raises `UnsupportedValueError` for those in a list or tuple, where a load would have None in their place.
    """
    lost = [*_find_dropped(state_dict, unflatten_state_dict(*flatten_state_dict(state_dict)), ())]
    what = f"torch's own format has no place for the empty containers of {plan.source.uri} at"
    misplaced = [_dotted(path) for path, is_in_sequence in lost if is_in_sequence]
    if misplaced:
        raise UnsupportedValueError(
            f"{what} {quote_names(misplaced)}: a load would have None there. Nothing was written. Export in the format "
            "'torch', which keeps them, or leave them out with include",
            uri=plan.source.uri,
        )
    if lost:
        warnings.warn(
            f"{what} {quote_names([_dotted(path) for path, _ in lost])}: a load gives these keys back only to a "
            "state dict that has them. The format 'torch' keeps them",
            stacklevel=2,
        )


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _find_dropped(
    value: object, back: object, path: tuple[Any, ...], *, is_in_sequence: bool = False
) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Yield the path of each empty container that torch dropped from `value` when it made `back`.

    The second element is True for an element of a list or tuple.
    """
    if value is back or not isinstance(value, (Mapping, list, tuple)):
        return
    if not value and type(value) is not type(back):
        yield path, is_in_sequence
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(back, Mapping):
            other = back.get(str(key))
        else:
            other = back[key] if isinstance(back, list) and key < len(back) else None
        yield from _find_dropped(each, other, (*path, key), is_in_sequence=not isinstance(value, Mapping))


def _load(plan: ExportPlan) -> tuple[dict[str, Any], tuple[int, int]]:
    """Load the state dict. Return it with the number of its tensors and of its values."""
    state_dict = load_whole(
        plan.source,
        plan.options,
        include=plan.include,
        strip_prefix=plan.strip_prefix,
        allow_pickle=plan.allow_pickle,
    )
    if not state_dict:
        raise UnsupportedValueError(f"{plan.source.uri} holds nothing to export", uri=plan.source.uri)
    flat = flatten_entries(state_dict, uri=plan.source.uri)
    num_tensors = sum(isinstance(value, torch.Tensor) for value in flat.values())
    return state_dict, (num_tensors, len(flat) - num_tensors)


def _escape(name: str) -> str:
    """Return a pattern that fits only `name`."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file of an export."""

    name: str
    entries: tuple[Entry, ...]
    """In the order in which they are stored."""
    layout: Layout


def split_into_shards(entries: Sequence[Entry], *, max_shard_bytes: int) -> list[Shard]:
    """Split tensors into files of at most `max_shard_bytes` each. A larger tensor gets a file of its own.

    The entries keep their order from file to file, as in ``huggingface_hub.split_torch_state_dict_into_shards``. In
    each file, the largest elements come first, so that all are aligned.
    """
    groups = pack([entry.num_bytes for entry in entries], object_bytes=max_shard_bytes) or [range(0)]
    shards = []
    for number, group in enumerate(groups, start=1):
        members = [entries[i] for i in group]
        members = [members[i] for i in sort_for_storage(members)]
        name = _SINGLE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shards.append(Shard(name=name, entries=tuple(members), layout=lay_out(members)))
    return shards


def build_index(shards: Sequence[Shard]) -> bytes:
    """Build the index that ``transformers`` and torch's reader expect beside several files."""
    weight_map = {entry.fqn: shard.name for shard in shards for entry in shard.entries}
    total_bytes = sum(entry.num_bytes for shard in shards for entry in shard.entries)
    document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"


_EXPORTERS = {"safetensors": export_safetensors, "torch": export_torch, "dcp": export_dcp}
