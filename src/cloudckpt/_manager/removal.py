"""Removing one step's checkpoint, unless somebody is writing there."""

from __future__ import annotations

from datetime import datetime

from cloudckpt._commit.collect import Place, walk_checkpoint
from cloudckpt._commit.condition import check_condition
from cloudckpt._commit.garbage import attempt_time
from cloudckpt._commit.remove import delete_checkpoint
from cloudckpt._commit.resolve import resolve
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import parse_location
from cloudckpt.errors import CheckpointError
from cloudckpt.options import Options
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store


def remove(uri: str, options: Options, *, alive_since: datetime) -> str | None:
    """Remove the checkpoint at `uri`, as `cloudckpt.delete` does. One that is gone by now is as good as removed.

    Says why not, and leaves all alone, where a save that is not the committed one has shown a sign of life since
    `alive_since`: it overwrites what is there. One that begins later fails, for the number that it is to commit under
    is taken by then. Raises what `cloudckpt.delete` does.
    """
    location = parse_location(uri)
    store = open_store(location, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    conditional = options.commit == "conditional"
    if conditional:
        check_condition(store, retrier)
    inventory, prefixes = walk_checkpoint(store, retrier, has_hidden_uploads=location.scheme == "file")
    places: list[Place] = []
    for prefix in prefixes:
        own: Store = open_store(location.child(prefix.rstrip("/")), options) if prefix else store
        places.append(Place(store=own, root=store, prefix=prefix, found=inventory.at(prefix)))
    for place in places:
        if _is_written_to(place, retrier, alive_since=alive_since):
            return "another save is writing there"
    for place in places:
        delete_checkpoint(place, retrier, conditional=conditional)
    return None


def _is_written_to(place: Place, retrier: Retrier, *, alive_since: datetime) -> bool:
    attempts = {item.attempt for item in place.found if item.attempt}
    if len(attempts) <= 1:
        return False  # it is that of the commit, whose manifest may be large
    try:
        manifest = resolve(place.store, retrier).manifest
    except CheckpointError:
        own: set[str] = set()
    else:
        named = {place.prefix + stored.key for stored in manifest.objects}
        own = {item.attempt for item in place.found if item.key in named}
    return any(
        item.moment >= alive_since or _begun_since(item.attempt, alive_since)
        for item in place.found
        if item.attempt and item.attempt not in own
    )


def _begun_since(attempt: str, moment: datetime) -> bool:
    try:
        return attempt_time(attempt) >= moment
    except ValueError:
        return False
