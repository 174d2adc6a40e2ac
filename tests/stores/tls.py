"""Transfers over TLS: a suite for S3 and for GCS, against a server whose certificate is made on the spot."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cloudckpt import errors
from cloudckpt.stores.base import Part

BODY = bytes(range(256)) * 12_000  # several records of TLS


def make_certificate(directory: Path) -> Path:
    """Write a private key and a self-signed certificate for 127.0.0.1 into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server of a test")])
    now = dt.datetime.now(dt.timezone.utc)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = directory / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *form) + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


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
        ranged = scripted.reply(206, BODY, {"Content-Range": f"bytes 5-{len(BODY) + 4}/{len(BODY) + 9}"})
        usual = scripted.any_store()

        def answer(connection: Any, request: Any) -> None:
            (ranged if "range" in request.headers else usual)(connection, request)

        server = scripted.serve(answer, certificate=certificate)
        store = server.store(**self.trust(certificate, monkeypatch))
        part, target = Part(number=1, offset_bytes=0, size_bytes=len(BODY)), bytearray(len(BODY))
        store.upload_part("k", store.create_multipart("k"), part, [memoryview(BODY)], crc32c=crc32c(BODY))
        store.read_into("k", 5, [memoryview(target)[:1000], memoryview(target)[1000:]])
        assert target == BODY
        assert BODY in next(request.body for request in server.requests if len(request.body) >= len(BODY))
        assert server.num_connections == 1

    def test_a_server_that_is_not_trusted_gets_nothing(self, scripted: Any, certificate: Path) -> None:
        """If this fails, weights and credentials go to whoever answers, or the user does not learn who was refused."""
        server = scripted.serve(scripted.any_store(), certificate=certificate)
        words = f"certificate of {re.escape(server.endpoint_url)} was not accepted"
        with pytest.raises(errors.StoreError, match=words) as caught:
            server.store().head("k")
        assert not isinstance(caught.value, errors.TransientStoreError)
        assert server.requests == []
