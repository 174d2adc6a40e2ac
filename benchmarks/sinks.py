"""Sinks for saves without the cost of storage: they accept all that is written, and forget it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cloudckpt.stores.base import ObjectInfo, Part, Store, UploadedPart, Views
from cloudckpt.testing.faults import WrappedStore

_DATA = "data/"


class Sink(WrappedStore):
    """Takes every byte of a checkpoint's data, and of it keeps the sizes alone; manifests go to the store behind it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._taken: dict[str, ObjectInfo] = {}

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        if key.startswith(_DATA):
            self._take(key, sum(view.nbytes for view in views))
        else:
            self.inner.put(key, views, crc32c=crc32c, if_absent=if_absent)

    def create_multipart(self, key: str) -> str:
        return f"sink-{key}"

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:  # noqa: ARG002  # of all stores
        return UploadedPart(part=part, token=str(part.number), crc32c=crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:  # noqa: ARG002
        self._take(key, sum(one.part.size_bytes for one in parts))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Nothing is there."""

    def head(self, key: str) -> ObjectInfo:
        return self._taken[key] if key in self._taken else self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from (info for key, info in self._taken.items() if key.startswith(prefix))
        yield from self.inner.list(prefix)

    def _take(self, key: str, size_bytes: int) -> None:
        self._taken[key] = ObjectInfo(key=key, size_bytes=size_bytes, modified_at=datetime.now(timezone.utc))


class PacedSink(Sink):
    """The same at the rate of a network, `BYTES_PER_S` for all connections together."""

    BYTES_PER_S = 1e9

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + part.size_bytes / self.BYTES_PER_S
            wait_s = self._free_at_s - time.monotonic()
        time.sleep(max(0.0, wait_s))
        return super().upload_part(key, upload_id, part, views, crc32c=crc32c)


class Discarding(StorageWriter):
    """The same for torch's own path: what it is given counts as written."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...  # noqa: FBT001  # torch's

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for item in plan.items:
            planner.resolve_data(item)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return checkpoint_id is not None
