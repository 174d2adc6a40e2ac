"""The sending between machines, here in one process, and what becomes of it where one end goes, hangs or is no rank."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cloudckpt._share import door as doors
from cloudckpt._share.door import Door, Entrance, own_host
from cloudckpt._share.inlet import Inlet
from cloudckpt._share.outlet import Outlet
from cloudckpt._share.plan import Segment
from cloudckpt._share.wire import greeting, header

WAIT_S = 60.0
SEGMENT_BYTES = 300_000
THERE, HERE = 0, 1
"""The machine that reads, and the one that wants."""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    found = Entrance.new()
    assert found is not None
    yield found
    found.close()


@pytest.fixture
def opened(entrance: Entrance) -> Iterator[Callable[..., Outlet]]:
    found: list[Outlet] = []

    def open_outlet(some: list[Segment], *, timeout_s: float = WAIT_S, machines: tuple[int, ...] = (HERE,)) -> Outlet:
        found.append(Outlet(entrance, some, machines=machines, timeout_s=timeout_s))
        return found[-1]

    yield open_outlet
    for outlet in found:
        outlet.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "cloudckpt-send"]


def segments(num_segments: int, *, machine: int = THERE) -> list[Segment]:
    return [
        Segment(
            number=number,
            object_index=0,
            begin=number * SEGMENT_BYTES,
            end=(number + 1) * SEGMENT_BYTES,
            reader=0,
            takers=(),
            machine=machine,
        )
        for number in range(num_segments)
    ]


def content(number: int) -> bytes:
    return bytes([number % 251]) * SEGMENT_BYTES


class Wanting:
    """The end that wants, with what it got of each segment."""

    def __init__(self, door: Door, *, timeout_s: float = WAIT_S) -> None:
        self.gone: list[int] = []
        self.inlet = Inlet({THERE: door, HERE: door}, machine=HERE, timeout_s=timeout_s, on_gone=self.gone.append)

    def all_of(self, some: list[Segment]) -> dict[int, bytes | None]:
        found: dict[int, bytes | None] = {}
        for lane in self.inlet.lanes(some):
            for segment, fill in lane:
                view = memoryview(bytearray(SEGMENT_BYTES))
                is_whole = fill is not None and fill([view[:7], view[7:]])
                found[segment.number] = bytes(view) if is_whole else None
        return found


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


def test_all_that_is_sent_arrives_and_what_fails_is_said(entrance: Entrance, opened: Callable[..., Outlet]) -> None:
    """If this fails, bytes come in another segment's place, or a rank waits for what could not be read."""
    some = segments(20)
    outlet = opened(some)
    for segment in reversed(some[:15]):  # before it is connected
        outlet.send(segment.number, memoryview(content(segment.number)))

    def send_the_rest() -> None:
        wait_until(lambda: outlet.is_done(14))
        for number in (15, 16):
            outlet.send(number, memoryview(content(number)))
        outlet.send(17, None)
        outlet.leave()

    sender = threading.Thread(target=send_the_rest)
    sender.start()
    found = Wanting(entrance.door).all_of(some)
    sender.join(WAIT_S)
    assert found == {number: content(number) if number < 17 else None for number in range(20)}
    wait_until(lambda: all(outlet.is_done(segment.number) for segment in some))


def test_what_is_not_wanted_after_all_is_kept_for_nobody(entrance: Entrance, opened: Callable[..., Outlet]) -> None:
    """If this fails, the places of the ring fill up with what another machine has declined."""
    some = segments(4)
    outlet = opened(some)
    for segment in some:
        outlet.send(segment.number, memoryview(content(segment.number)))
    assert not outlet.is_done(3)
    assert Wanting(entrance.door).all_of(some[:1]) == {0: content(0)}
    wait_until(lambda: outlet.is_done(3))


@pytest.mark.parametrize("how", ["never comes", "takes nothing", "goes in the middle", "is known to be gone"])
def test_a_machine_that_takes_nothing_is_not_waited_for(
    entrance: Entrance, opened: Callable[..., Outlet], how: str
) -> None:
    """If this fails, a hanging or killed rank on another machine keeps this one's ring full for ever."""
    some = segments(60)  # more than a connection takes without a reader
    outlet = opened(some, timeout_s=WAIT_S if how in ("goes in the middle", "is known to be gone") else 2.0)
    for segment in some:
        outlet.send(segment.number, memoryview(content(segment.number)))
    with socket.socket() as other:
        if how in ("takes nothing", "goes in the middle"):
            other.connect((entrance.door.host, entrance.door.port))
            other.sendall(greeting(entrance.door, machine=HERE, wanted=some))
            assert other.recv(32) == entrance.door.answer
        if how == "goes in the middle":
            other.close()
        if how == "is known to be gone":
            outlet.forget(HERE)
        wait_until(lambda: all(outlet.is_done(segment.number) for segment in some))


