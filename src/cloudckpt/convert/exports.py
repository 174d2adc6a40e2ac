"""Export a checkpoint as files that other programs read."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import glob
import json
import logging
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from cloudckpt._display import transferred
from cloudckpt.commit.log import resolve
from cloudckpt.convert.bodies import TensorFile, plan_files
from cloudckpt.convert.conversion import (
    BodyIn,
    Conversion,
    ConversionReport,
    OnProgress,
    upload,
)
from cloudckpt.convert.state_dicts import flatten_entries, load_whole
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    Hint,
    InvalidOptionError,
    UnsupportedValueError,
    join_first,
    quote_names,
)
from cloudckpt.format.chunks import dtype_name, dtype_of
from cloudckpt.format.model import ITEMSIZE_BYTES, SAFETENSORS_TAG, StoredTensor
from cloudckpt.format.safetensors import INDEX_NAME, SINGLE_NAME, lay_out
from cloudckpt.format.wrappers import Registry, SavedWrapper, collapse
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import Reader
from cloudckpt.pipeline.wants import TensorBytes
from cloudckpt.tensors.body import PieceBody, new_piece
from cloudckpt.uri import folder_and_name

_log = logging.getLogger("cloudckpt")

ExportFormat: TypeAlias = Literal["safetensors", "torch"]

_SAFETENSORS_PATTERNS = (SINGLE_NAME, "model-?????-of-?????.safetensors", INDEX_NAME)
_RESERVED_NAME = "__metadata__"
_MAX_SHOWN_URLS = 3
_CONNECTIONS_PER_UPLOAD = 2
"""Connections that each upload uses to read the bytes that it sends."""
TILE_BYTES = MIB
_OTHER_FILES = (".bin", ".ckpt", ".pt", ".pth", ".safetensor")
_WILDCARD = re.compile(r"[*?[]")
_MAX_SHARD_BYTES = 5_000_000_000  # as huggingface_hub's


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: ExportFormat = "safetensors",  # as users call it
    include: str | Sequence[str] = (),
    strip_prefix: str = "",
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    skip_non_tensors: bool = False,
    dequantize: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
    on_progress: OnProgress | None = None,
) -> ConversionReport:
    """Write the checkpoint at `source` as files that other programs read, to `target` on any store.

    - ``"safetensors"``: a folder in Hugging Face's layout, or one file. Several files have an index, which is written
      last. Tensors of any size are streamed in at most ``options.read_bytes`` of memory. Tied tensors are written once
      for each name.
    - ``"torch"``: one file of ``torch.save`` with the nested state dict. Takes memory for the state dict, and as much
      room in the folder for temporary files. ``torch.distributed.checkpoint.format_utils.torch_save_to_dcp`` turns the
      file into torch's DCP format.

    Every byte that is read is checked, sharded tensors are put together, and all bits are those of the save. After an
    error, no index and no single file exists. `target` may hold other files.

    Args:
        source: URI of the checkpoint.
        target: URI of the folder; of the file for ``"torch"``, and for one file whose name ends in ``.safetensors`` in
            any case. A directory that exists is a folder.
        format: One of the two formats.
        include: Names of entries, or patterns as for files. ``"model"`` and ``"model.*"`` take all that is below
            ``model``. Empty for all entries.
        strip_prefix: First part, such as ``"model"``, to remove from dotted names. Makes the state dict of ``"torch"``
            flat.
        max_shard_bytes: Largest size of a safetensors file, unless one tensor is larger.
        skip_non_tensors: Leave Python objects out of safetensors files, which cannot hold them.
        dequantize: Write the values of tensors that consist of others, such as torchao's, to safetensors files: by
            default, their parts are written. Holds one such tensor in memory, and needs its class (`read`).
        overwrite: Remove the files of an earlier export before the first new one is written.
        allow_pickle: Consent to run code from the checkpoint, as in `load`.
        options: Options for the source.
        target_options: Options for the target.
        on_progress: Called with the bytes done and their total.

    Returns:
        Names and sizes of the files.

    Raises:
        UnsupportedValueError: The format cannot hold some entries, which the message names.
        CheckpointExistsError: Files of an earlier export exist.
        InvalidOptionError: An argument is wrong, or matches no entry.
        CheckpointNotFoundError: No checkpoint exists at `source`.
        CorruptCheckpointError: The source is damaged.

    Example::

        source, target = "s3://bucket/run/step-100", "s3://bucket/exports/step-100"
        report = cloudckpt.export_checkpoint(source, target, include="model", strip_prefix="model")
        print(report.files)  # ("model.safetensors",)

    """
    if format not in ("safetensors", "torch"):
        raise InvalidOptionError(
            f"format must be one of 'safetensors', 'torch', not {format!r}. For torch's DCP format, export as 'torch' "
            "and convert the file with torch.distributed.checkpoint.format_utils.torch_save_to_dcp"
        )
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise InvalidOptionError(f"max_shard_bytes must be a positive whole number, not {max_shard_bytes!r}")
    conversion = Conversion(
        source,
        target,
        options=options,
        target_options=target_options,
        overwrite=overwrite,
        on_progress=on_progress,
        include=include,
        strip_prefix=strip_prefix,
        allow_pickle=allow_pickle,
    )
    if format == "torch":
        report = _export_torch(conversion)
    else:
        report = _export_safetensors(
            conversion,
            max_shard_bytes=max_shard_bytes,
            skip_non_tensors=skip_non_tensors,
            dequantize=dequantize,
        )
    moved = transferred(report.num_bytes, report.convert_s)
    _log.info("exported %s to %s%s", report.source, report.target, moved)
    return report


def _export_safetensors(
    conversion: Conversion, *, max_shard_bytes: int, skip_non_tensors: bool, dequantize: bool
) -> ConversionReport:
    source, target, single_name = conversion.source, conversion.target, SINGLE_NAME
    patterns: Sequence[str] = _SAFETENSORS_PATTERNS
    path = target.location.path
    is_folder = target.location.local_path is not None and Path(path).is_dir()
    is_file = path.lower().endswith(".safetensors") and not is_folder
    if path.lower().endswith(_OTHER_FILES) and not is_folder:
        raise InvalidOptionError(
            f"{target.uri} has the name of a file of another format than 'safetensors'. Name a folder, or a file that "
            "ends in .safetensors, or export in the format 'torch'"
        )
    if is_file:
        folder, single_name = folder_and_name(target.location)
        target = Context(folder, target.options, rank=0)
        # Beside the index of an earlier export, readers would take the shards that it names.
        patterns = (glob.escape(single_name),) if single_name != SINGLE_NAME else _SAFETENSORS_PATTERNS
    manifest = resolve(source.client).manifest
    # One half is for the parts that are sent. The other is for what is read beside them: the rest of tiles, and gaps.
    budget_bytes = source.options.read_bytes // 2
    reader = Reader(_limit_memory(source, budget_bytes // target.connections), manifest)
    dequantizing = DequantizingReader(reader) if dequantize else None
    stored = manifest.tensors if dequantizing is None else dequantizing.tensors
    names = conversion.selection.choose_names([*stored, *manifest.values])
    left_out = tuple(fqn for fqn in names if fqn in manifest.values)
    fqns = {name: fqn for fqn, name in names.items() if fqn in stored}
    if left_out and not skip_non_tensors:
        raise UnsupportedValueError(
            f"safetensors files hold tensors alone, and these entries of {source.uri} are Python objects: "
            f"{quote_names(sorted(left_out))}",
            uri=source.uri,
            hint=Hint(
                advice="To leave them out, {option}; include only names of tensors, or export in the format 'torch'.",
                option="skip_non_tensors",
                value="True",
            ),
        )
    tensors = {name: stored[fqn] for name, fqn in fqns.items()}
    _check_tensors(fqns, tensors, source.uri)
    shards = name_shards(tensors, max_shard_bytes=max_shard_bytes, single_name=single_name)
    if is_file and len(shards) > 1:
        raise InvalidOptionError(
            f"{conversion.target.uri} is the name of one file, and files of at most {max_shard_bytes:,} bytes would be "
            f"{len(shards):,}. Name a folder, or allow larger files"
        )
    index = build_index(shards)
    last = (
        {INDEX_NAME: functools.partial(PieceBody, [new_piece(memoryview(index), begin=0)])} if len(shards) > 1 else {}
    )
    files = Files(conversion, target, patterns=patterns)
    files.check()
    written = files.write(
        {name: shard.body_in(dequantizing or reader, fqns) for name, shard in shards.items()},
        last=last,
        num_bytes=sum(shard.layout.size_bytes for shard in shards.values()) + (len(index) if last else 0),
        budget_bytes=budget_bytes,
        stop_reading=reader.context.stop,
    )
    return conversion.report("safetensors", written, num_tensors=len(fqns), left_out=left_out)


def _limit_memory(source: Context, budget_bytes: int) -> Context:
    """Return a context in which each load holds at most `budget_bytes`, besides the memory that it fills."""
    advanced = source.options.advanced
    request_bytes = max(min(advanced.request_bytes, budget_bytes), advanced.tile_bytes)
    options = dataclasses.replace(
        source.options,
        connections=_CONNECTIONS_PER_UPLOAD,
        read_bytes=max(budget_bytes, advanced.tile_bytes),
        advanced=dataclasses.replace(advanced, request_bytes=request_bytes),
    )
    return Context(source.location, options, rank=source.rank, recorder=source.recorder)


def _check_tensors(fqns: Mapping[str, str], tensors: Mapping[str, StoredTensor], uri: str) -> None:
    """Raise `UnsupportedValueError` for a dtype or a name that safetensors files cannot have."""
    unknown = {fqns[name]: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in SAFETENSORS_TAG}
    if unknown:
        raise UnsupportedValueError(
            f"safetensors files that every reader can open have no dtype for "
            f"{quote_names([f'{fqn} ({dtype})' for fqn, dtype in unknown.items()])} of {uri}. Convert them before "
            "they are saved, leave them out with include, or export in the format 'torch'",
            uri=uri,
        )
    if _RESERVED_NAME in tensors:
        raise UnsupportedValueError(
            f"no tensor of a safetensors file can be called {_RESERVED_NAME!r}, as one of {uri} is", uri=uri
        )


def name_shards(
    tensors: Mapping[str, StoredTensor], *, max_shard_bytes: int, single_name: str = SINGLE_NAME
) -> dict[str, TensorFile]:
    """Plan the files of an export, by their names. One file alone is called `single_name`."""
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    files = plan_files(shapes, file_bytes=max_shard_bytes) or [TensorFile(entries=(), layout=lay_out(()))]
    if len(files) == 1:
        return {single_name: files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": file for number, file in enumerate(files, start=1)}


def build_index(shards: Mapping[str, TensorFile]) -> bytes:
    """Build the index that ``transformers`` and torch's reader expect beside several files."""
    weight_map = {entry.fqn: name for name, shard in shards.items() for entry in shard.entries}
    total_bytes = sum(entry.num_bytes for shard in shards.values() for entry in shard.entries)
    document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"


