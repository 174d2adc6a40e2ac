"""A program that passes connections on and holds all of them together to a rate.

``relay.py PORT TARGET_PORT BYTES_PER_S``. What clients send is held to the rate, what they are answered is not. It is a
process of its own, so that it takes nothing of theirs but the line.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable

HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 20
"""Large, so that the line seldom wakes: a real one takes none of the cores that client and server share here."""


class Line:
    """A rate that many share, in the order in which they ask."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def carry(self, num_bytes: int) -> None:
        """Return when the line has carried them."""
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
            wait_s = self._free_at_s - now_s
        time.sleep(wait_s)


def serve(listener: socket.socket, target_port: int, line: Line) -> None:
    """Pass on every connection that comes, for ever."""
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((HOST, target_port))
        for source, sink, carry in ((client, server, line.carry), (server, client, _at_once)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pass_on, args=(source, sink, carry), daemon=True).start()


def _at_once(num_bytes: int) -> None:
    del num_bytes


def _pass_on(source: socket.socket, sink: socket.socket, carry: Callable[[int], None]) -> None:
    piece = memoryview(bytearray(_PIECE_BYTES))
    with contextlib.suppress(OSError):
        while num_bytes := source.recv_into(piece):
            carry(num_bytes)
            sink.sendall(piece[:num_bytes])
    for end in (source, sink):
        # One direction ends for both: HTTP has no half-open connections.
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def main() -> None:
    port, target_port, bytes_per_s = sys.argv[1:]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, int(port)))
        listener.listen(128)
        serve(listener, int(target_port), Line(float(bytes_per_s)))


if __name__ == "__main__":
    main()
