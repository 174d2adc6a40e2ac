"""Remove whole checkpoints (`delete`), and the remains of saves (`gc`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from cloudckpt import _clock
from cloudckpt._display import SHOWN_AS, count, size, with_short_repr
from cloudckpt._keywords import suggest_keywords
from cloudckpt._messages import gc_advice, plain_line
from cloudckpt.commit.commit import check_conditional_create
from cloudckpt.commit.entries import manifest_key
from cloudckpt.commit.garbage_plan import Inventory, RemovalPlan
from cloudckpt.commit.garbage_removal import (
    WalkedLocation,
    delete_checkpoint,
    find_spent_claims,
    plan_garbage,
    remove_garbage,
    walk,
)
from cloudckpt.commit.log import describe_folders, list_kept_folders
from cloudckpt.commit.references import Siblings
from cloudckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    GarbageLeftError,
    InvalidOptionError,
    InvalidURIError,
    StoreError,
)
from cloudckpt.events import Event, EventName
from cloudckpt.io.client import StoreClient, open_client
from cloudckpt.options import Options
from cloudckpt.pipeline.context import log_and_deliver
from cloudckpt.stores import open_store
from cloudckpt.uri import Location, parse_location

__all__ = ["Garbage", "GarbageReport", "KeptObject", "delete", "gc"]

_ONE_DAY = timedelta(days=1)
_PARTS = ("manifest", "data/")
"""The beginnings of the keys of a checkpoint."""


@suggest_keywords
def gc(
    root: str | os.PathLike[str],
    *,
    older_than: timedelta | float = _ONE_DAY,
    dry_run: bool = True,
    quiet: bool = False,
    options: Options | None = None,
) -> GarbageReport:
    """Find, and with ``dry_run=False`` remove, the remains of dead, failed and overwritten saves under `root`.

    Garbage is data that the current manifest does not name, unfinished uploads, manifests that no longer count, remains
    of probes, and the last traces of deleted checkpoints. Files of other programs, objects of a checkpoint, and data of
    a save with a sign of life in the last `older_than` are never removed. A save whose data is removed all the same can
    no longer be committed, and fails. A location whose state is unclear is left alone and reported. A run can be
    interrupted and repeated at any moment, and two can run at once.

    Args:
        root: A checkpoint, a folder of checkpoints, or any folder above.
        older_than: A timedelta or seconds. It must be longer than a save takes.
        dry_run: Only report. Writes nothing to the store.
        quiet: Do not print the report of a dry run.
        options: How to reach the store.

    Returns:
        The garbage that was found, and removed unless it was a dry run.

    Raises:
        GarbageLeftError: Something could not be removed or looked at. The rest was done; ``report`` lists the remains.
        StoreError: `root` cannot be listed.
        NoConditionalCommitError: The store cannot create-if-absent, unless ``Options(commit="unconditional")``.
        InvalidOptionError: An argument is wrong.

    Example::

        cloudckpt.gc("s3://bucket/run")  # prints the garbage
        cloudckpt.gc("s3://bucket/run", older_than=2 * 86_400, dry_run=False)

    """
    options = options or Options()
    _parse_older_than(older_than)
    if not isinstance(dry_run, bool):
        raise InvalidOptionError(f"dry_run must be True or False, not {dry_run!r}")
    location = parse_location(root)
    report = _Collection(location, options, older_than=older_than, dry_run=dry_run).report()
    if dry_run and not quiet:
        print(report)  # noqa: T201  # what a dry run is for
    if report.failed:
        first, num_more = report.failed[0], len(report.failed) - 1
        why = first.reason.removesuffix(".")
        raise GarbageLeftError(
            f"gc could not look at, or remove, all that is under {location.uri}: "
            + (why if first.uri in why else f"{first.uri}: {why}")
            + (f" (and {num_more} more, see the error's report)" if num_more else "")
            + ". The rest was done. Run gc again when the cause is removed",
            uri=location.uri,
            report=report,
        )
    return report


@suggest_keywords
def delete(uri: str | os.PathLike[str], *, options: Options | None = None) -> None:
    """Delete the checkpoint at `uri`, with the remains of other saves there.

    After the first request it is gone for every reader. If the process dies then, `gc` removes the rest. A save that
    runs at the same place fails: one object of about a hundred bytes stays to prevent its commit, until `gc` removes it
    after its `older_than`.

    Args:
        uri: The checkpoint.
        options: How to reach the store.

    Raises:
        CheckpointNotFoundError: No checkpoint is committed there.
        InvalidManifestError: The only manifest is that of another program.
        CheckpointChangedError: Another save committed meanwhile. It is left untouched.
        CommitUnknownError: The outcome is unknown.
        StoreError: A request failed.
        NoConditionalCommitError: The store cannot create-if-absent.

    Example::

        cloudckpt.delete("s3://bucket/run/step-100")

    """
    options = options or Options()
    location = parse_location(uri)
    try:
        _delete(location, options)
    except (StoreError, CheckpointError) as error:
        _emit("delete.failed", location.uri, options, error=error)
        raise
    _emit("delete.done", location.uri, options)


def walk_checkpoint(location: Location, options: Options) -> WalkedLocation:
    """List the objects and uploads of cloudckpt at `location`, the location of a checkpoint.

    Raises `NoConditionalCommitError` if the store cannot keep a save from committing during the deletion.
    """
    client = _open_client(location, options)
    if options.commit == "conditional":
        check_conditional_create(client)
    inventory = walk(client, prefixes=_PARTS)
    if inventory.unlisted is not None:
        raise inventory.unlisted
    return _walked_location(location, client, inventory, "", options)


def remove_spent_claims(location: Location, options: Options, *, older_than: timedelta) -> None:
    """Remove the claims of removed checkpoints at `location`, and the data that only these kept, as `gc` does."""
    walked = walk_checkpoint(location, options)
    if any(item.kind == "claim" for item in walked.items):
        with_siblings = replace(walked, siblings=_siblings_of(location, walked.client, options))
        remove_garbage(with_siblings, before=_clock.now() - older_than, conditional=options.commit == "conditional")


def _delete(location: Location, options: Options) -> None:
    walked = walk_checkpoint(location, options)
    if not delete_checkpoint(walked, conditional=options.commit == "conditional"):
        if walked.items:
            advice = f"Saves left data there. {gc_advice(location.uri)}"
        elif folders := list_kept_folders(walked.client):
            advice = f"It has the {describe_folders(folders)}: name the one to delete"
        else:
            advice = "Check the URI"
        raise CheckpointNotFoundError(
            f"no checkpoint is committed at {location.uri}, so there is nothing to delete. {advice}", uri=location.uri
        )


class _Collection:
    """One call of `gc`."""

    def __init__(self, location: Location, options: Options, *, older_than: timedelta | float, dry_run: bool) -> None:
        self._location = location
        self._options = options
        self._older_than = older_than
        self._dry_run = dry_run
        self._is_conditional = options.commit == "conditional"
        self._client = _open_client(location, options)
        self._found: list[Garbage] = []
        self._skipped: list[KeptObject] = []
        self._failed: list[KeptObject] = []

    def report(self) -> GarbageReport:
        """Collect the garbage at every location, and report it."""
        if not self._dry_run and self._is_conditional:
            check_conditional_create(self._client)
        inventory = walk(self._client)
        if inventory.unlisted is not None:
            self._fail(self._location.uri, inventory.unlisted, "unfinished uploads: ")
        before = _parse_older_than(self._older_than)  # after the walk, which has found the store's clock
        for prefix in inventory.locations:
            self._collect(prefix, inventory, before)
        return GarbageReport(
            root=self._location.uri,
            dry_run=self._dry_run,
            locations=tuple(self._found),
            skipped=tuple(self._skipped),
            failed=tuple(self._failed),
            is_nothing_there=not inventory.locations,
        )

    def _collect(self, prefix: str, inventory: Inventory, before: datetime) -> None:
        root_uri = self._location.uri
        uri = f"{root_uri.rstrip('/')}/{prefix.rstrip('/')}" if prefix else root_uri
        failures: dict[str, StoreError] = {}
        num_untried = 0
        try:
            walked = _walked_location(self._location, self._client, inventory, prefix, self._options)
            if self._dry_run:
                spent = find_spent_claims(walked, before=before, conditional=self._is_conditional, is_dry=True)
                _, plan = plan_garbage(walked, before=before, spent=spent)
                young = plan.young
            else:
                removal = remove_garbage(walked, before=before, conditional=self._is_conditional)
                plan, failures, young, num_untried = removal.removed, removal.errors, removal.young, removal.num_untried
        except (StoreError, CommitUnknownError) as error:
            self._fail(uri, error)
            return
        except (CheckpointError, InvalidURIError) as error:
            # The manifest.json of another program is skipped silently if no data of cloudckpt is beside it.
            if inventory.items_at(prefix):
                self._skipped.append(KeptObject(uri=uri, reason=str(error)))
            return
        for key, failure in failures.items():
            self._fail(self._client.url(key), failure)
        if num_untried:
            reason = f"{count(num_untried, 'more object')} not tried after these failures"
            self._failed.append(KeptObject(uri=uri, reason=reason))
        if young:
            uploads = sum(item.kind == "upload" for item in young)
            data = f"{size(sum(item.size_bytes for item in young))} and {count(uploads, 'unfinished upload')}"
            moment = f"{before:%Y-%m-%d %H:%M:%S} UTC"
            reason = f"{data} that no checkpoint needs, of saves that were alive after {moment}"
            self._skipped.append(KeptObject(uri=uri, reason=reason))
        if plan.is_empty:
            return
        garbage = describe_garbage(uri, prefix, plan)
        self._found.append(garbage)
        if not self._dry_run:
            _emit("gc.removed", uri, self._options, num_bytes=garbage.num_bytes, message=", ".join(garbage.reasons))

    def _fail(self, uri: str, error: Exception, prefix: str = "") -> None:
        self._failed.append(KeptObject(uri=uri, reason=f"{prefix}{error}"))
        _emit("gc.failed", uri, self._options, error=error)


def _parse_older_than(older_than: timedelta | float) -> datetime:
    """Return the time before which garbage must have been written."""
    seconds = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds < math.inf:
        raise InvalidOptionError(
            f"older_than must be a timedelta or a number of seconds, finite and not negative, not {older_than!r}"
        )
    try:
        return _clock.now() - timedelta(seconds=seconds)
    except OverflowError:
        raise InvalidOptionError(f"older_than must not reach back beyond the year 1, as {older_than!r} does") from None


def _open_client(location: Location, options: Options) -> StoreClient:
    def on_retry(error: StoreError) -> None:
        _emit("retry", location.uri, options, key=error.key, error=error)

    return open_client(location, options, on_retry=on_retry)


def _emit(
    name: EventName,
    uri: str,
    options: Options,
    *,
    key: str = "",
    num_bytes: int = 0,
    error: Exception | None = None,
    message: str = "",
) -> None:
    """Emit an event. An exception of a subscriber is only logged, because a removal cannot be undone."""
    text = message if error is None else str(error)
    kind = "" if error is None else type(error).__name__
    event = Event(name=name, uri=uri, rank=0, key=key, num_bytes=num_bytes, error=kind, message=text)
    log_and_deliver(event, options, words=f"{name} {uri}" + (f": {text}" if text else ""))


def _walked_location(
    location: Location, client: StoreClient, inventory: Inventory, prefix: str, options: Options
) -> WalkedLocation:
    if not prefix:
        return WalkedLocation(client=client, root=client, prefix=prefix, items=inventory.items_at(prefix))
    # Raises `InvalidURIError` for a folder that no checkpoint can have.
    own = parse_location(location.child(prefix.rstrip("/")).uri)
    return WalkedLocation(
        client=client.at(open_store(own, options)),
        root=client,
        prefix=prefix,
        items=inventory.items_at(prefix),
        siblings=_siblings_of(own, client, options),
    )


def _siblings_of(location: Location, client: StoreClient, options: Options) -> Siblings:
    return lambda folder: client.at(open_store(location.parent.child(folder), options))


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """Garbage of one location."""

    uri: str
    """URI of the location."""
    keys: tuple[str, ...]
    """Keys of the objects, relative to the root."""
    uploads: tuple[str, ...]
    """Keys of the unfinished uploads, relative to the same root."""
    num_bytes: int
    """Size of the objects, on a path with that of unfinished uploads, which no other store reports."""
    reasons: tuple[str, ...]
    """Counts by kind, in words."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class KeptObject:
    """A location, step or object that stays as it is: not removed or, in a `DrainReport`, not copied."""

    uri: str
    """Its URI."""
    reason: str
    """Reason why it stays."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """Result of `gc`. ``str()`` of it is the text that a dry run prints."""

    root: str
    """URI that was searched."""
    dry_run: bool
    """True if nothing was removed."""
    locations: tuple[Garbage, ...]
    """Garbage by location."""
    skipped: tuple[KeptObject, ...]
    """Locations whose state is unclear, and data of saves that may still run. Nothing of them was removed."""
    failed: tuple[KeptObject, ...]
    """Items that could not be removed or looked at."""
    is_nothing_there: bool = field(default=False, metadata={SHOWN_AS: lambda value: value or None})
    """True if cloudckpt wrote nothing under `root`, which may be the wrong one."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all objects, relative to `root`."""
        return tuple(key for garbage in self.locations for key in garbage.keys)

    @property
    def uploads(self) -> tuple[str, ...]:
        """Keys of all unfinished uploads, relative to `root`."""
        return tuple(key for garbage in self.locations for key in garbage.uploads)

    @property
    def num_objects(self) -> int:
        """Number of objects."""
        return sum(len(garbage.keys) for garbage in self.locations)

    @property
    def num_uploads(self) -> int:
        """Number of unfinished uploads."""
        return sum(len(garbage.uploads) for garbage in self.locations)

    @property
    def num_bytes(self) -> int:
        """Size of all objects."""
        return sum(garbage.num_bytes for garbage in self.locations)

    def __str__(self) -> str:
        how = " (dry run; pass dry_run=False to remove it)" if self.dry_run and self.locations else ""
        failed = (f"{item.uri}: failed: {item.reason}" for item in self.failed)
        return "\n".join(map(plain_line, (*failed, *lines_of(self, how=how))))


