"""Connections without TLS: cloudckpt warns once, and sends no token to one because of a variable alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials, Credentials

from cloudckpt import errors
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.s3 import S3Store

CLEAR = "http://store.example:9000"


def s3_client(**options: Any) -> Any:
    keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    session = S3Store("bucket", "", storage_options={**keys, **options}, timeout_s=1, connections=1).session
    return session.client()


def gcs_client(**options: Any) -> Any:
    session = GCSStore("bucket", "", storage_options=options, timeout_s=1, connections=1).session
    return session.client()


class Token(Credentials):
    def refresh(self, request: Any) -> None:
        self.token = "hush"  # noqa: S105  # nobody's


@pytest.mark.parametrize(
    ("make", "options", "variable"),
    [
        (s3_client, {"endpoint_url": CLEAR}, None),
        (s3_client, {}, "AWS_ENDPOINT_URL_S3"),
        (gcs_client, {"endpoint_url": CLEAR, "anonymous": True}, None),
        (gcs_client, {"endpoint_url": CLEAR, "credentials": Token()}, None),
        (gcs_client, {"project": "p"}, "STORAGE_EMULATOR_HOST"),
        (gcs_client, {"anonymous": True}, "API_ENDPOINT_OVERRIDE"),
    ],
)
def test_plain_http_to_another_machine_is_said_once(
    make: Any, options: dict[str, Any], variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, weights and tokens are there for everybody on the way, and nobody is told; or is told all day."""
    if variable is not None:
        monkeypatch.setenv(variable, CLEAR)
    with pytest.warns(UserWarning, match="is plain HTTP") as caught:
        assert make(**options).endpoint_url == CLEAR
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(**{**options, "read_timeout_s": 2.0})  # another client, the same endpoint


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://store.example"])
def test_loopback_and_tls_are_not_warned_about(url: str) -> None:
    """If this fails, everybody who tests on their own machine learns to ignore the warning."""
    s3_client(endpoint_url=url)
    gcs_client(endpoint_url=url, anonymous=True)


@pytest.mark.parametrize("variable", ["STORAGE_EMULATOR_HOST", "API_ENDPOINT_OVERRIDE"])
@pytest.mark.filterwarnings("ignore:The GCS endpoint .* is plain HTTP")
def test_a_variable_alone_sends_no_token_in_clear(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a variable left over from a test has a real account's token sent for all to read."""
    monkeypatch.setenv(variable, CLEAR)
    with pytest.raises(errors.InvalidOptionError, match="credentials are not sent there"):
        gcs_client(credentials=Token())
    assert isinstance(gcs_client(anonymous=True).credentials, AnonymousCredentials)
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    assert isinstance(gcs_client(credentials=Token()).credentials, Token)
