"""Imports that take the whole state dict in memory: of a ``torch.save`` file, and of torch's own DCP format."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import tempfile
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from cloudckpt._commit.resolve import settle
from cloudckpt._convert.names import shown
from cloudckpt._convert.plan import Done, ImportPlan
from cloudckpt._convert.progress import Progress
from cloudckpt._convert.sides import folder_and_name
from cloudckpt._convert.whole import entries_in, load_whole, renamed
from cloudckpt._pipeline.context import Context
from cloudckpt._stage.values import unsafe_names
from cloudckpt._transfer.download import fetch
from cloudckpt.api import save
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    ShortObjectError,
    UnsafePickleError,
    UnsupportedValueError,
)
from cloudckpt.options import MIB
from cloudckpt.report import Event
from cloudckpt.stores.base import ObjectInfo

_PIECE_BYTES = 16 * MIB
_DCP_SUFFIXES = (".metadata", ".distcp")


def import_torch(plan: ImportPlan, progress: Progress) -> Done:
    """See `cloudckpt.import_checkpoint`."""
    with _read(plan) as (found, check_unchanged):
        state_dict = found
        if plan.include or plan.add_prefix:
            state_dict = renamed(state_dict, include=plan.include, add_prefix=plan.add_prefix, uri=plan.source.uri)
        return _saved(state_dict, plan, progress, check_unchanged)


def import_dcp(plan: ImportPlan, progress: Progress) -> Done:
    """See `cloudckpt.import_checkpoint`."""
    context = Context(plan.source, plan.options, rank=0)

    def files() -> list[ObjectInfo]:
        found = context.retrier.call(lambda: list(context.store.list()))
        return sorted((info for info in found if info.key.endswith(_DCP_SUFFIXES)), key=lambda info: info.key)

    def check_unchanged() -> None:
        now = files()
        if len(now) != len(before) or any(
            one.key != other.key or not one.is_same_write(other) for one, other in zip(now, before, strict=True)
        ):
            raise _replaced(plan.source.uri)

    before = files()
    state_dict = load_whole(
        plan.source,
        plan.options,
        include=plan.include,
        add_prefix=plan.add_prefix,
        allow_pickle=plan.allow_pickle,
    )
    return _saved(state_dict, plan, progress, check_unchanged)


def _saved(
    state_dict: dict[str, Any], plan: ImportPlan, progress: Progress, check_unchanged: Callable[[], None]
) -> Done:
    flat = entries_in(state_dict, uri=plan.source.uri)
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
    return Done(num_tensors=len(tensors), num_values=len(flat) - len(tensors), files=sizes)


@contextlib.contextmanager
def _read(plan: ImportPlan) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Yield what the file holds, which torch maps into memory, and a check that raises where it was replaced."""
    folder, name = folder_and_name(plan.source)
    context = Context(folder, plan.options, rank=0)
    with tempfile.TemporaryDirectory(prefix="cloudckpt-import-") as scratch:
        path = plan.source.path if plan.source.scheme == "file" else os.path.join(scratch, "state.pt")  # noqa: PTH118

        def look() -> tuple[dict[str, Any], ObjectInfo]:
            try:
                info = _head(context, name)
            except ObjectNotFoundError as error:
                raise CheckpointNotFoundError(f"{plan.source.uri} is not there", uri=plan.source.uri) from error
            if plan.source.scheme != "file":
                _download(context, name, info, path)
            return _unpickled(path, plan), info

        # No checksum covers the file, and each answer may be wrong once.
        doubted = (CheckpointNotFoundError, CorruptCheckpointError, ShortObjectError)
        state_dict, info = context.retrier.confirmed(look, doubted)

        def check_unchanged() -> None:
            if plan.source.scheme == "file" and not _head(context, name).is_same_write(info):
                raise _replaced(plan.source.uri)

        yield state_dict, check_unchanged


def _head(context: Context, name: str) -> ObjectInfo:
    """What two HEADs in a row say of the file: one with a wrong size would cut it, or seem to tell of another write."""

    def look() -> tuple[ObjectInfo, Hashable]:
        info = context.retrier.call(lambda: context.store.head(name))
        return info, (info.size_bytes, info.version or info.modified_at)

    return settle(look, changing=lambda: _replaced(context.store.url(name)))


def _download(context: Context, name: str, info: ObjectInfo, path: str) -> None:
    with open(path, "wb") as file:  # noqa: PTH123
        for begin in range(0, info.size_bytes, _PIECE_BYTES):
            piece = bytearray(min(_PIECE_BYTES, info.size_bytes - begin))
            fetch(context.store, context.retrier, key=name, begin=begin, views=[memoryview(piece)])
            file.write(piece)
    if not _head(context, name).is_same_write(info):
        raise _replaced(context.store.url(name))


def _replaced(uri: str) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"{uri} was replaced while it was read, so nothing was committed. Import again", uri=uri
    )


def _unpickled(path: str, plan: ImportPlan) -> dict[str, Any]:
    uri = plan.source.uri
    try:
        found = _loaded(path, weights_only=not plan.allow_pickle)
    except Exception as error:  # a pickle can raise anything
        if isinstance(error, pickle.UnpicklingError) and not plan.allow_pickle:
            raise UnsafePickleError(
                f"{uri} holds more than tensors and plain values, so that reading it could run any code (it uses "
                f"{unsafe_names(path)}), or it is no file of torch.save. If you trust who wrote it, pass "
                "allow_pickle=True (cloudckpt import --unsafe-pickle)",
                uri=uri,
            ) from error
        raise CorruptCheckpointError(
            f"{uri} cannot be read as a file of torch.save ({type(error).__name__}: {error})", uri=uri
        ) from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        what = (
            f"a dict with the keys {shown([repr(key) for key in found])}"
            if isinstance(found, dict)
            else type(found).__name__
        )
        raise UnsupportedValueError(f"{uri} holds no state dict with names, but {what}", uri=uri)
    return found


def _loaded(path: str, *, weights_only: bool) -> Any:
    is_archive = torch.serialization._is_zipfile  # noqa: SLF001  # only archives can be mapped into memory
    with open(path, "rb") as file:  # noqa: PTH123
        mmap = bool(is_archive(file))
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
