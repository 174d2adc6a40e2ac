"""The probe of endpoints that are not Amazon's: it finds every wrong answer that a server was seen to give."""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from awscrt.checksums import crc32c

from cloudckpt import errors
from cloudckpt.io.client import StoreClient
from cloudckpt.stores import probe as probing
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3.session import is_amazons
from cloudckpt.testing.contract_base import put

if TYPE_CHECKING:
    import socket

pytestmark = pytest.mark.usefixtures("retries_at_once")

WAIT_S = 60.0
PREFIX = f"/bucket/run/{probing.KEY_PREFIX}"


@dataclass
class SmallS3:
    """A bucket as it should be, but for what the fields say."""

    scripted: Any
    conditional: bool = True
    overwrites_what_it_refuses: bool = False
    condition_error: tuple[int, str] | None = None
    """Answered to the header, whatever lies at the key."""
    exists_error: tuple[int, str] = (412, "PreconditionFailed")
    verifies: bool = True
    denied: frozenset[str] = frozenset()
    """Methods."""
    objects: dict[str, bytes] = field(default_factory=dict)
    lost_answer: int | None = None
    """The request, counted from 0, that is carried out and not answered."""
    num_requests: int = 0

    def __call__(self, connection: socket.socket, request: Any) -> None:
        answer = self.carry_out(request)
        number, self.num_requests = self.num_requests, self.num_requests + 1
        if number == self.lost_answer:
            answer = self.scripted.hang_up
        answer(connection, request)

    def carry_out(self, request: Any) -> Callable[..., None]:
        path, error = request.path, self.scripted.error
        if request.method in self.denied:
            return error(403, "AccessDenied")
        if request.method == "DELETE":
            self.objects.pop(path, None)
            return self.scripted.reply(204)
        if request.method == "GET":
            found = self.objects.get(path)
            return error(404, "NoSuchKey") if found is None else self.scripted.reply(200, found, {"ETag": '"e"'})
        refusal = self.refusal(request)
        if refusal is None or (refusal == self.exists_error and self.overwrites_what_it_refuses):
            self.objects[path] = request.body
        return self.scripted.reply(200, b"", {"ETag": '"e"'}) if refusal is None else error(*refusal)

    def refusal(self, request: Any) -> tuple[int, str] | None:
        if request.headers.get("if-none-match") == "*":
            if self.condition_error is not None:
                return self.condition_error
            if self.conditional and request.path in self.objects:
                return self.exists_error
        sent = request.headers["x-amz-checksum-crc32c"]
        right = base64.b64encode(crc32c(request.body).to_bytes(4, "big")).decode()
        return (400, "BadDigest") if self.verifies and sent != right else None


def served(scripted: Any, **faults: Any) -> tuple[SmallS3, Any]:
    bucket = SmallS3(scripted, **faults)
    return bucket, scripted.serve(bucket)


def retried(store: S3Store) -> Any:
    """Probe as a save does."""
    return StoreClient(store, retries=3, timeout_s=WAIT_S).call(store.probe)


