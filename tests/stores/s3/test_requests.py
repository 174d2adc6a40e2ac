"""The requests on the wire: each option is in all requests that it belongs to, and no request costs time in vain."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from awscrt.checksums import crc32c

from cloudckpt import errors
from cloudckpt.stores.base import FoundPart, Part, UploadedPart
from cloudckpt.stores.s3 import store as s3_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from cloudckpt.stores.s3 import S3Store

KEY = bytes(range(32))
BODY = b"0123456789"
PART = Part(number=1, offset_bytes=0, size_bytes=10)
VIEWS = [memoryview(BODY)[:4], memoryview(BODY)[4:]]
CRC = crc32c(BODY)
ENCODED_CRC = base64.b64encode(CRC.to_bytes(4, "big")).decode()

CALLS: dict[str, Callable[[S3Store], object]] = {
    "PutObject": lambda store: store.put("k", VIEWS, crc32c=CRC),
    "CreateMultipartUpload": lambda store: store.create_multipart("k"),
    "UploadPart": lambda store: store.upload_part("k", "UP", PART, VIEWS, crc32c=CRC),
    "CompleteMultipartUpload": lambda store: store.complete_multipart(
        "k",
        "UP",
        [UploadedPart(part=PART, token="e", crc32c=CRC)],  # noqa: S106 (a dummy)
    ),
    "AbortMultipartUpload": lambda store: store.abort_multipart("k", "UP"),
    "GetObject": lambda store: store.read_into("k", 0, [memoryview(bytearray(10))]),
    "GetObject whole": lambda store: store.read("k", max_bytes=10),
    "HeadObject": lambda store: store.head("k"),
    "ListObjectsV2": lambda store: list(store.list()),
    "ListObjectsV2 directories": lambda store: list(store.list_directories()),
    "ListMultipartUploads": lambda store: list(store.list_uploads()),
    "ListParts": lambda store: list(store.list_parts("k", "UP")),
    "DeleteObject": lambda store: store.delete(["k"]),
    "DeleteObjects": lambda store: store.delete([f"k{n}" for n in range(20)]),
    "CopyObject": lambda store: store.copy_from(store.url("k"), "k2"),
    "UploadPartCopy": lambda store: store.copy_part("k2", "UP", PART, source_url=store.url("k"), source_begin=7),
}
READS = {"GetObject", "GetObject whole", "HeadObject"}
CREATES = {"PutObject", "CreateMultipartUpload", "CopyObject"}
PARTS = {"UploadPart", "UploadPartCopy", "CompleteMultipartUpload", "ListParts"}

CUSTOMER = {
    "x-amz-server-side-encryption-customer-algorithm": "AES256",
    "x-amz-server-side-encryption-customer-key": base64.b64encode(KEY).decode(),
    "x-amz-server-side-encryption-customer-key-md5": base64.b64encode(
        hashlib.md5(KEY, usedforsecurity=False).digest()
    ).decode(),
}
OPTIONS: list[tuple[dict[str, Any], set[str], dict[str, str]]] = [
    ({"sse": "AES256"}, CREATES, {"x-amz-server-side-encryption": "AES256"}),
    (
        {"sse": "aws:kms", "kms_key_id": "alias/k"},
        CREATES,
        {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": "alias/k"},
    ),
    ({"sse_customer_key": KEY}, CREATES | PARTS | READS, CUSTOMER),
    (
        {"sse_customer_key": KEY},
        {"CopyObject", "UploadPartCopy"},
        {name.replace("x-amz-", "x-amz-copy-source-"): value for name, value in CUSTOMER.items()},
    ),
    ({"storage_class": "STANDARD_IA"}, CREATES, {"x-amz-storage-class": "STANDARD_IA"}),
    ({"tags": {"team": "a b"}}, CREATES, {"x-amz-tagging": "team=a+b"}),
    ({"tags": {"team": "a b"}}, {"CopyObject"}, {"x-amz-tagging-directive": "REPLACE"}),
    ({"request_payer": True}, set(CALLS), {"x-amz-request-payer": "requester"}),
]


@pytest.mark.parametrize(
    ("options", "calls", "headers"), OPTIONS, ids=[f"{'+'.join(o)}-{len(c)}" for o, c, _ in OPTIONS]
)
def test_every_option_is_on_every_request_it_belongs_to(
    scripted: Any, options: dict[str, Any], calls: set[str], headers: dict[str, str]
) -> None:
    """An option forgotten on one request: parts refused for want of the customer key, objects in the wrong class."""
    server = scripted.serve(scripted.any_s3())
    store = server.store(**options)
    for name, call in CALLS.items():
        server.requests.clear()
        call(store)
        sent = server.requests[-1].headers
        found = {header: sent.get(header) for header in headers}
        assert found == (headers if name in calls else dict.fromkeys(headers)), name


def test_the_customer_key_is_on_every_request_of_a_large_copy(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects above 5 GiB under a customer key could not be copied."""
    monkeypatch.setattr(s3_store, "CHECKED_PART_BYTES", 8)
    server = scripted.serve(scripted.any_s3(size_bytes=20))
    store = server.store(sse_customer_key=KEY, tags={"a": "b"})
    store.copy_from(store.url("k"), "k2")
    head, create, *parts, complete = server.requests
    parts.sort(key=lambda part: int(part.query["partNumber"]))
    assert head.method == "HEAD"
    assert create.headers["x-amz-tagging"] == "a=b"
    assert [part.headers["x-amz-copy-source-range"] for part in parts] == ["bytes=0-7", "bytes=8-15", "bytes=16-19"]
    for request in (head, create, *parts, complete):
        assert CUSTOMER.items() <= request.headers.items()
    for part in parts:
        assert part.headers["x-amz-copy-source-server-side-encryption-customer-algorithm"] == "AES256"
    assert complete.body.count(b"<PartNumber>") == 3


