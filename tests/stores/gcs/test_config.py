"""Storage options: what is right is taken, what is wrong is said, all of it and at once."""

from __future__ import annotations

import pytest
from google.auth.credentials import AnonymousCredentials

from cloudckpt.errors import InvalidOptionError
from cloudckpt.stores.gcs.client import parse_storage_options


def test_every_problem_is_told_at_once() -> None:
    """One problem at a time means one start of a large job for each."""
    with pytest.raises(InvalidOptionError) as caught:
        parse_storage_options(
            {
                "endpoint": "http://x",
                "anonymous": "yes",
                "endpoint_url": "storage.example",
                "credentials": "a token",
                "storage_class": "NEAR LINE",
            }
        )
    text = str(caught.value)
    assert text.startswith("Storage options for GCS: 'endpoint' is not known (did you mean 'endpoint_url'?)")
    for words in (
        "anonymous must be True or False",
        "endpoint_url must look like https://host",
        "credentials must be a google.auth.credentials.Credentials, not a str",
        "storage_class holds white space",
    ):
        assert words in text
    assert "a token" not in text


def test_credentials_are_never_shown() -> None:
    """A configuration that is logged would log a token."""

    class Shown(AnonymousCredentials):
        def __repr__(self) -> str:
            return "HUSH"

    assert "HUSH" not in repr(parse_storage_options({"credentials": Shown()}))
