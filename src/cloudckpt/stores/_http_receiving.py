"""An HTTP body, received off its socket, past `http.client` and its buffer.

Without TLS, ``MSG_WAITALL`` lets the kernel gather megabytes before it wakes the thread, which costs a call, and the
GIL, for each piece instead of for each packet or so. With TLS each record is a call; those in between are saved.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import socket
import ssl
import struct
import sys
from collections import deque
from email.errors import MissingHeaderBodySeparatorDefect
from types import MethodDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudckpt.stores.base import Views

_MOST_AT_ONCE_BYTES = 8 * 1024 * 1024
_MOST_VIEWS_AT_ONCE = 1024  # IOV_MAX
_RECORD_BYTES = 16 * 1024  # the most that TLS has in one
_WORTH_IT_BYTES = 256 * 1024
_SHARE_OF_TIMEOUT = 0.25


class WholeHeadResponse(http.client.HTTPResponse):
    """A response whose head has come to its end.

    The standard library takes the end of the connection for the end of a head, and stops at a line that is no header:
    it would believe half a Content-Length, half a Content-Range or half an ETag, or that there is none.
    """

    def begin(self) -> None:
        """Read the head; raises `http.client.IncompleteRead` where it is cut, or cannot be read to its end."""
        source: Any = self.fp
        watched: Any = _WatchedLines(source)
        self.fp = watched
        try:
            super().begin()
        finally:
            if self.fp is watched:
                self.fp = source
        defects = getattr(self.headers, "defects", ())
        is_read = not any(isinstance(defect, MissingHeaderBodySeparatorDefect) for defect in defects)
        if watched.last not in (None, b"\r\n", b"\n") or not is_read:
            raise http.client.IncompleteRead(b"")


class _WatchedLines:
    """The file that a head is read from, and the last line that was read."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.last: bytes | None = None

    def readline(self, most_bytes: int) -> bytes:
        self.last = self._source.readline(most_bytes)
        return self.last

    def close(self) -> None:
        self._source.close()


def socket_under(response: object) -> socket.socket | None:
    """The socket that the rest of the body of `response` can be received from.

    ``None`` where it has to be read through `response`: in chunks, without a length, where it is short, and wherever
    something else than the standard library's own parts lies between.
    """
    if sys.platform != "linux" or not isinstance(response, http.client.HTTPResponse) or response.chunked:
        return None
    if response.length is None or response.length < _WORTH_IT_BYTES:
        return None
    buffer: Any = response.fp
    raw = getattr(buffer, "raw", None)
    connection = getattr(raw, "_sock", None)
    if type(buffer) is not io.BufferedReader or type(raw) is not socket.SocketIO:
        return None
    # gevent and its like have put their own in the place of socket.socket; a thread of theirs must not block.
    if type(socket.socket.recvmsg_into) is not MethodDescriptorType:
        return None
    if type(connection) is ssl.SSLSocket:
        return connection
    return connection if type(connection) is socket.socket and connection.gettimeout() else None


def receive(response: Any, connection: socket.socket, views: Views) -> None:
    """Fill `views` one after the other, or as far as the body goes.

    ``response.length`` says at any time, after an error too, how much of the body has not come. The socket's timeout
    holds as ever: without a byte for as long, and up to a quarter more, it is `TimeoutError`.
    """
    left = deque(views)
    held_bytes = len(response.fp.peek())
    while left and held_bytes and response.length:
        count = response.readinto(left[0][:held_bytes])
        held_bytes -= count
        _drop(left, count)
    if not response.length:
        return
    if isinstance(connection, ssl.SSLSocket):
        _receive_records(response, connection, left)
    else:
        with _waiting_in_the_kernel(connection):
            _receive_pieces(response, connection, left)


def _receive_pieces(response: Any, connection: socket.socket, left: deque[memoryview]) -> None:
    while left and response.length:
        buffers = _first(left, min(response.length, _MOST_AT_ONCE_BYTES))
        count = connection.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
        if not count:
            return
        response.length -= count
        _drop(left, count)


def _receive_records(response: Any, connection: ssl.SSLSocket, left: deque[memoryview]) -> None:
    read: Any = connection.read  # all that recv_into() would do is to call it
    for view in left:
        start = 0
        while start < view.nbytes and response.length:
            most_bytes = min(_RECORD_BYTES, response.length)
            count = read(most_bytes, view[start : start + most_bytes])
            if not count:
                return
            start += count
            response.length -= count


@contextlib.contextmanager
def _waiting_in_the_kernel(connection: socket.socket) -> Iterator[None]:
    """Meanwhile a receive waits in the kernel for all that it was asked for, but not for long.

    Python knows nothing of it: as the socket has a timeout, it waits for the first byte of each piece itself, with
    that timeout. So there always is one when the kernel begins to gather, and a signal, or a line that is slow, ends
    that with what is there instead of beginning it anew.
    """
    timeout_s = connection.gettimeout() or 0.0
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s * _SHARE_OF_TIMEOUT))
    os.set_blocking(connection.fileno(), True)
    try:
        yield
    finally:
        os.set_blocking(connection.fileno(), False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0.0))


def _timeval(seconds: float) -> bytes:
    whole_s = int(seconds)
    # Nothing at all would mean for ever.
    least_us = 1 if seconds > 0 else 0
    return struct.pack("@ll", whole_s, max(int((seconds - whole_s) * 1e6), least_us))


def _first(left: deque[memoryview], most_bytes: int) -> list[memoryview]:
    """The beginning of what is `left` to fill, at most so many bytes."""
    buffers: list[memoryview] = []
    for view in left:
        if not most_bytes or len(buffers) == _MOST_VIEWS_AT_ONCE:
            break
        buffers.append(view if view.nbytes <= most_bytes else view[:most_bytes])
        most_bytes -= buffers[-1].nbytes
    return buffers


def _drop(left: deque[memoryview], num_bytes: int) -> None:
    """Take from what is `left` to fill its first `num_bytes`."""
    while left and num_bytes >= left[0].nbytes:
        num_bytes -= left.popleft().nbytes
    if num_bytes:
        left[0] = left[0][num_bytes:]
