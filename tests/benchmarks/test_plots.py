"""A run as pictures and a page, which a person looks at: here, that they are there, whole, and of the right run."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from benchmarks.results.bars import LOCAL, SLOW, verdicts
from benchmarks.results.model import parsed
from benchmarks.results.page import page
from benchmarks.results.plots import margin_of, plots
from tests.benchmarks.test_results import MIB, cell, document

from benchmarks import plot as command

RUN = document(
    cell("cloudckpt", "save", [1.0, 1.0, 1.1], cpu_s=0.5, peak_bytes=512 * MIB),
    cell("s3torchconnector", "save", [4.0, 4.0, 4.0], cpu_s=3.0),
    cell("limit", "send", [0.7, 0.7, 0.7]),
    cell("cloudckpt-path", "load", [1.0, 1.0], place=LOCAL),
    cell("s3fs", "save", [], place=SLOW, failed="not installed: <s3fs> & more"),
)
_VOID = {"meta", "img"}


class Checker(HTMLParser):
    """That tags are closed in order, and nothing is asked of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[bytes] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert name not in {"href", "srcset"}
            if name == "src":
                assert value is not None
                assert value.startswith("data:image/png;base64,")
                self.images.append(base64.b64decode(value.partition(",")[2], validate=True))
            if tag == "img" and name == "alt":
                assert value

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def size_of(png: bytes) -> tuple[int, int]:
    height, width = matplotlib.image.imread(io.BytesIO(png), format="png").shape[:2]
    return width, height


def test_there_is_a_picture_of_the_bars_and_of_each_place() -> None:
    """If this fails, a place that was measured is not shown, or one that was not is an empty picture."""
    drawn = plots(parsed(RUN))
    assert [plot.name for plot in drawn] == ["bars", "64x32mib-fasts3-http-1-process", "64x32mib-path-1-process"]
    for plot in drawn:
        width, height = size_of(plot.png)
        assert width > 800
        assert height > 100
    assert "s3torchconnector" in drawn[1].about
    assert plots(parsed(document())) == []


def test_pictures_are_the_same_every_time() -> None:
    """If this fails, plots that were drawn again differ in version control though no figure has changed."""
    first, second = plots(parsed(RUN)), plots(parsed(json.loads(json.dumps(RUN))))
    assert [plot.png for plot in first] == [plot.png for plot in second]


def test_margins_say_how_far_a_bar_is_reached() -> None:
    """If this fails, a bar that was missed is drawn as one that was reached."""
    margins = {
        (one.bar.name, one.bar.formula.partition(",")[0]): margin_of(one)
        for one in verdicts(parsed(RUN))
        if one.found is not None
    }
    assert margins["save, HTTP", "GB/s ÷ s3torchconnector's"] == pytest.approx((4.0 + 4.0 / 1.1) / 2 / 3)
    assert margins["save, HTTP", "CPU s/GB"] == pytest.approx(0.30 / 0.25)
    assert margins["save, memory", "most MiB over the tensors"] == pytest.approx(0.5)
    assert margins["save, HTTP", "GB/s ÷ bare sockets'"] < 1  # only a stretch
    nothing = document(cell("cloudckpt", "save", [1.0, 1.0], cpu_s=1.0, peak_bytes=0))
    assert [margin_of(one) for one in verdicts(parsed(nothing)) if one.bar.name == "save, memory"] == [16.0]


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    """If this fails, the page shows nothing where there is no network, or lets a message of a rival's into its HTML."""
    results = parsed(RUN)
    drawn = plots(results)
    text = page(results, drawn, title="A <run>")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert checker.images == [plot.png for plot in drawn]
    assert not re.search(r"https?://|<script|@import|url\(", text)
    shown = " ".join(checker.text)
    assert "A <run>" in shown
    assert "not installed: <s3fs> & more" in shown
    for word in ("MISSED by 256 MiB (100%)", "A processor, 2 cores", "torch 2.11", "abc", "2030-01-01"):
        assert word in shown
    assert text.count("class='missed'") == 1


def test_the_command_writes_all_of_it(tmp_path: Path, capsys: Any) -> None:
    """If this fails, `python -m benchmarks.plot` does not work."""
    (tmp_path / "r.json").write_text(json.dumps(RUN))
    assert command.main([str(tmp_path / "r.json"), "--out", str(tmp_path / "out" / "deep")]) == 0
    written = capsys.readouterr().out.split()
    assert sorted(map(str, (tmp_path / "out" / "deep").iterdir())) == sorted(written)
    assert {Path(name).suffix for name in written} == {".html", ".png"}
    assert command.main([str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
