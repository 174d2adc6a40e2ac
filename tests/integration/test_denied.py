"""Removals that a server's own policy denies: nothing is hidden, nothing grows, and each report is true."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.commit.gc.leftovers import LONG_AGO, at, holds, keys_in, put, save
from tests.integration.servers import Servers
from tests.kit.wire import GCS_RETAINED, Wire, WireRule

import cloudckpt
from cloudckpt import CheckpointManager, Options
from cloudckpt.doctor import examine
from cloudckpt.errors import AccessDeniedError, GarbageLeftError
from cloudckpt.testing.servers import Server


def check_refusals(root: str, options: Options) -> None:
    """Try each removal with `options`, which the store refuses, and then look with other ones that reach it."""
    for step in range(3):
        save(f"{root}/step-{step}", step)
    put(at(f"{root}/step-2"), f"data/{LONG_AGO}/0-0.safetensors")
    num_keys = []
    for _ in range(3):
        with pytest.raises(AccessDeniedError, match="Nothing was deleted, and the checkpoint can be loaded as before"):
            cloudckpt.delete(f"{root}/step-1", options=options)
        with CheckpointManager(root, keep_last=1, async_=False, no_dist=True, options=options) as manager:
            manager.restore({"w": torch.zeros(300)})
            manager.save(3, {"w": torch.full((300,), 3.0)}, overwrite=True)
        assert manager.retention is not None
        assert manager.retention.removed == ()
        assert sorted(one.uri for one in manager.retention.failed) == [f"{root}/step-{step}" for step in range(3)]
        with pytest.raises(GarbageLeftError) as caught:
            cloudckpt.gc(f"{root}/step-2", older_than=0, dry_run=False, options=options)
        assert not [key for key in caught.value.report.keys if "safetensors" in key]
        assert all(holds(f"{root}/step-{step}", step) for step in range(3))
        num_keys.append(len([key for key in keys_in(root) if "step-3" not in key]))
    assert num_keys[2] == num_keys[1] <= num_keys[0] + 1
    assert [info.name for info in cloudckpt.list_checkpoints(root)] == [f"step-{step}" for step in range(4)]


@contextlib.contextmanager
def denying_deletions(client: Any, bucket: str) -> Iterator[None]:
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": ["s3:DeleteObject"],
        "Resource": [f"arn:aws:s3:::{bucket}/*"],
    }
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
    try:
        yield
    finally:
        client.delete_bucket_policy(Bucket=bucket)


def test_a_bucket_policy_that_denies_deletions_hides_nothing(rgw: Any, use: Callable[[Server], str]) -> None:
    """If this fails, credentials that may not delete hide checkpoints by trying, or leave more objects each time."""
    uri = use(rgw)
    with contextlib.closing(rgw.client()) as client, denying_deletions(client, uri.removeprefix("s3://")):
        check_refusals(f"{uri}/run", Options(retries=0))
        report = examine(f"{uri}/run")
        assert report.is_healthy, report
        assert report["delete"].outcome == "failed", report
    cloudckpt.delete(f"{uri}/run/step-1")
    cloudckpt.gc(f"{uri}/run", older_than=0, dry_run=False)
    assert [info.name for info in cloudckpt.list_checkpoints(f"{uri}/run")] == ["step-0", "step-2", "step-3"]


def test_a_retention_policy_hides_nothing(servers: Servers, use: Callable[[Server], str]) -> None:
    """If this fails, retention in a bucket with a retention policy hides the steps that the policy protects."""
    server = servers.up("fake-gcs")
    root = f"{use(server)}/run"
    rule = WireRule(action=GCS_RETAINED, method="DELETE", path=r"manifest|safetensors", times=None)
    with Wire(server.endpoint_url, rule) as wire:
        check_refusals(root, Options(retries=0, storage_options={"endpoint_url": wire.url, "anonymous": True}))
    cloudckpt.delete(f"{root}/step-1")
    assert [info.name for info in cloudckpt.list_checkpoints(root)] == ["step-0", "step-2", "step-3"]
