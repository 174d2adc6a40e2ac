"""Export a checkpoint as files that other programs read."""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import msgspec
import torch

from cloudckpt._display import transferred
from cloudckpt._keywords import suggest_keywords
from cloudckpt._messages import did_you_mean, quote_names
from cloudckpt.convert.assembly import Assembler, find_ranges
from cloudckpt.convert.bodies import TensorFile, plan_files
from cloudckpt.convert.export_files import ExportFolder, NewFile, find_companions
from cloudckpt.convert.state_dicts import flatten_entries, load_whole
from cloudckpt.convert.transfer import WIDE_FLOATS, ConversionReport, OnProgress, Transfer, is_one_service
from cloudckpt.errors import Hint, InvalidOptionError, UnsupportedValueError
from cloudckpt.format.model import (
    ITEMSIZE_BYTES,
    SAFETENSORS_TAG,
    FilesManifest,
    Manifest,
    StoredTensor,
    refuse_differences,
)
from cloudckpt.format.safetensors import INDEX_NAME, SINGLE_NAME, lay_out
from cloudckpt.format.wrappers import Registry, SavedWrapper, collapse
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.safetensors_files import find_source
from cloudckpt.pipeline.wanted_items import TensorBytes
from cloudckpt.tensors.data_objects import PieceBody, new_piece
from cloudckpt.tensors.tensor_bytes import dtype_name, dtype_of
from cloudckpt.uri import folder_and_name

_log = logging.getLogger("cloudckpt")

ExportFormat: TypeAlias = Literal["safetensors", "torch"]

_SAFETENSORS_PATTERNS = (SINGLE_NAME, "model-?????-of-?????.safetensors", INDEX_NAME)
_RESERVED_NAME = "__metadata__"
_CONNECTIONS_PER_UPLOAD = 2
"""Connections that each upload uses to read the bytes that it sends."""
_OTHER_FILES = (".bin", ".ckpt", ".pt", ".pth", ".safetensor")
MAX_SHARD_BYTES = 5_000_000_000  # as huggingface_hub's
_MIN_SHARED_BYTES = 16 * MIB
"""Files of a shared export are no smaller for the sake of having one for each process."""
_EXPORT_KEY = "cloudckpt.export"
"""Key in the metadata of a shared export's files. Its value tells them from those of any other export."""


