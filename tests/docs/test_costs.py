"""The cost model counts the requests that saves and loads make, and the document shows what it says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt import costs
from cloudckpt._pipeline import context as contexts
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.sizes import part_bytes_of
from cloudckpt._transfer.width import KnownWidths
from cloudckpt._uri import parse_location
from cloudckpt.options import GIB, MIB, Options
from cloudckpt.stores.gcs.session import GCSSession
from cloudckpt.stores.s3.client import S3Client
from cloudckpt.testing.servers import GCSServer, S3Server, clean_environment, fake_gcs_server
from cloudckpt.testing.wire import Seen, Wire

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

READS = {"GetObject", "HeadObject", "objects.get", "objects.get_media"}
FREE = {"DeleteObject", "DeleteObjects", "AbortMultipartUpload", "objects.delete", "batch"}


def counted(apis: Counter[str]) -> costs.Requests:
    reads = sum(count for api, count in apis.items() if api in READS)
    free = sum(count for api, count in apis.items() if api in FREE)
    return costs.Requests(num_writes=apis.total() - reads - free, num_reads=reads)


@pytest.mark.parametrize(
    ("num_mib", "object_mib"), [(1, 4096), (17, 4096), (33, 16), (70, 64)], ids=["put", "parts", "objects", "both"]
)
def test_s3_makes_the_requests_that_are_counted(
    s3_bucket: S3Server, monkeypatch: pytest.MonkeyPatch, num_mib: int, object_mib: int
) -> None:
    """If this fails, the model tells a user another number of requests than the bill will have."""
    made: Counter[str] = Counter()
    call = S3Client.call

    def watched(self: Any, api: str, **members: Any) -> Any:
        made[api] += 1
        return call(self, api, **members)

    options = Options(object_bytes=object_mib * MIB, share_reads="never")
    cloudckpt.save({"probed": 1}, "s3://bucket/probed", options=options)  # moto is tried out at the first save
    state = {f"t{i}": torch.ones(MIB // 4) for i in range(num_mib)}
    monkeypatch.setattr(contexts, "_known_widths", KnownWidths())
    monkeypatch.setattr(S3Client, "call", watched)
    cloudckpt.save(state, "s3://bucket/c", options=options)
    expected = costs.save_requests(num_mib * MIB, options=options)
    assert counted(made) == expected, made
    made.clear()
    monkeypatch.setattr(contexts, "_known_widths", KnownWidths())
    cloudckpt.load(state, "s3://bucket/c", options=options)
    loaded, expected = counted(made), costs.load_requests(num_mib * MIB, options=options)
    assert loaded.num_writes == expected.num_writes, made
    assert expected.num_reads <= loaded.num_reads <= expected.num_reads + num_mib // object_mib + 1, made


def seen(requests: Sequence[Seen]) -> costs.Requests:
    """By what HTTP says alone: listings have a query of their own, and what is removed is free."""
    kinds: Counter[str] = Counter()
    for request in requests:
        is_read = request.method in ("GET", "HEAD") and "list-type" not in request.target
        kinds["free" if request.method == "DELETE" else "read" if is_read else "write"] += 1
    return costs.Requests(num_writes=kinds["write"], num_reads=kinds["read"])


@pytest.mark.parametrize("num_mib", [1, 40])
def test_a_server_sees_the_requests_that_are_counted(s3_bucket: S3Server, num_mib: int) -> None:
    """If this fails, the model, the reports and the bill tell of three different numbers of requests."""
    with Wire(s3_bucket.endpoint_url) as wire:
        options = Options(storage_options={**s3_bucket.storage_options, "endpoint_url": wire.url})
        cloudckpt.save({"probed": 1}, "s3://bucket/probed", options=options)
        state = {f"t{i}": torch.ones(MIB // 4) for i in range(num_mib)}
        expected = costs.save_requests(num_mib * MIB, options=options)
        for overwrite in (False, True):
            before = len(wire.requests)
            report = cloudckpt.save(state, "s3://bucket/c", overwrite=overwrite, options=options).report
            assert report is not None
            made = wire.requests[before:]
            assert report.num_requests == len(made)
            assert seen(made) == expected + costs.Requests(num_reads=3 * overwrite), made


@pytest.fixture
def gcs_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GCSServer]:
    environment = clean_environment()
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    with fake_gcs_server() as server:
        server.create_bucket("bucket")
        yield server


@pytest.mark.parametrize("num_mib", [1, 17, 70])
def test_gcs_makes_the_requests_that_are_counted(
    gcs_server: GCSServer, monkeypatch: pytest.MonkeyPatch, num_mib: int
) -> None:
    """If this fails, the model tells a user of GCS another number of operations than the bill will have."""
    made: Counter[str] = Counter()
    call = GCSSession.call

    def watched(self: Any, operation: str, api: str, key: str, ask: Any) -> Any:
        made[api] += bool(key) or api != "objects.insert"  # without a key the client is only asked where it sends to
        return call(self, operation, api, key, ask)

    # Parts of 1 MiB, so that they are composed in a tree.
    options = Options(storage_options=gcs_server.storage_options, part_bytes=MIB)
    cloudckpt.save({"probed": 1}, "gs://bucket/probed", options=options)
    state = {f"t{i}": torch.ones(MIB // 4) for i in range(num_mib)}
    monkeypatch.setattr(GCSSession, "call", watched)
    cloudckpt.save(state, "gs://bucket/c", options=options)
    expected = costs.save_requests(num_mib * MIB, composes=True, options=options)
    assert counted(made) == expected, made


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("num_bytes", [MIB, 256 * MIB, GIB, 80 * GIB])
def test_parts_are_those_of_a_save(monkeypatch: pytest.MonkeyPatch, num_bytes: int, *, on_gpu: bool) -> None:
    """If this fails, saves have larger or smaller parts than the model reckons with."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    context = Context(parse_location("s3://bucket/run"), Options(), rank=0)
    assert costs._part_bytes(num_bytes, 1, Options(), on_gpu=on_gpu) == part_bytes_of(
        context, num_bytes, are_copied=on_gpu
    )


def test_dollars_are_requests_and_storage() -> None:
    """If this fails, the sum is not what the prices make of the counts."""
    cost = costs.monthly(100 * GIB, every_minutes=60, keep=2, ranks=8)
    assert cost.num_saves == 730
    assert cost.storage_dollars == pytest.approx(200 * 0.023)
    writes = 730 * cost.per_save.num_writes / 1000 * 0.005
    assert cost.request_dollars == pytest.approx(writes + 730 * cost.per_save.num_reads / 1000 * 0.0004)
    kept = costs.monthly(100 * GIB, every_minutes=60, keep=2, prices=costs.GCS_STANDARD, soft_delete_days=7)
    assert kept.stored_gib == pytest.approx(200 + 2 * 100 * 7 * 24)


def test_the_document_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, the document's example is not what a user sees."""
    costs.main(["--gib", "140", "--ranks", "64", "--every-minutes", "30", "--keep", "5"])
    assert capsys.readouterr().out in (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
