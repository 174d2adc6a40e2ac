"""Bodies of HTTP requests and answers, sent from the caller's memory and received into it without a copy."""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import io
import os
import socket
import ssl
import struct
import sys
from collections.abc import Iterator
from email.errors import MissingHeaderBodySeparatorDefect
from types import MethodDescriptorType
from typing import Any

from cloudckpt.stores.base import Views, batches, join_views, num_bytes, skip_bytes

_SENT_AT_ONCE_BYTES = 256 * 1024  # a larger piece could take longer than a timeout on a slow line
_MAX_SENT_BYTES = 1024 * 1024 * 1024
_MAX_VIEWS = 1024  # IOV_MAX

_MAX_READ_BYTES = 1024 * 1024
MAX_RECEIVED_BYTES = 8 * 1024 * 1024
_MIN_RECEIVED_BYTES = 256 * 1024
SHARE_OF_TIMEOUT = 0.25
GATHERED_BYTES = 512 * 1024
_MAX_RECORD_BYTES = 32 * 1024  # OpenSSL may have most of one record already
_CRC32C_BYTES = 4


def encode_crc32c(crc32c: int) -> str:
    """Return the checksum as the services' headers and documents have it."""
    return base64.b64encode(crc32c.to_bytes(_CRC32C_BYTES, "big")).decode()


def decode_crc32c(encoded: object) -> int | None:
    """Return the checksum in an answer; None if there is none, or that of a composite."""
    try:
        value = base64.b64decode(str(encoded), validate=True)
    except ValueError:
        return None
    return int.from_bytes(value, "big") if len(value) == _CRC32C_BYTES else None


class ViewsBody:
    """A readable file over memory views, which copies none of them.

    A connection of `make_cancellable` takes all views at once (`take_remaining`). For others, ``read(n)`` takes `n` for
    a hint and returns a view: HTTP libraries ask for 16 to 128 KiB, and would make thousands of calls for a part.
    """

    def __init__(self, views: Views) -> None:
        self._views = [view for view in views if view.nbytes]
        self._size_bytes = num_bytes(self._views)
        self._position_bytes = 0

    def __len__(self) -> int:
        return self._size_bytes

    def read(self, size_hint: int | None = -1, /) -> memoryview | bytes:
        """Return the remaining bytes of one view, of any size; nothing at the end. Without a hint, return all bytes."""
        if size_hint is None or size_hint < 0:  # as moto does in the process of its user
            return b"".join(self.take_remaining())
        remaining = self._remaining()
        if not remaining:
            return b""
        self._position_bytes += remaining[0].nbytes
        return remaining[0]

    def take_remaining(self) -> list[memoryview]:
        """Return all bytes that were not read."""
        remaining = self._remaining()
        self._position_bytes = self._size_bytes
        return remaining

    def tell(self) -> int:
        """Return the number of bytes before the next piece."""
        return self._position_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to `offset`, as any file does."""
        bases_bytes = {io.SEEK_SET: 0, io.SEEK_CUR: self._position_bytes, io.SEEK_END: self._size_bytes}
        if whence not in bases_bytes:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence!r}")
        self._position_bytes = min(max(offset + bases_bytes[whence], 0), self._size_bytes)
        return self._position_bytes

    def _remaining(self) -> list[memoryview]:
        return skip_bytes(self._views, self._position_bytes)


def send_all(connection: Any, views: Views) -> None:
    """Send `views`. The connection's timeout bounds the time without progress. A slow line is not cut off.

    Over plain HTTP on Linux, a call takes up to 1,024 views and waits in the kernel until all are sent, so that the
    thread waits less often for the GIL. Raises `TimeoutError` after at most 1.25 timeouts in which the kernel has taken
    no byte.
    """
    if type(connection) is not socket.socket or not _may_wait_in_the_kernel(connection):
        try:
            for batch in batches(views, max_bytes=_SENT_AT_ONCE_BYTES, max_views=len(views)):
                connection.sendall(join_views(batch))
        except ssl.SSLEOFError as error:  # Python's class for EPIPE; the store's answer may have come before
            raise BrokenPipeError(errno.EPIPE, str(error)) from error
        return
    with _waiting_in_the_kernel(connection, socket.SO_SNDTIMEO):
        for batch in batches(views, max_bytes=_MAX_SENT_BYTES, max_views=_MAX_VIEWS):
            unsent = batch
            while unsent:
                unsent = skip_bytes(unsent, connection.sendmsg(unsent))


class WholeHeadResponse(http.client.HTTPResponse):
    """A response that raises `http.client.IncompleteRead` if its head is cut or cannot be parsed to its end.

    The standard library takes the end of the connection for the end of a head, and stops at a line that is no header.
    It would believe half a Content-Length, half an ETag, or that there is none.
    """

    def begin(self) -> None:
        head: Any = _HeadReader(self.fp)
        self.fp = head
        super().begin()
        self.fp = head.connection
        # The parser stops at a line that is no header, and takes what follows for the body of the head's message.
        has_stopped = any(isinstance(defect, MissingHeaderBodySeparatorDefect) for defect in self.headers.defects)
        if head.last_line not in (b"\r\n", b"\n") or has_stopped:
            raise http.client.IncompleteRead(b"")


class _HeadReader:
    """Reads the lines of a head, and keeps the last one: a head ends in an empty line."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.last_line = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def readline(self, max_bytes: int) -> bytes:
        self.last_line = self.connection.readline(max_bytes)
        if b"\r" in self.last_line.removesuffix(b"\n").removesuffix(b"\r"):
            raise http.client.IncompleteRead(b"")  # the parser would take what follows for a header of its own
        return self.last_line


