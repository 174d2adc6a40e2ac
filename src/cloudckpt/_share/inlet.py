"""The receiving of segments that ranks on other machines read."""

from __future__ import annotations

import contextlib
import errno
import hmac
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from cloudckpt._share.door import TOKEN_BYTES, Door
from cloudckpt._share.plan import Segment
from cloudckpt._share.wire import HEADER_BYTES, greeting, header_of
from cloudckpt._threads import Event
from cloudckpt.stores.base import Views

_LONGEST_CONNECT_S = 5.0
_LOOK_EVERY_S = 0.25
_MOST_LANES = 4


class _Giver:
    """A rank on another machine, from which one thread receives."""

    def __init__(self, door: Door, segments: Sequence[Segment], *, machine: int) -> None:
        self.door, self.segments, self.machine = door, list(segments), machine
        self.left = dict(enumerate(segments))
        self.connection: socket.socket | None = None
        self.is_connected = self.has_answered = False
        self.since_s = time.monotonic()
        """When it last made progress."""

    def begin(self) -> None:
        """Connect, without waiting for it."""
        family = socket.AF_INET6 if ":" in self.door.host else socket.AF_INET
        self.connection = socket.socket(family, socket.SOCK_STREAM)
        self.connection.setblocking(False)  # noqa: FBT003  # the library's signature
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = self.connection.connect_ex((self.door.host, self.door.port))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, "cannot connect")

    def next(self, header: bytes) -> tuple[Segment, int]:
        """What comes, and how many bytes: none if it will not come after all."""
        index, num_bytes = header_of(header)
        segment = self.left.get(index)
        if segment is None or num_bytes not in (0, segment.end - segment.begin):
            raise OSError(errno.EPROTO, "the other rank sends what was not asked for")
        del self.left[index]
        self.since_s = time.monotonic()
        return segment, num_bytes


