"""Import files of other programs as a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cloudckpt._display import transferred
from cloudckpt._keywords import suggest_keywords
from cloudckpt._messages import quote_names
from cloudckpt.api import save
from cloudckpt.commit.log import TORCH_METADATA_KEY, has_torch_checkpoint
from cloudckpt.convert.bodies import write_files
from cloudckpt.convert.state_dicts import flatten_entries, load_whole
from cloudckpt.convert.transfer import (
    ConversionReport,
    Format,
    OnProgress,
    Transfer,
    check_unchanged,
    head_file,
    replaced_error,
)
from cloudckpt.errors import (
    ALLOW_PICKLE_HINT,
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidOptionError,
    ShortObjectError,
    UnsafePickleError,
    UnsupportedValueError,
)
from cloudckpt.events import Event
from cloudckpt.format.build import Content
from cloudckpt.format.model import Chunk, StoredTensor
from cloudckpt.io.download import download_range
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.safetensors_files import list_source
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.tensors.values import unsafe_names
from cloudckpt.uri import folder_and_name

_log = logging.getLogger("cloudckpt")
_DOWNLOAD_BYTES = 16 * MIB
_DCP_SUFFIXES = (".metadata", ".distcp")


@suggest_keywords
def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Format = "safetensors",  # as users call it
    include: str | Sequence[str] = (),
    add_prefix: str = "",
    tie: Mapping[str, str] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
    on_progress: OnProgress | None = None,
) -> ConversionReport:
    """Save files of another program at `source`, on any store, as a checkpoint at `target`.

    - ``"safetensors"``: a file, a folder of files with or without Hugging Face's index, or the index. Tensors are
      streamed in at most ``options.read_bytes`` of memory. Names that ``safetensors.torch.save_model`` left out for
      tied tensors come back.
    - ``"torch"``: a file of ``torch.save`` with a state dict. Its tensors are mapped from the file. A file that is not
      local is first copied to the folder for temporary files.
    - ``"dcp"``: a folder in torch's own format, of any version that torch reads. Takes memory for the state dict.

    The checkpoint is committed as by `save`. None of these formats has checksums, so damage from before the import
    cannot be found.

    Args:
        source: URI of the file or folder.
        target: URI of the checkpoint.
        format: One of the three formats.
        include: Names of entries, or patterns as for files. Empty for all entries.
        add_prefix: First part, such as ``"model"``, to add to each name. The nested dicts of ``"torch"`` and
            ``"dcp"`` files then become names with dots.
        tie: More names for tensors of safetensors files (``{"lm_head.weight": "embed.weight"}``), for those that
            ``save_pretrained`` leaves out. The bytes are stored once.
        overwrite: Replace a checkpoint at `target`.
        allow_pickle: Consent to run code from the files. ``"dcp"`` always needs it, because its metadata is a pickle.
        options: Options for the source.
        target_options: Options for the target.
        on_progress: Called with the bytes done and their total.

    Returns:
        Counts and sizes of the import.

    Raises:
        CheckpointNotFoundError: No such file exists.
        CorruptCheckpointError: A file is cut, or of another kind.
        UnsafePickleError: A file needs `allow_pickle`.
        UnsupportedValueError: The content is no state dict that can be saved.
        CheckpointChangedError: A file was replaced during the import.
        CheckpointExistsError: A checkpoint exists at `target`.
        InvalidOptionError: An argument is wrong, or matches no entry.

    Example::

        cloudckpt.import_checkpoint("model.safetensors", "s3://bucket/base/step-0", add_prefix="model")
        cloudckpt.load("s3://bucket/base/step-0", model=model)

    """
    if format not in ("safetensors", "torch", "dcp"):
        raise InvalidOptionError(f"format must be one of 'safetensors', 'torch', 'dcp', not {format!r}")
    ties = dict(tie or {})
    if not all(isinstance(name, str) and name for pair in ties.items() for name in pair):
        raise InvalidOptionError(f"tie must be names of tensors by further names for them, not {tie!r}")
    if ties and format != "safetensors":
        raise InvalidOptionError(f"tie is for safetensors files: those of {format=} have the tied tensors' names")
    transfer = Transfer(
        source,
        target,
        options=options,
        target_options=target_options,
        overwrite=overwrite,
        on_progress=on_progress,
        include=include,
        add_prefix=add_prefix,
        allow_pickle=allow_pickle,
    )
    if format == "safetensors":
        report = _import_safetensors(transfer, ties)
    elif format == "torch":
        report = _import_torch(transfer)
    else:
        report = _import_dcp(transfer)
    moved = transferred(report.num_bytes, report.convert_s)
    _log.info("imported %s to %s%s", report.source, report.target, moved)
    return report


def _import_safetensors(transfer: Transfer, tie: Mapping[str, str]) -> ConversionReport:
    source = list_source(transfer.source)
    reader, ties = CheckpointReader(source.context, source.manifest), {**source.ties, **tie}
    tensors = {name: tensor for name, tensor in reader.manifest.tensors.items() if name not in source.ties}
    for name, stored_name in tie.items():
        if stored_name not in tensors:
            raise InvalidOptionError(
                f"no tensor of {transfer.source.uri} is called {stored_name!r}, as tie says. It has "
                f"{quote_names(sorted(tensors))}"
            )
        if name in tensors:
            raise InvalidOptionError(f"{name!r} is in {transfer.source.uri} already, and needs no tie")
    names = transfer.selection.choose_names([*tensors, *ties])
    names_by_fqn: defaultdict[str, list[str]] = defaultdict(list)  # of each stored tensor, its own name first
    for fqn, name in names.items():
        names_by_fqn[ties.get(fqn, fqn)].append(name)
    fqns = {tied_names[0]: fqn for fqn, tied_names in names_by_fqn.items()}
    if unknown := [f"{fqn} ({source.unknown[fqn]})" for fqn in fqns.values() if fqn in source.unknown]:
        raise UnsupportedValueError(
            f"{transfer.source.uri} has tensors of dtypes that torch does not have: {quote_names(unknown)}. Choose "
            "others with include",
            uri=transfer.source.uri,
        )
    draft, files, receipts = write_files(
        transfer,
        {name: (tensors[fqn].dtype, tensors[fqn].shape) for name, fqn in fqns.items()},
        reader,
        fqns,
        budget_bytes=transfer.source.options.read_bytes,
        stop_reading=source.context.stop,
        check_unchanged=reader.check_unchanged,
    )
    stored: dict[str, StoredTensor] = {}
    for number, file in enumerate(files):
        for entry, begin in zip(file.entries, file.layout.begins, strict=True):
            fqn = fqns[entry.fqn]
            chunk = Chunk((0,) * len(entry.shape), entry.shape, number, begin, begin + entry.num_bytes)
            tensor = StoredTensor(dtype=tensors[fqn].dtype, shape=entry.shape, chunks=[chunk])
            stored.update(dict.fromkeys(names_by_fqn[fqn], tensor))
    draft.commit(Content(objects=[receipts], tensors={name: stored[name] for name in names.values()}))
    sizes = {receipt.key: receipt.size_bytes for receipt in receipts}
    return transfer.report("safetensors", sizes, num_tensors=len(names), contexts=(source.context,))


def _import_torch(transfer: Transfer) -> ConversionReport:
    folder, name = folder_and_name(transfer.source.location)
    context = Context(folder, transfer.source.options, rank=0)
    with _read(transfer, context, name) as (state_dict, check_unchanged):
        renamed = transfer.selection.rename_entries(state_dict)
        return _save_state_dict("torch", renamed, transfer, check_unchanged, contexts=(context,))


def _import_dcp(transfer: Transfer) -> ConversionReport:
    source = transfer.source

    def list_files() -> list[ObjectInfo]:
        infos = source.client.list()
        return sorted((info for info in infos if info.key.endswith(_DCP_SUFFIXES)), key=lambda info: info.key)

    def check_unchanged() -> None:
        infos_after = list_files()
        if len(infos_after) != len(infos_before) or any(
            info.key != info_before.key or not info.is_same_write(info_before)
            for info, info_before in zip(infos_after, infos_before, strict=True)
        ):
            raise replaced_error(source.uri)

    if not has_torch_checkpoint(source.client):
        raise CheckpointNotFoundError(
            f"{source.uri} has no {TORCH_METADATA_KEY}, so no DCP checkpoint is there. Check the URI and the format",
            uri=source.uri,
        )
    infos_before = list_files()
    state_dict, loaded = load_whole(
        source.location, source.options, transfer.selection, allow_pickle=transfer.allow_pickle
    )
    return _save_state_dict("dcp", state_dict, transfer, check_unchanged, num_other_requests=loaded.num_requests)


def _save_state_dict(
    kind: Format,
    state_dict: dict[str, Any],
    transfer: Transfer,
    check_source_unchanged: Callable[[], None],
    *,
    contexts: Sequence[Context] = (),
    num_other_requests: int = 0,
) -> ConversionReport:
    target, progress = transfer.target, transfer.progress
    flat = flatten_entries(state_dict, uri=transfer.source.uri)
    tensors = [value for value in flat.values() if isinstance(value, torch.Tensor)]
    progress.expect(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    users_on_event = target.options.on_event
    sizes: dict[str, int] = {}

    def on_event(event: Event) -> None:
        if event.name == "save.part_uploaded":
            progress.add(event.num_bytes)
        elif event.name == "save.object_uploaded":
            sizes[event.key] = event.num_bytes
        elif event.name == "save.committing":
            check_source_unchanged()
        if users_on_event is not None:
            users_on_event(event)

    options = dataclasses.replace(target.options, on_event=on_event)
    saved = save(state_dict, target.uri, no_dist=True, overwrite=transfer.overwrite, options=options)
    return transfer.report(
        kind,
        sizes,
        num_tensors=len(tensors),
        num_values=len(flat) - len(tensors),
        contexts=contexts,
        num_other_requests=num_other_requests + (saved.report.num_requests if saved.report else 0),
    )


@contextlib.contextmanager
def _read(transfer: Transfer, context: Context, name: str) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Yield the content of a file, mapped into memory, and a check that raises if it was replaced.

    The file is `name` in the folder of `context`.
    """
    location = transfer.source.location
    with tempfile.TemporaryDirectory(prefix="cloudckpt-import-") as scratch:
        is_local = location.local_path is not None
        path = location.local_path or str(Path(scratch, "state.pt"))

        def look() -> tuple[dict[str, Any], ObjectInfo]:
            info = head_file(context, name)
            if not is_local:
                _download(context, name, info, path)
            check_unchanged(context, [info])
            return _unpickle(path, location.uri, allow_pickle=transfer.allow_pickle), info

        # No checksum covers the file, so an answer that finds damage must be confirmed.
        errors = (CheckpointNotFoundError, CheckpointChangedError, CorruptCheckpointError, ShortObjectError)
        state_dict, info = context.client.confirm(look, errors=errors)
        yield state_dict, lambda: check_unchanged(context, [info] if is_local else [])