class BodyEndedError(Exception):
    """The body ended before the views were full."""


class ResponseBody:
    """The body of one response, read from the HTTP connection itself.

    Args:
        body: urllib3's response, or botocore's body around it. Both would copy every byte.

    Attributes:
        received_bytes: The bytes that have arrived, except for a piece of at most 1 MiB that was on its way when an
            error was raised.

    """

    def __init__(self, body: Any) -> None:
        self._body = body
        # botocore's body → urllib3's response → http.client's. The last reads into memory without a copy.
        self._raw = getattr(body, "_raw_stream", body)
        self._source = getattr(self._raw, "_original_response", None) or body
        # The response drops it at the body's end.
        self._connection = getattr(getattr(getattr(self._source, "fp", None), "raw", None), "_sock", None)
        self.received_bytes = 0

    def fill(self, views: Views) -> None:
        """Fill `views` one after the other. Raises `BodyEndedError` if the body ends before they are full."""
        response, connection = self._source, _find_socket(self._source, num_bytes(views))
        if connection is None:
            for view in views:
                begin = 0
                while begin < view.nbytes:
                    count = response.readinto(view[begin : begin + _MAX_READ_BYTES])
                    if not count:
                        raise BodyEndedError
                    begin += count
                    self.received_bytes += count
            return
        awaited_bytes = response.length
        try:
            buffered_bytes = len(response.fp.peek())
            buffered = batches(views, max_bytes=buffered_bytes, max_views=len(views)) if buffered_bytes else iter(())
            for piece in next(buffered, []):
                response.readinto(piece)
            remaining = skip_bytes(views, buffered_bytes)
            if isinstance(connection, ssl.SSLSocket):
                _receive_records(response, connection, remaining)
                return
            with _waiting_in_the_kernel(connection, socket.SO_RCVTIMEO):
                for batch in batches(remaining, max_bytes=MAX_RECEIVED_BYTES, max_views=_MAX_VIEWS):
                    unfilled = batch
                    while unfilled:
                        count = connection.recvmsg_into(unfilled, 0, socket.MSG_WAITALL)[0]
                        if not count:
                            raise BodyEndedError
                        response.length -= count  # http.client continues from here
                        unfilled = skip_bytes(unfilled, count)
        finally:
            self.received_bytes += awaited_bytes - response.length

    def close(self, *, reuse: bool) -> None:
        """Give the connection back. It is used again only if `reuse` and if the body was read to its end."""
        if not reuse or not self._is_at_end() or self._has_bytes_after_body():
            self._body.close()
        release = getattr(self._raw, "release_conn", None)
        if release is not None:
            release()

    def _has_bytes_after_body(self) -> bool:
        """Return True if OpenSSL has bytes after the body: the pool looks for them in the kernel alone."""
        return isinstance(self._connection, ssl.SSLSocket) and self._connection.pending() > 0

    def _is_at_end(self) -> bool:
        is_closed = getattr(self._source, "isclosed", None)
        if is_closed is not None and is_closed():
            return True
        try:
            # A chunked body ends in a chunk of its own, which has to be read too.
            return not self._source.readinto(memoryview(bytearray(1)))
        except Exception:  # noqa: BLE001  # the views are full; only the connection is lost
            return False