class Inlet:
    """What one rank receives in one load. No other rank is waited for without bound.

    One that gives nothing, or not all of a segment that it has begun, for half of `timeout_s`, or stops in the middle
    of one for a quarter, is gone: its segments will not come. That is sooner than ranks of this machine give up this
    one.
    """

    def __init__(
        self, doors: Mapping[int, Door], *, machine: int, timeout_s: float, on_gone: Callable[[int], None]
    ) -> None:
        self._doors = doors
        self._machine = machine
        self._patience_s = timeout_s / 2
        self._stall_s = timeout_s / 4
        self._on_gone = on_gone
        self._stopped = Event()
        self._num_running: int | None = None
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()

    def lanes(self, segments: Sequence[Segment]) -> list[Iterator[tuple[Segment, Callable[[Views], bool] | None]]]:
        """Each for a thread of its own: together `segments`, each once it is there, with what fills views with its
        bytes; None if it will not come. They end early after `stop`.

        What fills them says whether the bytes came whole, and is of use until the next step.
        """
        by_machine: defaultdict[int, list[Segment]] = defaultdict(list)
        for segment in segments:
            assert segment.machine is not None  # noqa: S101  # or nobody would send it
            by_machine[segment.machine].append(segment)
        # Also those of which nothing is wanted: they would wait for this one.
        givers = [
            _Giver(door, by_machine[machine], machine=machine)
            for machine, door in self._doors.items()
            if machine != self._machine
        ]
        num_lanes = self._num_running = min(len(givers), _MOST_LANES)
        return [self._lane(givers[lane::num_lanes]) for lane in range(num_lanes)]

    @property
    def has_ended(self) -> bool:
        """Whether all has come that ever will, and every other rank has heard what this one wants."""
        return self._num_running == 0

    def stop(self) -> None:
        """Nothing more is received: whoever waits for it ends."""
        self._stopped.set()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _lane(self, givers: Sequence[_Giver]) -> Iterator[tuple[Segment, Callable[[Views], bool] | None]]:
        with selectors.DefaultSelector() as selector:
            try:
                waiting = list(givers)
                for giver in waiting:
                    self._begin(giver, selector)
                while waiting and not self._stopped.is_set():
                    ready = selector.select(_LOOK_EVERY_S)
                    now_s = time.monotonic()  # what comes while this thread is busy is not late
                    for key, _ in ready:
                        yield from self._step(key.data, selector)
                        if self._stopped.is_set():
                            return
                    self._look(waiting, selector, now_s=now_s)
                    for giver in waiting:
                        if giver.connection is None:
                            yield from ((segment, None) for segment in giver.left.values())
                            giver.left.clear()
                    waiting = [giver for giver in waiting if giver.connection is not None]
                if not self._stopped.is_set():
                    self._end_lane()
            finally:
                for giver in givers:
                    self._end(giver, selector)

    def _end_lane(self) -> None:
        with self._lock:
            self._num_running = (self._num_running or 0) - 1

    def _begin(self, giver: _Giver, selector: selectors.BaseSelector) -> None:
        try:
            giver.begin()
        except OSError:
            self._give_up(giver, selector)
            return
        assert giver.connection is not None  # noqa: S101  # it has begun
        selector.register(giver.connection, selectors.EVENT_WRITE, giver)
        with self._lock:
            self._connections.add(giver.connection)

    def _step(
        self, giver: _Giver, selector: selectors.BaseSelector
    ) -> Iterator[tuple[Segment, Callable[[Views], bool] | None]]:
        connection = giver.connection
        if connection is None:
            return
        deadline_s = time.monotonic() + self._patience_s
        try:
            if not giver.is_connected:
                self._greet(giver, connection)
                selector.modify(connection, selectors.EVENT_READ, giver)
            elif not giver.has_answered:
                answer = _received(connection, TOKEN_BYTES, deadline_s=deadline_s)
                if not hmac.compare_digest(answer, giver.door.answer):
                    self._give_up(giver, selector)
                    return
                giver.has_answered = True
                giver.since_s = time.monotonic()
            else:
                segment, num_bytes = giver.next(_received(connection, HEADER_BYTES, deadline_s=deadline_s))
                if num_bytes == 0:
                    yield segment, None
                else:
                    body = _Body(connection, patience_s=self._patience_s)
                    yield segment, body.fill
                    giver.since_s = time.monotonic()
                    if not body.is_whole:  # what follows could not be told from it
                        self._give_up(giver, selector)
            if giver.is_connected and not giver.left and giver.has_answered:
                self._end(giver, selector)
        except OSError:
            self._give_up(giver, selector)

    def _greet(self, giver: _Giver, connection: socket.socket) -> None:
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, "cannot connect")
        connection.settimeout(self._stall_s)
        connection.sendall(greeting(giver.door, machine=self._machine, wanted=giver.segments))
        giver.is_connected = True
        giver.since_s = time.monotonic()

    def _look(self, waiting: Sequence[_Giver], selector: selectors.BaseSelector, *, now_s: float) -> None:
        for giver in waiting:
            patience_s = self._patience_s if giver.is_connected else min(self._patience_s, _LONGEST_CONNECT_S)
            if giver.connection is not None and now_s - giver.since_s >= patience_s:
                self._give_up(giver, selector)

    def _give_up(self, giver: _Giver, selector: selectors.BaseSelector) -> None:
        self._end(giver, selector)
        self._on_gone(giver.machine)

    def _end(self, giver: _Giver, selector: selectors.BaseSelector) -> None:
        connection, giver.connection = giver.connection, None
        if connection is None:
            return
        with contextlib.suppress(KeyError):
            selector.unregister(connection)
        with self._lock:
            self._connections.discard(connection)
        connection.close()


class _Body:
    """The bytes of one segment, on their way."""

    def __init__(self, connection: socket.socket, *, patience_s: float) -> None:
        self._connection = connection
        self._patience_s = patience_s
        self.is_whole = False

    def fill(self, views: Views) -> bool:
        """Once only. False where the connection broke, or brought nothing or too little for too long."""
        deadline_s = time.monotonic() + self._patience_s
        try:
            for view in views:
                _receive_into(self._connection, view, deadline_s=deadline_s)
        except OSError:
            return False
        self.is_whole = True
        return True


def _received(connection: socket.socket, num_bytes: int, *, deadline_s: float) -> bytes:
    found = bytearray(num_bytes)
    _receive_into(connection, memoryview(found), deadline_s=deadline_s)
    return bytes(found)


def _receive_into(connection: socket.socket, view: memoryview, *, deadline_s: float) -> None:
    """Raises `OSError` where the other end has closed, nothing comes for as long as the socket's timeout says, or not
    all has come by the deadline.
    """
    while view:
        if time.monotonic() >= deadline_s:
            raise TimeoutError("the other rank sends too slowly")
        num_received = connection.recv_into(view)
        if not num_received:
            raise OSError(errno.ECONNRESET, "the other rank has closed the connection")
        view = view[num_received:]
