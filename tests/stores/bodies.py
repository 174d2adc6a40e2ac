"""How a store over HTTP takes the bodies of answers: a suite for S3 and for GCS, which read them by the same code."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from cloudckpt import errors

MIB = 1 << 20


def read_four(store: Any) -> None:
    store.read_into("k", 0, [memoryview(bytearray(4))])


class BodyTests:
    """Each directory's `scripted` says what the store is."""

    def test_a_body_that_stalls_is_given_up_in_time_and_says_how_far_it_got(self, scripted: Any) -> None:
        """A load would hang for ever, or start the range anew instead of going on where it stopped."""

        def stall(connection: socket.socket, _: object) -> None:
            connection.sendall(
                b"HTTP/1.1 206 X\r\nContent-Length: 3145728\r\nContent-Range: bytes 0-3145727/3145728\r\n\r\n"
            )
            connection.sendall(b"a" * (MIB + 5))
            all_sent.set()
            server.closing.wait(30)

        for timeout_s in (0.5, 5.0):
            all_sent = threading.Event()
            server = scripted.serve(stall)
            target = bytearray(3 * MIB)
            with pytest.raises(errors.StoreError) as caught:
                server.store(timeout_s=timeout_s).read_into("k", 0, [memoryview(target)])
            if all_sent.is_set():  # else it was this machine that stalled
                break
        assert isinstance(caught.value, errors.InterruptedReadError)
        assert MIB <= caught.value.received_bytes <= MIB + 5
        assert target[: caught.value.received_bytes] == b"a" * caught.value.received_bytes

    @pytest.mark.parametrize("sent", [0, 1, 6, 9])
    def test_a_body_that_breaks_off_says_how_far_it_got(self, scripted: Any, sent: int) -> None:
        """The read could not go on at the byte reached; worse, a short body could pass for a whole one."""
        headers = {"Content-Range": "bytes 5-14/100"}
        server = scripted.serve(scripted.reply(206, b"abcdefghij"[:sent], headers, length=10))
        target = bytearray(10)
        views = [memoryview(target)[:6], memoryview(target)[6:]]
        with pytest.raises(errors.InterruptedReadError) as caught:
            server.store().read_into("k", 5, views)
        assert caught.value.received_bytes == sent
        assert target[:sent] == b"abcdefghij"[:sent]

    def test_a_whole_read_that_breaks_off_is_no_object(self, scripted: Any) -> None:
        """Half a manifest could be taken for the manifest."""
        server = scripted.serve(scripted.reply(200, b"half", {"ETag": '"e"'}, length=8))
        with pytest.raises(errors.InterruptedReadError):
            server.store().read("k", max_bytes=10)

    @pytest.mark.parametrize(
        ("status", "content_range", "body", "expected"),
        [
            (206, "bytes 10-13/14", b"abcd", errors.ShortObjectError),  # the object ends before the range does
            (206, "bytes 0-9/100", b"0123456789", errors.TransientStoreError),  # another one, as long
            (206, "bytes 10-19/100", b"abcd", errors.TransientStoreError),  # another length
            (206, "bytes 10-19/100\rX: y", b"0123456789", errors.TransientStoreError),  # headers cannot be told apart
            (206, None, b"0123456789", errors.TransientStoreError),
            (200, None, b"0123456789", errors.ShortObjectError),  # the whole object, and it is too short
            (200, None, b"x" * 100, errors.UnsupportedOperationError),  # the whole object
            (416, None, b"<Error><Code>InvalidRange</Code></Error>", errors.ShortObjectError),
            (416, None, b"<html>no</html>", errors.TransientStoreError),
        ],
    )
    def test_only_the_range_that_was_asked_for_is_taken(
        self, scripted: Any, status: int, content_range: str | None, body: bytes, expected: type[errors.StoreError]
    ) -> None:
        """A proxy or store that ignores ranges would fill tensors with bytes from elsewhere in the object, and one odd
        answer of a proxy would be taken for a damaged object.
        """
        headers = {"ETag": '"e"'} if content_range is None else {"Content-Range": content_range}
        server = scripted.serve(scripted.reply(status, body, headers))
        target = bytearray(10)
        with pytest.raises(expected) as caught:
            server.store().read_into("k", 10, [memoryview(target)])
        assert type(caught.value) is expected
        assert target == bytes(10)

    def test_a_connection_with_a_rest_of_an_answer_is_not_used_again(self, scripted: Any) -> None:
        """The rest of one body would be read as the beginning of the next answer."""
        server = scripted.serve(
            scripted.reply(206, b"x" * 100, {"Content-Range": "bytes 0-99/100"}), scripted.any_store()
        )
        store = server.store()
        with pytest.raises(errors.TransientStoreError):
            read_four(store)
        read_four(store)
        assert server.num_connections == 2

    def test_chunked_bodies_are_read(self, scripted: Any) -> None:
        """Some proxies drop the length: loads through them would fail, or leave the body's end in the connection."""
        head = b"HTTP/1.1 206 X\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-3/9\r\n"
        head += b"Content-Type: message/rfc822\r\n\r\n"  # http.client parses heads with the parser of mails
        server = scripted.serve(lambda connection, _: connection.sendall(head + b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"))
        store = server.store()
        for _ in range(2):
            target = bytearray(4)
            store.read_into("k", 0, [memoryview(target)])
            assert target == b"abcd"
        assert server.num_connections == 1

    def test_a_larger_object_than_expected_is_not_read(self, scripted: Any) -> None:
        """A manifest of 100 GB, put there by someone else, would fill the memory."""
        server = scripted.serve(scripted.any_store(size_bytes=1000))
        assert len(server.store().read("k", max_bytes=1000)) == 1000
        with pytest.raises(errors.StoreError, match="1,000 bytes") as caught:
            server.store().read("k", max_bytes=999)
        assert type(caught.value) is errors.StoreError
