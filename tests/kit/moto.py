"""moto's S3, with atomic conditional puts as on a real store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from cloudckpt.testing.servers import S3Server


class LockedS3:
    """A WSGI application. moto alone lets another put come between a look at a key and the write."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._conditional_puts = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._conditional_puts if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
            return [b"".join(self._moto(environ, start_response))]


@contextlib.contextmanager
def locked_s3_server() -> Iterator[S3Server]:
    """Serve it on a free port of the loopback interface, in threads of this process."""
    server = make_server("127.0.0.1", 0, LockedS3(), threaded=True)
    thread = threading.Thread(target=server.serve_forever, name="s3-server", daemon=True)
    thread.start()
    try:
        yield S3Server(endpoint_url=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
