"""Import files of other programs as a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import platform
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from cloudckpt._version import __version__
from cloudckpt.api import save
from cloudckpt.commit.commit_time import draw_commit_time_ns
from cloudckpt.convert.bodies import TensorsBody
from cloudckpt.convert.endpoints import TargetJob, check_apart, folder_and_name, upload_session
from cloudckpt.convert.reports import (
    Conversion,
    ConversionReport,
    Format,
    OnProgress,
    Progress,
    build_report,
)
from cloudckpt.convert.safetensors_source import FileTensor, SafetensorsSource
from cloudckpt.convert.state_dicts import (
    choose_names,
    flatten_entries,
    load_whole,
    parse_patterns,
    quote_names,
    rename_entries,
)
from cloudckpt.errors import (
    ALLOW_PICKLE_HINT,
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteSaveError,
    InvalidOptionError,
    ObjectNotFoundError,
    ShortObjectError,
    UnsafePickleError,
    UnsupportedValueError,
)
from cloudckpt.events import Event
from cloudckpt.format.codec import pack_tiles
from cloudckpt.format.model import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    Chunk,
    Manifest,
    ObjectReceipt,
    StoredObject,
    StoredTensor,
)
from cloudckpt.format.safetensors import HeaderEntry, Layout, lay_out, pack, sort_for_storage
from cloudckpt.format.validation import find_problems
from cloudckpt.io.download import fetch
from cloudckpt.io.upload import choose_held_part_bytes
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.values import unsafe_names
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """Arguments of `import_checkpoint`, checked."""

    source: Location
    target: Location
    options: Options
    target_options: Options
    include: tuple[str, ...]
    add_prefix: str
    tie: dict[str, str]
    """Names of tensors by their additional names."""
    overwrite: bool
    allow_pickle: bool


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Format = "safetensors",  # the common word for it
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
    - ``"torch"``: a file of ``torch.save`` with a state dict. Its tensors are mapped from the file. A file that is
      not local is first copied to the folder for temporary files.
    - ``"dcp"``: a folder in torch's own format, of any version that torch reads. Takes memory for the state dict.

    The checkpoint is committed as by `save`. None of these formats has checksums, so damage from before the import
    cannot be found.

    Args:
        source: URI of the file or folder.
        target: URI of the checkpoint.
        format: One of the three formats.
        include: Patterns of names, as of files. Empty for all entries.
        add_prefix: Prefix for each name. Makes the state dict of ``"torch"`` and ``"dcp"`` flat.
        tie: More names for tensors of safetensors files (``{"lm_head.weight": "embed.weight"}``), for those that
            ``save_pretrained`` leaves out. The bytes are stored once.
        overwrite: Replace a checkpoint at `target`.
        allow_pickle: Consent to run code from the files. ``"dcp"`` always needs it, because its metadata is a pickle.
        options: Options for the source.
        target_options: Options for the target.
        on_progress: Called with the bytes done and their total.

    Raises:
        CheckpointNotFoundError: No such file exists.
        CorruptCheckpointError: A file is cut, or of another kind.
        UnsafePickleError: A file needs `allow_pickle`.
        UnsupportedValueError: The content is no state dict that can be saved.
        CheckpointChangedError: A file was replaced during the import.
        CheckpointExistsError: A checkpoint exists at `target`.

    """
    begun_s = time.monotonic()
    if format not in _IMPORTERS:
        raise InvalidOptionError(f"format must be one of {', '.join(map(repr, _IMPORTERS))}, not {format!r}")
    options, target_options = options or Options(), target_options or Options()
    plan = ImportPlan(
        source=parse_location(source),
        target=parse_location(target),
        options=options,
        target_options=target_options,
        include=parse_patterns(include),
        add_prefix=add_prefix,
        tie=_parse_tie(tie, format),
        overwrite=overwrite,
        allow_pickle=allow_pickle,
    )
    check_apart(plan.source, plan.target, options, target_options)
    report = build_report(
        plan.source, plan.target, format, _IMPORTERS[format](plan, Progress(on_progress)), begun_s=begun_s
    )
    _log.info("imported %s", report)
    return report


