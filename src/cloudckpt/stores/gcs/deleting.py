"""Removal in an order that holds, several at once where none is asked for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from cloudckpt._workers import each_done
from cloudckpt.errors import ObjectNotFoundError
from cloudckpt.stores.gcs.client import MOST_HELPERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cloudckpt.stores.gcs.client import GCSClient
    from cloudckpt.stores.gcs.session import GCSSession

_MOST_PER_ROW = 1000
_FEWEST_PER_ROW = 17


def delete_objects(session: GCSSession, operation: str, names: Iterable[str]) -> None:
    """Remove the objects `names`; each request is made once the one before it has succeeded.

    Only long rows of siblings go several at once: objects of one attempt's data, whose order means nothing. A
    manifest, with few beside it, goes by itself.
    """
    for row in _rows(names):
        if len(row) < _FEWEST_PER_ROW:
            for name in row:
                _delete(session, operation, name)
        else:
            delete_in_any_order(session, operation, row)


def delete_in_any_order(session: GCSSession, operation: str, names: list[str]) -> None:
    """Remove the objects `names`; raises the first error, once all requests under way have ended."""

    def work(name: str) -> None:
        _delete(session, operation, name)

    for _ in each_done(names, work, num_threads=MOST_HELPERS, name="cloudckpt-gcs", on_failure=_nothing):
        pass


def _rows(names: Iterable[str]) -> Iterator[list[str]]:
    for _, siblings in itertools.groupby(names, key=lambda name: name.rpartition("/")[0]):
        while row := list(itertools.islice(siblings, _MOST_PER_ROW)):
            yield row


def _nothing() -> None:
    """What is under way has its timeouts."""


def _delete(session: GCSSession, operation: str, name: str) -> None:
    def ask(client: GCSClient) -> None:
        client.bucket(session.bucket).delete_blob(name, **client.each_call)

    try:
        session.call(operation, "objects.delete", name, ask)
    except ObjectNotFoundError:
        return
