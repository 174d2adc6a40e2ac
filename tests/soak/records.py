"""What every client did, and when: written down as it happens, judged at the end by rules of their own.

The rules know nothing of numbers and fences. To them a URI is a register: saves write it, loads read it, each within
its span of time, and what is read must be something that a register can hold.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

ONCE_SAVED = ("confirmed", "unknown", "overtaken")
"""How a save may have ended whose values can be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One call of one client. Times are the monotonic clock's, which all processes share."""

    what: str
    """``save``, ``load``, or ``list`` where that failed."""
    uri: str
    begun_s: float
    ended_s: float
    identity: str = ""
    """Of a save: what was to be saved. Of a load: what was found."""
    outcome: str = ""
    """Of a save: ``confirmed``, ``refused`` (another counts), ``overtaken`` (another counts, this one is there too),
    ``unknown`` or ``failed``. Of a load: ``whole``, ``changed`` or ``failed``."""
    text: str = ""
    num_retries: int = 0
    num_faults: int = 0
    """That its own client met."""


class Log:
    """A file of records, one a line, so that the client's memory does not grow with them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        line = json.dumps(asdict(record)) + "\n"
        with self._lock:
            self._file.write(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def records_of(path: Path) -> Iterator[Record]:
    with path.open() as file:
        for line in file:
            yield Record(**json.loads(line))


def now_s() -> float:
    return time.monotonic()


@dataclass(slots=True)
class History:
    """All records of all clients."""

    records: Sequence[Record]
    saves: dict[str, list[Record]] = field(init=False)
    loads: dict[str, list[Record]] = field(init=False)

    def __post_init__(self) -> None:
        self.saves, self.loads = defaultdict(list), defaultdict(list)
        for record in self.records:
            if record.what in ("save", "load"):
                (self.saves if record.what == "save" else self.loads)[record.uri].append(record)

    def outcomes(self, what: str) -> dict[str, int]:
        counts: dict[str, int] = defaultdict(int)
        for record in self.records:
            if record.what == what:
                counts[record.outcome] += 1
        return dict(counts)

    def uris(self, *outcomes: str) -> set[str]:
        """Of the saves that ended in one of these ways."""
        return {uri for uri, saves in self.saves.items() if any(save.outcome in outcomes for save in saves)}

    def problems(self, *, may_be_overwritten: Iterable[str]) -> list[str]:
        """Every load that found what it cannot have found, and every second winner where one only can be."""
        overwritten = tuple(may_be_overwritten)
        problems = []
        for uri, saves in self.saves.items():
            winners = [save for save in saves if save.outcome == "confirmed"]
            if len(winners) > 1 and not uri.startswith(overwritten):
                problems.append(f"{uri}: {len(winners)} saves were told that they made it, and none may overwrite")
            rivals = [save for save in saves if save.outcome in ONCE_SAVED]
            problems += [
                f"{uri}: {save.identity!r} was refused for another save, and there was none: {save.text}"
                for save in saves
                if save.outcome in ("refused", "overtaken")
                and not any(rival.begun_s < save.ended_s and rival is not save for rival in rivals)
            ]
        for uri, loads in self.loads.items():
            whole = [load for load in loads if load.outcome == "whole"]
            problems += [text for load in whole if (text := self._wrong(uri, load)) is not None]
            problems += self._inversions(uri, whole)
        return problems

    def wrong_at_the_end(self, uri: str, identity: str) -> str | None:
        """Of what is found after everything has ended."""
        end_s = now_s()
        found = Record(what="load", uri=uri, begun_s=end_s, ended_s=end_s, identity=identity, outcome="whole")
        return self._wrong(uri, found)

    def _wrong(self, uri: str, load: Record) -> str | None:
        saves = self.saves[uri]
        found = [save for save in saves if save.identity == load.identity]
        if not found:
            return f"{uri}: found {load.identity!r}, which nobody saved there"
        (save,) = found
        if save.outcome not in ONCE_SAVED:
            return f"{uri}: found {load.identity!r}, whose save was {save.outcome}: {save.text}"
        if save.begun_s > load.ended_s:
            return f"{uri}: found {load.identity!r} before its save began"
        for other in saves:
            if other.outcome == "confirmed" and _end_of(save) < other.begun_s and other.ended_s < load.begun_s:
                return f"{uri}: found {load.identity!r}, although {other.identity!r} had replaced it"
        return None

    def _inversions(self, uri: str, loads: Sequence[Record]) -> list[str]:
        """New, then old again."""
        by_identity = {save.identity: save for save in self.saves[uri]}
        newest_begun_s, newest = 0.0, ""
        by_end = sorted(loads, key=lambda load: load.ended_s)
        problems = []
        ended = iter(by_end)
        following = next(ended, None)
        for load in sorted(loads, key=lambda load: load.begun_s):
            while following is not None and following.ended_s < load.begun_s:
                save = by_identity.get(following.identity)
                if save is not None and save.begun_s > newest_begun_s:
                    newest_begun_s, newest = save.begun_s, save.identity
                following = next(ended, None)
            save = by_identity.get(load.identity)
            if save is not None and _end_of(save) < newest_begun_s:
                problems.append(f"{uri}: found {load.identity!r} after another load had found {newest!r}")
        return problems


def _end_of(save: Record) -> float:
    """When it can last have taken effect. One of unknown outcome may still arrive."""
    return save.ended_s if save.outcome == "confirmed" else float("inf")