def _export_torch(conversion: Conversion) -> ConversionReport:
    source, options = conversion.source, conversion.source.options
    folder, name = folder_and_name(conversion.target.location)
    target = Context(folder, conversion.target.options, rank=0)
    files = Files(conversion, target, patterns=(glob.escape(name),))
    files.check()
    state_dict = load_whole(source.location, options, conversion.selection, allow_pickle=conversion.allow_pickle)
    if not state_dict:
        raise UnsupportedValueError(f"{source.uri} holds nothing to export", uri=source.uri)
    flat = flatten_entries(state_dict, uri=source.uri)
    num_tensors = sum(isinstance(value, torch.Tensor) for value in flat.values())
    with tempfile.TemporaryDirectory(prefix="cloudckpt-export-") as scratch:
        path = Path(scratch, "state.pt")
        torch.save(_replace_named_tuples(state_dict), path)
        content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)  # mapped, not read
        written = files.write(
            {name: functools.partial(PieceBody, [new_piece(content, begin=0)])},
            num_bytes=content.nbytes,
            budget_bytes=options.read_bytes,
        )
    return conversion.report("torch", written, num_tensors=num_tensors, num_values=len(flat) - num_tensors)


def _replace_named_tuples(value: Any) -> Any:
    """Replace named tuples in `value` by tuples: a reader of the file would need the classes of named tuples."""
    if type(value) is dict:
        return {key: _replace_named_tuples(element) for key, element in value.items()}
    if type(value) is list:
        return list(map(_replace_named_tuples, value))
    is_tuple = type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))
    return tuple(map(_replace_named_tuples, value)) if is_tuple else value


