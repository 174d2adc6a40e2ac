"""What the stores that speak HTTP say about the same trouble, whatever their SDK calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    TransientStoreError,
    UnsupportedOperationError,
)

Rule: TypeAlias = tuple[type[StoreError], str]
"""What to raise, and what to do next; ``{bucket}``, ``{endpoint}`` and ``{permission}`` are filled in."""

BUCKET: Rule = (
    BucketNotFoundError,
    "Bucket {bucket!r} does not exist at {endpoint}. Create it, or correct its name.",
)
CANNOT: Rule = (UnsupportedOperationError, "This store does not offer the operation, or not with these options.")
CLOSED: Rule = (TransientStoreError, "{endpoint} closed the connection. Try again.")
CONNECT_LATE: Rule = (
    StoreTimeoutError,
    "{endpoint} accepted no connection in time. Check endpoint_url and the network, or raise timeout_s.",
)
DENIED: Rule = (AccessDeniedError, "Grant {permission} to these credentials.")
EXISTS: Rule = (ObjectExistsError, "An object lies at this key already; it was left as it is.")
FOREIGN: Rule = (
    TransientStoreError,
    (
        "Is a proxy or a load balancer between? Try again; if it goes on, check endpoint_url, and what answers at "
        "{endpoint}."
    ),
)
LATER: Rule = (TransientStoreError, "Try again; if it goes on, look into what {endpoint} says.")
NOTHING: Rule = (ObjectNotFoundError, "Nothing lies at this key.")
PROXY: Rule = (TransientStoreError, "The proxy did not connect. Check HTTP_PROXY, HTTPS_PROXY and NO_PROXY.")
READ_LATE: Rule = (StoreTimeoutError, "{endpoint} made no progress in time. Try again, or raise timeout_s.")
REQUEST: Rule = (StoreError, "The store refuses the request as it stands. Check storage_options and the key.")
SHORT: Rule = (ShortObjectError, "The object ends before the range that was asked for.")
TLS: Rule = (TransientStoreError, "TLS to {endpoint} failed. Check endpoint_url (http or https), and try again.")
UNREACHED: Rule = (
    TransientStoreError,
    "No connection to {endpoint}. Check that it runs, the network, and endpoint_url (host, port, http or https).",
)


SAID_BY_ANYONE = frozenset({407, 408, 413, 429})
"""Statuses below 500 that mean the same whoever answers with them, a proxy too. None of them says that an object is
there, or is not, or ends somewhere."""


def by_name(groups: Sequence[tuple[Rule, str]]) -> dict[str, Rule]:
    return {name: rule for rule, names in groups for name in names.split()}
