"""Every call of a store's protocol as a value, for the clauses that hold of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from cloudckpt.errors import StoreError, UnsupportedOperationError
from cloudckpt.stores.base import Store
from cloudckpt.testing._contract_tools import bodies_of, content, keys, parts_of, put, read_range, upload_part

BODY = bytes(range(256)) * 16
"""What lies at the keys that the calls are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the protocol, which can be made again and again."""

    key: str
    run: Callable[[Store], object]


def calls_of(store: Store) -> dict[str, Call]:
    """Every call that a store has, about objects that exist."""
    for key in ("run/kept", "run/removed"):
        put(store, key, BODY)
    found = {
        "put": Call(key="run/new", run=lambda far: put(far, "run/new", BODY)),
        "read_into": Call(key="run/kept", run=lambda far: read_range(far, "run/kept", 0, len(BODY))),
        "read": Call(key="run/kept", run=lambda far: content(far, "run/kept")),
        "head": Call(key="run/kept", run=lambda far: far.head("run/kept")),
        "list": Call(key="run/", run=lambda far: keys(far, "run/")),
        "list_directories": Call(key="", run=lambda far: list(far.list_directories())),
        "delete": Call(key="run/removed", run=lambda far: far.delete(["run/removed"])),
        "copy": Call(key="run/kept", run=lambda far: far.copy("run/kept", "run/copy")),
    }
    with contextlib.suppress(UnsupportedOperationError):
        source_url = store.url("run/kept")
        store.copy_from(source_url, "run/by-service")
        found["copy_from"] = Call(key="run/kept", run=lambda far: far.copy_from(source_url, "run/by-service"))
    if store.capabilities.multipart:
        body = bodies_of(store, 1)[0]
        part = parts_of([body])[0]
        upload_id = store.create_multipart("run/upload")
        gone_id = store.create_multipart("run/gone")
        found |= {
            "create_multipart": Call(key="run/more", run=lambda far: far.create_multipart("run/more")),
            "upload_part": Call(
                key="run/upload", run=lambda far: upload_part(far, "run/upload", upload_id, part, body)
            ),
            "list_uploads": Call(key="", run=lambda far: list(far.list_uploads())),
            "abort_multipart": Call(key="run/gone", run=lambda far: far.abort_multipart("run/gone", gone_id)),
        }
    if store.capabilities.listed_parts != "none":
        found["list_parts"] = Call(key="run/upload", run=lambda far: list(far.list_parts("run/upload", upload_id)))
    return found


def outcome_of(call: Callable[[], object]) -> object:
    """What `call` returns, or the `StoreError` that it raises; other errors pass."""
    try:
        return call()
    except StoreError as error:
        return error
