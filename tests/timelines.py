"""Reads a trace and finds what is wrong with it, by the Trace Event Format's own text."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

_NEEDED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
}
_METADATA = {"process_name", "thread_name", "thread_sort_index"}


class Timeline:
    """A trace that has been found valid."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text())
        assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
        assert document["displayTimeUnit"] in {"ms", "ns"}
        self.about: dict[str, Any] = document["otherData"]
        self.events: list[dict[str, Any]] = document["traceEvents"]
        problems = [problem for event in self.events for problem in problems_of(event)]
        problems += overlaps_of(self.events)
        assert not problems, problems[:10]

    def named(self, *names: str) -> list[dict[str, Any]]:
        """The spans with one of these names."""
        return [event for event in self.events if event["ph"] == "X" and event["name"] in names]

    @property
    def lanes(self) -> dict[int, str]:
        """The threads' names."""
        return {event["tid"]: event["args"]["name"] for event in self.events if event["name"] == "thread_name"}

    def num_bytes(self, *names: str, key: str = "data/") -> int:
        """Of the bodies that arrived, in objects whose key begins with `key`."""
        return sum(span["args"]["bytes"] for span in self.named(*names) if span["args"]["key"].startswith(key))


def problems_of(event: dict[str, Any]) -> list[str]:
    """Of one event."""
    kind = event.get("ph")
    if kind not in _NEEDED:
        return [f"no such phase: {event}"]
    problems = [f"no {name}: {event}" for name in _NEEDED[kind] - set(event)]
    problems += [
        f"{name} is no whole number: {event}"
        for name in ("ts", "dur", "pid", "tid")
        if name in event and (type(event[name]) is not int or event[name] < 0)
    ]
    if kind == "C" and not all(type(value) in {int, float} for value in event["args"].values()):
        problems.append(f"a counter counts numbers: {event}")
    if kind == "M" and event["name"] not in _METADATA:
        problems.append(f"no such metadata: {event}")
    return problems


def overlaps_of(events: list[dict[str, Any]]) -> list[str]:
    """Spans of one lane that neither follow nor hold each other: the viewers draw those wrongly."""
    problems: list[str] = []
    lanes: defaultdict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], -(event["ts"] + event["dur"]), event["name"]))
    for spans in lanes.values():
        ends: list[int] = []
        for begin, minus_end, name in sorted(spans):
            while ends and ends[-1] <= begin:
                ends.pop()
            if ends and -minus_end > ends[-1]:
                problems.append(f"{name} [{begin}, {-minus_end}) goes on after {ends[-1]}, where its holder ends")
            ends.append(-minus_end)
    return problems