@suggest_keywords
def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: ExportFormat = "safetensors",  # as users call it
    include: str | Sequence[str] = (),
    strip_prefix: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    skip_non_tensors: bool = False,
    dequantize: bool = False,
    dtype: torch.dtype | str | None = None,
    config_from: str | os.PathLike[str] | None = None,
    part: tuple[int, int] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
    on_progress: OnProgress | None = None,
) -> ConversionReport:
    """Write the checkpoint, or the safetensors files, at `source` as files for other programs, to `target`.

    - ``"safetensors"``: a folder in Hugging Face's layout, or one file. Several files have an index, which is written
      last. Tensors of any size are streamed in at most ``options.read_bytes`` of memory. Tied tensors are written once
      for each name.
    - ``"torch"``: one file of ``torch.save`` with the nested state dict. Takes memory for the state dict, and as much
      room in the folder for temporary files. ``torch.distributed.checkpoint.format_utils.torch_save_to_dcp`` turns the
      file into torch's DCP format.

    Every byte that is read is checked, sharded tensors are put together, and all bits are those of the save, unless
    `dtype` is given. After an error, no index and no single file exists. `target` may hold other files.

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
        dtype: Dtype such as ``"bfloat16"`` to which floating-point tensors of 16 bits or more are cast, while they are
            streamed. Other tensors stay. A value that would become infinite is an error that names its tensor, unless
            ``options.allow_lossy_casts``.
        config_from: URI of a folder, such as that of the base model. Its files that hold no weights, such as those of
            config and tokenizer, are copied along. A file that exists at the target stays.
        part: ``(rank, world_size)``, to share the export: each process calls this with the same other arguments, and
            writes its files. The process that finds all files of the export there writes the index. No process waits
            for another one. A part that is called again writes only what is missing.
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
        StateDictMismatchError: `dtype` cannot hold a value of a tensor, which the message names.

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
    if format == "torch" and any(option is not None for option in (dtype, config_from, part)):
        raise InvalidOptionError("dtype, config_from and part are for safetensors files, and not for format='torch'")
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise InvalidOptionError(f"max_shard_bytes must be a positive whole number, not {max_shard_bytes!r}")
    match part:
        case None:
            pass
        case (int(rank), int(world_size)) if 0 <= rank < world_size:
            pass
        case _:
            raise InvalidOptionError(f"part must be (rank, world_size), such as (0, 4), not {part!r}")
    transfer = Transfer(
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
        report = _export_torch(transfer)
    else:
        report = _export_safetensors(
            transfer,
            max_shard_bytes=max_shard_bytes,
            skip_non_tensors=skip_non_tensors,
            dequantize=dequantize,
            dtype=_parse_dtype(dtype),
            config_from=config_from,
            part=part,
        )
    moved = transferred(report.num_bytes, report.convert_s)
    _log.info("exported %s to %s%s", report.source, report.target, moved)
    return report


def _export_safetensors(
    transfer: Transfer,
    *,
    max_shard_bytes: int,
    skip_non_tensors: bool,
    dequantize: bool,
    dtype: str | None,
    config_from: str | os.PathLike[str] | None,
    part: tuple[int, int] | None,
) -> ConversionReport:
    source, target, single_name = transfer.source, transfer.target, SINGLE_NAME
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
    context, resolved = find_source(source)
    manifest = resolved.manifest
    refuse_differences(manifest, uri=source.uri)
    # One half is for the parts that are sent, the other for bytes that are read around them: whole tiles, and gaps.
    budget_bytes = source.options.read_bytes // 2
    reader = CheckpointReader(_limit_memory(context, budget_bytes // target.max_connections), manifest)
    dequantizing = DequantizingReader(reader) if dequantize else None
    stored = manifest.tensors if dequantizing is None else dequantizing.tensors
    names = transfer.selection.choose_names([*stored, *manifest.values])
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
    tensors = {name: _cast_to(dtype, stored[fqn]) for name, fqn in fqns.items()}
    check_tensors(fqns, tensors, manifest, source.uri)
    metadata = {}
    if part is not None:
        total_bytes = sum(math.prod(tensor.shape) * ITEMSIZE_BYTES[tensor.dtype] for tensor in tensors.values())
        if not is_file:
            max_shard_bytes = min(max_shard_bytes, max(-(-total_bytes // part[1]), _MIN_SHARED_BYTES))
        # A digest of the source and of the names that its tensors get.
        metadata[_EXPORT_KEY] = hashlib.sha256(msgspec.json.encode([manifest, fqns])).hexdigest()
    shards = name_shards(tensors, max_shard_bytes=max_shard_bytes, single_name=single_name, metadata=metadata)
    if is_file and len(shards) > 1:
        raise InvalidOptionError(
            f"{transfer.target.uri} is the name of one file, and files of at most {max_shard_bytes:,} bytes would be "
            f"{len(shards):,}. Name a folder, or allow larger files"
        )
    new = {
        name: NewFile(
            size_bytes=shard.layout.size_bytes,
            body_in=shard.body_in(dequantizing or reader, fqns),
            header=shard.layout.header,
        )
        for name, shard in shards.items()
    }
    index = {INDEX_NAME: _in_memory(memoryview(build_index(shards)))} if len(shards) > 1 else {}
    is_copied = is_one_service(context, target) and target.store.capabilities.copies_ranges and manifest.has_checksums
    ranges = {name: find_ranges(shard, stored, fqns) for name, shard in shards.items()} if is_copied else {}
    assembler = Assembler(target, reader, ranges)
    files = ExportFolder(
        transfer,
        target,
        patterns=patterns,
        budget_bytes=budget_bytes,
        reader=reader,
        assemble=assembler.submit,
    )
    if part is None:
        files.check()
    companions = {} if config_from is None else find_companions(transfer, config_from, dtype, tensors=fqns)
    is_whole = True
    if part is not None:
        written, is_whole = files.write_part(part, new, index=index, companions=companions)
    else:
        to_copy = files.find_missing(companions)
        written = files.write(new | to_copy, index) if index else files.write(to_copy, new)
    return transfer.report(
        "safetensors",
        written,
        num_tensors=len(fqns),
        left_out=left_out,
        copied_bytes=assembler.count_bytes(),
        is_whole=is_whole,
        contexts=(reader.context, target),
    )


def _in_memory(content: memoryview | torch.Tensor) -> NewFile:
    return NewFile(size_bytes=content.nbytes, body_in=functools.partial(PieceBody, [new_piece(content, begin=0)]))


_DTYPES_BY_SHORT_NAME = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}


def _parse_dtype(dtype: torch.dtype | str | None) -> str | None:
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in WIDE_FLOATS:
        near = _DTYPES_BY_SHORT_NAME.get(name, "")
        raise InvalidOptionError(f"dtype must be one of {', '.join(WIDE_FLOATS)}, not {dtype!r}{did_you_mean(near)}")
    return None if dtype is None else name


def _cast_to(dtype: str | None, tensor: StoredTensor) -> StoredTensor:
    """Return the tensor as the export has it."""
    if dtype is None or tensor.dtype not in WIDE_FLOATS:
        return tensor
    return msgspec.structs.replace(tensor, dtype=dtype)


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


def check_tensors(fqns: Mapping[str, str], tensors: Mapping[str, StoredTensor], manifest: Manifest, uri: str) -> None:
    """Raise `UnsupportedValueError` for a dtype or a name that safetensors files cannot have."""
    unknown = {fqns[name]: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in SAFETENSORS_TAG}
    if isinstance(manifest, FilesManifest):
        unknown |= {fqn: manifest.unknown[fqn] for fqn in fqns.values() if fqn in manifest.unknown}
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
    tensors: Mapping[str, StoredTensor], *, max_shard_bytes: int, single_name: str, metadata: Mapping[str, str]
) -> dict[str, TensorFile]:
    """Plan the files of an export, by their names. One file alone is called `single_name`."""
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    files = plan_files(shapes, file_bytes=max_shard_bytes, metadata=metadata)
    files = files or [TensorFile(entries=(), layout=lay_out((), metadata=metadata))]
    if len(files) == 1:
        return {single_name: files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": file for number, file in enumerate(files, start=1)}


def build_index(shards: Mapping[str, TensorFile], *, metadata: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Build the index that ``transformers`` and torch's reader expect beside several files. It has `metadata`, too."""
    weight_map = {entry.fqn: name for name, shard in shards.items() for entry in shard.entries}
    total_bytes = sum(entry.num_bytes for shard in shards.values() for entry in shard.entries)
    document = {"metadata": {"total_size": total_bytes, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"


def _export_torch(transfer: Transfer) -> ConversionReport:
    source, options = transfer.source, transfer.source.options
    folder, name = folder_and_name(transfer.target.location)
    target = Context(folder, transfer.target.options, rank=0)
    files = ExportFolder(transfer, target, patterns=(glob.escape(name),), budget_bytes=options.read_bytes)
    files.check()
    state_dict, loaded = load_whole(source.location, options, transfer.selection, allow_pickle=transfer.allow_pickle)
    if not state_dict:
        raise UnsupportedValueError(f"{source.uri} holds nothing to export", uri=source.uri)
    flat = flatten_entries(state_dict, uri=source.uri)
    num_tensors = sum(isinstance(value, torch.Tensor) for value in flat.values())
    with tempfile.TemporaryDirectory(prefix="cloudckpt-export-") as scratch:
        path = Path(scratch, "state.pt")
        torch.save(_replace_named_tuples(state_dict), path)
        content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)  # mapped, not read
        written = files.write({name: _in_memory(content)})
    return transfer.report(
        "torch",
        written,
        num_tensors=num_tensors,
        num_values=len(flat) - num_tensors,
        contexts=(target,),
        num_other_requests=loaded.num_requests,
    )


def _replace_named_tuples(value: Any) -> Any:
    """Replace named tuples in `value` by tuples: a reader of the file would need the classes of named tuples."""
    if type(value) is dict:
        return {key: _replace_named_tuples(element) for key, element in value.items()}
    if type(value) is list:
        return list(map(_replace_named_tuples, value))
    is_tuple = type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))
    return tuple(map(_replace_named_tuples, value)) if is_tuple else value