def _download(context: Context, name: str, info: ObjectInfo, path: str) -> None:
    with Path(path).open("wb") as file:
        for begin in range(0, info.size_bytes, _DOWNLOAD_BYTES):
            content = bytearray(min(_DOWNLOAD_BYTES, info.size_bytes - begin))
            download_range(context.client, key=name, begin=begin, views=[memoryview(content)])
            file.write(content)


def _unpickle(path: str, uri: str, *, allow_pickle: bool) -> dict[str, Any]:
    try:
        mmap = zipfile.is_zipfile(path)  # files of older versions of torch cannot be mapped into memory
        state_dict = torch.load(path, map_location="cpu", weights_only=not allow_pickle, mmap=mmap)
    except Exception as error:  # a pickle can raise any exception
        if isinstance(error, pickle.UnpicklingError) and not allow_pickle:
            raise UnsafePickleError(
                f"{uri} holds more than tensors and plain values, so that reading it could run any code (it uses "
                f"{unsafe_names(path)}), or it is no file of torch.save",
                uri=uri,
                hint=ALLOW_PICKLE_HINT,
            ) from error
        raise CorruptCheckpointError(
            f"{uri} cannot be read as a file of torch.save ({type(error).__name__}: {error})", uri=uri
        ) from error
    if not isinstance(state_dict, dict) or not all(isinstance(key, str) for key in state_dict):
        content = (
            f"a dict with the keys {quote_names([repr(key) for key in state_dict])}"
            if isinstance(state_dict, dict)
            else type(state_dict).__name__
        )
        raise UnsupportedValueError(f"{uri} holds no state dict with names, but {content}", uri=uri)
    return state_dict
