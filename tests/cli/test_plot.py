"""``cloudckpt plot``, ``timeline`` and ``report``."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.conftest import OLD_ATTEMPT, Run, leave_unfinished, save
from tests.kit.places import LocalPlace

import cloudckpt
from cloudckpt.cli._draw import (
    PANEL_HEIGHT,
    Dot,
    Line,
    Series,
    Text,
    draw_bars,
    draw_series,
    draw_timeline,
    to_lines,
    to_svg,
)
from cloudckpt.cli._metrics import REMOVED_NOTE

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "</title></svg><script>alert(1)</script><img src=x onerror='alert(2)'>\"&\x1b[31m"


def _save_run(place: LocalPlace, metric: str = "loss") -> None:
    for step, value in ((1, 0.5), (2, None), (10, 0.25), (20, 0.75)):
        metadata = {"step": step, "metrics": {metric: value, "kl": step}}
        save(place.uri(f"step-{step}"), options=cloudckpt.Options(metadata=metadata))


def _parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314  # the tests have drawn it


def test_a_run_is_plotted_over_its_steps(local: LocalPlace, run: Run, tmp_path: Path) -> None:
    """If this fails, a plot shows other values than the checkpoints have, or at other steps, or another best one."""
    _save_run(local)
    leave_unfinished(local, "step-20", attempt=OLD_ATTEMPT)
    output = tmp_path / "run.svg"
    ended = run("plot", local.root, "--json", "-o", str(output))
    document = ended.document
    assert "replaced" not in ended.err
    again = run("plot", local.root, "-o", str(output))
    assert (again.out, "It replaced the run.svg" in again.err) == (f"{output}\n", True)
    assert "removed" not in output.read_text()
    series = {one["name"]: one for one in document["series"]}
    assert list(series) == ["loss", "kl", "size", "duration"]
    assert series["loss"]["points"] == [[1, 0.5], [10, 0.25], [20, 0.75]]
    assert (series["loss"]["best"], series["kl"]["best"]) == ([10, 0.25], None)
    assert series["size"]["points"][0][1] == pytest.approx(len(local.read(local.data_keys()[0])) / 1024, rel=0.01)
    dots = _parse(output.read_text()).iter(f"{SVG}circle")
    assert [dot.findtext(f"{SVG}title", "") for dot in dots][:4] == [
        "step 1: 0.5",
        "step 10: 0.25",
        "step 20: 0.75",
        "best 0.25 at step 10",
    ]
    shown = run("plot", local.root, "--name", "l*")
    assert (shown.code, "loss   * best: 0.25 at step 10" in shown.out, "size" in shown.out) == (0, True, False)
    missing = run("plot", local.root, "--name", "acc")
    assert (missing.code, "loss, kl, size, duration" in missing.err) == (3, True)


def test_removed_steps_are_drawn_as_removed(local: LocalPlace, run: Run, tmp_path: Path) -> None:
    """If this fails, a plot lacks removed steps, marks one as the best, or calls it one that exists."""
    for steps in (range(4), range(4, 6)):  # a restart continues the curve
        with cloudckpt.CheckpointManager(local.root, keep_last=2) as manager:
            manager.restore({"w": torch.ones(1)})
            for step in steps:
                manager.save(step, {"w": torch.ones(1)}, metrics={"loss": math.nan if step == 2 else step})
    assert [info.step for info in manager.steps()] == [4, 5]
    assert [best.step for best in [manager.best("loss")] if best is not None] == [4]
    output = tmp_path / "run.svg"
    drawn = run("plot", local.root, "--json", "--name", "loss", "-o", str(output))
    (series,) = drawn.document["series"]
    assert (series["points"], series["gaps"]) == ([[0, 0.0], [1, 1.0], [3, 3.0], [4, 4.0], [5, 5.0]], [2])
    assert (sorted(series["removed"]), series["best"]) == ([0, 1, 2, 3], [4, 4.0])
    assert REMOVED_NOTE in drawn.err
    dots = [dot.findtext(f"{SVG}title", "") for dot in _parse(output.read_text()).iter(f"{SVG}circle")]
    assert dots[:4] == ["step 0 (removed): 0", "step 1 (removed): 1", "step 3 (removed): 3", "step 4: 4"]
    assert (shown := run("plot", local.root, "--name", "loss")).out.count("◦") == 3
    assert REMOVED_NOTE in shown.err
    run("report", local.root, "-o", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert page.index(REMOVED_NOTE) < page.index("<svg")
    listed = run("ls", local.root, "--metrics", "--long")
    assert ("step-3" in listed.out, "earlier_metrics" in listed.out) == (False, False)


def test_values_that_cannot_be_drawn_are_named(local: LocalPlace, run: Run, tmp_path: Path) -> None:
    """If this fails, a metric that became NaN is missing from the plot unseen, or its line goes on."""
    for step, acc in enumerate((0.25, 0.5, None, 0.75, 1e305), start=1):
        metrics = {"loss": None, "huge": 1e300, "acc": acc, "": step}
        save(local.uri(f"step-{step}"), options=cloudckpt.Options(metadata={"step": step, "metrics": metrics}))
    message = "every value is NaN or beyond ±1e+300: loss, huge\n"
    drawn = run("plot", local.root, "--json", "-o", str(tmp_path / "run.svg"))
    series = {one["name"]: one for one in drawn.document["series"]}
    assert (series["loss"]["points"], series["loss"]["gaps"]) == ([], [1, 2, 3, 4, 5])
    assert (series["acc"]["points"], series["acc"]["best"]) == ([[1, 0.25], [2, 0.5], [4, 0.75]], None)
    lines = _parse((tmp_path / "run.svg").read_text()).iter(f"{SVG}polyline")
    assert [len((one.get("points") or "").split()) for one in lines if one.get("stroke-width") == "2"][:2] == [2, 1]
    assert message in drawn.err
    shown = run("plot", local.root)
    assert (shown.out.splitlines()[0], "''" in shown.out) == ("acc", True)
    texts = ["".join(to_lines(Series("acc", "", [(1, 0.0), (9, 0.0)], None, gaps))) for gaps in ([], [5])]
    assert ["·" in text for text in texts] == [True, False]
    nothing = run("plot", local.root, "--name", "loss")
    assert (nothing.code, "loss" in nothing.err, "is named like" in nothing.err) == (3, True, False)
    assert message in run("report", local.root, "-o", str(tmp_path / "r.html")).err
    listed = run("ls", local.root, "--metrics")
    assert ("highest acc" in listed.err, "lowest" in listed.err, "''" in listed.out) == (True, False, True)


def test_a_best_value_that_is_not_drawn_is_refused(local: LocalPlace, run: Run) -> None:
    """If this fails, a plot shows no best value, and nothing says that --name leaves it out."""
    _save_run(local)
    hidden = run("plot", local.root, "--name", "size", "--best", "min:loss")
    assert (hidden.code, "--best min:loss: --name leaves this metric out" in hidden.err) == (2, True)
    assert run("plot", local.root, "--name", "lo*", "--best", "min:loss").code == 0


def test_a_format_that_cannot_be_written_is_refused_before_anything_is_read(
    local: LocalPlace, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a plot ends in a traceback, or a file has another format than its name says."""
    for command, message in (
        (["plot", "-o", "x.jpg"], ".svg or .png"),
        (["report", "-o", "x.pdf"], ".html"),
        (["plot", "-o", "region=x"], "-o is short for --output here"),
    ):
        ended = run(command[0], local.root, *command[1:])
        assert (ended.code, message in ended.err) == (2, True), ended.err
    assert run("plot", local.root).code == run("report", local.root, "-o", "x.html").code == 3
    _save_run(local)
    assert "has the checkpoints step-" in run("plot", local.root + "/nowhere").err
    assert run("plot", local.root, "-o", local.root + "/nowhere/x.svg").code == 2
    assert run("plot", local.root, "-o", local.root + "/x.png").code == 0
    assert local.read("x.png").startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = run("plot", local.root, "-o", local.root + "/y.png")
    assert (ended.code, "'.[plot]'" in ended.err, "y.png" in local.contents()) == (2, True, False)


