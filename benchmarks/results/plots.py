"""A run as pictures: the systems of each place side by side."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results.model import SYSTEM_TITLES, Place, Quantity, Results, Row, Spread, cpu_s_per_gb, gb_per_s

# Of Okabe and Ito, whose colours people with any kind of colour vision tell apart (https://jfly.uni-koeln.de/color/).
_COLOURS = {
    "cloudckpt": "#0072B2",
    "cloudckpt-process": "#0072B2",
    "cloudckpt-path": "#0072B2",
    "s3torchconnector": "#E69F00",
    "s3torchconnector-kept": "#E69F00",
    "s3fs": "#CC79A7",
    "s3fs-tuned": "#D55E00",
    "filesystem": "#E69F00",
    "limit": "#999999",
}
_HEADLINE_SYSTEMS = ("cloudckpt", "s3torchconnector", "s3fs")
_OTHER_COLOUR = "#56B4E9"
_WIDTH_INCHES = 10.0
_HEADLINE_WIDTH_INCHES = 4.5
_ROW_INCHES = 0.32
_MARGIN_INCHES = 1.2
_PADDING_INCHES = 0.2
"""A white card around the picture: pages may be dark."""
_DPI = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture in a file's bytes."""

    name: str
    """Name of the file, without its ending."""
    title: str
    about: str
    """Description for readers who cannot see it."""
    png: bytes


def plots(results: Results) -> list[Plot]:
    """Return the headline, if its systems were measured, and each place."""
    found = [plot for plot in [_headline_plot(results)] if plot is not None]
    for place in results.places():
        rows = [row for row in results.rows if row.place == place and row.counted]
        if rows:
            found.append(_place_plot(place, rows))
    return found


def _headline_plot(results: Results) -> Plot | None:
    """Draw GB/s of saves and loads by system, for the first place where cloudckpt was measured beside another one."""
    for place in results.places():
        rows = [row for row in results.rows if row.place == place and row.counted and row.system in _HEADLINE_SYSTEMS]
        systems = [system for system in _HEADLINE_SYSTEMS if any(row.system == system for row in rows)]
        if len(systems) < 2 or systems[0] != "cloudckpt":
            continue
        rows_inches = 2 * len(systems) * _ROW_INCHES
        # Narrow, and fine: a telephone's screen shows it whole, and its letters can be read there.
        figure = Figure(figsize=(_HEADLINE_WIDTH_INCHES, rows_inches + _MARGIN_INCHES), dpi=200, layout="constrained")
        axes = figure.subplots(2, 1, sharey=True)
        for axis, verb in zip(axes, ("save", "load"), strict=True):
            by_system = {row.system: row for row in rows if row.verb == verb}
            label = f"{verb}, GB/s: more is better"
            _draw_rows(axis, [by_system[system] for system in systems if system in by_system], gb_per_s, label)
        titles = [SYSTEM_TITLES[system] for system in systems]
        axes[0].set_yticks(range(len(systems)), titles)
        axes[0].invert_yaxis()
        about = f"Saves and loads of {', '.join(titles)} in GB/s: medians, with the range."
        return Plot(name="headline", title="Saves and loads", about=about, png=_png(figure))
    return None


def _place_plot(place: Place, rows: Sequence[Row]) -> Plot:
    figure = _figure(len(rows), title=str(place))
    axes = figure.subplots(1, 2, sharey=True)
    _draw_rows(axes[0], rows, gb_per_s, "GB/s, more is better")
    _draw_rows(axes[1], rows, cpu_s_per_gb, "client CPU seconds per GB, less is better")
    axes[0].set_yticks(range(len(rows)), [f"{row.verb}  {_title(row)}" for row in rows])
    axes[0].invert_yaxis()
    about = f"Throughput and CPU seconds per GB of {', '.join(dict.fromkeys(map(_title, rows)))}"
    return Plot(name=_slug(str(place)), title=str(place), about=f"{about}: medians, with the range.", png=_png(figure))


def _title(row: Row) -> str:
    return SYSTEM_TITLES.get(row.system, row.system)


def _draw_rows(axes: Axes, rows: Sequence[Row], quantity: Quantity, label: str) -> None:
    spreads = [Spread.of(list(row.by_repetition(quantity).values())) for row in rows]
    medians = [spread.median for spread in spreads]
    axes.barh(
        range(len(rows)),
        medians,
        xerr=[
            [spread.median - spread.low for spread in spreads],
            [spread.high - spread.median for spread in spreads],
        ],
        color=[_COLOURS.get(row.system, _OTHER_COLOUR) for row in rows],
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
    )
    for number, spread in enumerate(spreads):
        axes.annotate(
            f"{spread.median:.2f}", (spread.high, number), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    _tidy(axes, label)


def _figure(num_rows: int, *, title: str) -> Figure:
    figure = Figure(figsize=(_WIDTH_INCHES, num_rows * _ROW_INCHES + _MARGIN_INCHES), dpi=_DPI, layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure


def _tidy(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(
        content,
        format="png",
        bbox_inches="tight",
        pad_inches=_PADDING_INCHES,
        metadata={"Software": None},  # or another version changes every file
    )
    return content.getvalue()


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()