class DequantizingReader:
    """Reads a checkpoint, and dequantizes its wrappers. It holds one wrapper at a time, with its values."""

    def __init__(self, reader: CheckpointReader) -> None:
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
        self._reader.read_bytes([tensor for tensor in wanted if tensor.name not in self._wrappers])
        for tensor in wanted:
            if tensor.name in self._wrappers:
                with self._lock:
                    if self._last is None or self._last[0] != tensor.name:
                        self._last = None  # frees its memory first
                        self._last = tensor.name, self._dequantize(tensor.name, tensor.dtype)
                    tensor.buffer.copy_(self._last[1][tensor.begin : tensor.end])

    def _describe(self, wrapper: SavedWrapper) -> StoredTensor:
        tensor = wrapper.rebuild(lambda _, part: torch.empty(part.shape, dtype=dtype_of(part.dtype), device="meta"))
        return StoredTensor(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), chunks=[])

    def _dequantize(self, name: str, dtype: str | None) -> torch.Tensor:
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
        values = values.detach().to(wrapper.dtype).contiguous().view(-1)
        result = torch.empty(values.shape, dtype=wrapper.dtype if dtype is None else dtype_of(dtype), device="cpu")
        cast = self._reader.find_cast(name, values.dtype, result)
        return result.copy_(values if cast is None else cast.check(values)).view(torch.uint8)


def _add_wanted(wanted: list[TensorBytes], name: str, stored: StoredTensor) -> torch.Tensor:
    num_bytes = math.prod(stored.shape) * ITEMSIZE_BYTES[stored.dtype]
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    wanted.append(TensorBytes(name=name, begin=0, end=num_bytes, buffer=buffer))
    return buffer.view(dtype_of(stored.dtype)).view(stored.shape)
