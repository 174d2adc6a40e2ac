"""Where a probe's answer counts: in saves, in other processes, and not at Amazon's own endpoints."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt.stores import probe as probing
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3.config import is_amazons
from cloudckpt.testing.contract_base import keys

WAIT_S = 60.0


def test_a_save_through_a_gateway_that_drops_the_condition_is_refused(gateway_of: Any) -> None:
    """Weights would be uploaded and committed without protection, and nobody told (G2)."""
    requests: list[str] = []

    def drop(moto: Any, start_response: Any, environ: dict[str, Any]) -> Any:
        requests.append(environ["PATH_INFO"])
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return moto(environ, start_response)

    gateway = gateway_of(drop)
    name = f"probe-{os.urandom(8).hex()}"
    uri = f"s3://{name}/run/step-1"
    gateway.client.create_bucket(Bucket=name)
    options = cloudckpt.Options(storage_options=gateway.storage_options, timeout_s=WAIT_S)
    store = S3Store(name, "", storage_options=gateway.storage_options, timeout_s=WAIT_S, connections=1)
    state = {"weight": torch.arange(8.0)}
    with pytest.raises(cloudckpt.errors.NoConditionalCommitError) as caught:
        cloudckpt.save(state, uri, options=options)
    message = str(caught.value)
    for words in (uri, gateway.endpoint_url, "ignores the condition", "nothing was written", "newer version"):
        assert words in message
    assert "Options(commit='unconditional')" in message
    assert keys(store) == []
    assert list(store.list_uploads()) == []
    assert not any("data/" in path for path in requests)

    requests.clear()
    cloudckpt.save(state, uri, options=dataclasses.replace(options, commit="unconditional"))
    assert not any(probing.KEY_PREFIX in path for path in requests)
    loaded = {"weight": torch.zeros(8)}
    cloudckpt.load(loaded, uri, options=options)
    assert torch.equal(loaded["weight"], state["weight"])


AMAZONS = [
    "https://s3.amazonaws.com",
    "https://s3.eu-west-1.amazonaws.com",
    "https://S3.eu-west-1.amazonaws.com.:443",
    "https://s3-us-west-2.amazonaws.com",
    "https://s3.dualstack.us-east-1.amazonaws.com",
    "https://s3-fips.us-gov-west-1.amazonaws.com",
    "https://s3-accelerate.amazonaws.com",
    "https://s3express-use1-az4.us-east-1.amazonaws.com",
    "https://bucket.vpce-1a2b3c4d-5e6f.s3.us-east-1.vpce.amazonaws.com",
    "https://s3.cn-north-1.amazonaws.com.cn",
    "https://s3.eusc-de-east-1.amazonaws.eu",
    "https://s3.us-iso-east-1.c2s.ic.gov",
]
OTHERS = [
    "https://s3.example.com",
    "https://s3.amazonaws.com.example.com",
    "https://amazonaws.com",
    "https://s3amazonaws.com",
    "https://s3-gateway-1234567890.us-east-1.elb.amazonaws.com",
    "https://ec2-203-0-113-1.compute-1.amazonaws.com",
    "https://abc.execute-api.us-east-1.amazonaws.com",
    "https://vpce-1a2b-3c4d.vpce-svc-5e6f.us-east-1.vpce.amazonaws.com",
    "https://s3-outposts.us-east-1.amazonaws.com",
    "https://account.r2.cloudflarestorage.com",
    "https://storage.googleapis.com",
    "http://127.0.0.1:9000",
    "http://[::1]:9000",
]


@pytest.mark.parametrize(
    ("endpoint_url", "amazons"), [(url, True) for url in AMAZONS] + [(url, False) for url in OTHERS]
)
def test_amazons_own_endpoints_are_told_from_others(endpoint_url: str, amazons: bool) -> None:  # noqa: FBT001
    """A server behind Amazon's load balancer would be trusted as S3 is; or S3 itself be asked needlessly."""
    assert is_amazons(endpoint_url) is amazons


@pytest.mark.parametrize("region", ["eu-west-1", "cn-north-1", "us-gov-west-1", "us-iso-east-1"])
def test_amazon_is_not_asked(monkeypatch: pytest.MonkeyPatch, region: str) -> None:
    """Each process of each save would cost six requests and a permission to delete that it may not have."""
    monkeypatch.setattr("cloudckpt.stores.s3.client.S3Session.call", lambda *_, **__: pytest.fail("a request"))
    options = {"region": region, "access_key_id": "a", "secret_access_key": "b"}
    store = S3Store("bucket", "run", storage_options=options, timeout_s=20, connections=1)
    assert store.probe() == store.capabilities
    assert store.capabilities.conditional_create
