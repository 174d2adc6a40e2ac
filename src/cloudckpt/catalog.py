"""Which checkpoints there are under a root."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import datetime

from cloudckpt._commit.resolve import MANIFEST_PREFIX, manifest_number
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location, parse_location
from cloudckpt._workers import each_done
from cloudckpt.errors import InvalidURIError
from cloudckpt.options import Options
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One committed checkpoint."""

    uri: str
    name: str
    """Its last segment: ``step-100`` of ``s3://bucket/run/step-100``."""
    committed_at: datetime
    """When, by the store's clock, the manifest that counts was written."""


def list_checkpoints(root: str | os.PathLike[str], *, options: Options | None = None) -> list[CheckpointInfo]:
    """The committed checkpoints directly under `root`, oldest first.

    What is unfinished, failed or foreign is not in the list. The order is that in which the store got the manifests:
    a copy of checkpoints made by other tools has the order of the copying. Commits within the resolution of the
    store's clock are ordered by name, numbers by value. Only listings are made; no manifest is opened. Raises
    `StoreError` subclasses.
    """
    options = options or Options()
    location = parse_location(root)
    store = open_store(location.uri, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    names = [name for name in retrier.call(lambda: list(store.list_directories())) if _can_be_opened(location, name)]
    committed_at: dict[str, datetime | None] = {}

    def look(name: str) -> None:
        committed_at[name] = retrier.call(lambda: _committed_at(store, name))

    for _ in each_done(names, look, num_threads=options.connections, name="cloudckpt-list", on_failure=retrier.stop):
        pass
    found = [
        CheckpointInfo(uri=location.child(name).uri, name=name, committed_at=moment)
        for name in names
        if (moment := committed_at[name]) is not None
    ]
    return sorted(found, key=lambda info: (info.committed_at, _natural(info.name)))


def _can_be_opened(location: Location, name: str) -> bool:
    """Whether a checkpoint can have this name. A bucket can hold others, which some other tool has written."""
    try:
        parse_location(location.child(name).uri)
    except InvalidURIError:
        return False
    return True


def latest(root: str | os.PathLike[str], *, options: Options | None = None) -> CheckpointInfo | None:
    """The checkpoint directly under `root` that was committed last; None where there is none."""
    return next(reversed(list_checkpoints(root, options=options)), None)


def _committed_at(store: Store, name: str) -> datetime | None:
    prefix = f"{name}/"
    manifests = [
        (number, info.modified_at)
        for info in store.list(prefix + MANIFEST_PREFIX)
        if (number := manifest_number(info.key.removeprefix(prefix))) is not None
    ]
    return max(manifests)[1] if manifests else None


def _natural(name: str) -> list[tuple[int, str]]:
    """``step-2`` before ``step-10``."""
    return [(int(text), "") if text.isdigit() else (-1, text) for text in _DIGITS.split(name)]