def test_a_store_is_probed_once_for_each_process(scripted: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A save would cost more requests than said, again and again; or leave its own objects in the bucket."""
    bucket, server = served(scripted)
    with caplog.at_level("INFO", logger="cloudckpt"):
        found = server.store(prefix="run").probe()
    assert (found.conditional_create, found.verifies_crc32c, found.observed) == (True, True, "")
    assert [request.method for request in server.requests] == ["PUT", "PUT", "GET", "PUT", "DELETE"]
    assert len({request.path for request in server.requests}) == 1
    assert server.requests[0].path.startswith(PREFIX)
    assert bucket.objects == {}
    assert f"{server.endpoint_url} (bucket 'bucket'): create-if-absent (If-None-Match: *) works" in caplog.text
    assert server.store(prefix="another").probe() == found
    assert pickle.loads(pickle.dumps(server.store())).probe() == found
    assert bucket.num_requests == 5


@pytest.mark.parametrize(
    ("faults", "saw"),
    [
        ({"conditional": False}, "ignores the condition: a second create-if-absent at one key succeeded"),
        ({"overwrites_what_it_refuses": True}, "overwrites it all the same"),
        ({"condition_error": (501, "NotImplemented")}, r"refuses the condition: .*NotImplemented \(501\)"),
        ({"condition_error": (400, "InvalidArgument")}, r"refuses the condition: .*InvalidArgument \(400\)"),
        ({"exists_error": (400, "InvalidRequest")}, "does not say that an object exists already: .*InvalidRequest"),
    ],
    ids=["ignores", "overwrites", "501", "400", "no 412"],
)
def test_a_store_that_cannot_create_if_absent_is_found_out(scripted: Any, faults: dict[str, Any], saw: str) -> None:
    """Two saves to one URI would both report success (G2)."""
    bucket, server = served(scripted, **faults)
    store = server.store(prefix="run")
    found = store.probe()
    assert not found.conditional_create
    assert found.verifies_crc32c
    assert re.search(saw, found.observed), found.observed
    assert found.observed.startswith(f"{server.endpoint_url} (bucket 'bucket') ")
    assert bucket.objects == {}
    assert bucket.num_requests <= 6


def test_found_capability_is_remembered(scripted: Any) -> None:
    """A put that is to be conditional would overwrite, although it is known that it will."""
    bucket, server = served(scripted, conditional=False)
    store = server.store(prefix="run")
    store.probe()
    num_requests = bucket.num_requests
    with pytest.raises(errors.UnsupportedOperationError, match="ignores the condition"):
        put(store, "manifest.json", b"{}", if_absent=True)
    assert bucket.num_requests == num_requests
    put(store, "manifest.json", b"{}")
    assert list(bucket.objects) == ["/bucket/run/manifest.json"]


def test_a_missing_permission_is_named_and_nothing_else_is_said(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning about an object that was never written would hide what is wrong; a cached failure would last."""
    bucket, server = served(scripted, denied=frozenset({"PUT"}))
    with caplog.at_level("INFO", logger="cloudckpt"), pytest.raises(errors.AccessDeniedError, match="s3:PutObject"):
        server.store().probe()
    assert bucket.num_requests == 1
    assert caplog.text == ""
    bucket.denied = frozenset()
    assert server.store().probe().conditional_create


def test_the_probe_works_with_credentials_that_may_only_put(scripted: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer in a bucket that it may only add to could not save; or what it leaves there would not be named."""
    bucket, server = served(scripted, denied=frozenset({"GET", "DELETE"}))
    with caplog.at_level("WARNING", logger="cloudckpt"):
        found = server.store(prefix="run").probe()
    assert (found.conditional_create, found.verifies_crc32c) == (True, True)
    (left,) = bucket.objects
    assert left.startswith(PREFIX)
    (record,) = caplog.records
    assert record.getMessage().partition(" stays: ")[2].startswith(f"s3:/{left}: DeleteObject failed: AccessDenied")
    assert record.getMessage().endswith("Because. Grant s3:DeleteObject to these credentials")


@pytest.mark.parametrize("lost", range(5))
def test_a_lost_answer_of_the_probe_is_not_taken_for_a_refusal(scripted: Any, lost: int) -> None:
    """The object of a put whose answer was lost would be taken for a refusal, and the save be refused for good."""
    bucket, server = served(scripted, lost_answer=lost)
    found = retried(server.store(prefix="run"))
    assert found.conditional_create
    assert bucket.objects == {}
    again = lost < 3  # the last put only informs, and the delete is repeated by itself
    assert len({request.path for request in server.requests}) == (2 if again else 1)
    assert bucket.num_requests == (lost + 1 + 1 + 5 if again else 6 if lost == 4 else 5)


AMAZONS = [
    "https://s3.amazonaws.com",
    "https://s3.eu-west-1.amazonaws.com",
    "https://S3.eu-west-1.amazonaws.com.:443",
    "https://s3express-use1-az4.us-east-1.amazonaws.com",
    "https://bucket.vpce-1a2b3c4d-5e6f.s3.us-east-1.vpce.amazonaws.com",
    "https://s3.cn-north-1.amazonaws.com.cn",
]
OTHERS = [
    "https://s3.example.com",
    "https://s3.amazonaws.com.example.com",
    "https://s3-gateway-1234567890.us-east-1.elb.amazonaws.com",
    "https://vpce-1a2b-3c4d.vpce-svc-5e6f.us-east-1.vpce.amazonaws.com",
    "https://account.r2.cloudflarestorage.com",
    "http://127.0.0.1:9000",
]


@pytest.mark.parametrize(
    ("endpoint_url", "amazons"), [(url, True) for url in AMAZONS] + [(url, False) for url in OTHERS]
)
def test_amazons_own_endpoints_are_told_from_others(endpoint_url: str, amazons: bool) -> None:  # noqa: FBT001
    """A server behind Amazon's load balancer would be trusted as S3 is; or S3 itself be asked needlessly."""
    assert is_amazons(endpoint_url) is amazons


@pytest.mark.parametrize("region", ["eu-west-1", "cn-north-1", "us-gov-west-1", "us-iso-east-1"])
def test_the_probe_sends_nothing_to_amazon(monkeypatch: pytest.MonkeyPatch, region: str) -> None:
    """Each process of each save would cost six requests and a permission to delete that it may not have."""
    monkeypatch.setattr("cloudckpt.stores.s3.session.S3Client.request_for", lambda *_, **__: pytest.fail("a request"))
    options = {"region": region, "access_key_id": "a", "secret_access_key": "b"}
    store = S3Store("bucket", "run", storage_options=options, timeout_s=20, connections=1)
    assert store.probe() == store.capabilities
    assert store.capabilities.conditional_create
