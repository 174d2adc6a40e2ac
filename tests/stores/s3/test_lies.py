"""Servers and proxies whose listings are not what was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from cloudckpt import errors

PAGE = "<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{content}</ListBucketResult>"
OBJECT = "<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"


def test_a_key_outside_the_root_is_an_error(scripted: Any) -> None:
    """Its beginning would be cut off, and the rest taken for a key of ours: removing it could hit another object."""
    listing = PAGE.format(truncated="false", content=OBJECT.format(key="elsewhere/a"))
    with pytest.raises(errors.UnsupportedOperationError, match="ignores prefixes"):
        list(scripted.serve(scripted.reply(200, listing)).store(prefix="p").list())


def test_a_listing_without_end_is_noticed(scripted: Any) -> None:
    """Opening a checkpoint would hang for ever behind a proxy that ignores page tokens."""
    token = "<NextContinuationToken>again</NextContinuationToken>"  # noqa: S105  # of a listing
    server = scripted.serve(scripted.reply(200, PAGE.format(truncated="true", content=token)))
    with pytest.raises(errors.UnsupportedOperationError, match="round in circles"):
        list(server.store(prefix="p").list())
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<Prefix>q/</Prefix>", "another Prefix"),
        ("<Prefix/>", "another Prefix"),
        ("<Prefix>p/</Prefix><KeyCount>2</KeyCount>" + OBJECT.format(key="p/a"), "has 1"),
        ("<Contents><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>", "lacks"),
        ("<Contents><Key>p/a</Key><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>", "lacks"),
        ("<Contents><Key>p/a</Key><Size>1</Size></Contents>", "lacks"),
    ],
)
def test_a_listing_that_was_not_asked_for_is_not_believed(scripted: Any, content: str, words: str) -> None:
    """If this fails, a cache that ignores queries answers with another listing: checkpoints are missing, or a KeyError
    names neither store nor remedy.
    """
    server = scripted.serve(scripted.reply(200, PAGE.format(truncated="false", content=content)))
    with pytest.raises(errors.TransientStoreError, match=f"not asked for: .*{words}|cannot be|is not S3's"):
        list(server.store(prefix="p").list())


@pytest.mark.parametrize("echo", ["p/a b+%20/", "p/a%20b%2B%2520/", "p/a+b%2B%2520/"], ids=["rgw", "moto", "rclone"])
def test_a_listing_that_was_asked_for_is_believed_however_it_is_spelled(scripted: Any, echo: str) -> None:
    """If this fails, a bucket on Ceph or rclone cannot be listed where a key has a space or a percent sign."""
    content = f"<Prefix>{echo}</Prefix><EncodingType>url</EncodingType><KeyCount>0</KeyCount>"
    server = scripted.serve(scripted.reply(200, PAGE.format(truncated="false", content=content)))
    assert list(server.store(prefix="p").list("a b+%20/")) == []
