"""Exports that take the whole state dict in memory: as ``torch.save`` writes it, and in torch's own DCP format."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from cloudckpt._convert.bodies import FileBody
from cloudckpt._convert.files import Files
from cloudckpt._convert.names import shown
from cloudckpt._convert.plan import Done, ExportPlan
from cloudckpt._convert.progress import Progress
from cloudckpt._convert.sides import folder_and_name
from cloudckpt._convert.whole import entries_in, load_whole
from cloudckpt._pipeline.context import Context
from cloudckpt.errors import UnsupportedValueError
from cloudckpt.options import MIB

_METADATA = ".metadata"
_TILE_BYTES = MIB


def export_torch(plan: ExportPlan, progress: Progress) -> Done:
    """See `cloudckpt.export_checkpoint`."""
    folder, name = folder_and_name(plan.target)
    target = Context(folder, plan.target_options, rank=0)
    files = Files(
        target, progress, patterns=(_escaped(name),), entries=(name,), overwrite=plan.overwrite, tile_bytes=_TILE_BYTES
    )
    files.check()
    state_dict, done = _loaded(plan)
    with tempfile.TemporaryDirectory(prefix="cloudckpt-export-") as scratch:
        path = os.path.join(scratch, "state.pt")  # noqa: PTH118
        torch.save(state_dict, path)
        size_bytes = os.path.getsize(path)  # noqa: PTH202
        progress.expect(size_bytes)
        files.clear([name])
        files.upload_only(
            name,
            lambda arena: FileBody(path, arena, size_bytes=size_bytes),
            size_bytes=size_bytes,
            budget_bytes=plan.options.read_bytes,
        )
    return Done(num_tensors=done[0], num_values=done[1], files=files.written)


def export_dcp(plan: ExportPlan, progress: Progress) -> Done:
    """See `cloudckpt.export_checkpoint`."""
    target = Context(plan.target, plan.target_options, rank=0)
    files = Files(
        target,
        progress,
        patterns=(_METADATA, "__*_*.distcp"),
        entries=(_METADATA,),
        overwrite=plan.overwrite,
        tile_bytes=_TILE_BYTES,
    )
    files.check()
    state_dict, done = _loaded(plan)
    with tempfile.TemporaryDirectory(prefix="cloudckpt-export-") as scratch:
        _check_nesting(state_dict, plan)
        dcp_save(state_dict, storage_writer=_Writer(scratch, sync_files=False), no_dist=True)
        sizes = {name: os.path.getsize(os.path.join(scratch, name)) for name in sorted(os.listdir(scratch))}  # noqa: PTH118, PTH202, PTH208
        progress.expect(sum(sizes.values()))
        files.clear(sizes)
        with files.upload(budget_bytes=plan.options.read_bytes) as submit:
            for name, size_bytes in sizes.items():
                if name != _METADATA:
                    path = os.path.join(scratch, name)  # noqa: PTH118
                    submit(name, lambda arena, path=path, size=size_bytes: FileBody(path, arena, size_bytes=size))  # type: ignore[misc]  # mypy cannot see the defaults
        with open(os.path.join(scratch, _METADATA), "rb") as file:  # noqa: PTH118, PTH123
            files.put_last(_METADATA, file.read())
    return Done(num_tensors=done[0], num_values=done[1], files=files.written)


class _Writer(FileSystemWriter):
    """One that pickles no path of ours: that of Python 3.13 cannot be read by an older one."""

    def storage_meta(self) -> StorageMeta:
        """With text alone."""
        return StorageMeta(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)


def _check_nesting(state_dict: dict[str, Any], plan: ExportPlan) -> None:
    """Warn of empty containers that torch's planners leave out: the key is missing then, as that of SGD's ``state``.

    Raises `UnsupportedValueError` for those in a list or tuple, where something else would stand in their place.
    """
    lost = [*_lost(state_dict, unflatten_state_dict(*flatten_state_dict(state_dict)), ())]
    what = f"torch's own format has no place for the empty containers of {plan.source.uri} at"
    misplaced = [_dotted(path) for path, is_in_sequence in lost if is_in_sequence]
    if misplaced:
        raise UnsupportedValueError(
            f"{what} {shown(misplaced)}: a load would have None there. Nothing was written. Export in the format "
            "'torch', which keeps them, or leave them out with include",
            uri=plan.source.uri,
        )
    if lost:
        warnings.warn(
            f"{what} {shown([_dotted(path) for path, _ in lost])}: a load gives these keys back only to a state dict "
            "that has them. The format 'torch' keeps them",
            stacklevel=2,
        )


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _lost(
    value: object, back: object, path: tuple[Any, ...], *, is_in_sequence: bool = False
) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Yield the paths of what is empty in `value` and missing in `back`, which torch has made of it.

    Each comes with whether it is an element of a list or tuple.
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
        yield from _lost(each, other, (*path, key), is_in_sequence=not isinstance(value, Mapping))


def _loaded(plan: ExportPlan) -> tuple[dict[str, Any], tuple[int, int]]:
    """The state dict, and how many tensors and values are in it."""
    state_dict = load_whole(
        plan.source,
        plan.options,
        include=plan.include,
        strip_prefix=plan.strip_prefix,
        allow_pickle=plan.allow_pickle,
    )
    if not state_dict:
        raise UnsupportedValueError(f"{plan.source.uri} holds nothing to export", uri=plan.source.uri)
    flat = entries_in(state_dict, uri=plan.source.uri)
    num_tensors = sum(isinstance(value, torch.Tensor) for value in flat.values())
    return state_dict, (num_tensors, len(flat) - num_tensors)


def _escaped(name: str) -> str:
    """As a pattern that fits nothing else."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)
