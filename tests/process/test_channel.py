"""Messages between two processes: whole, in their order, with their files, and no wait without a bound."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudckpt._process.channel import Channel, ClosedError, GarbledError, SilentError, close_files

WAIT_S = 60.0
SOON_S = 0.05


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = socket.socketpair()
    channels = Channel(one), Channel(other)
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_whole_and_in_order_while_both_ends_talk(ends: tuple[Channel, Channel]) -> None:
    """If this fails, the two processes wait for each other for ever, or understand each other wrongly."""
    messages = [bytes([n % 251]) * (n * 40_000) for n in range(60)]  # far more than a socket holds

    def talk(channel: Channel) -> list[bytes]:
        sender = threading.Thread(target=lambda: [channel.send(message, timeout_s=WAIT_S) for message in messages])
        sender.start()
        got = [channel.receive(timeout_s=WAIT_S)[0] for _ in messages]
        sender.join(WAIT_S)
        return got

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(talk, ends)) == [messages, messages]


def test_threads_that_send_at_once_do_not_mix_their_messages(ends: tuple[Channel, Channel]) -> None:
    """If this fails, an event of one upload thread breaks that of another, and the save with it."""
    one, other = ends
    senders = [
        threading.Thread(target=lambda n=n: [one.send((n, bytes([n]) * 70_000), timeout_s=WAIT_S) for _ in range(20)])
        for n in range(4)
    ]
    for sender in senders:
        sender.start()
    got = [other.receive(timeout_s=WAIT_S)[0] for _ in range(80)]
    for sender in senders:
        sender.join(WAIT_S)
    assert all(content == bytes([n]) * 70_000 for n, content in got)
    assert sorted(n for n, _ in got) == sorted(list(range(4)) * 20)


def test_files_come_with_their_message(ends: tuple[Channel, Channel]) -> None:
    """If this fails, the upload process maps other memory than that of the snapshot."""
    one, other = ends
    files = []
    for n in range(70):
        files.append(os.memfd_create(f"file-{n}"))
        os.write(files[-1], b"%d" % n)
    one.send("without", timeout_s=WAIT_S)
    one.send("with", files, timeout_s=WAIT_S)
    one.send("after", timeout_s=WAIT_S)
    close_files(files)
    assert other.receive(timeout_s=WAIT_S) == ("without", [])
    message, got = other.receive(timeout_s=WAIT_S)
    try:
        assert message == "with"
        assert [os.pread(file, 10, 0) for file in got] == [b"%d" % n for n in range(70)]
        assert not any(os.get_inheritable(file) for file in got)
    finally:
        close_files(got)
    assert other.receive(timeout_s=WAIT_S) == ("after", [])


def test_an_end_that_is_closed_is_told_at_once(ends: tuple[Channel, Channel]) -> None:
    """If this fails, a process outlives the other, or a save waits for one that is gone."""
    one, other = ends
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.receive, timeout_s=None)
        one.close()
        assert isinstance(waiting.exception(WAIT_S), ClosedError)
    with pytest.raises(ClosedError):
        other.send("too late", timeout_s=WAIT_S)
    assert not other.is_open()


def test_what_was_sent_before_the_end_is_still_received(ends: tuple[Channel, Channel]) -> None:
    """If this fails, a process that died right after it began the commit is taken for one that did not begin it."""
    one, other = ends
    one.send("last words", timeout_s=WAIT_S)
    other.send("never read, so that the end is a reset", timeout_s=WAIT_S)
    one.close()
    assert other.receive(timeout_s=WAIT_S) == ("last words", [])
    with pytest.raises(ClosedError):
        other.receive(timeout_s=WAIT_S)


def test_one_who_neither_gives_nor_takes_is_not_waited_for(ends: tuple[Channel, Channel]) -> None:
    """If this fails, a process that is stopped makes the save hang for ever."""
    one, _ = ends
    assert one.is_open()
    with pytest.raises(SilentError):
        one.receive(timeout_s=SOON_S)
    with pytest.raises(SilentError):
        one.send(bytes(50_000_000), timeout_s=SOON_S)
    with pytest.raises(ClosedError):  # half of a message may have gone
        one.send("more", timeout_s=SOON_S)


def test_half_a_message_is_not_waited_for(ends: tuple[Channel, Channel]) -> None:
    """If this fails, a process that hangs in the middle of a message makes the save hang."""
    one, other = ends
    one._connection.send(struct.pack("<QI", 100, 0) + b"half")
    with pytest.raises(SilentError):
        other.receive(timeout_s=SOON_S)


def raise_odd_error() -> None:
    raise LookupError("as some class's own code does")


class Odd:
    def __reduce__(self) -> object:
        return raise_odd_error, ()


@pytest.mark.parametrize("content", [b"no pickle", b"", pickle.dumps(Odd())], ids=["garbage", "empty", "odd"])
def test_what_cannot_be_unpickled_is_said_and_skipped(ends: tuple[Channel, Channel], content: bytes) -> None:
    """If this fails, a message of a class that is not here comes out as a riddle, or breaks those after it."""
    one, other = ends
    one._connection.send(struct.pack("<QI", len(content), 0) + content)
    one.send("next", timeout_s=WAIT_S)
    with pytest.raises(GarbledError):
        other.receive(timeout_s=WAIT_S)
    assert other.receive(timeout_s=WAIT_S) == ("next", [])


def test_what_cannot_be_pickled_is_refused_before_anything_is_sent(ends: tuple[Channel, Channel]) -> None:
    """If this fails, a value that cannot travel leaves half a message behind."""
    one, other = ends
    with pytest.raises(Exception, match="pickle"):
        one.send(lambda: None, timeout_s=WAIT_S)
    one.send("next", timeout_s=WAIT_S)
    assert other.receive(timeout_s=WAIT_S) == ("next", [])
