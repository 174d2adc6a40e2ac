"""Suites for S3 and GCS, which send, receive and keep clients by the same code, each on a server on loopback."""

from __future__ import annotations

import re
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from awscrt.checksums import crc32c
from tests.kit.clock import set_time
from tests.kit.scripted import make_certificate
from tests.kit.wire import Reply, Wire, WireRule
from tests.stores.wire_contract import WireContract

from cloudckpt import _clock, errors
from cloudckpt.errors import MissingDependencyError
from cloudckpt.stores.base import Part


class HTTPStoreContract(WireContract):
    """A subclass says which store's, and has its server in the fixture `http_server`."""

    shared_between_processes = True
    num_paging_keys = 40  # thousands take half a minute; pages are shown in test_requests
    store_type: ClassVar[type[Any]]
    denial: ClassVar[Reply]

    @pytest.fixture
    def store(self, http_server: Any) -> Any:
        bucket = f"contract-{uuid.uuid4().hex}"
        http_server.create_bucket(bucket)
        self.storage_options = http_server.storage_options
        return self._opened(bucket, self.storage_options["endpoint_url"], timeout_s=60)

    def _opened(self, bucket: str, endpoint_url: str, *, timeout_s: float) -> Any:
        options = {**self.storage_options, "endpoint_url": endpoint_url}
        return self.store_type(bucket, "a root/x", storage_options=options, timeout_s=timeout_s, connections=8)

    def endpoint_url(self, store: Any) -> str:
        return self.storage_options["endpoint_url"]

    def at(self, store: Any, endpoint_url: str, *, timeout_s: float) -> Any:
        return self._opened(urlsplit(store.uri).netloc, endpoint_url, timeout_s=timeout_s)

    @pytest.fixture(autouse=True)
    def _refusing_wire(self, http_server: Any) -> Iterator[None]:
        """The server lets everybody in, so it is the wire that refuses as the service does."""
        with Wire(http_server.endpoint_url, WireRule(action=self.denial, times=None)) as self.refusing_wire:
            yield

    def denied(self, store: Any) -> Any:
        return self.at(store, self.refusing_wire.url, timeout_s=60)

    @pytest.mark.parametrize("hours_ahead", [-30, 0.5, 30])
    def test_a_clock_that_is_an_hour_off_is_named(
        self, store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hours_ahead: float
    ) -> None:
        """If this fails, nobody learns of a wrong clock; or gc, on a machine that is ahead, takes running saves for
        dead.
        """
        set_time(monkeypatch, ahead_s=hours_ahead * 3600)
        new_client = self.at(store, self.endpoint_url(store), timeout_s=60 + hours_ahead)
        for _ in range(2):
            list(new_client.list())
        found = [one.getMessage() for one in caplog.records if "clock" in one.getMessage()]
        assert len(found) == (abs(hours_ahead) > 1), found
        assert all(f"30.0 hours {'ahead of' if hours_ahead > 0 else 'behind'} that of" in text for text in found)
        error_s = (_clock.now() - datetime.now(timezone.utc)).total_seconds()
        assert error_s == pytest.approx(0 if hours_ahead > 1 else hours_ahead * 3600, abs=5)