class Files:
    """Files of one export in one folder of a store.

    `patterns` match the names that an export of this format writes. If a file with a matching name exists, `check`
    fails, unless the export may overwrite. In that case, `write` removes the old export before it writes a file. It
    first removes the files whose patterns have no wildcard, since readers find the others by them.
    """

    def __init__(self, conversion: Conversion, target: Context, *, patterns: Sequence[str]) -> None:
        self._target = target
        self._progress = conversion.progress
        self._overwrite = conversion.overwrite
        self._patterns = patterns

    def check(self) -> None:
        """Raise `CheckpointExistsError` if a file exists that may not be replaced."""
        if not self._overwrite:
            self._refuse(self._find_names())

    def write(
        self,
        bodies: Mapping[str, BodyIn],
        *,
        last: Mapping[str, BodyIn] | None = None,
        num_bytes: int,
        budget_bytes: int,
        stop_reading: Callable[[], None] = lambda: None,
    ) -> dict[str, int]:
        """Replace the earlier export by new files, and return their sizes. A failure removes all files.

        Readers find the other files by those of `last`. Raises the errors of `check`.
        """
        self._progress.expect(num_bytes)
        self._clear([*bodies, *(last or ())])
        receipts, _ = upload(
            self._target,
            bodies,
            last=last,
            progress=self._progress,
            budget_bytes=budget_bytes,
            tile_bytes=TILE_BYTES,
            stop_reading=stop_reading,
        )
        return {receipt.key: receipt.size_bytes for receipt in receipts}

    def _refuse(self, names: Sequence[str]) -> None:
        if names:
            shown = join_first([self._target.store.url(name) for name in names], _MAX_SHOWN_URLS, separator=", ")
            raise CheckpointExistsError(
                f"{shown} {'exist' if len(names) > 1 else 'exists'} already: nothing was written",
                uri=self._target.uri,
                hint=Hint(advice="Choose another place, or {option} to replace it.", option="overwrite", value="True"),
            )

    def _clear(self, names: Iterable[str]) -> None:
        """Remove the export that is to be replaced. Without `overwrite`, make sure that no file has one of `names`.

        A HEAD finds a file that a listing may have left out.
        """
        target = self._target
        if not self._overwrite:
            self._refuse([name for name in names if self._is_there(name)])
            return
        names = self._find_names()
        first = [name for name in names if name in self._patterns]
        # Two calls, since a store removes many siblings in any order.
        for batch in (first, [name for name in names if name not in first]):
            if batch:
                target.client.delete(batch)

    def _find_names(self) -> list[str]:
        """Find the files of an earlier export. Two listings must agree, because one may lack a file."""

        def changing() -> CheckpointChangedError:
            return CheckpointChangedError(
                f"{self._target.uri} lists other files each time: nothing was written. Export to a place of its own",
                uri=self._target.uri,
            )

        return self._target.client.confirm(
            self._list_names, evidence=lambda names: ("names", *names), changing=changing
        )

    def _is_there(self, name: str) -> bool:
        return self._target.client.head(name) is not None

    def _list_names(self) -> list[str]:
        target = self._target
        # A folder can hold very many other files, so only these prefixes are listed.
        prefixes = {_WILDCARD.split(pattern, maxsplit=1)[0] for pattern in self._patterns}
        infos = [info for prefix in prefixes for info in target.client.list(prefix)]
        keys = {info.key for info in infos if "/" not in info.key}
        return sorted(key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in self._patterns))