def _parse_tie(tie: Mapping[str, str] | None, kind: Format) -> dict[str, str]:
    found = dict(tie or {})
    if not all(isinstance(name, str) and name for pair in found.items() for name in pair):
        raise InvalidOptionError(f"tie must be names of tensors by further names for them, not {tie!r}")
    if found and kind != "safetensors":
        raise InvalidOptionError(f"tie is for safetensors files: those of format={kind!r} have the tied tensors' names")
    return found


def _check_names_of_ties(plan: ImportPlan, fqns: Collection[str]) -> None:
    for name, kept in plan.tie.items():
        if kept not in fqns:
            raise InvalidOptionError(
                f"no tensor of {plan.source.uri} is called {kept!r}, as tie says. It has {quote_names(sorted(fqns))}"
            )
        if name in fqns:
            raise InvalidOptionError(f"{name!r} is in {plan.source.uri} already, and needs no tie")


def import_safetensors(plan: ImportPlan, progress: Progress) -> Conversion:
    """Import safetensors files, streamed."""
    source = SafetensorsSource(plan.source, plan.options)
    target = Context(plan.target, plan.target_options, rank=0)
    tensors = source.tensors
    _check_names_of_ties(plan, tensors)
    ties = {**source.ties, **plan.tie}
    names = choose_names([*tensors, *ties], include=plan.include, add_prefix=plan.add_prefix, uri=plan.source.uri)
    names_of: dict[str, list[str]] = {}  # of each stored tensor, its own name first
    for fqn, name in names.items():
        names_of.setdefault(ties.get(fqn, fqn), []).append(name)
    objects = _pack_objects(tensors, names_of, object_bytes=plan.target_options.advanced.object_bytes)
    save_id = str(uuid.uuid4())
    job = TargetJob(target, save_id=save_id)
    job.check(overwrite=plan.overwrite)
    progress.expect(sum(layout.size_bytes for _, layout in objects))
    keys = [job.key(number) for number in range(len(objects))]
    try:
        receipts = _upload_objects(objects, source, job, target, plan=plan, progress=progress)
        source.check_unchanged()
        manifest = _build_manifest(
            objects, receipts, names_of, tensors=tensors, attempt=job.attempt, save_id=save_id, plan=plan
        )
    except BaseException:
        job.remove(keys)
        raise
    job.commit_manifest(manifest, [receipt.key for receipt in receipts])
    return Conversion(num_tensors=len(names), num_values=0, files={each.key: each.size_bytes for each in receipts})


def _pack_objects(
    tensors: dict[str, FileTensor], names_of: dict[str, list[str]], *, object_bytes: int
) -> list[tuple[list[str], Layout]]:
    """Return for each data object the source's names of its tensors, and their layout."""
    fqns = list(names_of)
    sizes = [tensors[fqn].end - tensors[fqn].begin for fqn in fqns]
    objects = []
    for group in pack(sizes, object_bytes=object_bytes):
        members = [fqns[i] for i in group]
        entries = [_entry(names_of[fqn][0], tensors[fqn]) for fqn in members]
        order = sort_for_storage(entries)
        objects.append(([members[i] for i in order], lay_out([entries[i] for i in order])))
    return objects


def _entry(name: str, tensor: FileTensor) -> HeaderEntry:
    num_bytes = tensor.end - tensor.begin
    return HeaderEntry(fqn=name, dtype=tensor.dtype, shape=tensor.shape, offsets=None, num_bytes=num_bytes)


