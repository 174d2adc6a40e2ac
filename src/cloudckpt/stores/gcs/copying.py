"""Copies within the store, which the service makes itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudckpt.stores.gcs.client import GCSClient
    from cloudckpt.stores.gcs.session import GCSSession


def copy_object(session: GCSSession, source: str, target: str) -> None:
    """Rewrite the object `source` to `target`; a large one takes several calls, each of which goes on from the last."""
    token: str | None = None
    while True:

        def ask(client: GCSClient, token: str | None = token) -> Any:
            bucket = client.bucket(session.bucket)
            new = client.blob(session.bucket, target)
            return new.rewrite(bucket.blob(source), token=token, **client.each_call)[0]

        # What can be missing is the source, so it is what an error is about.
        token = session.call("copy", "objects.rewrite", source, ask)
        if token is None:
            return