def test_a_copied_part_names_its_range_and_its_checksum(scripted: Any) -> None:
    """The service would copy other bytes, or the CRC32C that proves them would be taken for none."""
    elements = f"<ETag>&quot;{'ab' * 16}&quot;</ETag><ChecksumCRC32C>{ENCODED_CRC}</ChecksumCRC32C>"
    server = scripted.serve(scripted.reply(200, f"<CopyPartResult>{elements}</CopyPartResult>"))
    store = server.store()
    found = store.copy_part("k2", "UP", PART, source_url="s3://other/a b", source_begin=7)
    assert found == FoundPart(number=1, size_bytes=10, token=f'"{"ab" * 16}"', crc32c=CRC, md5="ab" * 16)
    (request,) = server.requests
    assert (request.query["partNumber"], request.query["uploadId"]) == ("1", "UP")
    assert request.headers["x-amz-copy-source"] == "other/a%20b"
    assert request.headers["x-amz-copy-source-range"] == "bytes=7-16"


def test_a_failure_in_an_answer_of_200_is_no_copied_part(scripted: Any) -> None:
    """S3 begins such an answer before it has copied. The part would be taken for one that is there."""
    server = scripted.serve(scripted.reply(200, "<Error><Code>InternalError</Code><Message>no</Message></Error>"))
    with pytest.raises(errors.TransientStoreError):
        server.store().copy_part("k2", "UP", PART, source_url="s3://other/a", source_begin=0)


