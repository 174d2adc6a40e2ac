"""The sending of segments that this rank reads to the ranks on other machines that want them."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from cloudckpt._share.door import Entrance
from cloudckpt._share.plan import Segment
from cloudckpt._share.wire import GREETING_BYTES, WANT_BYTES, greeting_of, header, wants_of
from cloudckpt._threads import Thread

_MOST_STRANGERS = 64
"""Beyond one for each machine, all of which may come before the first has shown the key."""
_PIECE_BYTES = 1 << 20
_LOOK_EVERY_S = 0.25
_CLOSING_S = 5.0


class _Caller:
    """A connection, of a stranger until it has shown the key."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.heard = bytearray()
        self.machine: int | None = None
        self.indices: dict[int, int] = {}
        """The place in its list of each segment, by number, that it has still to get."""
        self.queue: deque[tuple[int | None, memoryview]] = deque()
        """What is to be sent, each with the number of the segment whose last bytes it is."""
        self.progress_s = time.monotonic()


class Outlet:
    """Sends what it is given to each machine that wants it. One thread does all of it, and waits for no machine.

    A machine that does not come, or takes nothing, for `timeout_s`, or whose connection breaks, is gone: nothing is
    kept for it, and nobody waits for it. Safe to use from many threads.
    """

    def __init__(
        self, entrance: Entrance, segments: Sequence[Segment], *, machines: Iterable[int], timeout_s: float
    ) -> None:
        self._entrance = entrance
        self._timeout_s = timeout_s
        self._numbers = {(segment.object_index, segment.begin): segment.number for segment in segments}
        self._lock = threading.Lock()
        self._awaited = dict.fromkeys(machines, time.monotonic())
        """Those that have not come yet, and since when."""
        self._callers: dict[int, _Caller] = {}
        self._strangers: set[_Caller] = set()
        self._most_strangers = _MOST_STRANGERS + len(self._awaited)
        self._open = {segment.number: set(self._awaited) for segment in segments}
        """Who has still to get each segment."""
        self._ready: dict[int, memoryview | None] = {}
        """What can be sent; None will not come."""
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)  # noqa: FBT003  # the library's signature
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(entrance.listener, selectors.EVENT_READ)
        self._thread = Thread(self._run, name="cloudckpt-send", daemon=True)
        self._thread.start()

    def send(self, number: int, view: memoryview | None) -> None:
        """Send the segment to all that want it; None if it will not come.

        `view` has to stay as it is until `is_done`.
        """
        with self._lock:
            if number in self._ready:
                return
            self._ready[number] = view
            for machine in self._open[number]:
                if machine in self._callers:
                    self._enqueue(self._callers[machine], number)
            self._forget_sent(number)
        self._wake()

    def is_done(self, number: int) -> bool:
        """Whether nobody will look at the segment's bytes any more."""
        with self._lock:
            return not self._open[number]

    def forget(self, machine: int) -> None:
        """It is known to be gone, unless it is connected here."""
        with self._lock:
            if self._awaited.pop(machine, None) is not None:
                self._close_to(machine)

    def leave(self) -> None:
        """What has not been given by now will not come. What has been is still sent."""
        for number in list(self._open):
            self.send(number, None)

    def break_off(self) -> None:
        """Nothing more is sent, and all who want something see it at once."""
        with self._lock:
            self._is_closing = True
        self._wake()

    def close(self) -> None:
        """Break off, and wait until everything is closed."""
        self.break_off()
        self._thread.join(_CLOSING_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is closed, or full, and then it wakes anyhow
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(_LOOK_EVERY_S):
                    if key.fileobj is self._woken:
                        with contextlib.suppress(OSError):
                            self._woken.recv(4096)
                    elif key.fileobj is self._entrance.listener:
                        self._accept()
                    else:
                        self._serve(key.data, events)
                with self._lock:
                    if self._is_closing:
                        return
                    self._look()
        finally:
            self._close_all()

    def _accept(self) -> None:
        try:
            connection, _ = self._entrance.listener.accept()
        except OSError:
            return
        if len(self._strangers) >= self._most_strangers:
            connection.close()
            return
        connection.setblocking(False)  # noqa: FBT003  # the library's signature
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = _Caller(connection)
        self._strangers.add(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _serve(self, caller: _Caller, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not self._hear(caller):
                self._drop(caller)
                return
            if events & selectors.EVENT_WRITE:
                self._send_some(caller)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(caller)

    def _hear(self, caller: _Caller) -> bool:
        """Read on; False where the connection is of no use any more."""
        goal_bytes = GREETING_BYTES
        if len(caller.heard) >= GREETING_BYTES:
            goal_bytes += greeting_of(caller.heard)[2] * WANT_BYTES
        text = caller.connection.recv(max(goal_bytes - len(caller.heard), 1))
        if not text or caller.machine is not None:  # it has ended, or goes on talking
            return False
        caller.heard += text
        if len(caller.heard) < GREETING_BYTES:
            return True
        key, machine, num_wants = greeting_of(caller.heard)
        if not hmac.compare_digest(key, self._entrance.door.key) or num_wants > len(self._numbers):
            return False
        if len(caller.heard) < GREETING_BYTES + num_wants * WANT_BYTES:
            return True
        return self._admit(caller, machine, wants_of(caller.heard))

    def _admit(self, caller: _Caller, machine: int, wants: list[tuple[int, int]]) -> bool:
        try:
            indices = {self._numbers[want]: index for index, want in enumerate(wants)}
        except KeyError:
            return False
        caller.heard = bytearray()
        with self._lock:
            if self._awaited.pop(machine, None) is None:  # it is known already, or was given up
                return False
            self._strangers.discard(caller)
            self._callers[machine] = caller
            caller.machine, caller.indices, caller.progress_s = machine, indices, time.monotonic()
            caller.queue.append((None, memoryview(self._entrance.door.answer)))
            for number, machines in self._open.items():
                if number not in indices:
                    machines.discard(machine)
                    self._forget_sent(number)
                elif number in self._ready:
                    self._enqueue(caller, number)
            self._watch(caller)
        return True

    def _enqueue(self, caller: _Caller, number: int) -> None:
        view = self._ready[number]
        if not caller.queue:
            caller.progress_s = time.monotonic()
        index = caller.indices.pop(number)
        if view is None:
            caller.queue.append((number, memoryview(header(index, 0))))
        else:
            caller.queue.append((None, memoryview(header(index, len(view)))))
            caller.queue.append((number, view))

    def _send_some(self, caller: _Caller) -> None:
        """Into the connection, as much as it takes at once, but no more than lets the others wait."""
        with self._lock:
            found = caller.queue[0] if caller.queue else None
        if found is None:
            self._watch(caller)
            return
        number, view = found
        num_sent = caller.connection.send(view[:_PIECE_BYTES])
        with self._lock:
            caller.progress_s = time.monotonic()
            if num_sent < len(view):
                caller.queue[0] = number, view[num_sent:]
                return
            caller.queue.popleft()
            if number is not None and caller.machine is not None:
                self._open[number].discard(caller.machine)
                self._forget_sent(number)
            self._watch(caller)

    def _forget_sent(self, number: int) -> None:
        if not self._open[number] and number in self._ready:
            self._ready[number] = None  # its place may be another's from now on

    def _watch(self, caller: _Caller) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.queue else 0)
        if self._selector.get_key(caller.connection).events != events:
            self._selector.modify(caller.connection, events, caller)

    def _look(self) -> None:
        since_s = time.monotonic() - self._timeout_s
        for machine, awaited_s in list(self._awaited.items()):
            if awaited_s <= since_s:
                del self._awaited[machine]
                self._close_to(machine)
        for caller in list(self._callers.values()):
            if caller.queue and caller.progress_s <= since_s:
                self._drop_known(caller)
            else:
                self._watch(caller)
        for caller in [one for one in self._strangers if one.progress_s <= since_s]:
            self._strangers.discard(caller)
            self._forget_connection(caller)

    def _drop(self, caller: _Caller) -> None:
        with self._lock:
            self._strangers.discard(caller)
            self._drop_known(caller)

    def _drop_known(self, caller: _Caller) -> None:
        self._forget_connection(caller)
        caller.queue.clear()
        if caller.machine is not None:
            self._callers.pop(caller.machine, None)
            self._close_to(caller.machine)

    def _close_to(self, machine: int) -> None:
        for number, machines in self._open.items():
            machines.discard(machine)
            self._forget_sent(number)

    def _forget_connection(self, caller: _Caller) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(caller.connection)
        caller.connection.close()

    def _close_all(self) -> None:
        with self._lock:
            for caller in [*self._callers.values(), *self._strangers]:
                self._drop_known(caller)
            for machines in self._open.values():
                machines.clear()
            self._awaited.clear()
            self._ready.clear()
            self._selector.close()
            self._waker.close()
            self._woken.close()
            self._entrance.close()
