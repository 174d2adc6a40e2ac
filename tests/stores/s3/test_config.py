"""``storage_options`` for S3: what is accepted, what is refused, and what is never shown."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from cloudckpt.errors import InvalidOptionError
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3.client import S3Config, parse_storage_options

KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"endpoint_url": "http://127.0.0.1:9000"}, {"endpoint_url": "http://127.0.0.1:9000"}),
        ({"region_name": "eu-west-1"}, {"region": "eu-west-1"}),
        (
            {"aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_session_token": "c"},
            {"access_key_id": "a", "secret_access_key": "b", "session_token": "c"},
        ),
        ({"path_style": True}, {"addressing_style": "path"}),
        ({"kms_key_id": "k"}, {"kms_key_id": "k", "sse": "aws:kms"}),
        ({"sse": "aws:kms:dsse", "kms_key_id": "k"}, {"kms_key_id": "k", "sse": "aws:kms:dsse"}),
        ({"sse_customer_key": KEY}, {"sse_customer_key": KEY}),
        ({"sse_customer_key": base64.b64encode(KEY).decode()}, {"sse_customer_key": KEY}),
        ({"tags": {"team": "a b", "n": "1"}}, {"tags": "team=a+b&n=1"}),
        ({"request_payer": True}, {"request_payer": "requester"}),
        ({"request_payer": False}, {}),
        ({"connect_timeout_s": 3, "read_timeout_s": 4.5}, {"connect_timeout_s": 3.0, "read_timeout_s": 4.5}),
        ({"verify": False}, {"verify": False}),
        ({"ca_bundle": "/etc/ca.pem"}, {"verify": "/etc/ca.pem"}),
        ({"region": None, "profile": None}, {}),
        ({"endpoint_url": "https://host/a@b"}, {"endpoint_url": "https://host/a@b"}),
    ],
)
def test_options_are_understood(options: dict[str, Any], expected: dict[str, Any]) -> None:
    """An option that the documentation names would be refused, or taken for another."""
    assert parse_storage_options(options) == S3Config(**expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": "http://x"}, "'endpoint' is not known (did you mean 'endpoint_url'?)"),
        ({"endpoint_url": "127.0.0.1:9000"}, "must look like https://host"),
        ({"region": "eu west"}, "white space"),
        ({"access_key_id": "a"}, "belong together"),
        ({"session_token": "a"}, "session_token needs"),
        ({"anonymous": True, "profile": "p"}, "anonymous excludes"),
        ({"anonymous": "yes"}, "True or False"),
        ({"path_style": True, "addressing_style": "virtual"}, "contradicts"),
        ({"sse": "aes"}, "must be one of AES256"),
        ({"sse": "AES256", "kms_key_id": "k"}, "kms_key_id needs"),
        ({"sse": "AES256", "sse_customer_key": KEY}, "excludes"),
        ({"sse_customer_key": b"short"}, "32 bytes"),
        ({"tags": {str(n): "" for n in range(11)}}, "10 tags"),
        ({"read_timeout_s": "soon"}, "positive"),
        ({"ca_bundle": ""}, "certificate bundle"),
    ],
)
def test_options_that_cannot_work_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    """A typing error would be ignored, and surface as a failed save hours later."""
    with pytest.raises(InvalidOptionError) as caught:
        S3Store("bucket", "", storage_options=options, timeout_s=1, connections=1)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"access_key_id": "AKID", "secret_access_key": "hush\n"},
        {"access_key_id": "AKID", "secret_access_key": "x", "session_token": "hush\r\n"},
        {"sse_customer_key": "hush"},
        {"endpoint_url": "https://user:hush@host"},
        {"endpoint_url": "user:hush@host"},
        {"endpoint_url": "https://user:hush/@host"},
    ],
)
def test_refusals_do_not_show_secrets(options: dict[str, Any]) -> None:
    """A key with a stray line break would be printed into a log by the message that complains about it."""
    with pytest.raises(InvalidOptionError) as caught:
        parse_storage_options(options)
    assert "hush" not in str(caught.value)


def test_reprs_do_not_show_secrets() -> None:
    """A debugger's or logger's repr would give the credentials away."""
    options = {
        "access_key_id": "AKID",
        "secret_access_key": "hush",
        "session_token": "hush-too",
        "sse_customer_key": KEY,
    }
    store = S3Store("bucket", "a/b", storage_options=options, timeout_s=1, connections=1)
    assert repr(store) == "S3Store('s3://bucket/a/b')"
    shown = f"{store!r} {store.uri} {store.session!r} {store.session.client_key!r} {parse_storage_options(options)!r}"
    assert "hush" not in shown
    assert repr(KEY) not in shown
    assert base64.b64encode(KEY).decode() not in shown
