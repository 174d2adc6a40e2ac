"""What `gc` found and removed, for people and programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cloudckpt._commit.garbage import Plan
from cloudckpt._commit.resolve import manifest_key
from cloudckpt.options import GIB, KIB, MIB

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


def garbage_of(uri: str, prefix: str, plan: Plan) -> Garbage:
    """What is to go at one location, whose keys begin with `prefix`."""
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


def _shown(text: str) -> str:
    """As one line of plain text: keys are whatever somebody put into the bucket."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
