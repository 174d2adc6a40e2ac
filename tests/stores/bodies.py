"""How a store over HTTP takes the bodies of answers: a suite for S3 and for GCS, which read them by the same code."""

from __future__ import annotations

from typing import Any

import pytest

from cloudckpt import errors

MIB = 1 << 20


def read_four(store: Any) -> None:
    store.read_into("k", 0, [memoryview(bytearray(4))])


class BodyTests:
    """Each directory's `scripted` says what the store is."""

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
