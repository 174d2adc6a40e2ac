"""Watches for secrets in all that cloudckpt says, for as long as the tests run: whatever holds one fails its test.

Searched are the messages of its loggers at every level, warnings, the texts and attributes of its errors and of all
that they are chained to, the representations of options, stores, writers, readers, reports and handles, and every
manifest. Processes that tests start are watched where they install this too, as the ranks do.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_SECRETS = re.compile(r"testing-secret|(?<![a-z0-9])(?:hush)+(?![a-z0-9])|PRIVATE KEY-----", re.IGNORECASE)
"""The secrets of test servers, those that tests make up (``hush``, which base64 has, too), and keys of accounts."""

_FIRST = "cloudckpt"
_lock = threading.Lock()
_hits: list[str] = []
_is_installed = False


class LeakedSecretError(AssertionError):
    """cloudckpt showed a secret."""


def search(text: str, place: str) -> None:
    """Record a hit if `text` holds a secret."""
    found = _SECRETS.search(text)
    if found is not None:
        around = text[max(0, found.start() - 60) : found.start() + 60]
        with _lock:
            _hits.append(f"{place} shows the secret {found.group()!r}: …{around!r}…")


def search_error(error: BaseException | None, place: str) -> None:
    """Search all that a traceback of `error` would show, but for lines of code, and what it carries for handlers."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__module__.partition(".")[0] == _FIRST or not seen - {id(error)}:
            search(f"{error!r} {vars(error)!r}", place)
        search(" ".join([str(error), *getattr(error, "__notes__", ())]), place)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def hits() -> list[str]:
    """Return the hits since the last call."""
    with _lock:
        found = _hits.copy()
        _hits.clear()
    return found


def check() -> None:
    """Raise `LeakedSecretError` if there are hits."""
    found = hits()
    if found:
        raise LeakedSecretError("\n".join(found))


def install() -> None:
    """Watch this process from now on."""
    global _is_installed  # noqa: PLW0603  # once per process
    if _is_installed:
        return
    _is_installed = True
    logger = logging.getLogger(_FIRST)
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_Searching())
    warnings.warn = _searching_warn(warnings.warn)
    raising: Any = type(pytest.raises(Exception))
    raising.__exit__ = _searching_exit(raising.__exit__)
    _watch_what_is_made()


def _watch_what_is_made() -> None:
    from cloudckpt import errors, events, options, report  # noqa: PLC0415  # coverage begins before it
    from cloudckpt.background import handle  # noqa: PLC0415  # coverage begins before it
    from cloudckpt.commit import commit  # noqa: PLC0415
    from cloudckpt.dcp.storage_reader import ObjectStoreReader  # noqa: PLC0415
    from cloudckpt.dcp.storage_writer import ObjectStoreWriter  # noqa: PLC0415
    from cloudckpt.stores.fsspec_store import FsspecStore  # noqa: PLC0415
    from cloudckpt.stores.gcs import GCSStore  # noqa: PLC0415
    from cloudckpt.stores.s3 import S3Store  # noqa: PLC0415

    for name in errors.__all__:
        if "__init__" in vars(getattr(errors, name)):
            _after_init(getattr(errors, name), lambda error: f"{error!r} {error} {vars(error)!r}")
    for kind in (
        *(options.Options, report.SaveReport, report.LoadReport, events.Event),
        *(S3Store, GCSStore, FsspecStore, ObjectStoreWriter, ObjectStoreReader, handle.AsyncSave),
    ):
        _after_init(kind, lambda made: f"{made!r} {made}")
    encode = commit.encode

    @functools.wraps(encode)
    def searching(*args: Any, **kwargs: Any) -> bytes:
        document = encode(*args, **kwargs)
        search(document.decode(), "a manifest")
        return document

    commit.encode = searching


def _after_init(kind: Any, text_of: Callable[[Any], str]) -> None:
    init = kind.__init__

    @functools.wraps(init)
    def searching(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        search(text_of(self), f"a {type(self).__name__}")

    kind.__init__ = searching


class _Searching(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        search(record.getMessage(), f"a log record of {record.name}")
        if record.exc_info:
            search_error(record.exc_info[1], f"an error in a log record of {record.name}")


def _searching_warn(warn: Any) -> Any:
    @functools.wraps(warn)
    def searching(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
        search(str(message), "a warning")
        warn(message, category, stacklevel + 1, *args, **kwargs)

    return searching


def _searching_exit(leave: Any) -> Any:
    @functools.wraps(leave)
    def searching(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        search_error(error if _is_ours(error) else None, "an error that a caller gets")
        return leave(self, kind, error, trace)

    return searching


def _is_ours(error: BaseException | None) -> bool:
    return error is not None and any(base.__module__.partition(".")[0] == _FIRST for base in type(error).__mro__)


@pytest.fixture(autouse=True)
def no_secret_is_shown() -> Iterator[None]:
    """Fail whichever test makes cloudckpt show one."""
    yield
    check()
