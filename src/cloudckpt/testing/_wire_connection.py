"""One client's connection through the wire, and the store's behind it."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias

from cloudckpt.testing._wire_actions import (
    CutAnswer,
    CutRequest,
    Delay,
    LoseAnswer,
    Moment,
    Reply,
    Seen,
    StallAnswer,
    StallRequest,
    Tell,
    Throttle,
)
from cloudckpt.testing._wire_http import EndedError, Head, Stream, all_but_the_last_byte

Decide: TypeAlias = Callable[[Head], Seen]
"""Notes the request, and says what to do to it."""
Connect: TypeAlias = Callable[[], socket.socket]
Stall: TypeAlias = Callable[[], object]
"""Returns once the wire is closed."""
Pause: TypeAlias = Callable[[float], object]
"""Returns after so many seconds."""

_FINAL = 200
_THROTTLED_BYTES = 16 * 1024  # what goes through at once where the rate is low


def reset(connection: socket.socket) -> None:
    """End the connection so that the other side meets an error, not an end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Connection:
    """Passes one exchange after the other until either side ends, or a rule ends it."""

    def __init__(self, client: socket.socket, *, connect: Connect, decide: Decide, stall: Stall, pause: Pause) -> None:
        self._client = Stream(client)
        self._connect = connect
        self._decide = decide
        self._stall = stall
        self._pause = pause
        self._store: Stream | None = None

    def run(self) -> None:
        """Until the end; both sockets are closed then."""
        try:
            while self._waits_for_client() and (head := self._client.head()) is not None:
                if not self._exchange(head):
                    break
        except (EndedError, OSError, ValueError):
            # What the store does to us is done to the client, and the other way round: it meets a broken connection.
            reset(self._client.socket)
        finally:
            self._client.socket.close()
            if self._store is not None:
                self._store.socket.close()

    def _waits_for_client(self) -> bool:
        """True once the client has sent something; false where the store ends the connection first, as it may."""
        if self._store is None or self._client.holds_bytes:
            return True
        ready, _, _ = select.select([self._client.socket, self._store.socket], [], [])
        return self._client.socket in ready

    def _exchange(self, head: Head) -> bool:
        """One request and its answer; whether another may follow."""
        seen = self._decide(head)
        action = seen.action
        body = self._client.request_body(head)
        if isinstance(action, Reply):
            return self._reply(action, head, body)
        self._act("request", seen)
        if isinstance(action, Throttle):
            body = self._slowly(body, action.request_bytes_per_s)
        if isinstance(action, CutRequest | StallRequest):
            return self._break_request(action, head, body)
        answer = self._pass_on(head, body)
        pieces = self._reach_store().answer_body(answer, method=head.method)
        if isinstance(action, LoseAnswer | CutAnswer | StallAnswer):
            return self._break_answer(action, answer, pieces)
        if isinstance(action, Tell | Delay) and action.moment == "answer":
            pieces = iter(list(pieces))  # a completion of S3's is carried out when its answer ends, not when it begins
        self._act("answer", seen)
        if isinstance(action, Throttle):
            pieces = self._slowly(pieces, action.answer_bytes_per_s)
        self._client.socket.sendall(answer.raw)
        for piece in pieces:
            self._client.socket.sendall(piece)
        return answer.leaves_open(head)

    def _act(self, moment: Moment, seen: Seen) -> None:
        action = seen.action
        if isinstance(action, Tell) and action.moment == moment:
            action.function(seen)
        if isinstance(action, Delay) and action.moment == moment:
            self._pause(action.delay_s)

    def _slowly(self, pieces: Iterator[bytes], bytes_per_s: float | None) -> Iterator[bytes]:
        if bytes_per_s is None:
            yield from pieces
            return
        for piece in pieces:
            for start in range(0, len(piece), _THROTTLED_BYTES):
                part = piece[start : start + _THROTTLED_BYTES]
                self._pause(len(part) / bytes_per_s)
                yield part

    def _reply(self, action: Reply, head: Head, body: Iterator[bytes]) -> bool:
        if not head.expects_continue:
            for _ in body:
                pass
        reason = http.client.responses.get(action.status, "")
        fields = [("Content-Length", str(len(action.body))), *action.headers]
        if head.expects_continue:
            fields.append(("Connection", "close"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        content = b"" if head.method == "HEAD" else action.body
        self._client.socket.sendall(f"HTTP/1.1 {action.status} {reason}\r\n{lines}\r\n".encode("latin-1") + content)
        return not head.expects_continue

    def _pass_on(self, head: Head, body: Iterator[bytes]) -> Head:
        """The store's answer to the whole request."""
        store = self._reach_store()
        store.socket.sendall(head.raw)
        if head.expects_continue:
            answer = self._final_answer(store, stops_at_interim=True)
            if answer is not None:
                return answer
        with contextlib.suppress(ConnectionError):  # a store may refuse a request before it has read all of it
            for piece in body:
                store.socket.sendall(piece)
        answer = self._final_answer(store)
        if answer is None:
            raise EndedError
        return answer

    def _final_answer(self, store: Stream, *, stops_at_interim: bool = False) -> Head | None:
        while (answer := store.head()) is not None:
            if answer.status >= _FINAL:
                return answer
            self._client.socket.sendall(answer.raw)
            if stops_at_interim:
                return None
        raise EndedError

    def _break_request(self, action: CutRequest | StallRequest, head: Head, body: Iterator[bytes]) -> bool:
        pieces = all_but_the_last_byte(body, most_bytes=action.after_bytes)
        first = next(pieces, None)
        if first is not None:  # a request without a body is whole with its head, so nothing of it may pass
            store = self._reach_store()
            store.socket.sendall(head.raw)
            store.socket.sendall(first)
            for piece in pieces:
                store.socket.sendall(piece)
        if isinstance(action, StallRequest):
            self._stall()
        reset(self._client.socket)
        return False

    def _break_answer(
        self, action: LoseAnswer | CutAnswer | StallAnswer, answer: Head, pieces: Iterator[bytes]
    ) -> bool:
        after_bytes = None if isinstance(action, LoseAnswer) else action.after_bytes
        if after_bytes is not None:
            self._client.socket.sendall(answer.raw)
            for piece in all_but_the_last_byte(pieces, most_bytes=after_bytes):
                self._client.socket.sendall(piece)
        for _ in pieces:  # what is lost has been answered all the same
            pass
        if isinstance(action, StallAnswer):
            self._stall()
        if isinstance(action, LoseAnswer) or (isinstance(action, CutAnswer) and action.reset):
            reset(self._client.socket)
        return False

    def _reach_store(self) -> Stream:
        if self._store is None:
            self._store = Stream(self._connect())
        return self._store
