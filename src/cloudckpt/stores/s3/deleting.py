"""Removal in an order that holds, in as few requests as that allows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from cloudckpt.errors import ObjectNotFoundError, StoreError, UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cloudckpt.stores.s3.session import S3Session

_MOST_PER_BATCH = 1000  # https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
_FEWEST_PER_BATCH = 17


def delete_objects(session: S3Session, keys: Iterable[str]) -> None:
    """Remove the objects at `keys`; each request is made once the one before it has succeeded.

    S3 promises no order within a batch, so a batch holds siblings alone, and only of a long row of them:
    objects of one attempt's data, whose order means nothing. A manifest, with few beside it, goes by
    itself.
    """
    for batch in _batches(keys):
        if len(batch) < _FEWEST_PER_BATCH:
            _delete_singly(session, batch)
            continue
        try:
            _delete_batch(session, batch)
        except StoreError as error:
            # Not offered; or not with a checksum's header, in whose place some stores want Content-MD5.
            if type(error) not in (StoreError, UnsupportedOperationError):
                raise
            _delete_singly(session, batch)


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    for _, siblings in itertools.groupby(keys, key=lambda key: key.rpartition("/")[0]):
        while batch := list(itertools.islice(siblings, _MOST_PER_BATCH)):
            yield batch


def _delete_singly(session: S3Session, keys: list[str]) -> None:
    for key in keys:
        try:
            session.call("delete", "DeleteObject", key)
        except ObjectNotFoundError:  # noqa: PERF203 (each is a request; the block costs nothing beside it)
            continue


def _delete_batch(session: S3Session, keys: list[str]) -> None:
    answer = session.call(
        "delete", "DeleteObjects", None, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
    )
    for failed in answer.get("Errors", []):
        error = session.translate_code(
            failed.get("Code", ""),
            failed.get("Message", ""),
            "delete",
            "DeleteObjects",
            failed.get("Key", ""),
        )
        if not isinstance(error, ObjectNotFoundError):
            raise error
