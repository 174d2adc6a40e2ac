"""The two ends of a copy or conversion, and the commit at the target."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

from cloudckpt.commit.attempts import data_key, data_prefix
from cloudckpt.convert.reports import Progress
from cloudckpt.errors import InvalidURIError
from cloudckpt.io.resume import Leftover, find_leftovers
from cloudckpt.io.upload import UploadSession
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.save import SaveJob
from cloudckpt.tensors.extensions import WriteTransforms
from cloudckpt.uri import Location

_SERVICES = ("s3", "gs", "memory")


def check_apart(source: Location, target: Location, options: Options, target_options: Options) -> None:
    """Raise `InvalidURIError` if both are the same place, or one lies inside the other."""
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
    """Return True if one service with one set of credentials has both, so that it can be asked to copy."""
    mine, its = source.options.storage_options, target.options.storage_options
    return source.location.scheme == target.location.scheme in _SERVICES and dict(mine) == dict(its)


def folder_and_name(location: Location) -> tuple[Location, str]:
    """Split the location of a file into its folder and its name."""
    folder, _, name = location.path.rpartition("/")
    if not name:
        raise InvalidURIError(f"{location.uri} names no file: add a name such as model.pt")
    return dataclasses.replace(location, path=folder or ("/" if location.scheme == "file" else "")), name


def upload_session(
    target: Context, progress: Progress, *, part_bytes: int, tile_bytes: int, resumable: bool
) -> UploadSession:
    """Open a session that uploads objects, each whole or not at all."""

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


_RANK = 0  # copies and imports run in one process


class TargetJob(SaveJob):
    """A save whose objects come from elsewhere. Call `check`, write the objects at `key`, then `commit_manifest`."""

    def __init__(self, context: Context, *, save_id: str, copy_of: str | None = None) -> None:
        super().__init__(context, save_id=save_id, transforms=WriteTransforms(None))
        self._copy_of = copy_of

    @property
    def attempt(self) -> str:
        """Identifier of this save. It exists after `check`."""
        return self._attempt

    def key(self, number: int) -> str:
        """Return the key of the data object with that number."""
        return data_key(self._attempt, _RANK, number)

    def leftovers(self) -> dict[str, list[Leftover]]:
        """Find what earlier attempts left and this one may use (`Options.resume`), by the keys of this one."""
        context = self._context
        if not context.store.capabilities.multipart:
            return {}
        earlier = [data_prefix(name, _RANK) for name in self._resumed]
        found = find_leftovers(context.store, context.retrier, earlier)
        return {data_prefix(self._attempt, _RANK) + rest: leftovers for rest, leftovers in found.items()}

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects that no manifest names."""
        self._remove(keys)
