"""A run as pictures: the systems of each place side by side, and the bars on one axis."""

# ruff: noqa: RUF001  # the signs are meant

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results.bars import Verdict, verdicts
from benchmarks.results.model import Place, Quantity, Results, Row, Spread, cpu_s_per_gb, gb_per_s

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
_NAMES = {"cloudckpt": "cloudckpt", "s3torchconnector": "s3torchconnector", "s3fs": "torch FsspecWriter (s3fs)"}
"""Systems of the headline, as users call them, in its order."""
_OTHER_COLOUR = "#56B4E9"
_REACHED, _MISSED = "#009E73", "#D55E00"
_WIDTH_INCHES = 10.0
_ROW_INCHES = 0.32
_MARGIN_INCHES = 1.2
_DPI = 110
_LARGEST_MARGIN = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture in a file's bytes."""

    name: str
    """Of the file, without its ending."""
    title: str
    about: str
    """What it shows, for those who cannot see it."""
    png: bytes


def plots(results: Results) -> list[Plot]:
    """Return the headline, each place, and what the project holds itself to, for each that was measured."""
    judged = [verdict for verdict in verdicts(results) if verdict.found is not None]
    found = [plot for plot in [_headline_plot(results)] if plot is not None]
    for place in results.places():
        rows = [row for row in results.rows if row.place == place and row.counted]
        if rows:
            found.append(_place_plot(place, rows))
    return [*found, _bars_plot(judged)] if judged else found


def _headline_plot(results: Results) -> Plot | None:
    """Draw GB/s of saves and loads by system, for the first place where cloudckpt was measured beside another one."""
    for place in results.places():
        rows = [row for row in results.rows if row.place == place and row.counted and row.system in _NAMES]
        systems = [system for system in _NAMES if any(row.system == system for row in rows)]
        if len(systems) < 2 or systems[0] != "cloudckpt":
            continue
        figure = _figure(2 * len(systems), title="GB/s, more is better")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, verb in zip(axes, ("save", "load"), strict=True):
            by_system = {row.system: row for row in rows if row.verb == verb}
            _draw_rows(axis, [by_system[system] for system in systems if system in by_system], gb_per_s, verb)
        axes[0].set_yticks(range(len(systems)), [_NAMES[system] for system in systems])
        axes[0].invert_yaxis()
        names = ", ".join(_NAMES[system] for system in systems)
        about = f"Saves and loads of {names} in GB/s: medians, with the range."
        return Plot(name="headline", title="Saves and loads", about=about, png=_png(figure))
    return None


def _place_plot(place: Place, rows: Sequence[Row]) -> Plot:
    figure = _figure(len(rows), title=str(place))
    axes = figure.subplots(1, 2, sharey=True)
    _draw_rows(axes[0], rows, gb_per_s, "GB/s, more is better")
    _draw_rows(axes[1], rows, cpu_s_per_gb, "client CPU seconds per GB, less is better")
    axes[0].set_yticks(range(len(rows)), [f"{row.verb}  {row.system}" for row in rows])
    axes[0].invert_yaxis()
    about = f"Throughput and CPU seconds per GB of {', '.join(dict.fromkeys(row.system for row in rows))}"
    return Plot(name=_slug(str(place)), title=str(place), about=f"{about}: medians, with the range.", png=_png(figure))


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


def _bars_plot(judged: Sequence[Verdict]) -> Plot:
    """How far each is from what is asked: to the right of 1 it is reached."""
    figure = _figure(len(judged), title="What was asked, and what was reached")
    axes = figure.subplots()
    margins = [margin_of(verdict) for verdict in judged]
    axes.barh(
        range(len(judged)),
        [margin - 1 for margin in margins],
        left=1,
        color=[_REACHED if margin >= 1 else _MISSED for margin in margins],
    )
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(0.5, *margins) / 1.2, max(2.0, *margins) * 1.2)
    axes.axvline(1, color="#333333", linewidth=1)
    ticks = [tick for tick in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16) if _is_inside(tick, axes.get_xlim())]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(judged)), [_short_name(verdict) for verdict in judged])
    axes.invert_yaxis()
    _tidy(axes, "found ÷ asked, or asked ÷ found where less is better: 1 and more is reached")
    num_missed = sum(margin < 1 for margin in margins)
    about = f"{len(judged) - num_missed} of {len(judged)} bars and stretches are reached; the table says which."
    return Plot(name="bars", title="Bars", about=about, png=_png(figure))


def margin_of(verdict: Verdict) -> float:
    """How many times what is asked was found; the inverse where less is better. Of the bar, or of a mere stretch.

    Cut off where it is so far away that nothing else could be seen beside it.
    """
    assert verdict.found is not None  # noqa: S101  # the caller has looked
    limit = verdict.bar.bar if verdict.bar.bar is not None else verdict.bar.stretch
    assert limit is not None  # noqa: S101  # every bar has one of them
    value = verdict.found.value
    more, less = (value, limit) if verdict.bar.sense == "≥" else (limit, value)
    return min(max(more / less if less else _LARGEST_MARGIN, 1 / _LARGEST_MARGIN), _LARGEST_MARGIN)


def _short_name(verdict: Verdict) -> str:
    bar = verdict.bar
    limit = bar.bar if bar.bar is not None else bar.stretch
    kind = "" if bar.bar is not None else "stretch: "
    return f"{bar.name}: {bar.formula.partition(',')[0].partition(' (')[0]} ({kind}{bar.sense} {limit:g})"


def _is_inside(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


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
    figure.savefig(content, format="png", metadata={"Software": None})  # or another version changes every file
    return content.getvalue()


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()
