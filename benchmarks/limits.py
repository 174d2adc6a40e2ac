"""Limits of the machine itself: a thread pool on bare sockets, one copy of the memory, one write to a disk.

None of it checks, signs or promises anything: it says how fast a client could be, not what one should do.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks import training
from benchmarks.outcomes import Outcome, Running, Settings
from benchmarks.systems import System, beside

_CONNECTIONS = 8
"""With more of them it gets slower, where the server is on the same machine."""
_REQUEST_BYTES = 32 << 20
_TIMEOUT_S = 120.0
_CREDENTIAL = "AWS4-HMAC-SHA256 Credential=limit/20260101/us-east-1/s3/aws4_request"
_HEADERS = f"Host: 127.0.0.1\r\nAuthorization: {_CREDENTIAL}\r\n"
"""Without a signature: moto looks whether there is an authorization, and not at that."""
_LARGEST_HEAD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One object, and the memory that it is sent from or received into."""

    key: str
    views: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        return sum(view.nbytes for view in self.views)


class Limit(System):
    """Moves the same bytes as the others, with nothing around them."""

    name = "limit"
    schemes = ("s3", "")
    module = "torch"
    distributions = ("torch",)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._num_connections = settings.connections or _CONNECTIONS
        self._buffers: list[torch.Tensor] = []

    def save(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        """Send it, or write it to a file and wait for the disk."""
        if "://" in uri:
            self._transfer(state_dict, uri, _send)
        else:
            directory = Path(uri)
            directory.mkdir(parents=True, exist_ok=True)
            _write(directory / str(_rank()), _views(state_dict))
        return Outcome()

    def load(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        """Receive it, or copy it from the memory in which the system has the file."""
        if "://" in uri:
            self._transfer(state_dict, uri, _receive)
        else:
            _read(Path(uri) / str(_rank()), _views(state_dict))
        return Outcome(num_bytes_read=sum(view.nbytes for view in _views(state_dict)))

    def begin(self, state_dict: dict[str, Any], uri: str) -> Running:
        """Copy it in memory."""
        del uri
        sources = [_local(tensor) for tensor in state_dict.values()]
        if [source.shape for source in sources] != [buffer.shape for buffer in self._buffers]:
            self._buffers = [torch.zeros_like(source) for source in sources]
        started_s = time.perf_counter()
        for buffer, source in zip(self._buffers, sources, strict=True):
            buffer.copy_(source)
        return Running(blocking_s=time.perf_counter() - started_s, is_done=lambda: True, result=lambda: None)

    def save_beside_training(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        """Beside a process of its own that sends a copy: what the machine takes from the loop, whoever uploads."""
        processes: list[BaseProcess] = []
        blocking_s = 0.0

        def begin() -> Callable[[], bool]:
            nonlocal blocking_s
            blocking_s = self.begin(state_dict, uri).blocking_s
            copies = dict(zip(state_dict, self._buffers, strict=True))
            # Sockets alone: nothing of torch runs in the child, which would not survive the fork.
            processes.append(multiprocessing.get_context("fork").Process(target=self.save, args=(copies, uri)))
            processes[0].start()
            return lambda: not processes[0].is_alive()

        try:
            speeds = training.compared(begin)
        finally:
            for process in processes:
                process.join(_TIMEOUT_S)
        if processes[0].exitcode != 0:
            raise RuntimeError(f"the process that sends ended with {processes[0].exitcode}")
        return beside(blocking_s, speeds)

    def _transfer(
        self, state_dict: dict[str, Any], uri: str, exchange: Callable[[socket.socket, _Request], None]
    ) -> None:
        # A list's iterator, unlike a generator, may be shared by threads.
        todo = iter(list(_requests(_views(state_dict), f"/{uri.partition('://')[2]}/{_rank()}")))
        with ThreadPoolExecutor(self._num_connections) as pool:
            for done in [pool.submit(self._work, todo, exchange) for _ in range(self._num_connections)]:
                done.result()

    def _work(self, todo: Iterator[_Request], exchange: Callable[[socket.socket, _Request], None]) -> None:
        with self._connected() as connection:
            for request in todo:
                exchange(connection, request)

    def _connected(self) -> socket.socket:
        parts = urlsplit(self.settings.endpoint_url or "")
        if not parts.hostname or not parts.port:
            raise ValueError("bare sockets need an endpoint with a port")
        connection = socket.create_connection((parts.hostname, parts.port), timeout=_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if parts.scheme == "http":
            return connection
        context = ssl.create_default_context(cafile=self.settings.ca_bundle)
        return context.wrap_socket(connection, server_hostname=parts.hostname)


def _send(connection: socket.socket, request: _Request) -> None:
    head = f"PUT {request.key} HTTP/1.1\r\n{_HEADERS}Content-Length: {request.num_bytes}\r\n\r\n"
    connection.sendall(head.encode())
    for view in request.views:
        connection.sendall(view)
    rest = _body_after_head(connection)
    if rest:
        raise ValueError(f"{request.key}: an answer of {len(rest)} bytes to a put")


def _receive(connection: socket.socket, request: _Request) -> None:
    connection.sendall(f"GET {request.key} HTTP/1.1\r\n{_HEADERS}\r\n".encode())
    rest = _body_after_head(connection)
    for view in request.views:
        begin = min(len(rest), view.nbytes)
        view[:begin] = rest[:begin]
        rest = rest[begin:]
        while begin < view.nbytes:
            received = connection.recv_into(view[begin:])
            if received == 0:
                raise ConnectionError(f"{request.key}: the answer ended early")
            begin += received


def _body_after_head(connection: socket.socket) -> bytes:
    """Reads an answer's head; what came of its body along with it."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(_LARGEST_HEAD_BYTES)
        received += piece
        if not piece or len(received) > 2 * _LARGEST_HEAD_BYTES:
            raise ConnectionError(f"no answer, but {received[:100]!r}")
    head, _, rest = received.partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1] != b"200":
        raise ConnectionError(f"answered with {head[:100]!r}")
    return rest


def _requests(views: Iterable[memoryview], prefix: str) -> Iterator[_Request]:
    """The views in requests of `_REQUEST_BYTES`, the last one smaller."""
    numbers = itertools.count()
    pending: list[memoryview] = []
    pending_bytes = 0
    for whole in views:
        view = whole
        while view.nbytes:
            taken = view[: _REQUEST_BYTES - pending_bytes]
            view = view[taken.nbytes :]
            pending.append(taken)
            pending_bytes += taken.nbytes
            if pending_bytes == _REQUEST_BYTES:
                yield _Request(key=f"{prefix}-{next(numbers)}", views=tuple(pending))
                pending, pending_bytes = [], 0
    if pending:
        yield _Request(key=f"{prefix}-{next(numbers)}", views=tuple(pending))


def _write(path: Path, views: Iterable[memoryview]) -> None:
    with path.open("wb", buffering=0) as file:
        for whole in views:
            view = whole
            while view.nbytes:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _read(path: Path, views: Iterable[memoryview]) -> None:
    with path.open("rb", buffering=0) as file:
        for whole in views:
            view = whole
            while view.nbytes:
                received = file.readinto(view)
                if not received:
                    raise EOFError(f"{path} ended early")
                view = view[received:]


def _views(state_dict: dict[str, Any]) -> list[memoryview]:
    return [memoryview(_local(tensor).reshape(-1).numpy()).cast("B") for tensor in state_dict.values()]


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
