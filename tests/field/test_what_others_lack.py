"""What the nearest rival's DCP writer and reader do not have, or do in a way that loses data, asked of ours."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.e2e.models import assert_same
from tests.e2e.places import Place, S3Place

import cloudckpt
from cloudckpt.options import KIB, MIB
from cloudckpt.testing.servers import S3Server
from cloudckpt.testing.wire import Seen, Wire
from cloudckpt.testing.wrapping import Call, WrappedStore

pytestmark = pytest.mark.faults

WAIT_S = 30.0


def over(wire: Wire, **more: Any) -> cloudckpt.Options:
    return cloudckpt.Options(storage_options={"endpoint_url": wire.url, **more})


def writes_in(wire: Wire) -> list[Seen]:
    """Without those of the probe, which is no part of the save."""
    return [
        seen
        for seen in wire.requests
        if seen.method in {"PUT", "POST", "DELETE"} and ".cloudckpt-probe" not in seen.target
    ]


def test_commit_by_rename(s3: S3Place, s3_server: S3Server) -> None:
    """A rename is a copy and a delete → the commit is one conditional put, the last write of a save; nothing is copied
    and, on a fresh path, nothing deleted.
    """
    cloudckpt.save({"x": torch.ones(3)}, s3.uri("warm"))  # the endpoint is known by now
    with Wire(s3_server.endpoint_url) as wire:
        cloudckpt.save({"x": torch.ones(1000)}, s3.uri(), options=over(wire))
        writes = writes_in(wire)
    assert [seen.method for seen in writes] == ["PUT", "PUT"]
    assert not any(seen.header("x-amz-copy-source") for seen in writes)
    data, manifest = writes
    assert "/data/" in data.target
    assert manifest.target.partition("?")[0].endswith("/manifest.json")
    assert manifest.header("if-none-match") == "*"


def test_no_checksums_end_to_end(s3: S3Place, s3_server: S3Server) -> None:
    """No checksum goes with what is written → each object and each part is sent with its CRC32C, for the store to
    refuse what was damaged on its way.
    """
    with Wire(s3_server.endpoint_url) as wire:
        options = cloudckpt.Options(storage_options=s3.options_at(wire.url), part_bytes=5 * MIB, object_bytes=MIB)
        cloudckpt.save({"large": torch.rand(11 * MIB // 4), "small": torch.rand(10)}, s3.uri(), options=options)
        puts = [seen for seen in writes_in(wire) if seen.method == "PUT"]
    assert len(puts) >= 5
    assert all(seen.header("x-amz-checksum-crc32c") for seen in puts)


class Meeting(WrappedStore):
    """No read of data goes on before four are under way at once."""

    def __init__(self, inner: Any, arrived: threading.Semaphore, all_are_here: threading.Event) -> None:
        super().__init__(inner)
        self._arrived = arrived
        self._all_are_here = all_are_here

    def around(self, call: Call, action: Any) -> Any:
        if call.operation == "read_into":
            if not self._arrived.acquire(blocking=False):
                self._all_are_here.set()
            assert self._all_are_here.wait(WAIT_S), "a read waits for the one before it"
        return action()


def test_reads_one_after_the_other(place: Place) -> None:
    """Files are read one after the other → four ranges, of one file or of several, are under way at once."""
    state = {f"t{number}": torch.rand(256 * KIB) for number in range(4)}
    for name, object_bytes in (("files", KIB), ("one-file", MIB * 1000)):
        uri = place.uri(name)
        cloudckpt.save(state, uri, options=cloudckpt.Options(object_bytes=object_bytes))
        arrived, all_are_here = threading.Semaphore(3), threading.Event()  # the fourth is the last
        options = cloudckpt.Options(
            connections=4,
            request_bytes=MIB,
            max_gap_bytes=0,
            wrap_store=functools.partial(Meeting, arrived=arrived, all_are_here=all_are_here),
        )
        target = {key: torch.zeros_like(value) for key, value in state.items()}
        cloudckpt.load(target, uri, options=options)
        assert_same(target, state)


def test_no_endpoint_class_or_key_for_dcp(s3: S3Place, s3_server: S3Server) -> None:
    """Endpoint, storage class and KMS key cannot be given to the DCP writer → each request of torch's own dcp.save
    goes to that endpoint, and every object has that class and key.
    """
    with Wire(s3_server.endpoint_url) as wire:
        options = over(wire, storage_class="STANDARD_IA", kms_key_id="alias/of-the-team")
        writer = cloudckpt.ObjectStoreWriter(s3.uri(), options=options)
        dcp.save({"x": torch.ones(1000)}, storage_writer=writer)
        puts = [seen for seen in writes_in(wire) if seen.method == "PUT"]
        before = len(wire.requests)
        state = {"x": torch.zeros(1000)}
        dcp.load(state, storage_reader=cloudckpt.ObjectStoreReader(s3.uri(), options=options))
        assert len(wire.requests) > before
    assert_same(state, {"x": torch.ones(1000)})
    assert len(puts) == 2
    assert {seen.header("x-amz-storage-class") for seen in puts} == {"STANDARD_IA"}
    assert {seen.header("x-amz-server-side-encryption-aws-kms-key-id") for seen in puts} == {"alias/of-the-team"}


def test_no_list_latest_or_garbage_collection(place: Place) -> None:
    """Checkpoints cannot be listed, the newest not found, none deleted, and garbage stays → all four are one call."""
    for step in (1, 2, 10):
        cloudckpt.save({"x": torch.full((10,), float(step))}, place.uri(f"step-{step}"))
    place.write("step-11/data/20260101T000000000Z-0123456789ab/0-0.safetensors", b"of a save that died")
    names = [found.name for found in cloudckpt.list_checkpoints(place.root)]
    assert sorted(names) == ["step-1", "step-10", "step-2"]
    newest = cloudckpt.latest(place.root)
    assert newest is not None
    assert newest.name == "step-10"
    cloudckpt.delete(place.uri("step-1"))
    assert sorted(found.name for found in cloudckpt.list_checkpoints(place.root)) == ["step-10", "step-2"]
    report = cloudckpt.gc(place.root, older_than=0, dry_run=False)
    assert any(key.startswith("step-11/") for key in report.keys)
    assert not any(key.startswith("step-11/") for key in place.data_keys())
    cloudckpt.gc(place.root, older_than=0, dry_run=False)  # and what kept that save from being committed after all
    left = place.keys()
    assert {key.partition("/")[0] for key in left} == {"step-2", "step-10"}
