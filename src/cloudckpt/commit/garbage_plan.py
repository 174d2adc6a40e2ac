"""Decide what is garbage at a location. Pure functions of values, which make no requests."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal, NamedTuple

from cloudckpt.commit.attempts import ATTEMPT, parse_number
from cloudckpt.commit.entries import LogEntry, parse_entry
from cloudckpt.errors import StoreError
from cloudckpt.stores.base import ObjectInfo, UploadInfo

Kind = Literal["data", "upload", "probe", "claim"]

_FOLDER = rf"((?:.*/)?)data/({ATTEMPT.pattern})/"
_NUMBER = r"(?:0|[1-9][0-9]*)"
_DATA = re.compile(rf"{_FOLDER}{_NUMBER}-{_NUMBER}(?:\.safetensors|\.receipt)", re.DOTALL)
_IN_FOLDER = re.compile(rf"{_FOLDER}[^/]*", re.DOTALL)
_PROBE = re.compile(r"((?:.*/)?)\.cloudckpt-probe-[0-9a-f]{16}", re.DOTALL)
_CLAIM = re.compile(rf"{_FOLDER}[^/]+\.claim", re.DOTALL)
_HIDDEN_ID = re.compile(r"[0-9a-f]{32}")
_TIME_CHARACTERS = len("20260131T235959123")


class FoundItem(NamedTuple):
    """An item that cloudckpt wrote beside its log: data, an unfinished upload, a claim, or the remains of a probe."""

    kind: Kind
    key: str
    """Relative to the root that was walked."""
    attempt: str
    """The attempt that wrote it; empty if no attempt did."""
    size_bytes: int
    moment: datetime
    upload_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalPlan:
    """The items to remove at one location, in the order of the fields, and the `young` ones, which stay."""

    needs_fence: bool
    """True if a fence must be put first: the save of some of this data could still commit."""
    uploads: tuple[FoundItem, ...]
    entries: tuple[LogEntry, ...]
    """Lowest number first."""
    objects: tuple[FoundItem, ...]
    """Sorted by key."""
    lone_fence: LogEntry | None
    """The last trace of a checkpoint, which ends the log."""
    young: tuple[FoundItem, ...]
    """Data and uploads that the current manifest does not name, and that are too young to remove."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to remove."""
        return not (self.uploads or self.entries or self.objects or self.lone_fence)


class Inventory:
    """The items that cloudckpt wrote under a root, by location: the folder, with its slash, of a log."""

    def __init__(self, *, has_hidden_uploads: bool) -> None:
        self._has_hidden_uploads = has_hidden_uploads
        self._found: dict[str, list[FoundItem]] = {}
        self.unlisted: StoreError | None = None
        """The reason why unfinished uploads are not listed; None if they are."""

    def add_object(self, info: ObjectInfo) -> None:
        """Add an object of a listing, if its name is one that cloudckpt gives."""
        folder, slash, name = info.key.rpartition("/")
        moment = info.changed_at or info.modified_at
        if parse_entry(name, info) is not None:
            self._found.setdefault(folder + slash, [])
        elif parsed := _parse_key(_DATA, info.key):
            self._add(parsed[0], FoundItem("data", info.key, parsed[1], info.size_bytes, moment))
        elif parsed := _parse_key(_CLAIM, info.key):
            self._add(parsed[0], FoundItem("claim", info.key, parsed[1], info.size_bytes, moment))
        elif match := _PROBE.fullmatch(info.key):
            self._add(match[1], FoundItem("probe", info.key, "", info.size_bytes, moment))

    def add_upload(self, info: UploadInfo) -> None:
        """Add an unfinished upload. In the hidden folders of a store of files, all uploads are cloudckpt's."""
        rest = (info.size_bytes, info.started_at, info.upload_id)
        if parsed := _parse_key(_DATA, info.key):
            self._add(parsed[0], FoundItem("upload", info.key, parsed[1], *rest))
        elif match := _PROBE.fullmatch(info.key):
            self._add(match[1], FoundItem("upload", info.key, "", *rest))
        elif self._has_hidden_uploads and _HIDDEN_ID.fullmatch(info.upload_id):
            folder, slash, _ = info.key.rpartition("/")
            location, attempt = _parse_key(_IN_FOLDER, info.key) or (folder + slash, "")
            self._add(location, FoundItem("upload", info.key, attempt, *rest))

    def _add(self, location: str, item: FoundItem) -> None:
        self._found.setdefault(location, []).append(item)

    @property
    def locations(self) -> list[str]:
        """The locations of all items and logs, sorted."""
        return sorted(self._found)

    def items_at(self, location: str) -> Sequence[FoundItem]:
        """Return the items at a location, besides the log."""
        return self._found.get(location, ())