def test_a_large_copy_that_fails_is_aborted(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts would be paid for, or the user read of the abort and not of the permission that is missing."""
    monkeypatch.setattr(s3_store, "CHECKED_PART_BYTES", 10)
    ok = scripted.any_s3(size_bytes=20)
    server = scripted.serve(ok, ok, scripted.error(403, "AccessDenied"))
    with pytest.raises(errors.AccessDeniedError, match="s3:PutObject"):
        server.store().copy_from("s3://bucket/k", "k2")
    assert [request.method for request in server.requests] == ["HEAD", "POST", "PUT", "DELETE"]


@pytest.mark.parametrize("name", ["PutObject", "UploadPart"])
def test_bodies_go_out_unsigned_whole_and_with_their_checksum(scripted: Any, name: str) -> None:
    """Hashing or chunking the body costs three times the CPU; without the CRC32C the store checks nothing."""
    server = scripted.serve(scripted.any_s3())
    CALLS[name](server.store())
    (request,) = server.requests
    assert request.body == BODY
    assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert request.headers["x-amz-checksum-crc32c"] == ENCODED_CRC
    assert request.headers["content-length"] == "10"
    assert request.headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKID/")
    for unwanted in ("expect", "transfer-encoding", "content-encoding", "x-amz-trailer"):
        assert unwanted not in request.headers
    assert not any(header.startswith("x-amz-checksum-") and "crc32c" not in header for header in request.headers)


def test_create_if_absent_is_a_condition_of_the_store(scripted: Any) -> None:
    """Two writers could both commit; and a plain put must not carry the condition."""
    server = scripted.serve(scripted.any_s3())
    store = server.store()
    store.put("k", VIEWS, crc32c=CRC, if_absent=True)
    store.put("k", VIEWS, crc32c=CRC)
    assert server.requests[0].headers["if-none-match"] == "*"
    assert "if-none-match" not in server.requests[1].headers


def test_listings_go_on_over_pages(scripted: Any) -> None:
    """Everything behind the first 1,000 keys would be invisible to gc and latest."""
    contents = (
        "<Contents><Key>p/{0}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        "<CommonPrefixes><Prefix>p/d{0}/</Prefix></CommonPrefixes>"
    )
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>T=1</NextContinuationToken>"
    done = "<IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>"
    first = scripted.reply(200, f"<ListBucketResult>{more}{contents.format(1)}</ListBucketResult>")
    last = scripted.reply(200, f"<ListBucketResult>{done}{contents.format('2%2B')}</ListBucketResult>")
    server = scripted.serve(first, last, first, last)
    store = server.store(prefix="p")
    assert [found.key for found in store.list("")] == ["1", "2+"]
    assert server.requests[1].query["continuation-token"] == "T=1"
    assert list(store.list_directories()) == ["d1", "d2+"]


def test_listings_of_uploads_go_on_over_pages(scripted: Any) -> None:
    """gc would leave all unfinished uploads behind the first 1,000."""
    upload = "<Upload><Key>p/x/{0}</Key><UploadId>{0}</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated></Upload>"
    done = "<IsTruncated>false</IsTruncated>"
    more = (
        "<IsTruncated>true</IsTruncated><NextKeyMarker>p/x/a</NextKeyMarker><NextUploadIdMarker>a</NextUploadIdMarker>"
    )
    server = scripted.serve(
        scripted.reply(200, f"<ListMultipartUploadsResult>{more}{upload.format('a')}</ListMultipartUploadsResult>"),
        scripted.reply(200, f"<ListMultipartUploadsResult>{done}{upload.format('b')}</ListMultipartUploadsResult>"),
    )
    found = list(server.store(prefix="p").list_uploads("x/"))
    assert [(upload.key, upload.upload_id) for upload in found] == [("x/a", "a"), ("x/b", "b")]
    assert server.requests[0].query["prefix"] == "p/x/"
    assert server.requests[1].query["key-marker"] == "p/x/a"
    assert server.requests[1].query["upload-id-marker"] == "a"


def test_listings_of_parts_go_on_over_pages(scripted: Any) -> None:
    """A save that is resumed would send again all parts behind the first 1,000; or take another checksum for theirs."""
    part = "<Part><PartNumber>{0}</PartNumber><Size>5</Size><ETag>{1}</ETag>{2}</Part>"
    first = part.format(1, f'"{"0f" * 16}"', f"<ChecksumCRC32C>{ENCODED_CRC}</ChecksumCRC32C>")
    second = part.format(2, '"of something else"', "<ChecksumCRC32C>AAAAAA==-2</ChecksumCRC32C>")
    more = "<IsTruncated>true</IsTruncated><NextPartNumberMarker>1</NextPartNumberMarker>"
    done = "<IsTruncated>false</IsTruncated>"
    server = scripted.serve(
        scripted.reply(200, f"<ListPartsResult>{more}{first}</ListPartsResult>"),
        scripted.reply(200, f"<ListPartsResult>{done}{second}</ListPartsResult>"),
    )
    found = list(server.store(prefix="p").list_parts("x", "UP"))
    assert [(part.number, part.size_bytes, part.crc32c, part.md5) for part in found] == [
        (1, 5, CRC, "0f" * 16),
        (2, 5, None, None),
    ]
    assert [request.query.get("part-number-marker") for request in server.requests] == [None, "1"]
    assert {request.query["uploadId"] for request in server.requests} == {"UP"}


def test_deletes_keep_their_order_and_batch_only_rows_of_siblings(scripted: Any) -> None:
    """Data could be gone while its manifest still stands, because S3 orders nothing within a batch."""
    server = scripted.serve(scripted.any_s3())
    data = [f"data/a/{n}" for n in range(1002)]
    server.store().delete(iter(["manifest.json", "manifest.1.json", *data]))
    first, second, third, *rest = server.requests
    assert [first.path, second.path] == ["/bucket/manifest.json", "/bucket/manifest.1.json"]
    assert third.method == "POST"
    assert third.body.count(b"<Key>") == 1000
    assert [request.path for request in rest] == ["/bucket/data/a/1000", "/bucket/data/a/1001"]


def test_one_key_that_a_batch_could_not_delete_is_an_error(scripted: Any) -> None:
    """S3 answers 200 and hides the failure in the body: the bucket would fill up silently."""
    failed = "<Error><Key>p/k3</Key><Code>AccessDenied</Code><Message>No.</Message></Error>"
    gone = "<Error><Key>p/k2</Key><Code>NoSuchKey</Code><Message>No.</Message></Error>"
    server = scripted.serve(scripted.reply(200, f"<DeleteResult>{gone}{failed}</DeleteResult>"))
    with pytest.raises(Exception, match=r"s3://bucket/p/k3: .*s3:DeleteObject"):
        server.store(prefix="p").delete([f"k{n}" for n in range(20)])


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (400, "InvalidRequest"), (400, "InvalidArgument")])
def test_a_store_without_batches_deletes_singly(scripted: Any, refusal: tuple[int, str]) -> None:
    """Some stores have no DeleteObjects, or not with our checksum: nothing could be removed there."""
    server = scripted.serve(scripted.error(*refusal), scripted.reply(204), scripted.error(404, "NoSuchKey"))
    server.store().delete([f"k{n}" for n in range(20)])
    assert [request.method for request in server.requests] == ["POST"] + ["DELETE"] * 20
