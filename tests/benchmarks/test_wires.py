"""Bare sockets, and what is put between a client and a server, on a server that runs."""

from __future__ import annotations

import shutil
import ssl

import boto3
import botocore.exceptions
import pytest
from benchmarks.certificates import make_certificates
from benchmarks.limits import Limit
from benchmarks.outcomes import Settings
from benchmarks.payloads import KIB, Payload, Tensors
from benchmarks.state import State

from benchmarks import servers, wires
from cloudckpt.testing.servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

# Two requests of the largest size, the second of several tensors, and one that is smaller.
PAYLOAD = Payload(
    name="p",
    tensors=(
        Tensors(name="large", count=1, shape=(33 * KIB, 256)),
        Tensors(name="small", count=3, shape=(64, 256)),
    ),
)

needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/bin") is None, reason="needs haproxy"
)


@pytest.fixture(scope="module")
def moto():
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def limit_at(endpoint_url, ca_bundle=None):
    settings = Settings(endpoint_url=endpoint_url, region=None, ca_bundle=ca_bundle, no_dist=True, connections=2)
    return Limit(settings)


def assert_goes_there_and_back(limit, uri):
    state = State(PAYLOAD, "sharded", None)
    state.fill()
    limit.save(state.state_dict, uri)
    state.zero()
    limit.load(state.state_dict, uri)
    state.verify()


@needs_haproxy
def test_tls_is_checked_with_the_runs_own_authority(moto, certificates):
    """Clients would be measured without checking certificates, or in clear text."""
    with wires.tls(moto.endpoint_url, certificates) as url:
        assert url.startswith("https://")
        assert_goes_there_and_back(limit_at(url, str(certificates.ca_bundle)), f"{moto.uri}/tls")
        with pytest.raises(ssl.SSLCertVerificationError):
            limit_at(url).save(State(PAYLOAD, "sharded", None).state_dict, f"{moto.uri}/unchecked")
        client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
            verify=str(certificates.ca_bundle),
        )
        assert client.list_buckets()["Buckets"]
        with pytest.raises(botocore.exceptions.ClientError, match="404"):
            client.head_object(Bucket=servers.BUCKET, Key="absent")
        client.close()