def attempt_time(attempt: str) -> datetime:
    """Return when the attempt began, by the clock of the machine that drew its id. Raise `ValueError` for other ids."""
    return datetime.strptime(attempt[:_TIME_CHARACTERS], "%Y%m%dT%H%M%S%f").replace(tzinfo=timezone.utc)


def plan_removal(
    items: Sequence[FoundItem],
    entries: Sequence[LogEntry],
    *,
    location: str,
    current: int | None,
    references: Mapping[int, Collection[str]],
    claimed: Collection[str],
    before: datetime,
    is_fenced: bool,
) -> RemovalPlan:
    """Plan the removal of garbage at `location`, among its `items` and the `entries` of its log.

    The plan spares all that the manifest `current` references, and all with a sign of life since `before`.
    `references` are the keys, relative to the location, that each readable manifest names. `claimed` are the keys of
    claims and of the objects that they name. `is_fenced` says that the log has grown since the items were listed, so
    that their writers can no longer commit.
    """
    last_signs = _find_last_signs(items, entries, references=references)
    named = {location + key for key in (*claimed, *(references.get(current, ()) if current is not None else ()))}

    def is_dead(item: FoundItem) -> bool:
        return last_signs.get(item.attempt, item.moment) < before

    uploads = tuple(item for item in items if item.kind == "upload" and is_dead(item))
    objects = tuple(sorted(item for item in items if item.kind != "upload" and item.key not in named and is_dead(item)))
    # A save must not be committed after its data is removed. A probe belongs to no save, and an aborted upload makes
    # its save fail.
    needs_fence = not is_fenced and any(item.kind == "data" for item in objects)

    def is_stale(entry: LogEntry) -> bool:
        if entry.number == current or entry.modified_at >= before:
            return False
        if entry == entries[-1]:  # a fence, or it would be current
            return needs_fence
        return all(
            last_signs[attempt] < before for attempt in _attempts_of(references.get(entry.number, ()), last_signs)
        )

    stale = tuple(entry for entry in entries if is_stale(entry))
    last_entry = entries[-1] if entries else None
    is_lone = (
        last_entry is not None
        and last_entry.modified_at < before
        and current is None
        and not any(item.kind == "data" for item in objects)
        and len(uploads) + len(objects) == len(items)
        and len(stale) + 1 == len(entries)
    )
    return RemovalPlan(
        needs_fence=needs_fence,
        uploads=uploads,
        entries=stale,
        objects=objects,
        lone_fence=last_entry if is_lone else None,
        young=tuple(
            item for item in items if item.kind in ("data", "upload") and not is_dead(item) and item.key not in named
        ),
    )


def _find_last_signs(
    items: Iterable[FoundItem], entries: Iterable[LogEntry], *, references: Mapping[int, Collection[str]]
) -> dict[str, datetime]:
    """Return the time of the newest sign of life of each attempt."""
    last_signs: dict[str, datetime] = {}

    def note_sign(attempt: str, moment: datetime) -> None:
        last_signs[attempt] = max(last_signs.get(attempt, moment), moment)

    for item in items:
        if item.attempt:
            note_sign(item.attempt, item.moment)
    for attempt in list(last_signs):
        note_sign(attempt, attempt_time(attempt))
    for entry in entries:
        for attempt in _attempts_of(references.get(entry.number, ()), last_signs):
            note_sign(attempt, entry.modified_at)
    # A running copy may use the leftovers of an earlier one that would commit under the same number.
    last_by_number: dict[int, datetime] = {}
    numbers = {attempt: number for attempt in last_signs if (number := parse_number(attempt)) is not None}
    for attempt, number in numbers.items():
        last_by_number[number] = max(last_by_number.get(number, last_signs[attempt]), last_signs[attempt])
    return last_signs | {attempt: last_by_number[number] for attempt, number in numbers.items()}


def _attempts_of(keys: Iterable[str], last_signs: Mapping[str, datetime]) -> set[str]:
    parsed_keys = (_parse_key(_DATA, key) for key in keys)
    return {parsed[1] for parsed in parsed_keys if parsed is not None and parsed[1] in last_signs}


def _parse_key(pattern: re.Pattern[str], key: str) -> tuple[str, str] | None:
    """Return location and attempt of a key that `pattern` matches; None for other keys."""
    match = pattern.fullmatch(key)
    if match is None:
        return None
    try:
        attempt_time(match[2])
    except ValueError:  # digits that are no time: cloudckpt has not drawn this id
        return None
    return match[1], match[2]