class DequantizingReader:
    """Reads a checkpoint, and dequantizes its wrappers. It holds one wrapper at a time, with its values."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._uri = reader.context.uri
        self._lock = threading.Lock()
        self._last: tuple[str, torch.Tensor] | None = None
        make = functools.partial(SavedWrapper, Registry(uri=self._uri))
        entries, _ = collapse(reader.manifest.wrappers, reader.manifest.tensors, {}, make)
        self._wrappers = {name: entry for name, entry in entries.items() if isinstance(entry, SavedWrapper)}
        self.tensors: dict[str, StoredTensor] = {
            name: self._describe(entry) if isinstance(entry, SavedWrapper) else entry for name, entry in entries.items()
        }
        """The tensors by name, without chunks if they are dequantized."""

    def read_bytes(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all buffers."""
        self._reader.read_bytes([want for want in wanted if want.name not in self._wrappers])
        for want in wanted:
            if want.name in self._wrappers:
                with self._lock:
                    if self._last is None or self._last[0] != want.name:
                        self._last = None
                        self._last = want.name, self._dequantize(want.name)
                    want.buffer.copy_(self._last[1][want.begin : want.end])

    def _describe(self, wrapper: SavedWrapper) -> StoredTensor:
        tensor = wrapper.rebuild(lambda _, part: torch.empty(part.shape, dtype=dtype_of(part.dtype), device="meta"))
        return StoredTensor(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), chunks=[])

    def _dequantize(self, name: str) -> torch.Tensor:
        wanted: list[TensorBytes] = []
        wrapper: Any = self._wrappers[name].rebuild(functools.partial(_add_wanted, wanted))
        self._reader.read_bytes(wanted)
        try:
            values: torch.Tensor = wrapper.dequantize()
        except Exception as error:  # the code of a class can raise anything
            raise UnsupportedValueError(
                f"{name!r} of {self._uri} cannot be dequantized: {type(error).__name__}: {error}. Export its parts "
                "instead",
                uri=self._uri,
            ) from error
        return values.detach().to(wrapper.dtype).contiguous().view(-1).view(torch.uint8)


def _add_wanted(wanted: list[TensorBytes], name: str, stored: StoredTensor) -> torch.Tensor:
    num_bytes = math.prod(stored.shape) * ITEMSIZE_BYTES[stored.dtype]
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    wanted.append(TensorBytes(name=name, begin=0, end=num_bytes, buffer=buffer))
    return buffer.view(dtype_of(stored.dtype)).view(stored.shape)
