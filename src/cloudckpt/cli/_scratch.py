"""A fresh place below a URI that is empty again afterwards, whatever happens in between."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloudckpt.cli._ending import telling
from cloudckpt.cli._errors import interrupt_of

if TYPE_CHECKING:
    from cloudckpt._uri import Location
    from cloudckpt.cli._console import Console
    from cloudckpt.options import Options

_NUM_TRIES = 5
_PAUSE_S = 0.2


@contextlib.contextmanager
def scratch(uri: str, what: str, options: Options, console: Console) -> Iterator[Location]:
    """A location below `uri` whose name begins with `what`. Raises `StoreError` where one may not look or remove."""
    from cloudckpt._uri import parse_location
    from cloudckpt.doctor.directories import unmade_afterwards

    above = parse_location(uri)
    location = above.child(f"{what}-{uuid.uuid4().hex[:12]}")
    _check_removable(location, options)
    with unmade_afterwards(above), telling(f"remove by hand what lies under {location.uri}"):
        try:
            yield location
        except BaseException as error:
            interrupt = interrupt_of(error)
            if interrupt is None:
                raise
            raise interrupt from None  # whether that commit arrived does not matter: nothing of it stays
        finally:
            try:
                _remove(location, options)
            except BaseException:
                console.warn(f"Not everything was removed: remove by hand what lies under {location.uri}")
                raise


def _check_removable(location: Location, options: Options) -> None:
    """A bucket that does not exist, lets nobody in or nothing out is found out before anything is written."""
    from cloudckpt._transfer.retry import Retrier
    from cloudckpt.errors import UnsupportedOperationError
    from cloudckpt.stores.open import open_store

    store = open_store(location, options)
    next(store.list(), None)
    if location.scheme == "file":
        return
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    with contextlib.suppress(UnsupportedOperationError):
        retrier.call(lambda: next(store.list_uploads(), None))
    retrier.call(lambda: store.delete(["nothing"]))  # which is not there: whether that may be removed is answered first


def _remove(location: Location, options: Options) -> None:
    from cloudckpt._transfer.retry import Retrier
    from cloudckpt.errors import UnsupportedOperationError
    from cloudckpt.stores.open import open_store

    if location.scheme == "file":
        for number in range(_NUM_TRIES):
            if number:
                time.sleep(_PAUSE_S)
            # What was interrupted removes files of its own meanwhile, and may still be making some.
            shutil.rmtree(location.path, ignore_errors=True)
            if not Path(location.path).exists():
                return
        shutil.rmtree(location.path)
        return
    store = open_store(location, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    for _ in range(_NUM_TRIES):  # an upload that was interrupted may still have come through
        with contextlib.suppress(UnsupportedOperationError):
            for upload in retrier.call(lambda: list(store.list_uploads())):
                retrier.call(lambda upload=upload: store.abort_multipart(upload.key, upload.upload_id))  # type: ignore[misc]  # mypy cannot see the default
        keys = retrier.call(lambda: [info.key for info in store.list()])
        if not keys:
            return
        retrier.call(lambda keys=keys: store.delete(keys))  # type: ignore[misc]  # as above
