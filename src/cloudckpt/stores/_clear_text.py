"""What travels in clear: said once for each endpoint, to whoever reads warnings and to whoever reads logs."""

from __future__ import annotations

import logging
import warnings
from urllib.parse import urlsplit

from cloudckpt.stores._storage_options import is_loopback

_log = logging.getLogger("cloudckpt")

warned_endpoints: set[str] = set()


def is_clear(endpoint_url: str) -> bool:
    """Whether whoever is on the way to the endpoint can read and change what goes there."""
    parts = urlsplit(endpoint_url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def warn_of_clear_text(endpoint_url: str, *, store: str) -> None:
    """A warning and a log record, where `endpoint_url` is plain HTTP to another machine; once in each process."""
    if not is_clear(endpoint_url) or endpoint_url in warned_endpoints:
        return
    warned_endpoints.add(endpoint_url)
    words = (
        f"The {store} endpoint {endpoint_url} is plain HTTP: anyone on the way can read and change checkpoints, and "
        "take tokens from it. Use https:// where you can."
    )
    _log.warning("%s", words)
    warnings.warn(words, UserWarning, stacklevel=3)
