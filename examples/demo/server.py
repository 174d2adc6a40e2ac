"""An S3 server for the length of the demo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

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
