"""Ways to move parts to and from a server, which `benchmarks.transport` compares."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from cloudckpt.stores.base import Store

KIB = 1024
MIB = 1024 * 1024
OBJECT = "object"
"""The key of what is downloaded."""
AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=candidate/20260101/us-east-1/s3/aws4_request"
"""Without a signature: moto looks whether there is an authorization, and not at that."""
TIMEOUT_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A bucket, and how its server is spoken to."""

    endpoint_url: str
    ca_bundle: Path | None
    bucket: str
    connections: int

    @property
    def host(self) -> str:
        return urlsplit(self.endpoint_url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.endpoint_url).port or 80


class Candidate(abc.ABC):
    """One way to move parts of one size to and from a server; called from many threads at once.

    A part that did not move raises an error.
    """

    def __init__(self, where: Where) -> None:
        self.where = where

    @abc.abstractmethod
    def up(self, number: int, part: memoryview) -> None:
        """Send the part with that number, from 0 on, to a place of its own."""

    @abc.abstractmethod
    def down(self, number: int, part: memoryview) -> None:
        """Fill it from `OBJECT`, which begins with part 0."""

    def key_of(self, number: int) -> str:
        """Return the key of a part that was sent."""
        return f"{type(self).__name__}-{number}"

    def sent(self, store: Store, num_parts: int, part_bytes: int) -> Iterator[bytes]:
        """The parts as they lie on the server, read through `store`."""
        for number in range(num_parts):
            yield store.read(self.key_of(number), max_bytes=part_bytes)

    def close(self) -> None:  # noqa: B027 (not all have something to close)
        """End the connections; no part is under way any more."""


@dataclass(slots=True)
class Connection(Generic[T]):
    """An engine's own, and whether it ends with this request."""

    line: T
    ends: bool = True


class Kept(Generic[T]):
    """Connections that are kept between parts, each used by one thread at a time."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], object]) -> None:
        self._make, self._close = make, close
        self._idle: list[Connection[T]] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[Connection[T]]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = Connection(self._make())
        connection.ends = True  # unless its user says otherwise
        try:
            yield connection
        finally:
            if connection.ends:
                self._close(connection.line)
            else:
                self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._close(self._idle.pop().line)


def range_of(number: int, part: memoryview) -> str:
    """The Range header that asks for a part."""
    start = number * part.nbytes
    return f"bytes={start}-{start + part.nbytes - 1}"


def check(status: int, body: bytes = b"") -> None:
    """Raise `ConnectionError` for every answer but that to a put or to a get."""
    if status not in (200, 206):
        raise ConnectionError(f"answered with {status}: {body[:200]!r}")