class _Page(HTMLParser):
    """The tags, the attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_is_one_file_whose_names_are_text(local: LocalPlace, run: Run, tmp_path: Path) -> None:
    """If this fails, a tensor's name runs code at the colleague who opens the report, or the page needs a network."""
    for step in (1, 2):
        state = {"model": {EVIL: torch.ones(4), "w": torch.ones(step, 2)}, f"value{EVIL}": step}
        save(local.uri(f"step-{step}"), state, options=cloudckpt.Options(metadata={"metrics": {f"loss {EVIL}": step}}))
    trace = {"otherData": {"uri": EVIL}, "traceEvents": [_span(EVIL, 0, 5, {EVIL: EVIL})]}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    output = tmp_path / "report.html"
    command = ["report", local.root, "-o", str(output), "--trace", str(tmp_path / "trace.json")]
    for more in ([], ["--values", "--compare", "step-1", "step-2"]):
        ended = run(*command, *more)
        assert ended.code == 0, ended.err
        assert ("It replaced the report.html that was there." in ended.err) == bool(more)
        page = output.read_text()
        assert REMOVED_NOTE not in page
        parsed = _Page(page)
        drawn = {"svg", "title", "rect", "polyline", "circle", "text"}
        frame = {"html", "head", "meta", "style", "body", "h1", "h2", "p", "div", "figure"}
        assert parsed.tags == drawn | frame | {"table", "thead", "tbody", "tr", "th", "td", "wbr"}
        assert not any(name.startswith("on") or name in ("src", "href") for name in parsed.attributes)
        assert "\x1b" not in page
        assert page.count("http") - page.count("http://www.w3.org/2000/svg") == 1  # http-equiv
        assert f"model.{EVIL}".replace("\x1b", "\\x1b") in parsed.text
    for svg in page.split("<svg")[1:]:
        _parse("<svg" + svg.partition("</svg>")[0] + "</svg>")