def _upload_objects(
    objects: Sequence[tuple[list[str], Layout]],
    source: SafetensorsSource,
    job: TargetJob,
    target: Context,
    *,
    plan: ImportPlan,
    progress: Progress,
) -> list[ObjectReceipt]:
    budget_bytes, tile_bytes = plan.options.read_bytes, plan.target_options.advanced.tile_bytes
    part_bytes = choose_held_part_bytes(
        budget_bytes,
        connections=target.connections,
        most_bytes=target.options.advanced.part_bytes,
        tile_bytes=tile_bytes,
    )
    leftovers = job.leftovers()
    with (
        contextlib.closing(Arena(budget_bytes=budget_bytes)) as arena,
        upload_session(
            target, progress, part_bytes=part_bytes, tile_bytes=tile_bytes, resumable=target.options.resume
        ) as session,
    ):
        body_of = functools.partial(TensorsBody, reader=source, arena=arena)
        try:
            for number, (fqns, layout) in enumerate(objects):
                body = body_of(layout.header, fqns, layout.begins, size_bytes=layout.size_bytes)
                session.submit(job.key(number), body, leftovers.get(job.key(number), []))
            session.tasks.join()
            return session.receipts()
        except BaseException:
            source.stop()
            raise


def _build_manifest(
    objects: Sequence[tuple[list[str], Layout]],
    receipts: Sequence[ObjectReceipt],
    names_of: dict[str, list[str]],
    *,
    tensors: dict[str, FileTensor],
    attempt: str,
    save_id: str,
    plan: ImportPlan,
) -> Manifest:
    stored: dict[str, StoredTensor] = {}
    for index, (fqns, layout) in enumerate(objects):
        for fqn, begin in zip(fqns, layout.begins, strict=True):
            tensor = tensors[fqn]
            end = begin + tensor.end - tensor.begin
            chunk = Chunk((0,) * len(tensor.shape), tensor.shape, index, begin, end)
            for name in names_of[fqn]:
                stored[name] = StoredTensor(dtype=tensor.dtype, shape=tensor.shape, chunks=[chunk])
    manifest = Manifest(
        format=FORMAT_NAME,
        version=(FORMAT_MAJOR, FORMAT_MINOR),
        attempt=attempt,
        created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        committed_at_ns=draw_commit_time_ns(),
        world_size=1,
        software={"cloudckpt": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        tile_bytes=plan.target_options.advanced.tile_bytes,
        objects=[
            StoredObject(key=each.key, size=each.size_bytes, crc32c=pack_tiles(each.tile_crc32cs)) for each in receipts
        ],
        tensors=stored,
        values={},
        save_id=save_id,
        metadata=dict(plan.target_options.metadata),
    )
    problems = find_problems(manifest)
    if problems:
        raise IncompleteSaveError(
            f"what was read from {plan.source.uri} makes no whole checkpoint: {'; '.join(problems[:3])}",
            uri=plan.target.uri,
        )
    return manifest


_PIECE_BYTES = 16 * MIB
_DCP_SUFFIXES = (".metadata", ".distcp")


def import_torch(plan: ImportPlan, progress: Progress) -> Conversion:
    """Import a file of ``torch.save``."""
    with _read(plan) as (found, check_unchanged):
        state_dict = found
        if plan.include or plan.add_prefix:
            state_dict = rename_entries(
                state_dict, include=plan.include, add_prefix=plan.add_prefix, uri=plan.source.uri
            )
        return _save_state_dict(state_dict, plan, progress, check_unchanged)


def import_dcp(plan: ImportPlan, progress: Progress) -> Conversion:
    """Import a checkpoint of torch's own DCP format."""
    context = Context(plan.source, plan.options, rank=0)

    def files() -> list[ObjectInfo]:
        found = context.retrier.collect(context.store.list)
        return sorted((info for info in found if info.key.endswith(_DCP_SUFFIXES)), key=lambda info: info.key)

    def check_unchanged() -> None:
        now = files()
        if len(now) != len(before) or any(
            one.key != other.key or not one.is_same_write(other) for one, other in zip(now, before, strict=True)
        ):
            raise _replaced_error(plan.source.uri)

    before = files()
    state_dict = load_whole(
        plan.source,
        plan.options,
        include=plan.include,
        add_prefix=plan.add_prefix,
        allow_pickle=plan.allow_pickle,
    )
    return _save_state_dict(state_dict, plan, progress, check_unchanged)


def _save_state_dict(
    state_dict: dict[str, Any], plan: ImportPlan, progress: Progress, check_unchanged: Callable[[], None]
) -> Conversion:
    flat = flatten_entries(state_dict, uri=plan.source.uri)
    tensors = [value for value in flat.values() if isinstance(value, torch.Tensor)]
    progress.expect(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    theirs = plan.target_options.on_event
    sizes: dict[str, int] = {}

    def on_event(event: Event) -> None:
        if event.name == "save.part_uploaded":
            progress.add(event.num_bytes)
        elif event.name == "save.object_uploaded":
            sizes[event.key] = event.num_bytes
        elif event.name == "save.committing":
            check_unchanged()
        if theirs is not None:
            theirs(event)

    options = dataclasses.replace(plan.target_options, on_event=on_event)
    save(state_dict, plan.target.uri, no_dist=True, overwrite=plan.overwrite, options=options)
    return Conversion(num_tensors=len(tensors), num_values=len(flat) - len(tensors), files=sizes)


@contextlib.contextmanager
def _read(plan: ImportPlan) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Yield the content of the file, mapped into memory, and a check that raises if the file was replaced."""
    folder, name = folder_and_name(plan.source)
    context = Context(folder, plan.options, rank=0)
    with tempfile.TemporaryDirectory(prefix="cloudckpt-import-") as scratch:
        is_local = plan.source.scheme == "file"
        path = plan.source.path if is_local else str(Path(scratch, "state.pt"))

        def look() -> tuple[dict[str, Any], ObjectInfo]:
            try:
                info = context.retrier.call(context.store.head, name)
            except ObjectNotFoundError as error:
                raise CheckpointNotFoundError(f"{plan.source.uri} is not there", uri=plan.source.uri) from error
            if not is_local:
                _download(context, name, info, path)
            check_unchanged(info)
            return _unpickle(path, plan), info

        def check_unchanged(info: ObjectInfo) -> None:
            # One HEAD may be wrong, so two have to agree.
            if not any(context.retrier.call(context.store.head, name).is_same_write(info) for _ in range(2)):
                raise _replaced_error(plan.source.uri)

        # No checksum covers the file, so an answer that is wrong once must not count.
        doubted = (CheckpointNotFoundError, CheckpointChangedError, CorruptCheckpointError, ShortObjectError)
        state_dict, info = context.retrier.confirm(look, doubted)
        yield state_dict, lambda: check_unchanged(info) if is_local else None


def _download(context: Context, name: str, info: ObjectInfo, path: str) -> None:
    with Path(path).open("wb") as file:
        for begin in range(0, info.size_bytes, _PIECE_BYTES):
            piece = bytearray(min(_PIECE_BYTES, info.size_bytes - begin))
            fetch(context.store, context.retrier, key=name, begin=begin, views=[memoryview(piece)])
            file.write(piece)


def _replaced_error(uri: str) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"{uri} was replaced while it was read, so nothing was committed. Import again", uri=uri
    )


def _unpickle(path: str, plan: ImportPlan) -> dict[str, Any]:
    uri = plan.source.uri
    try:
        found = _load(path, weights_only=not plan.allow_pickle)
    except Exception as error:  # a pickle can raise any exception
        if isinstance(error, pickle.UnpicklingError) and not plan.allow_pickle:
            raise UnsafePickleError(
                f"{uri} holds more than tensors and plain values, so that reading it could run any code (it uses "
                f"{unsafe_names(path)}), or it is no file of torch.save",
                uri=uri,
                hint=ALLOW_PICKLE_HINT,
            ) from error
        raise CorruptCheckpointError(
            f"{uri} cannot be read as a file of torch.save ({type(error).__name__}: {error})", uri=uri
        ) from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        what = (
            f"a dict with the keys {quote_names([repr(key) for key in found])}"
            if isinstance(found, dict)
            else type(found).__name__
        )
        raise UnsupportedValueError(f"{uri} holds no state dict with names, but {what}", uri=uri)
    return found


def _load(path: str, *, weights_only: bool) -> Any:
    mmap = zipfile.is_zipfile(path)  # files of older versions of torch cannot be mapped into memory
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)


_IMPORTERS = {"safetensors": import_safetensors, "torch": import_torch, "dcp": import_dcp}
