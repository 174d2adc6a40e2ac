"""moto's S3 as a real store is: conditional puts in order, and answers that fail when a test asks for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from cloudckpt.testing.servers import S3Server

Trouble = Literal["deny", "slow down"]
Interference = Callable[[str, str], Trouble | None]
"""Of a request's method and URL path with its query: what to do to it."""


class FlakyS3:
    """A WSGI application."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        # moto looks whether the key is taken and then writes, with nothing to keep another put from coming between.
        self._conditional_puts = threading.Lock()
        self._interference: Interference | None = None

    @contextlib.contextmanager
    def troubled(self, interference: Interference) -> Iterator[None]:
        """While this lasts, `interference` decides about each request."""
        self._interference = interference
        try:
            yield
        finally:
            self._interference = None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        trouble = None
        if self._interference is not None:
            url = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
            trouble = self._interference(environ["REQUEST_METHOD"], url)
        if trouble in {"deny", "slow down"}:  # the body is taken all the same, or the client never reads the answer
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if trouble == "deny":
            return _failure(start_response, "403 Forbidden", "AccessDenied")
        if trouble == "slow down":
            return _failure(start_response, "503 Slow Down", "SlowDown")
        status, headers, body = self._answer(environ)
        start_response(status, headers)
        return [body]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
        captured: list[Any] = []

        def start_response(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
            captured.extend((status, headers))

        conditional = "HTTP_IF_NONE_MATCH" in environ
        with self._conditional_puts if conditional else contextlib.nullcontext():
            body = b"".join(self._moto(environ, start_response))
        return captured[0], captured[1], body


def _failure(start_response: Any, status: str, code: str) -> Iterable[bytes]:
    body = f"<Error><Code>{code}</Code><Message>the test asked for it</Message></Error>".encode()
    start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


@contextlib.contextmanager
def serve(application: FlakyS3) -> Iterator[S3Server]:
    """The application on a free port of the loopback interface, in threads of this process."""
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, name="s3-server", daemon=True)
    thread.start()
    try:
        yield S3Server(endpoint_url=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
