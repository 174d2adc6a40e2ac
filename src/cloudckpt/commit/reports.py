"""The reports of `gc`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cloudckpt.commit.garbage import RemovalPlan
from cloudckpt.commit.manifest_log import manifest_key
from cloudckpt.errors import printable
from cloudckpt.options import GIB, KIB, MIB

_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """The garbage of one location, removed or to be removed."""

    uri: str
    keys: tuple[str, ...]
    """The keys of the objects, relative to the root."""
    uploads: tuple[str, ...]
    """The keys of the unfinished uploads, relative to the same root."""
    num_bytes: int
    """The size of the objects. No store tells the size of unfinished uploads."""
    reasons: tuple[str, ...]
    """The counts by kind, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptObject:
    """A location or key that was kept, and the reason."""

    uri: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """The garbage that `gc` found, and removed unless it was a dry run. A dry run prints ``str()`` of it."""

    root: str
    dry_run: bool
    locations: tuple[Garbage, ...]
    skipped: tuple[KeptObject, ...]
    """Locations of which it could not be told what counts there, so that nothing was removed."""
    failed: tuple[KeptObject, ...]
    """Items that could not be removed or looked at."""
    is_nothing_there: bool = False
    """True if nothing under `root` is cloudckpt's: the root may be the wrong one."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all objects, relative to `root`."""
        return tuple(key for garbage in self.locations for key in garbage.keys)

    @property
    def uploads(self) -> tuple[str, ...]:
        """The keys of all unfinished uploads, relative to `root`."""
        return tuple(key for garbage in self.locations for key in garbage.uploads)

    @property
    def num_objects(self) -> int:
        """The number of objects."""
        return sum(len(garbage.keys) for garbage in self.locations)

    @property
    def num_uploads(self) -> int:
        """The number of unfinished uploads."""
        return sum(len(garbage.uploads) for garbage in self.locations)

    @property
    def num_bytes(self) -> int:
        """The size of all objects."""
        return sum(garbage.num_bytes for garbage in self.locations)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for garbage in self.locations:
            yield f"{_as_one_line(garbage.uri)}: {', '.join(garbage.reasons)} ({_size(garbage.num_bytes)})"
        for spared in self.skipped:
            yield f"{_as_one_line(spared.uri)}: left alone: {_as_one_line(spared.reason)}"
        for spared in self.failed:
            yield f"{_as_one_line(spared.uri)}: failed: {_as_one_line(spared.reason)}"
        done = "would be removed" if self.dry_run else "removed"
        how = " (dry run; pass dry_run=False to remove it)" if self.dry_run and self.locations else ""
        yield (
            f"{self.root}: {_count(self.num_objects, 'object')} of {_size(self.num_bytes)} and "
            f"{_count(self.num_uploads, 'unfinished upload')} {done}{how}"
        )
        if self.is_nothing_there:
            yield f"{self.root}: nothing of cloudckpt's lies there; is it the right place?"


def describe_garbage(uri: str, prefix: str, plan: RemovalPlan) -> Garbage:
    """Describe the garbage of one location, whose keys begin with `prefix`."""
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


def _as_one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")
