"""A run as pictures: the systems of each place side by side."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
_VERB_COLOURS = {"save": "#0072B2", "load": "#56B4E9"}
_DARK_VERB_COLOURS = {"save": "#3B9BDC", "load": "#A5D8F7"}
_OTHER_COLOURS = ("#9aa3ad", "#6b7480")
"""The colour of the systems beside ours, on a light and on a dark page."""
_LIGHT = {"text.color": "#222222", "grid.color": "#dddddd"}
_DARK = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#d6dae0"),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    "grid.color": "#4a4f59",
}
"""Letters and lines for a dark page, which shows through."""
_HEADLINE_WIDTH_INCHES = 4.5
_GROUP_INCHES = 0.5
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
    found = [plot for plot in [headline_plot(results)] if plot is not None]
    for place in results.places():
        rows = [row for row in results.rows if row.place == place and row.counted]
        if rows:
            found.append(_place_plot(place, rows))
    return found


def headline_plot(results: Results, *, is_dark: bool = False) -> Plot | None:
    """Draw saves and loads at the first place where cloudckpt was measured beside another system, and over TLS."""
    with rc_context(_DARK if is_dark else _LIGHT):
        return _headline_plot(
            results, "headline-dark" if is_dark else "headline", _DARK_VERB_COLOURS if is_dark else _VERB_COLOURS
        )


def _headline_plot(results: Results, name: str, colour_of: Mapping[str, str]) -> Plot | None:
    for place in results.places():
        pairs = _pairs_at(results, place)
        if len(pairs) < 2 or pairs[0][0].system != "cloudckpt":
            continue
        over_tls = _pairs_at(results, replace(place, wire="tls")) if place.wire == "http" else []
        tops = [2.4 * number for number in range(len(pairs))]
        tops += [tops[-1] + 3.2 + 2.4 * number for number in range(len(over_tls))]
        pairs += over_tls
        titles = [_title(save) + "\nover TLS" * (save.place.wire == "tls") for save, _ in pairs]
        # Narrow, and fine: a telephone's screen shows it whole, and its letters can be read there.
        size = (_HEADLINE_WIDTH_INCHES, len(pairs) * _GROUP_INCHES + _MARGIN_INCHES)
        figure = Figure(figsize=size, dpi=200, layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, quantity, label in (
            (axes[0], gb_per_s, "GB/s\nmore is better"),
            (axes[1], cpu_s_per_gb, "processor seconds per GB\nless is better"),
        ):
            rows = [row for pair in pairs for row in pair]
            each = [top + offset for top in tops for offset in (-0.43, 0.43)]
            _draw_rows(axis, rows, quantity, label, tops=each, colours=[colour_of[row.verb] for row in rows])
        axes[0].set_yticks(tops, [title.replace(" (", "\n(") for title in titles])
        for tick, (save, _) in zip(axes[0].get_yticklabels(), pairs, strict=True):
            tick.set_fontweight("bold" if save.system == "cloudckpt" else "normal")
        axes[0].invert_yaxis()
        patches = [Patch(color=colour, label=verb) for verb, colour in colour_of.items()]
        figure.legend(handles=patches, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
        about = f"Saves and loads of {', '.join(titles)} in GB/s and processor seconds per GB: medians, with the range."
        return Plot(name=name, title="Saves and loads", about=about.replace("\n", " "), png=_png(figure))
    return None


def groups_plot(
    name: str, groups: Mapping[str, Mapping[str, Sequence[float]]], label: str, *, is_dark: bool = False
) -> Plot:
    """Draw the values of each system as a bar, under the title of its group; those of the first system stand out.

    Args:
        name: The name of the file.
        groups: The values of each system, by the title of the group.
        label: The quantity and its unit.
        is_dark: For a dark page.

    """
    with rc_context(_DARK if is_dark else _LIGHT):
        colours = _DARK_VERB_COLOURS if is_dark else _VERB_COLOURS
        sizes = [len(systems) for systems in groups.values()]
        size = (_HEADLINE_WIDTH_INCHES, sum(sizes) * _ROW_INCHES + len(sizes) * 2 * _ROW_INCHES)
        figure = Figure(figsize=size, dpi=200, layout="constrained")
        all_axes = figure.subplots(len(sizes), squeeze=False, height_ratios=[number + 1 for number in sizes])[:, 0]
        for axes, (title, systems) in zip(all_axes, groups.items(), strict=True):
            spreads = [Spread.of(list(values)) for values in systems.values()]
            kinds = [colours["save"], *[_OTHER_COLOURS[is_dark]] * (len(spreads) - 1)]
            _draw_bars(axes, spreads, label if axes is all_axes[-1] else "", tops=range(len(spreads)), colours=kinds)
            axes.set_yticks(range(len(spreads)), [*systems])
            axes.get_yticklabels()[0].set_fontweight("bold")
            axes.set_title(title, loc="left", fontsize=9)
            axes.invert_yaxis()
        medians = (
            f"{system} {Spread.of(list(values)).median:.2f}"
            for systems in groups.values()
            for system, values in systems.items()
        )
        about = f"{', '.join(groups)}; {label}: {', '.join(medians)}"
        return Plot(name=name + "-dark" * is_dark, title=", ".join(groups), about=about, png=_png(figure))


def _pairs_at(results: Results, place: Place) -> list[tuple[Row, Row]]:
    """Return the saves and loads of the headline's systems that have both."""
    pairs = [(results.row(name, "save", place), results.row(name, "load", place)) for name in _HEADLINE_SYSTEMS]
    return [(save, load) for save, load in pairs if save is not None and load is not None]


