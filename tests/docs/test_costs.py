"""The formulas of `docs/cost.md` give the requests that saves and loads make, and its tables follow from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import pytest
import torch
from tests.docs.tables import ROOT

import cloudckpt
from cloudckpt.options import DEFAULT_CONNECTIONS, GIB, MIB, Options
from cloudckpt.testing.servers import GCSServer, S3Server, fake_gcs_server
from cloudckpt.testing.wire import Seen, Wire

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

DOCUMENT = (ROOT / "docs" / "cost.md").read_text()


def bytes_of_each(num_bytes: int, *, least_bytes: int) -> int:
    """The size of a rank's parts or requests, as the document has it."""
    return min(max(num_bytes // (4 * DEFAULT_CONNECTIONS), least_bytes), 64 * MIB)


def save_requests(rank_bytes: int, *, num_ranks: int = 1, object_bytes: int = 4 * GIB, on_gcs: bool) -> tuple[int, int]:
    """Writes and reads of a save, as the document has them."""
    part_bytes = bytes_of_each(rank_bytes, least_bytes=16 * MIB)
    num_full, rest_bytes = divmod(rank_bytes, object_bytes)
    num_writes = num_reads = 0
    for num_bytes in [object_bytes] * num_full + [rest_bytes] * bool(rest_bytes or not num_full):
        num_parts = num_bytes // part_bytes + 1
        num_writes += 1 if num_parts == 1 else num_parts + 2
        num_writes += -(-num_parts // 32) if on_gcs and num_parts > 32 else 0
        num_reads += num_parts > 1
    return 8 + num_ranks * num_writes, num_ranks * num_reads


def billed(requests: Sequence[Seen]) -> tuple[int, int]:
    """Writes and reads by their HTTP heads. Deletions, one by one or in a batch, are free."""
    kinds: Counter[str] = Counter()
    for method, target in ((request.method, urlsplit(request.target)) for request in requests):
        is_listing = "list-type" in target.query or target.path.endswith("/o")
        is_free = method == "DELETE" or target.path.startswith("/batch")
        kinds["free" if is_free else "read" if method in ("GET", "HEAD") and not is_listing else "write"] += 1
    return kinds["write"], kinds["read"]


def state_of(num_mib: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.ones(MIB // 4) for i in range(num_mib)}


@pytest.mark.parametrize(("num_mib", "object_mib"), [(1, 4096), (33, 4096), (70, 64)], ids=["put", "parts", "both"])
def test_s3_gets_the_requests_that_are_documented(s3_bucket: S3Server, num_mib: int, object_mib: int) -> None:
    """If this fails, the document or a report tells a user another number of requests than the bill will have."""
    with Wire(s3_bucket.endpoint_url) as wire:
        storage_options = {**s3_bucket.storage_options, "endpoint_url": wire.url}
        options = Options(storage_options=storage_options, object_bytes=object_mib * MIB)
        cloudckpt.save({"probed": 1}, "s3://bucket/probed", options=options)  # the five requests of a first save
        expected = save_requests(num_mib * MIB, object_bytes=object_mib * MIB, on_gcs=False)
        for overwrite in (False, True):
            before = len(wire.requests)
            report = cloudckpt.save(state_of(num_mib), "s3://bucket/c", overwrite=overwrite, options=options).report
            assert report is not None
            made = wire.requests[before:]
            if not overwrite:  # the removal of several objects counts as one
                assert report.num_requests == len(made)
            assert billed(made) == (expected[0] - 2 * overwrite, expected[1] + 3 * overwrite), made
        before = len(wire.requests)
        cloudckpt.load(state_of(num_mib), "s3://bucket/c", options=options)
        num_writes, num_reads = billed(wire.requests[before:])
        expected_reads = 1 - (-num_mib * MIB // bytes_of_each(num_mib * MIB, least_bytes=8 * MIB))
        assert num_writes == 1
        assert expected_reads <= num_reads <= expected_reads + num_mib // object_mib + 1, wire.requests[before:]


@pytest.fixture
def gcs_server() -> Iterator[GCSServer]:
    with fake_gcs_server() as server:
        server.create_bucket("bucket")
        yield server


@pytest.mark.parametrize("num_mib", [1, 33])
def test_gcs_gets_the_requests_that_are_documented(gcs_server: GCSServer, num_mib: int) -> None:
    """If this fails, the document tells a user of GCS another number of operations than the bill will have."""
    with Wire(gcs_server.storage_options["endpoint_url"]) as wire:
        options = Options(storage_options={**gcs_server.storage_options, "endpoint_url": wire.url})
        cloudckpt.save({"probed": 1}, "gs://bucket/probed", options=options)
        before = len(wire.requests)
        cloudckpt.save(state_of(num_mib), "gs://bucket/c", options=options)
        assert billed(wire.requests[before:]) == save_requests(num_mib * MIB, on_gcs=True), wire.requests[before:]


def rows_after(head: str) -> list[list[str]]:
    table = re.search(rf"^\| {re.escape(head)}.*\n\|[ -|]*\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def test_the_table_follows_from_the_formulas() -> None:
    """If this fails, the document's dollars are not what its prices make of its counts."""
    prices = {row[0].split()[0]: [float(cell.strip("$")) for cell in row[1:]] for row in rows_after("list price")}
    for _, service, gib, ranks, saves, requests, for_requests, for_storage in rows_after("checkpoint "):
        rank_bytes = int(gib.replace(",", "")) * GIB // int(ranks.replace(",", ""))
        counts = save_requests(rank_bytes, num_ranks=int(ranks.replace(",", "")), on_gcs=service == "GCS")
        assert requests == f"{counts[0]:,} and {counts[1]:,}"
        write_price, read_price, gib_price = prices[service]
        dollars = int(saves.replace(",", "")) * (counts[0] * write_price + counts[1] * read_price) / 1000
        assert for_requests == f"{dollars:,.2f}"
        assert for_storage == f"{3 * int(gib.replace(',', '')) * gib_price:,.2f}"