def _find_socket(response: object, wanted_bytes: int) -> socket.socket | None:
    """Return the socket to receive the body from without `http.client`; None if it must be read through that.

    Chunked and short bodies must be, and those for which another class than the standard library's is between.
    """
    if not isinstance(response, http.client.HTTPResponse) or response.chunked:
        return None
    if response.length is None or response.length < max(wanted_bytes, _MIN_RECEIVED_BYTES):
        return None
    buffer: Any = response.fp
    raw = getattr(buffer, "raw", None)
    connection: Any = getattr(raw, "_sock", None)
    if type(buffer) is not io.BufferedReader or type(raw) is not socket.SocketIO:
        return None
    return connection if _may_wait_in_the_kernel(connection) else None


def _may_wait_in_the_kernel(connection: Any) -> bool:
    # gevent and its like replace socket.socket; a thread of theirs must not block.
    is_standard = sys.platform == "linux" and type(socket.socket.recvmsg_into) is MethodDescriptorType
    return is_standard and type(connection) in (socket.socket, ssl.SSLSocket) and bool(connection.gettimeout())


def _receive_records(response: Any, connection: ssl.SSLSocket, views: Views) -> None:
    """Fill `views`, at most one record of TLS a call. Raises `BodyEndedError` if the body ends before they are full.

    The kernel gathers many records before it wakes the thread: each wake-up is a switch of threads, and a wait for the
    GIL. It no longer does so at the body's end, and on a slow line: the timeout has to bound a stall.
    """
    timeout_s = connection.gettimeout() or 0.0
    remaining_bytes = num_bytes(views)
    is_gathering = True
    _wait_for(connection, GATHERED_BYTES, timeout_s * SHARE_OF_TIMEOUT)
    try:
        for view in views:
            begin = 0
            while begin < view.nbytes:
                if is_gathering and remaining_bytes < GATHERED_BYTES + _MAX_RECORD_BYTES:
                    is_gathering = False
                    _wait_for(connection, 1, timeout_s)
                try:
                    count = connection.recv_into(view[begin:], view.nbytes - begin)
                except TimeoutError:
                    if not is_gathering:
                        raise
                    remaining_bytes = 0  # a slow line: gather no more
                    continue
                if not count:
                    raise BodyEndedError
                begin += count
                remaining_bytes -= count
                response.length -= count  # http.client continues from here
    finally:
        _wait_for(connection, 1, timeout_s)


def _wait_for(connection: socket.socket, min_bytes: int, timeout_s: float) -> None:
    with contextlib.suppress(OSError):  # such a kernel gathers nothing
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min_bytes)
    connection.settimeout(timeout_s)


@contextlib.contextmanager
def _waiting_in_the_kernel(connection: socket.socket, option: int) -> Iterator[None]:
    """Let each call wait in the kernel for all that it was asked for: fewer calls, and fewer waits for the GIL.

    Python knows nothing of it: since the socket has a timeout, it waits itself until the first byte can be moved. So
    the call moves a byte at least; a signal or a slow line then ends it with the bytes so far. `option` is SO_RCVTIMEO
    or SO_SNDTIMEO.
    """
    _set_kernel_timeout(connection, option, (connection.gettimeout() or 0.0) * SHARE_OF_TIMEOUT)
    os.set_blocking(connection.fileno(), True)
    try:
        yield
    finally:
        os.set_blocking(connection.fileno(), False)
        _set_kernel_timeout(connection, option, 0.0)


def _set_kernel_timeout(connection: socket.socket, option: int, timeout_s: float) -> None:
    min_us = 1 if timeout_s > 0 else 0  # zero means no timeout
    timeval = struct.pack("@ll", int(timeout_s), max(int(timeout_s % 1 * 1e6), min_us))
    connection.setsockopt(socket.SOL_SOCKET, option, timeval)
