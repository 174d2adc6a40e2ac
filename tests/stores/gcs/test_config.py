"""Storage options: what is right is taken, what is wrong is said, all of it and at once."""

from __future__ import annotations

from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials

from cloudckpt.errors import InvalidOptionError
from cloudckpt.stores.gcs.config import PARSERS, GCSConfig, parse_storage_options

KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"


def test_options_are_taken() -> None:
    """An option that is read under another name, or not at all, changes where or how a checkpoint lies."""
    given: dict[str, Any] = {
        "endpoint_url": "https://storage.example",
        "project": "p",
        "credentials_file": "/k.json",
        "user_project": "payer",
        "kms_key_name": KEY,
        "storage_class": "NEARLINE",
        "connect_timeout_s": 3,
        "read_timeout_s": 4.5,
    }
    config = parse_storage_options(given)
    assert {name: getattr(config, name) for name in given} == given
    assert parse_storage_options({"anonymous": True}).anonymous
    credentials = AnonymousCredentials()
    assert parse_storage_options({"credentials": credentials}).credentials is credentials


def test_every_option_has_its_field() -> None:
    """A parser without a field fails only where a user passes that option."""
    assert set(PARSERS) == set(GCSConfig.__slots__)


def test_none_is_left_out() -> None:
    """Options are often made of settings that may be unset."""
    assert parse_storage_options(dict.fromkeys(PARSERS)) == GCSConfig()


def test_every_problem_is_told_at_once() -> None:
    """One problem at a time means one start of a large job for each."""
    with pytest.raises(InvalidOptionError) as caught:
        parse_storage_options(
            {
                "endpoint": "http://x",
                "anonymous": "yes",
                "endpoint_url": "storage.example",
                "read_timeout_s": 0,
                "credentials": "a token",
                "credentials_file": 7,
                "storage_class": "NEAR LINE",
                "kms_key_name": "",
            }
        )
    text = str(caught.value)
    assert text.startswith("Storage options for GCS: 'endpoint' is not known (did you mean 'endpoint_url'?)")
    for words in (
        "anonymous must be True or False",
        "endpoint_url must look like https://host",
        "read_timeout_s must be a positive number",
        "credentials must be a google.auth.credentials.Credentials, not a str",
        "credentials_file must be the path",
        "storage_class holds white space",
        "kms_key_name must be a non-empty string",
    ):
        assert words in text
    assert "a token" not in text


@pytest.mark.parametrize(
    "options",
    [
        {"anonymous": True, "credentials_file": "/k.json"},
        {"anonymous": True, "credentials": AnonymousCredentials()},
        {"credentials_file": "/k.json", "credentials": AnonymousCredentials()},
    ],
)
def test_credentials_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    """One of them would win, and nobody could say which."""
    with pytest.raises(InvalidOptionError, match="exclude each other"):
        parse_storage_options(options)


def test_an_endpoint_with_credentials_in_it_is_refused() -> None:
    """Every message names the endpoint, and would name the password with it."""
    with pytest.raises(InvalidOptionError, match="must not hold credentials") as caught:
        parse_storage_options({"endpoint_url": "https://user:hush@storage.example"})
    assert "hush" not in str(caught.value)


def test_credentials_are_never_shown() -> None:
    """A configuration that is logged would log a token."""

    class Shown(AnonymousCredentials):
        def __repr__(self) -> str:
            return "HUSH"

    assert "HUSH" not in repr(parse_storage_options({"credentials": Shown()}))


@pytest.mark.parametrize(
    "given",
    [
        {"read_timeout_s": float("inf")},
        {"connect_timeout_s": 10**400},
        {"endpoint_url": "http://host:1/?query"},
        {"endpoint_url": "http://host:1/#fragment"},
        {"endpoint_url": "http://host :1"},
        {"endpoint_url": "http://host:1\n"},
    ],
    ids=["endless", "huge", "query", "fragment", "space", "line break"],
)
def test_what_no_request_could_be_made_with_is_refused(given: dict[str, Any]) -> None:
    """It would surface as an OverflowError out of a socket, or as a server that does not know the bucket."""
    with pytest.raises(InvalidOptionError, match=next(iter(given))):
        parse_storage_options(given)
