"""Unfinished uploads under a root, by the folder that they are for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import StoreError, UnsupportedOperationError
from cloudckpt.stores.base import Store, UploadInfo


def uploads_by_name(store: Store, retrier: Retrier, *, is_local: bool) -> Mapping[str, list[UploadInfo]]:
    """Unfinished uploads by the directory that they are for, with keys relative to it; the root's own under ``""``."""
    by_place: defaultdict[str, list[UploadInfo]] = defaultdict(list)
    try:
        for upload in retrier.call(lambda: list(store.list_uploads())):
            name, _, key = upload.key.partition("/")
            if name == "data":
                by_place[""].append(upload)
            else:
                relative = UploadInfo(key=key, upload_id=upload.upload_id, started_at=upload.started_at)
                by_place[name].append(relative)
    except UnsupportedOperationError:
        pass  # then none can be open
    except StoreError:
        if is_local:
            raise
    return by_place