def test_a_report_tells_what_takes_the_space_and_what_changed(local: LocalPlace, run: Run, tmp_path: Path) -> None:
    """If this fails, the report names another largest tensor than there is, or misses a change between two steps."""
    _save_run(local)
    save(local.uri("step-30"), {"model": {"w": torch.ones(600, 10), "new": torch.ones(2)}, "optim": {"step": 18}})
    output = str(tmp_path / "report.html")
    assert run("report", local.root, "-o", output).out == f"{output}\n"
    words = " ".join(_Page(Path(output).read_text()).text.split())
    assert "step-20 to step-30" in words
    assert "largest tensors (float32) model.w [600, 10] 23.4 KiB" in words
    for name, kind in (("model.w", "type"), ("model.new", "added"), ("model.b", "removed"), ("optim.lr", "removed")):
        assert f"{name}{kind}" in words, name
    assert "model: 23.4 KiB in 2 tensors with 6,002 elements" in words
    assert re.search(r"optim: \d B in 1 value", words)
    assert "4 differences in names, shapes and dtypes (values not compared): 3 in model, 1 in optim." in words
    assert "optim.stepvalues" not in words
    assert "* 0.25" in words
    run("report", local.root, "-o", output, "--values", "--compare", "step-20", "step-30")
    assert "optim.stepvalues: 17 → 18" in " ".join(_Page(Path(output).read_text()).text.split())
    save(local.uri("step-40"), {f"w{number}": torch.ones(1) for number in range(300)})
    run("report", local.root, "-o", output)
    words = " ".join(_Page(Path(output).read_text()).text.split())
    assert "303 differences" in words
    assert "The table leaves out 243 more differences: cloudckpt diff lists all." in words
    assert "286 others in w14, w15, w16 and 283 more" in words
    unknown = run("report", local.root, "-o", output, "--compare", "step-20", "step-31")
    assert (unknown.code, "'step-31'. There are: step-40, step-30, step-20" in unknown.err) == (3, True)
    run("report", local.root, "-o", output, "--compare", "20", "30")
    assert "step-20 to step-30" in " ".join(_Page(Path(output).read_text()).text.split())


