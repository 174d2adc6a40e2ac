"""The commit of a checkpoint whose manifest is there already: of a copy, or of an import."""

from __future__ import annotations

from collections.abc import Iterable

from cloudckpt._commit.attempt import data_key, data_prefix
from cloudckpt._commit.present import check_objects_present, check_still_next
from cloudckpt._commit.resolve import manifest_key
from cloudckpt._manifest.model import Manifest
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.save import SaveJob
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt._transfer.resume import Leftover, find_leftovers

_RANK = 0  # who copies or imports is one process


class TargetJob(SaveJob):
    """One save, whose objects come from elsewhere. `check`, then write objects under `key`, then `commit_manifest`."""

    def __init__(self, context: Context, *, save_id: str, copy_of: str | None = None) -> None:
        super().__init__(context, save_id=save_id, transforms=WriteTransforms(None))
        self._copy_of = copy_of

    @property
    def attempt(self) -> str:
        """Known once `check` was called."""
        return self._attempt

    def key(self, number: int) -> str:
        """Of the data object with that number."""
        return data_key(self._attempt, _RANK, number)

    def leftovers(self) -> dict[str, list[Leftover]]:
        """What earlier attempts left that may be taken up (`Options.resume`), by the keys of this one."""
        context = self._context
        if not context.store.capabilities.multipart:
            return {}
        earlier = [data_prefix(name, _RANK) for name in self._resumed]
        found = find_leftovers(context.store, context.retrier, earlier)
        return {data_prefix(self._attempt, _RANK) + rest: leftovers for rest, leftovers in found.items()}

    def commit_manifest(self, manifest: Manifest, keys: Iterable[str]) -> None:
        """Make `manifest` the checkpoint. Unless the outcome is unknown, a failure removes the objects at `keys`."""
        context = self._context
        try:
            check_objects_present(context.store, manifest, context.retrier)
            context.emit("save.committing", key=manifest_key(self._number))
            check_still_next(context.store, self._number, context.retrier)
        except Exception:
            self._remove(keys)
            raise
        self._publish(manifest, keys)
        self._tidy_up(manifest)

    def remove(self, keys: Iterable[str]) -> None:
        """Of what no manifest names."""
        self._remove(keys)
