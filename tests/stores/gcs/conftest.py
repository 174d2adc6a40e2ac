"""Servers to talk to: fake-gcs-server for what a store does, and scripted ones for what goes wrong on the way."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from awscrt.checksums import combine_crc32c, crc32c
from google.auth.credentials import Credentials
from tests.kit.scripted import Answer, Recorded, ScriptedServer, Scripting, reply

from cloudckpt.stores.gcs import GCSStore
from cloudckpt.testing.servers import GCSServer, fake_gcs_server


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GCSServer]:
    with fake_gcs_server() as server:
        yield server


@pytest.fixture
def bucket(gcs_server: GCSServer) -> str:
    name = f"test-{uuid.uuid4().hex}"
    gcs_server.create_bucket(name)
    return name


class Tokens(Credentials):
    """Credentials whose tokens are TOKEN-1-HUSH, TOKEN-2-HUSH, …: another one after each renewal."""

    def __init__(self, *, renewable: bool = True) -> None:
        super().__init__()
        self.num_renewals = 0
        self.renewable = renewable

    @property
    def valid(self) -> bool:
        return self.token is not None

    @property
    def expired(self) -> bool:
        return False

    def refresh(self, request: Any) -> None:
        if self.renewable:
            self.num_renewals += 1
        self.token = f"TOKEN-{self.num_renewals}-HUSH"


class GCSScriptedServer(ScriptedServer):
    """A scripted server, and stores that lie there."""

    def store(self, *, timeout_s: float = 20.0, prefix: str = "", **storage_options: object) -> GCSStore:
        whom = {} if "credentials" in storage_options else {"anonymous": True}
        options = {"endpoint_url": self.endpoint_url, **whom, **storage_options}
        return GCSStore("bucket", prefix, storage_options=options, timeout_s=timeout_s, connections=2)


def json_reply(value: object, status: int = 200) -> Answer:
    return reply(status, json.dumps(value), {"Content-Type": "application/json"})


def error_reply(status: int, reason: str, message: str = "Because.") -> Answer:
    errors = [{"domain": "global", "reason": reason, "message": message}]
    return json_reply({"error": {"code": status, "message": message, "errors": errors}}, status)


def encoded(value: int) -> str:
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def inserted(request: Recorded) -> tuple[dict[str, Any], bytes]:
    """The metadata and the bytes in the body of an upload, taken apart by RFC 2387."""
    match = re.fullmatch(r"multipart/related; boundary=(\w+)", request.headers["content-type"])
    assert match is not None
    before, metadata, media, after = request.body.split(b"--" + match[1].encode())
    assert (before, after) == (b"", b"--\r\n")
    head, _, text = metadata.partition(b"\r\n\r\n")
    assert head.strip() == b"Content-Type: application/json; charset=UTF-8"
    head, _, content = media.partition(b"\r\n\r\n")
    assert head.strip() == b"Content-Type: application/octet-stream"
    assert content.endswith(b"\r\n")
    return json.loads(text), content[:-2]


@dataclass
class AnyGCS:
    """A GCS that takes everything, keeps names, sizes, checksums and generations, and reads as zeros."""

    objects: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Generation, size and CRC32C of each name."""
    size_bytes: int = 10
    """The size of every object that was never written."""
    generation: int = 1000

    def __call__(self, connection: Any, request: Recorded) -> None:
        self._answer(request)(connection, request)

    def put(self, name: str, size_bytes: int, value: int) -> dict[str, Any]:
        self.generation += 1
        self.objects[name] = (self.generation, size_bytes, value)
        return self.resource(name)

    def resource(self, name: str) -> dict[str, Any]:
        zeros = (1, self.size_bytes, crc32c(bytes(self.size_bytes)))
        generation, size_bytes, value = self.objects.get(name, zeros)
        return {
            "kind": "storage#object",
            "name": name,
            "generation": str(generation),
            "size": str(size_bytes),
            "crc32c": encoded(value),
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }

    def _answer(self, request: Recorded) -> Answer:
        if request.path.startswith("/upload/"):
            metadata, content = inserted(request)
            return json_reply(self.put(metadata["name"], len(content), crc32c(content)))
        if request.path.startswith("/download/"):
            return _range_of(request, self.size_bytes)
        match = re.fullmatch(r"/storage/v1/b/bucket/o(?:/(.+))?", request.path, re.DOTALL)
        assert match is not None, request.path
        if request.method == "DELETE":
            return reply(204) if self.objects.pop(match[1], None) else error_reply(404, "notFound")
        if request.method == "POST":
            return self._made_of_others(match[1], json.loads(request.body))
        if match[1] is not None:
            return json_reply(self.resource(match[1]))
        prefix = request.query.get("prefix", "")
        found = [self.resource(name) for name in sorted(self.objects) if name.startswith(prefix)]
        return json_reply({"kind": "storage#objects", "items": found})

    def _made_of_others(self, path: str, body: dict[str, Any]) -> Answer:
        source, is_copy, target = path.partition("/rewriteTo/b/bucket/o/")
        if not is_copy:
            return self._composed(path.removesuffix("/compose"), body)
        self.objects[target] = self.objects.get(source, (1, self.size_bytes, 0))
        progress = {"totalBytesRewritten": "10", "objectSize": "10", "done": True}
        return json_reply({**progress, "resource": self.resource(target)})

    def _composed(self, target: str, body: dict[str, Any]) -> Answer:
        value = size_bytes = 0
        assert len(body["sourceObjects"]) <= 32
        for source in body["sourceObjects"]:
            known = self.objects.get(source["name"])
            if known is None or str(known[0]) != str(source.get("generation")):
                return error_reply(404, "notFound")
            value = combine_crc32c(value, known[2], known[1])
            size_bytes += known[1]
        return json_reply(self.put(target, size_bytes, value))


def _range_of(request: Recorded, size_bytes: int) -> Answer:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
    if match is None:
        return reply(200, bytes(size_bytes), {"X-Goog-Generation": "1"})
    begin, end = int(match[1]), min(int(match[2]) + 1, size_bytes)
    if begin >= size_bytes:
        return reply(416, "", {"X-Goog-Generation": "1"})
    return reply(206, bytes(end - begin), {"Content-Range": f"bytes {begin}-{end - 1}/{size_bytes}"})


class GCSScripting(Scripting):
    """Answers of GCS, and servers that give them."""

    server_type = GCSScriptedServer
    json = staticmethod(json_reply)
    error = staticmethod(error_reply)
    any_store = any_gcs = AnyGCS
    inserted = staticmethod(inserted)
    encoded = staticmethod(encoded)
    tokens = Tokens


@pytest.fixture
def scripted() -> Iterator[GCSScripting]:
    scripting = GCSScripting()
    yield scripting
    scripting.close()


@pytest.fixture(autouse=True)
def _no_bucket_keeps_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process remembers the buckets that refused to remove parts, by their names."""
    monkeypatch.setattr("cloudckpt.stores.gcs.store.keeping_buckets", set())