class ClientTests:
    """A subclass says which store's; each directory's `scripted` serves it."""

    store_type: type[Any]
    extra: str
    cache: Any
    credentials: dict[str, Any]
    """In its `storage_options`."""
    endpoint_variable: str
    """The environment variable that sends its clients to another endpoint."""
    another_class: str
    """Another storage class."""

    def opened(self, *, timeout_s: float = 20, **options: Any) -> Any:
        options = {**self.credentials, **options}
        return self.store_type("bucket", "", storage_options=options, timeout_s=timeout_s, connections=2)

    def test_stores_of_one_configuration_share_a_client(self, scripted: Any) -> None:
        """Each save would open its connections anew."""
        server = scripted.serve(scripted.any_store())
        for _ in range(3):
            server.store().head("k")
        server.store(prefix="other").head("k")
        assert len(self.cache) == 1
        assert server.num_connections == 1
        server.store(storage_class=self.another_class).head("k")
        server.store(timeout_s=7).head("k")
        assert len(self.cache) == 3

    def timeouts_s(self, client: Any) -> tuple[float, float]:
        """Return the client's timeouts for connecting and for reading."""
        raise NotImplementedError

    def test_each_call_has_the_timeouts_of_its_own_store(self, scripted: Any) -> None:
        """If this fails, the timeout of the first call holds for all later ones: a load hangs for longer than asked."""
        server = scripted.serve(scripted.any_store())
        expected = {60: (20, 20), 3: (3, 1), 6: (6, 2)}
        for timeout_s in (60, 3, 6, 60):
            store = server.store(timeout_s=timeout_s)
            store.head("k")
            assert self.timeouts_s(store.session.client()) == expected[timeout_s]
        options = {"connect_timeout_s": 5.0, "read_timeout_s": 7.0}
        assert self.timeouts_s(server.store(timeout_s=60, **options).session.client()) == (5, 7)

    def test_threads_that_start_together_make_one_client(self, scripted: Any) -> None:
        """Each would look for credentials, and open connections of its own; boto3 cannot even make two at once."""
        server = scripted.serve(scripted.any_store())
        store, barrier = server.store(), threading.Barrier(8, timeout=30)

        def ask() -> int:
            barrier.wait()
            return store.head("k").size_bytes

        with ThreadPoolExecutor(8) as pool:
            sizes = [future.result(30) for future in [pool.submit(ask) for _ in range(8)]]
        assert sizes == [10] * 8
        assert len(self.cache) == 1

    def test_without_its_sdk_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A ModuleNotFoundError would not say which of cloudckpt's extras to install."""
        monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
        with pytest.raises(MissingDependencyError, match=rf"extra '{self.extra}', as pip install"):
            self.opened()


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


_RECORDS = bytes(range(256)) * 12_000  # several of TLS


class TLSTests(ABC):
    """A subclass says how a user names the certificates that are trusted."""

    @pytest.fixture
    def certificate(self, tmp_path: Path) -> Path:
        return make_certificate(tmp_path)

    @abstractmethod
    def trust(self, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
        """Return the storage options with which `certificate` is trusted."""

    def test_a_part_is_sent_and_a_range_is_read(
        self, scripted: Any, certificate: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If this fails, no byte reaches or leaves a store over TLS, which every real endpoint speaks."""
        ranged = scripted.reply(206, _RECORDS, {"Content-Range": f"bytes 5-{len(_RECORDS) + 4}/{len(_RECORDS) + 9}"})
        usual = scripted.any_store()

        def answer(connection: Any, request: Any) -> None:
            (ranged if "range" in request.headers else usual)(connection, request)

        server = scripted.serve(answer, certificate=certificate)
        store = server.store(**self.trust(certificate, monkeypatch))
        part, target = Part(number=1, offset_bytes=0, size_bytes=len(_RECORDS)), bytearray(len(_RECORDS))
        store.upload_part("k", store.create_multipart("k"), part, [memoryview(_RECORDS)], crc32c=crc32c(_RECORDS))
        store.read_into("k", 5, [memoryview(target)[:1000], memoryview(target)[1000:]])
        assert target == _RECORDS
        assert _RECORDS in next(request.body for request in server.requests if len(request.body) >= len(_RECORDS))
        assert server.num_connections == 1

    def test_a_server_that_is_not_trusted_gets_nothing(self, scripted: Any, certificate: Path) -> None:
        """If this fails, weights and credentials go to whoever answers, or the user does not learn who was refused."""
        server = scripted.serve(scripted.any_store(), certificate=certificate)
        words = f"certificate of {re.escape(server.endpoint_url)} was not accepted"
        with pytest.raises(errors.StoreError, match=words) as caught:
            server.store().head("k")
        assert not isinstance(caught.value, errors.TransientStoreError)
        assert server.requests == []
