"""`Options.trace`: the timeline of a save or load, valid, complete, bounded, and never in the way."""

from __future__ import annotations

import itertools
import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.in_memory import Memory, state_of
from tests.kit.options import make_options
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt import Event, Options
from cloudckpt.errors import AccessDeniedError, InvalidOptionError
from cloudckpt.telemetry.timeline import trace_path
from cloudckpt.testing.faults import Fails, Faults, Rule

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
        """Return the bytes of the bodies that arrived, in objects whose key begins with `key`."""
        return sum(span["args"]["bytes"] for span in self.named(*names) if span["args"]["key"].startswith(key))


def problems_of(event: dict[str, Any]) -> list[str]:
    """Return the problems of one event."""
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


SMALL: dict[str, Any] = {"tile_bytes": 4096, "part_bytes": 8192, "request_bytes": 8192, "connections": 3}
MANY = {f"w{i}": torch.full((5000,), float(i)) for i in range(12)}
BODIES = ("put", "upload_part")
_numbers = itertools.count()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "{verb}.json"


def fresh_uri() -> str:
    return f"memory://traced-{next(_numbers)}/run"


def verb_of(trace: Path, verb: str) -> Timeline:
    return Timeline(trace_path(trace, rank=0, verb=verb))  # type: ignore[arg-type]


# --- what the timeline shows


def test_a_save_and_a_load_are_drawn_whole(trace: Path) -> None:
    """If this fails, a viewer refuses the file, or what is in it is not what the save and the load did."""
    uri, options = fresh_uri(), make_options(trace=trace, **SMALL)
    saved = cloudckpt.save(MANY, uri, no_dist=True, options=options).report
    assert saved is not None
    timeline = verb_of(trace, "save")
    assert timeline.num_bytes(*BODIES) == saved.num_bytes
    assert {"plan", "set_up", "write", "commit", "stage", "checksum", "create_multipart", "complete_multipart"} <= {
        event["name"] for event in timeline.events
    }
    assert [span["args"]["key"] for span in timeline.named("put")] == ["manifest.json"]
    assert len(timeline.named("stage")) == len(timeline.named("upload_part")) > 12
    assert sorted(span["args"]["part"] for span in timeline.named("stage")) == sorted(
        span["args"]["part"] for span in timeline.named("upload_part")
    )
    assert (timeline.about["verb"], timeline.about["uri"], timeline.about["num_events_left_out"]) == ("save", uri, 0)
    loaded = cloudckpt.load({name: torch.zeros(5000) for name in MANY}, uri, no_dist=True, options=options)
    assert loaded is not None
    timeline = verb_of(trace, "load")
    assert timeline.num_bytes("read_into") == loaded.num_bytes_read
    assert {"plan", "manifest", "read", "checksum", "stage", "place"} <= {event["name"] for event in timeline.events}


# --- when it is written


def test_a_failed_save_is_drawn_up_to_its_failure(trace: Path) -> None:
    """If this fails, there is no timeline of the very saves that one would look at."""
    faults = Faults(Rule(fault=Fails(AccessDeniedError), operations={"upload_part"}, times=None), seed=3)
    with pytest.raises(CheckpointException):
        cloudckpt.save(MANY, fresh_uri(), no_dist=True, options=make_options(trace=trace, wrap_store=faults, **SMALL))
    timeline = verb_of(trace, "save")
    assert timeline.named("write")[0]["args"] == {"error": "AccessDeniedError"}
    assert any(span["args"].get("error") == "AccessDeniedError" for span in timeline.named("upload_part"))
    assert timeline.named("abort_multipart")
    assert not timeline.named("commit")


# --- it costs little, and does no harm


@pytest.mark.parametrize("name", ["missing/trace.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_anything_begins(
    name: str, tmp_path: Path, memory: Memory
) -> None:
    """If this fails, a typing error in a path is found after an hour's save, or stops it half-way."""
    with pytest.raises(CheckpointException, match="trace must be a file that can be written") as caught:
        cloudckpt.save(state_of(), memory.uri(), no_dist=True, options=Options(trace=tmp_path / name))
    assert isinstance(caught.value, InvalidOptionError)
    assert memory.all_keys() == []
    cloudckpt.save(state_of(), memory.uri(), no_dist=True)
    with pytest.raises(CheckpointException, match="trace must be a file that can be written"):
        cloudckpt.load(state_of(), memory.uri(), no_dist=True, options=Options(trace=tmp_path / name))


def test_a_file_that_is_lost_on_the_way_costs_no_save(
    trace: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a disk that fills up with a timeline fails the save that it is of."""

    def lose(event: Event) -> None:
        if event.name == "save.set_up":
            trace_path(trace, rank=0, verb="save").unlink()

    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        cloudckpt.save(
            state_of(), memory.uri(), no_dist=True, options=make_options(trace=trace, on_event=lose, **SMALL)
        )
    assert sum("cannot be written any more" in record.message for record in caplog.records) == 1
    assert "manifest.json" in memory.all_keys()


def test_a_timeline_has_a_bound_and_says_what_it_left_out(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, tracing a save of many objects fills the memory or the disk."""
    monkeypatch.setattr("cloudckpt.telemetry.timeline.MAX_EVENTS", 40)
    monkeypatch.setattr("cloudckpt.telemetry.timeline.MAX_BUFFERED_EVENTS", 7)
    cloudckpt.save(MANY, fresh_uri(), no_dist=True, options=make_options(trace=trace, **SMALL))
    timeline = verb_of(trace, "save")
    assert sum(event["ph"] != "M" for event in timeline.events) == timeline.about["num_events"] == 40
    assert timeline.about["num_events_left_out"] > 40


# --- names


@pytest.mark.parametrize(
    ("name", "rank", "path"),
    [
        ("trace.json", 0, "trace.json"),
        ("trace.json", 3, "trace.3.json"),
        ("a/{verb}-{rank}.json", 12, "a/save-12.json"),
        ("a.b/trace", 1, "a.b/trace.1"),
    ],
)
def test_each_rank_has_a_file_of_its_own(name: str, rank: int, path: str) -> None:
    """If this fails, ranks of one host write over each other's timelines."""
    assert trace_path(name, rank=rank, verb="save") == Path(path)