def _place_plot(place: Place, rows: Sequence[Row]) -> Plot:
    figure = _figure(len(rows), title=str(place))
    axes = figure.subplots(1, 2, sharey=True)
    bars = {"tops": range(len(rows)), "colours": [_COLOURS.get(row.system, _OTHER_COLOUR) for row in rows]}
    _draw_rows(axes[0], rows, gb_per_s, "GB/s, more is better", **bars)
    _draw_rows(axes[1], rows, cpu_s_per_gb, "client CPU seconds per GB, less is better", **bars)
    axes[0].set_yticks(range(len(rows)), [f"{row.verb}  {_title(row)}" for row in rows])
    axes[0].invert_yaxis()
    about = f"Throughput and CPU seconds per GB of {', '.join(dict.fromkeys(map(_title, rows)))}"
    return Plot(name=_slug(str(place)), title=str(place), about=f"{about}: medians, with the range.", png=_png(figure))


def _title(row: Row) -> str:
    return SYSTEM_TITLES.get(row.system, row.system)


def _draw_rows(
    axes: Axes, rows: Sequence[Row], quantity: Quantity, label: str, *, tops: Sequence[float], colours: Sequence[str]
) -> None:
    _draw_bars(
        axes,
        [Spread.of(list(row.by_repetition(quantity).values())) for row in rows],
        label,
        tops=tops,
        colours=colours,
    )


def _draw_bars(
    axes: Axes, spreads: Sequence[Spread], label: str, *, tops: Sequence[float], colours: Sequence[str]
) -> None:
    medians = [spread.median for spread in spreads]
    axes.barh(
        tops,
        medians,
        xerr=[
            [spread.median - spread.low for spread in spreads],
            [spread.high - spread.median for spread in spreads],
        ],
        color=colours,
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": rcParams["text.color"]},
    )
    for top, spread in zip(tops, spreads, strict=True):
        shown = f"{spread.median:.{2 if spread.median >= 0.1 else 3}f}"
        axes.annotate(shown, (spread.high, top), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(x=0.15)
    _tidy(axes, label)


def _figure(num_rows: int, *, title: str) -> Figure:
    figure = Figure(figsize=(_WIDTH_INCHES, num_rows * _ROW_INCHES + _MARGIN_INCHES), dpi=_DPI, layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure


def _tidy(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", color=rcParams["grid.color"], linewidth=0.6)
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
