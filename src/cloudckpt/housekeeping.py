"""Removing what nobody needs: `gc` for what saves have left behind, `delete` for whole checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from cloudckpt._commit.collect import Left, Place, collect, judge, walk
from cloudckpt._commit.condition import check_condition
from cloudckpt._commit.garbage import Inventory, Plan
from cloudckpt._commit.remove import delete_checkpoint
from cloudckpt._commit.resolve import manifest_key, ranks_of
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location, parse_location
from cloudckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    GarbageLeftError,
    InvalidOptionError,
    InvalidURIError,
    StoreError,
)
from cloudckpt.options import GIB, KIB, MIB, Options
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

_ONE_DAY = timedelta(days=1)
_PARTS_OF_A_CHECKPOINT = ("manifest", "data/", "rank-")
_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """What goes, or went, at one location."""

    uri: str
    keys: tuple[str, ...]
    """Of the objects, relative to the root that was looked through."""
    uploads: tuple[str, ...]
    """The keys of the unfinished uploads, relative to the same root."""
    num_bytes: int
    """Of the objects. What unfinished uploads hold, no store says."""
    reasons: tuple[str, ...]
    """How many of what, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spared:
    """What was left alone, or could not be removed, and why."""

    uri: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """What `gc` found, and removed unless it was a dry run. ``str()`` of it is what a dry run prints."""

    root: str
    dry_run: bool
    locations: tuple[Garbage, ...]
    skipped: tuple[Spared, ...]
    """Locations of which it could not be told what counts there, so that nothing was removed."""
    failed: tuple[Spared, ...]
    """What was to go, or to be looked at, and could not."""
    is_nothing_there: bool = False
    """Whether nothing under `root` is cloudckpt's, be it garbage or not: perhaps it is not the place that was meant."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all objects, relative to `root`."""
        return tuple(key for garbage in self.locations for key in garbage.keys)

    @property
    def uploads(self) -> tuple[str, ...]:
        """The keys of all unfinished uploads, relative to `root`."""
        return tuple(key for garbage in self.locations for key in garbage.uploads)

    @property
    def num_objects(self) -> int:
        """How many objects."""
        return sum(len(garbage.keys) for garbage in self.locations)

    @property
    def num_uploads(self) -> int:
        """How many unfinished uploads."""
        return sum(len(garbage.uploads) for garbage in self.locations)

    @property
    def num_bytes(self) -> int:
        """Of all objects."""
        return sum(garbage.num_bytes for garbage in self.locations)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for garbage in self.locations:
            yield f"{_shown(garbage.uri)}: {', '.join(garbage.reasons)} ({_size(garbage.num_bytes)})"
        for spared in self.skipped:
            yield f"{_shown(spared.uri)}: left alone: {_shown(spared.reason)}"
        for spared in self.failed:
            yield f"{_shown(spared.uri)}: failed: {_shown(spared.reason)}"
        done = "would be removed" if self.dry_run else "removed"
        how = " (dry run; pass dry_run=False to remove it)" if self.dry_run and self.locations else ""
        yield (
            f"{self.root}: {_count(self.num_objects, 'object')} of {_size(self.num_bytes)} and "
            f"{_count(self.num_uploads, 'unfinished upload')} {done}{how}"
        )
        if self.is_nothing_there:
            yield f"{self.root}: nothing of cloudckpt's lies there; is it the right place?"


def gc(
    root: str | os.PathLike[str],
    *,
    older_than: timedelta | float = _ONE_DAY,
    dry_run: bool = True,
    quiet: bool = False,
    options: Options | None = None,
) -> GarbageReport:
    """Find, and with ``dry_run=False`` remove, what saves that died, failed or were overwritten left under `root`.

    `root` is a checkpoint, a folder of them, or anything above. Garbage is: data that the manifest that counts does not
    name, unfinished uploads, manifests that no longer count, what is left of probes, and the last traces of deleted
    checkpoints. Nothing goes that cloudckpt did not write; that a checkpoint is made of; or that belongs to a save
    with a sign of life in the last `older_than` (a timedelta, or seconds), which must be longer than a save takes: a
    save whose data is taken all the same can no longer be committed, and fails. Where it cannot be told what counts,
    nothing is removed, and the report says so.

    A dry run writes nothing, and unless `quiet` prints the report that it returns. A real run can be interrupted at any
    moment and repeated, and two can run at once. Raises `GarbageLeftError`, with the report, where something could not
    be removed, once all the rest was; `StoreError` where `root` cannot be listed; `NoConditionalCommitError` on a store
    that cannot create-if-absent, unless ``Options(commit="unconditional")``; `InvalidOptionError`.
    """
    options = options or Options()
    before = _before(older_than)
    _check_dry_run(dry_run)
    location = parse_location(root)
    store, retrier = open_store(location, options), _retrier(options)
    if not dry_run and options.commit == "conditional":
        check_condition(store, retrier)
    failed: list[Spared] = []
    inventory = walk(
        store,
        retrier,
        has_hidden_uploads=location.scheme == "file",
        on_unlisted=lambda error: failed.append(Spared(uri=location.uri, reason=f"unfinished uploads: {error}")),
    )
    found: list[Garbage] = []
    skipped: list[Spared] = []
    for prefix in inventory.locations:
        uri = _uri_of(location, prefix)
        try:
            place = _place(location, store, inventory, prefix, options)
            if dry_run:
                plan, left = judge(place, retrier, before=before).plan, list[Left]()
            else:
                plan, left = collect(place, retrier, before=before, conditional=options.commit == "conditional")
        except (StoreError, CommitUnknownError) as error:
            failed.append(Spared(uri=uri, reason=str(error)))
            continue
        except (CheckpointError, InvalidURIError) as error:
            # Another program's manifest.json is no business of ours where nothing of ours lies beside it.
            if inventory.at(prefix):
                skipped.append(Spared(uri=uri, reason=str(error)))
            continue
        failed += [Spared(uri=store.url(item.key), reason=str(item.error)) for item in left]
        if not plan.is_empty:
            found.append(_garbage(uri, prefix, plan))
    report = GarbageReport(
        root=location.uri,
        dry_run=dry_run,
        locations=tuple(found),
        skipped=tuple(skipped),
        failed=tuple(failed),
        is_nothing_there=not inventory.locations,
    )
    if dry_run and not quiet:
        print(report)  # noqa: T201  # what a dry run is for
    if failed:
        raise GarbageLeftError(
            f"gc could not do all of its work under {location.uri}: {failed[0].uri}: {failed[0].reason}"
            + (f" (and {len(failed) - 1} more, see the error's report)" if len(failed) > 1 else "")
            + ". The rest was done; run it again when that is mended",
            uri=location.uri,
            report=report,
        )
    return report


