"""Messages between two processes of one program, with open files beside them where needed."""

from __future__ import annotations

import array
import contextlib
import functools
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

MOST_FILES = 250
"""Beside one message; Linux takes 253 (``SCM_MAX_FD``)."""

_HEADER = struct.Struct("<QI")
"""How many bytes of pickle follow, and how many files came with this header."""
_ROOM_FOR_FILES = socket.CMSG_SPACE(MOST_FILES * array.array("i").itemsize)
_MS_PER_S = 1000


class ClosedError(Exception):
    """The other end is closed: its process has ended, or is about to."""


class SilentError(Exception):
    """The other end took or gave nothing for as long as it was waited for."""


class GarbledError(Exception):
    """What came is no message, or one that this process lacks the modules for. The next one can be received."""


class Channel:
    """One end of a socket pair. One thread at a time may receive; any may send, and each message goes as a whole.

    No call waits for longer than its `timeout_s` without a byte's progress; None is for ever. The socket has no timeout
    of its own: it would be that of all threads.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)  # noqa: FBT003  # the library's signature
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: object, files: Sequence[int] = (), *, timeout_s: float | None) -> None:
        """Send `message`, pickled, with copies of `files`, at most `MOST_FILES`.

        Raises `ClosedError`; `SilentError`, after which the channel is shut, since half a message may have gone; and,
        before anything is sent, whatever pickling raises.
        """
        content = memoryview(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        header = memoryview(_HEADER.pack(len(content), len(files)))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        with self._sending:
            try:
                # The files go with the header's first byte, so none can be taken for another message's.
                sent = self._done(lambda: self._connection.sendmsg([header], ancillary), select.POLLOUT, timeout_s)
                for rest in (header[sent:], content):
                    self._send_all(rest, timeout_s)
            except SilentError:
                self.shut()
                raise

    def receive(self, *, timeout_s: float | None) -> tuple[Any, list[int]]:
        """The next message, and the files that came with it, which are the caller's to close.

        Raises `ClosedError`, `SilentError` and `GarbledError`.
        """
        files: list[int] = []
        try:
            header = self._receive_header(files, timeout_s)
            num_bytes, num_files = _HEADER.unpack(header)
            content = memoryview(bytearray(num_bytes))
            self._receive_all(content, timeout_s)
            if len(files) != num_files:
                raise GarbledError("not all files came: this process has too many open")  # noqa: TRY301  # they are closed below
            return _unpickled(content), files
        except BaseException:
            close_files(files)
            raise

    def shut(self) -> None:
        """End both directions: whoever waits, at either end, gets `ClosedError`. For any thread, and repeatable."""
        with contextlib.suppress(OSError):  # the other end was faster, or it is closed already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut it, and free the socket. Only for when no other thread uses it any more."""
        self.shut()
        self._connection.close()

    def forget(self) -> None:
        """Free this process's copy of an end that another process goes on using."""
        self._connection.close()

    def is_open(self) -> bool:
        """Whether the other end was open a moment ago, as far as can be told without receiving."""
        poller = select.poll()
        try:
            poller.register(self._connection, select.POLLIN)
        except ValueError:
            return False
        return not any(state & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, state in poller.poll(0))

    def _receive_header(self, files: list[int], timeout_s: float | None) -> bytes:
        """Its bytes; the files that come with them are added to `files` at once, so that none is lost."""
        header = b""
        while len(header) < _HEADER.size:
            missing = _HEADER.size - len(header)
            receive = functools.partial(self._connection.recvmsg, missing, _ROOM_FOR_FILES, socket.MSG_CMSG_CLOEXEC)
            got, ancillary, _, _ = self._done(receive, select.POLLIN, timeout_s)
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                    files += numbers
            if not got:
                raise ClosedError
            header += got
        return header

    def _receive_all(self, view: memoryview, timeout_s: float | None) -> None:
        while view:
            got = self._done(functools.partial(self._connection.recv_into, view), select.POLLIN, timeout_s)
            if not got:
                raise ClosedError
            view = view[got:]

    def _send_all(self, view: memoryview, timeout_s: float | None) -> None:
        while view:
            sent = self._done(functools.partial(self._connection.send, view), select.POLLOUT, timeout_s)
            view = view[sent:]

    def _done(self, call: Callable[[], Any], event: int, timeout_s: float | None) -> Any:
        """What `call` returns as soon as it need not wait."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return call()
            except BlockingIOError:
                pass
            except OSError as error:  # reset, a broken pipe, shut or closed here
                raise ClosedError from error
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise SilentError
            poller = select.poll()
            try:
                poller.register(self._connection, event)
            except ValueError as error:
                raise ClosedError from error
            poller.poll(None if left_s is None else left_s * _MS_PER_S)


def _unpickled(content: memoryview) -> Any:
    try:
        return pickle.loads(content)  # noqa: S301  # from the other end, which is of this program
    except Exception as error:  # unpickling can raise anything
        raise GarbledError(f"{type(error).__name__}: {error}") from error


def close_files(files: Sequence[int]) -> None:
    """Close each of them."""
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)
