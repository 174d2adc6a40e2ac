"""Results as notebooks and interpreters show them: short, escaped, without secrets."""

from __future__ import annotations

import dataclasses
import re
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt import types
from cloudckpt._display import Listing, seconds
from cloudckpt.types import CheckpointInfo, Difference, KeptObject, SkippedCheckpoint, StepInfo

NAUGHTY = "<script>alert('&')</script>"
MOMENT = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)


class Tables(HTMLParser):
    """The cells of all tables by row; fails at a tag that is not closed, or that tables do not need."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data


def rows_of(shown: Any) -> list[list[str]]:
    return Tables(shown._repr_html_()).rows


def test_every_result_is_a_table_in_a_notebook() -> None:
    """If this fails, a notebook shows a line of raw fields for some result."""
    for name in {*types.__all__, "Options", "AdvancedOptions", "CheckpointManager"} - {"Preemption"}:
        shown = getattr(types, name, None) or getattr(cloudckpt, name)
        assert hasattr(shown, "_repr_html_"), name


def test_steps_are_rows_with_a_column_for_each_metric() -> None:
    """If this fails, the metrics of a run cannot be compared at a glance, or a column of nothing is shown."""
    steps = Listing(
        StepInfo(step=step, uri=f"s3://b/step-{step}", committed_at=MOMENT, metrics=metrics)
        for step, metrics in ((0, {"loss": 0.123456789}), (10, {"loss": 2, "acc": 0.5}))
    )
    assert rows_of(steps) == [
        ["step", "uri", "committed_at", "loss", "acc"],
        ["0", "s3://b/step-0", "2026-01-31 12:00:00Z", "0.1235", ""],
        ["10", "s3://b/step-10", "2026-01-31 12:00:00Z", "2", "0.5"],
    ]
    fast = StepInfo(step=20, uri="/nvme/step-20", committed_at=MOMENT, place="fast")
    assert [row[4] for row in rows_of(Listing([*steps, fast]))] == ["place", "root", "root", "fast"]
    assert repr(steps[0]) == (
        "StepInfo(step=0, uri='s3://b/step-0', committed_at='2026-01-31 12:00:00Z', metrics={'loss': 0.1235})"
    )
    found = [CheckpointInfo(uri="s3://b/a", name="a", committed_at=MOMENT, num_bytes=3 * 2**19, world_size=1000)]
    names, values = rows_of(Listing(found))
    assert dict(zip(names, values, strict=True)) == {
        "uri": "s3://b/a",
        "name": "a",
        "committed_at": "2026-01-31 12:00:00Z",
        "state": "committed",
        "num_bytes": "1.5 MiB",
        "world_size": "1,000",
    }
    steps = Listing([StepInfo(step=7, uri="u", committed_at=MOMENT, metrics={"step": 1.5, "uri": 2})])
    assert [row[0] + row[1] for row in rows_of(steps)] == ["stepuri", "7u"], "a metric replaces no field"
    assert rows_of(steps)[0][3:] == ["metrics.step", "metrics.uri"]
    assert Listing([])._repr_html_() == "none"


def test_numbers_that_do_not_apply_are_blank() -> None:
    """If this fails, a changed plain value reads as a tensor of which 0 of 0 elements differ, or a title is blank."""
    plain = Difference(name="lr", kind="values", before="1", after="2")
    tensor = Difference(name="w", kind="values", before="f", after="f", num_elements=4, num_different=1, max_absolute=2)
    assert [row[3:] for row in rows_of(Listing([plain, tensor]))][1:] == [
        ["2", "", "", ""],
        ["f", "4", "1", "2"],
    ]
    assert rows_of(Listing([plain]))[0] == ["name", "kind", "before", "after"]
    unnamed = StepInfo(step=0, uri="u", committed_at=MOMENT, metrics={"": 1.0})
    assert rows_of(Listing([unnamed]))[0][-1] == "''"


def test_cells_of_tables_are_grouped_and_aligned(tmp_path: Path) -> None:
    """If this fails, a shape reads as two large numbers, and times and tensors are hard to compare."""
    cloudckpt.save({"w": torch.zeros(2048, 2)}, str(tmp_path / "run" / "step-1"))
    (info,) = cloudckpt.list_checkpoints(tmp_path / "run", all=True)
    names, values = rows_of(Listing([info]))
    assert "attempt" not in names
    assert dict(zip(names, values, strict=True))["num_bytes"] == "16.1 KiB"
    described = cloudckpt.describe(info.uri)
    assert [row[:4] for row in rows_of(described.tensors)] == [
        ["name", "dtype", "shape", "num_bytes"],
        ["w", "float32", "[2048, 2]", "16.0 KiB"],
    ]
    html = described.tensors._repr_html_()  # type: ignore[attr-defined]
    assert re.findall(r"text-align:(\w+)[^>]*>(?:name|num_bytes)<", html) == ["left", "right"]
    assert [seconds(number) for number in (0, 0.00123, 0.0345, 0.9, 1.55, 75.25, 3600)] == [
        *("0.0 ms", "1.2 ms", "34 ms", "900 ms", "1.6 s", "75.2 s", "3,600.0 s")
    ]


def test_names_from_a_store_are_escaped() -> None:
    """If this fails, whoever can write to the bucket runs scripts in the notebooks of those who look at it."""
    one = Difference(name=NAUGHTY, kind="values", before=NAUGHTY, after=NAUGHTY)
    compared = types.Comparison(before=NAUGHTY, after="b", differences=(one,), num_same=0, num_bytes_compared=0)
    info = StepInfo(step=0, uri=NAUGHTY, committed_at=MOMENT, metrics={NAUGHTY: 1.0})
    for shown in (compared, info, Listing([info]), Listing([one])):
        assert "<script" not in shown._repr_html_()
        assert any(NAUGHTY in cell for row in rows_of(shown) for cell in row)


def test_options_tell_no_secret_and_only_what_was_set() -> None:
    """If this fails, a key of the store is in a notebook that is shared, or the text cannot be pasted."""
    storage_options = {"endpoint_url": "http://user:HUSH@host:9000", "secret_access_key": "HUSH", "key": {"a": "HUSH"}}
    options = cloudckpt.Options(connections=32, timeout_s=90.5, storage_options=storage_options)
    assert repr(options).endswith(", timeout_s=90.5, connections=32)")
    assert eval(repr(options), vars(cloudckpt)) == dataclasses.replace(  # noqa: S307
        options, storage_options={"endpoint_url": "http://***@host:9000", "secret_access_key": "***", "key": "***"}
    )
    assert "HUSH" not in options._repr_html_()
    assert "endpoint_url: http://***@host:9000" in rows_of(options)[0][1]
    assert ["staging_bytes", "512.0 MiB"] in rows_of(options)
    assert repr(cloudckpt.Options()) == "Options()"


def test_long_results_are_shortened() -> None:
    """If this fails, a comparison of two large checkpoints fills the notebook, or freezes its tab."""
    many = tuple(
        Difference(name=f"w{number}", kind="values", before="x" * 4096, after="", num_elements=1)
        for number in range(1000)
    )
    compared = types.Comparison(before="a", after="b", differences=many, num_same=0, num_bytes_compared=0)
    assert "differences=<1,000 in all>" in repr(compared)
    assert len(repr(compared)) < 200
    assert len(repr(many[0])) < 500
    assert sum(row[0].startswith("w") for row in rows_of(compared)) == 50
    assert "and 950 more" in compared._repr_html_()
    metadata = {"earlier_metrics": {str(step): {"loss": step} for step in range(999)}}
    saved = types.CheckpointInfo(uri="a", name="a", committed_at=MOMENT, metadata=metadata)
    assert "19: loss: 19, …" in saved._repr_html_()


def test_results_of_real_calls_are_shown(tmp_path: Path) -> None:
    """If this fails, a result of a real call cannot be shown, or shows other numbers than it has."""
    model = torch.nn.Linear(8, 8)
    manager = cloudckpt.CheckpointManager(tmp_path / "run", save_every=5, keep_last=1, keep_best=("loss", "min", 1))
    assert repr(manager) == f"<CheckpointManager of {tmp_path}/run: no save by this process yet>"
    with manager:
        for step in (0, 5):
            manager.save(step, model=model, metrics={"loss": step})
        manager.wait()
        shown = dict(row for row in rows_of(manager) if len(row) == 2)
    assert (shown["save_every"], shown["keep_best"], shown["last save"]) == ("5", "loss, min, 1", "step 5")
    assert [row[0] for row in rows_of(manager.steps())] == ["step", "0", "5"]
    uri = manager.uri_of(5)
    restored = manager.restore(model=model)
    assert restored is not None
    assert repr(restored) == f"Restored(step=5, uri={uri!r})"
    assert ["num_requests", str(restored.report.num_requests)] in rows_of(restored)
    saved = cloudckpt.save(str(tmp_path / "other"), model=model)
    assert ["entries", str(len(saved.state_dict_metadata))] in rows_of(saved)
    described = rows_of(cloudckpt.describe(uri))
    assert ["num_elements", "72"] in described
    assert ["model.weight", "float32", "[8, 8]", "256 B"] in [row[:4] for row in described]
    for report in (cloudckpt.verify(uri), cloudckpt.gc(tmp_path, quiet=True), manager.retention):
        assert rows_of(report)
    for root, is_shown in ((tmp_path, False), (tmp_path / "empty", True)):
        shown = [row[0] for row in rows_of(cloudckpt.gc(root, quiet=True))]
        assert ("is_nothing_there" in shown, "num_objects" in shown) == (is_shown, True)


@pytest.mark.parametrize("of", [KeptObject, SkippedCheckpoint])
def test_results_show_the_reasons_in_them(of: type[Any]) -> None:
    """If this fails, a report says that something was kept or skipped, and not why."""
    reason = f"{'step-60/' * 30} it is locked {'and more ' * 50}"
    if of is KeptObject:
        one = KeptObject(uri="s3://b/a", reason=reason)
        shown: Any = types.RetentionReport(kept=(), removed=(), failed=(one,))
    else:
        skipped = SkippedCheckpoint(uri="s3://b/a", why=reason)
        zeros = dict.fromkeys(
            ("rank", "num_bytes_wanted", "num_bytes_read", "num_requests", "num_retries", "plan_s", "read_s"), 0
        )
        shown = cloudckpt.LoadReport(uri="u", attempt="a", skipped=(skipped,), **zeros)
    assert "it is locked" in repr(shown)
    assert any(reason in row for row in rows_of(shown))
