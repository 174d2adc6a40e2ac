"""The place that the demo writes to: a fresh one on the user's store, or an S3 server of its own."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import cloudckpt
from cloudckpt.stores import open_store
from cloudckpt.testing.servers import clean_environment, moto_server

BUCKET = "demo"


@contextlib.contextmanager
def embedded_s3() -> Iterator[str]:
    """The URI of an empty bucket on a server on this machine.

    The environment says where it is, as it would for any S3; so nothing else in the demo knows of it.
    """
    before = dict(os.environ)
    with moto_server() as server:
        server.create_bucket(BUCKET)
        try:
            os.environ.clear()
            os.environ.update(clean_environment(before) | server.environment)
            yield f"s3://{BUCKET}"
        finally:
            os.environ.clear()
            os.environ.update(before)


def clean_up(uri: str) -> None:
    """Remove all that the demo wrote at `uri`, and what the killed rank left."""
    store = open_store(uri, cloudckpt.Options())
    # A manifest is the commit, so it goes before the data that it speaks of.
    store.delete(sorted((info.key for info in store.list()), key=lambda key: "/data/" in key))
    for upload in list(store.list_uploads()):
        store.abort_multipart(upload.key, upload.upload_id)
    if "://" not in uri:
        with contextlib.suppress(FileNotFoundError):
            Path(uri).rmdir()


@contextlib.contextmanager
def place_for(uri: str | None, *, keep: bool) -> Iterator[str]:
    """A fresh URI below `uri`, or in an S3 server of our own, that is removed again afterwards."""
    name = f"demo-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
    if uri is None:
        with embedded_s3() as bucket:
            yield f"{bucket}/{name}"
        return
    # The ranks run in another directory, so a relative path would be another path there.
    root = uri if "://" in uri else os.path.abspath(uri)  # noqa: PTH100 - Path mangles URIs
    fresh = f"{root.rstrip('/')}/{name}"
    cloudckpt.list_checkpoints(fresh)  # a wrong URI or a lack of access is told here, before anything is begun
    try:
        yield fresh
    finally:
        if keep:
            print(f"The checkpoints stay at {fresh}")
        else:
            clean_up(fresh)
