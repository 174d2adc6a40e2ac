"""One request to a server, with nothing in between."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from urllib.parse import urlsplit


def ask(
    endpoint_url: str,
    method: str,
    path: str,
    *,
    timeout_s: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """The status and the text of the answer; `OSError` or `http.client.HTTPException` where there is none."""
    connection = http.client.HTTPConnection(urlsplit(endpoint_url).netloc, timeout=timeout_s)
    try:
        connection.request(method, path, body=body, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def answers(endpoint_url: str, path: str = "/", *, timeout_s: float) -> bool:
    """Whether the server answers a request for `path` in time, whatever it says."""
    try:
        ask(endpoint_url, "GET", path, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException):
        return False
    return True