def test_a_report_leads_with_the_model_and_with_the_size_of_a_change(
    local: LocalPlace, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a report shows what differs off its edge, tells a private path, or has another order than ls."""
    for step in (1, 2):
        weight, moments = torch.ones(4), torch.full((4,), 100.0 * step)
        weight[0] = step / 2
        state = {"random_state": "x" * 999, "optimizer": {"m": moments}, "model": {"w": weight, "b": torch.ones(step)}}
        save(local.uri(f"step-{step}"), state)
    monkeypatch.chdir(Path(local.root).parent)
    output = tmp_path / "report.html"
    run("report", local.root, "-o", str(output), "--values")
    page = output.read_text()
    head, _, text = _Page(page).text.partition("Checkpoints\n")
    assert f"<title>{Path(local.root).name}</title>" in page
    assert str(tmp_path) not in page
    assert (text.index("step-1") < text.index("step-2"), "other saves" in head) == (True, False)
    assert text.index("model: ") < text.index("optimizer: ") < text.index("random_state: ")
    titles = "namemax differencechangedrelativechange"
    rows = "model.bshape: float32 [1] → float32 [2]model.w0.525 %0.5values: float32 [4]"
    assert f"{titles}{rows}optimizer.m100100 %0.5values: float32 [4]" in text
    bars = [one.text for one in _parse("<svg" + page.split("<svg")[-2].partition("</svg>")[0] + "</svg>").iter()]
    assert bars.index("model") < bars.index("optimizer") < bars.index("random_state")
    leave_unfinished(local, "step-2", attempt=OLD_ATTEMPT)
    run("report", local.root, "-o", str(output), "--title", "a & b")
    page = output.read_text()
    assert page.count("a &amp; b</") == 2
    assert " of other saves, such as unfinished ones" in page, "their bytes are named where there are any"


def _span(
    name: str, begin_us: int, dur_us: int, args: dict[str, Any], *, rank: int = 0, lane: int = 0
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "save",
        "name": name,
        "ts": begin_us,
        "dur": dur_us,
        "pid": rank,
        "tid": lane,
        "args": args,
    }


def test_a_timeline_has_its_spans_at_their_times(run: Run, tmp_path: Path) -> None:
    """If this fails, the picture of a save shows a wait where a rank worked, or the times of another rank."""
    spans = [
        _span("plan", 1000, 1000, {}),
        _span("write", 2000, 2000, {}),
        _span("upload_part", 2000, 500, {"key": "a"}, lane=1),
        _span("upload_part", 2500, 500, {"error": "TimeoutError"}, lane=1),
        _span("meeting", 1000, 4000, {}, rank=1),
    ]
    drawn = [one for one in _parse(to_svg(draw_timeline("t", spans))).iter(f"{SVG}rect") if len(one)]
    times = [(one.get("class"), float(one.get("x", "")), float(one.get("width", ""))) for one in drawn]
    (kinds, xs, widths) = zip(*times, strict=True)
    assert kinds == ("plan", "write", "transfer", "error", "wait")
    assert [round(width / widths[0], 2) for width in widths] == [1, 2, 0.5, 0.5, 4]
    assert [round((x - xs[0]) / widths[0], 2) for x in xs] == [0, 1, 1, 1.5, 0]
    traces = [str(tmp_path / f"{rank}.json") for rank in (0, 1)]
    for trace, uri in zip(traces, ("one", "two"), strict=True):
        save(str(tmp_path / uri), options=cloudckpt.Options(trace=trace))
    output = tmp_path / "t.svg"
    assert run("timeline", *traces, "-o", str(output)).code == 0
    titles = [one.text or "" for one in _parse(output.read_text()).iter(f"{SVG}title")]
    assert all(any(title.startswith(name) for title in titles) for name in ("plan: ", "write: ", "commit: ", "put: "))
    for name, content in (("none.json", None), ("list.json", "[1]"), ("empty.json", '{"traceEvents": []}')):
        if content is not None:
            (tmp_path / name).write_text(content)
        ended = run(
            "timeline", traces[0] if content == "[1]" else str(tmp_path / name), str(tmp_path / name), "-o", "x.svg"
        )
        assert (ended.code, name in ended.err) == (2, True), ended.err


def test_a_timeline_of_many_spans_is_a_file_that_opens() -> None:
    """If this fails, the timeline of a large save has a hundred thousand shapes, or a thousand lanes."""
    spans = [_span("put", begin, 1, {}, lane=1) for begin in range(0, 200_000, 2)]
    assert len(draw_timeline("t", spans).shapes) < 1500
    spans = [_span("write", 0, 9, {}, rank=rank) for rank in range(64)]
    spans += [_span("put", 0, 9, {}, rank=rank, lane=lane) for rank in range(64) for lane in range(16)]
    assert draw_timeline("t", spans).height < 2000


@pytest.mark.parametrize(
    ("first", "last", "labels"),
    [
        (0, 20_000, "0 5,000 10,000 15,000 20,000"),
        (137, 1291, "500 1,000 1,291"),
        (0, 150, "0 50 100 150"),
        (10, 1010, "250 500 750 1,010"),
        (1, 5_001_000, "2,000,000 5,001,000"),
        (7, 7, "7"),
        (3, 4, "3 4"),
        (2, 8, "2 4 6 8"),
    ],
)
def test_steps_below_a_plot_are_round(first: int, last: int, labels: str) -> None:
    """If this fails, a reader of a plot has to guess at which step a curve turns."""
    series = Series("loss", "", [(first, 1.0), (last, 2.0)])
    texts = [shape for shape in draw_series(series).shapes if isinstance(shape, Text) and shape.y > PANEL_HEIGHT - 20]
    assert [text.text for text in texts] == ["step", *labels.split()]
    assert to_lines(series)[-1].split() == ["step", *labels.split()]
    assert to_lines(series)[-2].count("┬") == len(labels.split())
    large = Series("loss", "", [(10**12, 1.0), (2 * 10**12, 2.0)])
    boxes = [text for text in draw_series(large).shapes if isinstance(text, Text) and text.y > PANEL_HEIGHT - 20][1:]
    assert 2 <= len(boxes) <= 3, "and none is on another"


def test_a_wide_range_has_a_log_scale_that_is_named() -> None:
    """If this fails, a gradient norm with one peak is a flat line; or a schedule that rises evenly is bent."""
    norms = Series("norm", "", [(step, 10.0 ** (step % 7 - 3)) for step in range(70)])
    figure = draw_series(norms)
    assert figure.title == to_lines(norms)[0] == "norm (log scale)"
    labels = [shape.text for shape in figure.shapes if isinstance(shape, Text)]
    assert [label for label in labels if label in ("0.001", "0.1", "10", "1,000")] == ["0.001", "0.1", "10", "1,000"]
    heights = [round(shape.y, 3) for shape in figure.shapes if isinstance(shape, Dot)][:7]
    assert len({round(a - b, 2) for a, b in itertools.pairwise(heights)}) == 1
    for values in ([1e-8 * step + 1e-9 for step in range(70)], [0.0, 1e4, 1.0], [-1.0, 1e4, 1.0], [2.0, 100.0, 3.0]):
        assert draw_series(Series("lr", "", [*enumerate(values)])).title == "lr"
    assert draw_series(Series("size", "B", [*enumerate([1.0, 1.0, 1e6])])).title == "size (B)", "from 0"


@given(st.lists(st.floats(min_value=-1e300, max_value=1e300), min_size=1, max_size=20), st.sampled_from(["", "s"]))
def test_every_value_is_drawn_inside_the_figure(values: list[float], unit: str) -> None:
    """If this fails, a metric that explodes, or that never changes, ends the plot of the run."""
    points = [(number * 10, value) for number, value in enumerate(values)]
    series = Series("loss", unit, points, points[0])
    figure = draw_series(series)
    places = [point for shape in figure.shapes if isinstance(shape, Line) for point in shape.points]
    places += [(shape.x, shape.y) for shape in figure.shapes if isinstance(shape, Dot)]
    assert all(0 <= x <= figure.width and 0 <= y <= figure.height for x, y in places)
    assert sum(isinstance(shape, Dot) for shape in figure.shapes) == len(values) + 1
    assert max(map(len, to_lines(series))) < 80
    bars = draw_bars("sizes", [("name", abs(value), "text") for value in values])
    _parse(to_svg(bars))