@pytest.mark.parametrize("how", ["wrong key", "unknown segment", "unknown machine", "too many", "goes on talking"])
def test_a_stranger_gets_nothing(entrance: Entrance, opened: Callable[..., Outlet], how: str) -> None:
    """If this fails, whoever reaches the port reads the model, or one bad caller keeps the ranks from sharing."""
    some = segments(3)
    outlet = opened(some)
    for segment in some:
        outlet.send(segment.number, memoryview(content(segment.number)))
    wrong = Door(host="", port=0, key=bytes(32), answer=b"")
    text = {
        "wrong key": greeting(wrong, machine=HERE, wanted=some),
        "unknown segment": greeting(entrance.door, machine=HERE, wanted=[*some[:2], segments(9)[8]]),
        "unknown machine": greeting(entrance.door, machine=7, wanted=some),
        "too many": greeting(entrance.door, machine=HERE, wanted=segments(4)),
        "goes on talking": greeting(wrong, machine=HERE, wanted=[]) + b"!" * 100,
    }[how]
    with socket.create_connection((entrance.door.host, entrance.door.port), timeout=WAIT_S) as stranger:
        stranger.sendall(text)
        try:
            heard = stranger.recv(1)
        except ConnectionResetError:
            heard = b""
        assert heard == b""
    assert set(Wanting(entrance.door).all_of(some).values()) == {content(number) for number in range(3)}


def test_all_machines_may_come_before_any_of_them_says_a_word(
    entrance: Entrance, opened: Callable[..., Outlet]
) -> None:
    """If this fails, machines of a large job are turned away, and this one's ring waits for them until the timeout."""
    (segment,) = segments(1)
    machines = tuple(range(1, 101))
    outlet = opened([segment], machines=machines)
    outlet.send(segment.number, memoryview(content(0)))
    with contextlib.ExitStack() as stack:
        callers = [
            stack.enter_context(socket.create_connection((entrance.door.host, entrance.door.port), timeout=WAIT_S))
            for _ in machines
        ]
        # They are let in in their order: by the time of the last, all that are turned away have been.
        callers[-1].sendall(greeting(entrance.door, machine=machines[-1], wanted=[segment]))
        assert callers[-1].recv(32) == entrance.door.answer
        for machine, caller in zip(machines[:-1], callers[:-1], strict=True):
            caller.sendall(greeting(entrance.door, machine=machine, wanted=[]))
            assert caller.recv(32) == entrance.door.answer


@pytest.mark.parametrize(
    "how", ["is not there", "never answers", "is another", "stops", "drips", "breaks off", "sends another"]
)
def test_what_does_not_come_is_left_to_this_rank_in_time(how: str) -> None:
    """If this fails, a rank waits without end for another machine, or takes bytes from who is none of its ranks."""
    some = segments(3)
    door = Door(host="127.0.0.1", port=1, key=b"k" * 32, answer=b"a" * 32)
    words = {
        "is not there": b"",
        "never answers": b"",
        "is another": b"x" * 32,
        "stops": door.answer + header(0, SEGMENT_BYTES) + b"half",
        "drips": door.answer + header(0, SEGMENT_BYTES) + b"half",
        "breaks off": door.answer + header(0, SEGMENT_BYTES) + b"half",
        "sends another": door.answer + header(0, 17) + b"z" * 17,
    }[how]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        door = Door(host="127.0.0.1", port=server.getsockname()[1], key=door.key, answer=door.answer)
        if how == "is not there":
            server.close()
        kept: list[socket.socket] = []

        def serve() -> None:
            connection, _ = server.accept()
            kept.append(connection)
            connection.recv(1)
            connection.sendall(words)
            with contextlib.suppress(OSError):
                while how == "drips" and time.monotonic() < begun_s + WAIT_S / 2:
                    threading.Event().wait(0.02)
                    connection.sendall(b"!")
            if how == "breaks off":
                connection.close()

        begun_s = time.monotonic()
        thread = threading.Thread(target=serve)
        if how not in ("is not there", "never answers"):
            thread.start()
        wanting = Wanting(door, timeout_s=1.0 if how in ("never answers", "stops", "drips") else WAIT_S)
        assert wanting.all_of(some) == dict.fromkeys(range(3))
        assert time.monotonic() - begun_s < WAIT_S / 4
        assert wanting.gone == [THERE]
        if thread.ident is not None:
            thread.join(WAIT_S)
        for connection in kept:
            connection.close()


def test_who_waits_can_be_stopped(entrance: Entrance, opened: Callable[..., Outlet]) -> None:
    """If this fails, a load that has failed waits for other machines before it says so."""
    opened(segments(3))
    wanting = Wanting(entrance.door)
    thread = threading.Thread(target=wanting.all_of, args=(segments(3),))
    thread.start()
    wanting.inlet.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_no_door_opens_where_others_could_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, ranks of other machines call their own machine, and wait there for an answer, or a load fails that
    needs no other machine.
    """
    assert own_host() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such0")
    assert own_host() is None
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("localhost", "a" * 64):  # the second is no name that could be looked up
        monkeypatch.setattr(doors.socket, "gethostname", lambda name=name: name)
        assert own_host() is None
        assert Entrance.new() is None