def lines_of(report: GarbageReport, *, how: str = "") -> Iterator[str]:
    """Yield the text of a report, without its failures. `how` follows the sums."""
    for garbage in report.locations:
        size_text = f" ({size(garbage.num_bytes)})" if garbage.keys or garbage.num_bytes else ""
        yield f"{garbage.uri}: {', '.join(garbage.reasons)}{size_text}"
    for item in report.skipped:
        yield f"{item.uri}: left alone: {item.reason}"
    yield (
        f"{report.root}: {count(report.num_objects, 'object')} and {count(report.num_uploads, 'unfinished upload')} of "
        f"{size(report.num_bytes)} {'would be removed' if report.dry_run else 'removed'}{how}"
    )
    if report.is_nothing_there:
        yield f"{report.root}: cloudckpt has written nothing there. Is it the right place?"


def describe_garbage(uri: str, prefix: str, plan: RemovalPlan) -> Garbage:
    """Describe the garbage of one location, whose keys begin with `prefix`."""
    entries = [*plan.entries, *([plan.lone_fence] if plan.lone_fence else [])]
    fences = [entry for entry in entries if entry.has_fence_size]
    data = [item for item in plan.objects if item.kind == "data"]
    claims = [item for item in plan.objects if item.kind == "claim"]
    attempts = {item.attempt for item in data}
    counts = (
        (len(data), f"{count(len(data), 'data object')} of {count(len(attempts), 'save')} that nothing refers to"),
        (len(plan.uploads), count(len(plan.uploads), "unfinished upload")),
        (len(entries) - len(fences), f"{count(len(entries) - len(fences), 'manifest')} that no longer counts"),
        (num_spent := len(fences) - (plan.lone_fence in fences), count(num_spent, "spent fence")),
        (plan.lone_fence in fences, "the fence of a removed checkpoint"),
        (len(claims), f"{count(len(claims), 'claim')} of saves that are gone"),
        (num_probes := len(plan.objects) - len(data) - len(claims), count(num_probes, "left-over probe")),
    )
    return Garbage(
        uri=uri,
        keys=(*(prefix + manifest_key(entry.number) for entry in entries), *(item.key for item in plan.objects)),
        uploads=tuple(item.key for item in plan.uploads),
        num_bytes=sum(item.size_bytes for item in (*plan.objects, *plan.uploads))
        + sum(entry.size_bytes for entry in entries),
        reasons=tuple(text for number, text in counts if number),
    )
