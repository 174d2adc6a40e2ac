"""The two ends of a copy or conversion."""

from __future__ import annotations

import dataclasses
import os

from cloudckpt._convert.progress import Progress
from cloudckpt._pipeline.context import Context
from cloudckpt._transfer.upload import UploadSession
from cloudckpt._uri import Location
from cloudckpt.errors import InvalidURIError
from cloudckpt.options import Options

_SERVICES = ("s3", "gs", "memory")
_LEAST_PART_BYTES = 64 * 1024


def check_apart(source: Location, target: Location, options: Options, target_options: Options) -> None:
    """Raises `InvalidURIError` where the one lies in the other, or both are the same place."""
    if source.scheme != target.scheme or source.authority != target.authority:
        return
    if _endpoint_of(options) != _endpoint_of(target_options):
        return
    one, other = _path_of(source), _path_of(target)
    if one == other:
        raise InvalidURIError(f"{source.uri} is both the source and the target: there is nothing to do. Give another")
    for inner, outer in ((one, other), (other, one)):
        if inner.startswith(outer + "/") or not outer:
            raise InvalidURIError(
                f"of {source.uri} and {target.uri}, one lies inside of the other: what belongs to which could not be "
                "told. Choose a target beside the source"
            )


def is_one_service(source: Context, target: Context) -> bool:
    """Whether one service, with one set of credentials, has both: it can then be asked to copy."""
    mine, its = source.options.storage_options, target.options.storage_options
    return source.location.scheme == target.location.scheme in _SERVICES and dict(mine) == dict(its)


def folder_and_name(location: Location) -> tuple[Location, str]:
    """The folder that a single file lies in, and its name there."""
    folder, _, name = location.path.rpartition("/")
    if not name:
        raise InvalidURIError(f"{location.uri} names no file: add a name such as model.pt")
    return dataclasses.replace(location, path=folder or ("/" if location.scheme == "file" else "")), name


def part_bytes_for(target: Context, *, budget_bytes: int, tile_bytes: int) -> int:
    """Of uploads whose every part is held in memory: so that there is one for each connection."""
    share_bytes = max(budget_bytes // target.connections, min(_LEAST_PART_BYTES, budget_bytes))
    return max(min(target.options.part_bytes, share_bytes) // tile_bytes, 1) * tile_bytes


def upload_session(
    target: Context, progress: Progress, *, part_bytes: int, tile_bytes: int, resumable: bool
) -> UploadSession:
    """Uploads of objects, whole or not at all."""

    def on_part(key: str, num_bytes: int) -> None:
        target.emit("save.part_uploaded", key=key, num_bytes=num_bytes)
        progress.add(num_bytes)

    return UploadSession(
        target.store,
        target.retrier,
        cleaner=target.new_retrier(),
        hedger=target.hedger,
        part_bytes=part_bytes,
        tile_bytes=tile_bytes,
        resumable=resumable,
        on_part=on_part,
        on_completing=lambda key: target.emit("save.completing", key=key),
        on_object=lambda key, num_bytes: target.emit("save.object_uploaded", key=key, num_bytes=num_bytes),
    )


def _endpoint_of(options: Options) -> str:
    return str(options.storage_options.get("endpoint_url") or "").rstrip("/")


def _path_of(location: Location) -> str:
    path = os.path.realpath(location.path) if location.scheme == "file" else location.path
    return path.rstrip("/")
