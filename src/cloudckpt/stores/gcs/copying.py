"""Copies within the store, which the service makes itself."""

from __future__ import annotations

import base64
import functools
from typing import TYPE_CHECKING, Any

from cloudckpt.stores.base import once

if TYPE_CHECKING:
    from cloudckpt.stores.base import Tried
    from cloudckpt.stores.gcs.client import GCSClient
    from cloudckpt.stores.gcs.session import GCSSession


def copy_object(
    session: GCSSession,
    source: str,
    target: str,
    *,
    bucket: str | None = None,
    operation: str = "copy",
    tried: Tried = once,
) -> int | None:
    """Rewrite the object `source` to `target`; a large one takes several calls, each of which goes on from the last.

    `source` lies in `bucket`, if one is given. The CRC32C that the service says `target` has, if it says one.
    """
    # What can be missing is the source, so it is what an error is about.
    asking = session if bucket is None else session.beside(bucket)
    token: str | None = None
    while True:

        def ask(client: GCSClient, token: str | None = token) -> tuple[str | None, Any]:
            old = client.bucket(asking.bucket).blob(source)
            new = client.blob(session.bucket, target)
            return new.rewrite(old, token=token, **client.each_call)[0], new.crc32c

        token, crc32c = tried(functools.partial(asking.call, operation, "objects.rewrite", source, ask))
        if token is None:
            return _decoded(crc32c)


def _decoded(crc32c: object) -> int | None:
    try:
        return int.from_bytes(base64.b64decode(crc32c, validate=True), "big") if isinstance(crc32c, str) else None
    except ValueError:
        return None