def delete(uri: str | os.PathLike[str], *, options: Options | None = None) -> None:
    """Delete the checkpoint at `uri`: all of it that cloudckpt wrote, and what saves to the same place left there.

    It is gone at once, for every reader, when the first request has succeeded; who dies afterwards leaves only what
    `gc` removes. A save that is under way there fails. What stays is one object of about a hundred bytes, which keeps
    such a save from being committed; `gc` removes that, too, after its `older_than`. What ranks saved there without
    collectives goes as well.

    Raises `CheckpointNotFoundError`; `InvalidManifestError` where another program's ``manifest.json`` is all there is;
    `CheckpointChangedError` where another save's commit came between, which is left untouched; `CommitUnknownError`
    where it cannot be known whether it is deleted; `StoreError`; `NoConditionalCommitError`.
    """
    options = options or Options()
    location = parse_location(uri)
    store, retrier = open_store(location, options), _retrier(options)
    conditional = options.commit == "conditional"
    if conditional:
        check_condition(store, retrier)
    inventory = walk(
        store, retrier, prefixes=_PARTS_OF_A_CHECKPOINT, has_hidden_uploads=location.scheme == "file", on_unlisted=None
    )
    was_there = False
    ranks = ranks_of(prefix.removesuffix("/") for prefix in inventory.locations)
    for prefix in inventory.locations:
        if prefix in {"", *(f"rank-{rank}/" for rank in ranks)}:
            place = _place(location, store, inventory, prefix, options)
            was_there |= delete_checkpoint(place, retrier, conditional=conditional)
    if not was_there:
        raise CheckpointNotFoundError(
            f"no checkpoint is committed at {location.uri}, so there is nothing to delete. What failed saves have left "
            "there, cloudckpt.gc removes",
            uri=location.uri,
        )


def _check_dry_run(dry_run: object) -> None:
    if not isinstance(dry_run, bool):
        raise InvalidOptionError(f"dry_run must be True or False, not {dry_run!r}")


def _before(older_than: timedelta | float) -> datetime:
    """The moment before which all signs of life must lie."""
    seconds = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds < math.inf:
        raise InvalidOptionError(
            f"older_than must be a timedelta or a number of seconds, finite and not negative, not {older_than!r}"
        )
    try:
        return datetime.now(timezone.utc) - timedelta(seconds=seconds)
    except OverflowError:
        raise InvalidOptionError(f"older_than must be a time since there are calendars, not {older_than!r}") from None


def _retrier(options: Options) -> Retrier:
    return Retrier(retries=options.retries, timeout_s=options.timeout_s)


def _shown(text: str) -> str:
    """As one line of plain text: keys are whatever somebody put into the bucket."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _uri_of(location: Location, prefix: str) -> str:
    return f"{location.uri.rstrip('/')}/{prefix.rstrip('/')}" if prefix else location.uri


def _place(location: Location, store: Store, inventory: Inventory, prefix: str, options: Options) -> Place:
    own = store
    if prefix:
        # A bucket can hold folders that no checkpoint can lie in.
        own = open_store(parse_location(location.child(prefix.rstrip("/")).uri), options)
    return Place(store=own, root=store, prefix=prefix, found=inventory.at(prefix))


def _garbage(uri: str, prefix: str, plan: Plan) -> Garbage:
    entries = [*plan.entries, *([plan.lone_fence] if plan.lone_fence else [])]
    fences = [entry for entry in entries if entry.is_fence]
    data = [item for item in plan.objects if item.kind == "data"]
    attempts = {item.attempt for item in data}
    counts = (
        (len(data), f"{_count(len(data), 'data object')} of {_count(len(attempts), 'save')} that nothing refers to"),
        (len(plan.uploads), _count(len(plan.uploads), "unfinished upload")),
        (len(entries) - len(fences), f"{_count(len(entries) - len(fences), 'manifest')} that no longer counts"),
        (len(fences), _count(len(fences), "spent fence")),
        (len(plan.objects) - len(data), _count(len(plan.objects) - len(data), "left-over probe")),
    )
    return Garbage(
        uri=uri,
        keys=(*(prefix + manifest_key(entry.number) for entry in entries), *(item.key for item in plan.objects)),
        uploads=tuple(item.key for item in plan.uploads),
        num_bytes=sum(item.size_bytes for item in plan.objects) + sum(entry.size_bytes for entry in entries),
        reasons=tuple(text for number, text in counts if number),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(num_bytes: int) -> str:
    for unit_bytes, name in _UNITS:
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {name}"
    return _count(num_bytes, "byte")
