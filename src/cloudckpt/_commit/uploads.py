"""Unfinished uploads under a root, by the folder that they are for."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping

from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import AccessDeniedError, StoreError, UnsupportedOperationError
from cloudckpt.stores.base import Store, UploadInfo


@contextlib.contextmanager
def noting(unlisted: dict[str, StoreError]) -> Iterator[None]:
    """A listing that was denied a look into some folders, and has given all else: these are in `unlisted` then."""
    try:
        yield
    except AccessDeniedError as error:
        if not error.unlisted:
            raise
        unlisted.update(dict.fromkeys(error.unlisted, error))


def uploads_by_name(store: Store, retrier: Retrier, *, is_local: bool) -> Mapping[str, list[UploadInfo]]:
    """Unfinished uploads by the directory that they are for, with keys relative to it; the root's own under ``""``.

    Those that may not be listed are left out.
    """

    def look() -> list[UploadInfo]:
        found = list[UploadInfo]()
        with noting({}):
            found.extend(store.list_uploads())  # extended by what there is before an error
        return found

    by_place: defaultdict[str, list[UploadInfo]] = defaultdict(list)
    try:
        for upload in retrier.call(look):
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
