"""Figures: numbers to shapes, and shapes to an SVG, a PNG or the lines of a terminal.

An SVG is styled by classes, one for each colour, so that a page or the file itself brings a light and a dark palette.
"""

from __future__ import annotations

import bisect
import html
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from cloudckpt._display import seconds, title_of
from cloudckpt._messages import install_advice, plain_line
from cloudckpt.errors import MissingDependencyError

Anchor: TypeAlias = Literal["start", "middle", "end"]
Color: TypeAlias = Literal[
    "surface", "ink", "muted", "grid", "series", "best", "plan", "write", "commit", "transfer", "stage", "wait", "error"
]
_PALETTE: dict[Color, tuple[str, str]] = {
    "surface": ("#ffffff", "#17181b"),
    "ink": ("#1c1d20", "#eceef1"),
    "muted": ("#63666d", "#a2a6ae"),
    "grid": ("#e3e5e8", "#34373d"),
    "series": ("#2a6fd0", "#6ea8f5"),
    "best": ("#c65a00", "#f5a04d"),
    "plan": ("#8a63d2", "#ab8ceb"),
    "write": ("#b9d3f3", "#26446b"),
    "commit": ("#2b935a", "#55c486"),
    "transfer": ("#3f86dd", "#5b9bee"),
    "stage": ("#d99a1c", "#d9a83f"),
    "wait": ("#c9ccd1", "#4d525b"),
    "error": ("#d03b3b", "#f26d6d"),
}
"""The hexadecimal colours in the light and the dark palette."""
PANEL_WIDTH, PANEL_HEIGHT, _ROW_HEIGHT = 360, 190, 36
_GAP = 16
_CHARACTER = 0.56
"""The width of a character of average text, as a share of the size of its font."""
_TIMELINE_WIDTH, _LABEL_WIDTH = 960, 76
_MAX_LANES = 400
_MIN_SPAN = 0.7
_WIDE, _MAX_POWERS = 100, 5
_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6))
_MAX_SHORTENED = 1e15
_MIN_RANGE = 1e-300  # narrower ones have no round values within
_PHASES = ("plan", "write", "read", "commit")
_COLORS: Mapping[str, Color] = {
    "plan": "plan",
    "write": "write",
    "read": "write",
    "commit": "commit",
    "set_up": "plan",
    "manifest": "plan",
    "meeting": "wait",
    "backoff": "error",
    "stage": "stage",
    "checksum": "stage",
    "place": "stage",
}
_LEGEND: Sequence[tuple[Color, str]] = (
    ("plan", "plan"),
    ("write", "write or read"),
    ("commit", "commit"),
    ("transfer", "call to the store"),
    ("stage", "copy, checksum"),
    ("wait", "wait for ranks"),
    ("error", "error, retry"),
)


class Rect(NamedTuple):
    """A filled rectangle. Browsers show the `title` when the mouse points at it."""

    x: float
    y: float
    width: float
    height: float
    color: Color
    title: str = ""


class Line(NamedTuple):
    """A line through points."""

    points: Sequence[tuple[float, float]]
    color: Color
    width: float = 1.0


class Dot(NamedTuple):
    """A filled circle."""

    x: float
    y: float
    radius: float
    color: Color
    title: str = ""


class Text(NamedTuple):
    """One line of text, whose `x` is its start, middle or end."""

    x: float
    y: float
    text: str
    color: Color = "muted"
    size: float = 12
    anchor: Anchor = "start"
    is_bold: bool = False


Shape: TypeAlias = Rect | Line | Dot | Text


class Figure(NamedTuple):
    """Shapes on a surface, in pixels from its upper left corner."""

    title: str
    width: float
    height: float
    shapes: Sequence[Shape]


class Series(NamedTuple):
    """One quantity over the steps of a run."""

    name: str
    unit: str
    points: Sequence[tuple[int, float]]
    best: tuple[int, float] | None = None
    """The point to mark."""
    gaps: Sequence[int] = ()
    """The steps whose value cannot be drawn, in order. No line is drawn across them."""
    removed: Collection[int] = ()
    """The steps of `points` that exist no longer."""
    span: tuple[int, int] | None = None
    """The first and the last step of the axis, if it is shared with other series."""

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last step of the axis."""
        return self.span or (self.points[0][0], self.points[-1][0])

    @property
    def title(self) -> str:
        unit = self.unit or ("log scale" if self.is_log else "")
        return f"{self.name} ({unit})" if unit else title_of(self.name)

    @property
    def is_log(self) -> bool:
        """True if a linear scale would show most of the values as one line at the bottom."""
        values = sorted(value for _, value in self.points)
        low, high = values[0], values[-1]
        return not self.unit and 0 < low < high / _WIDE and values[len(values) // 2] < high / 10

    def along(self, step: float) -> float:
        """Return where a step is between the first, at 0, and the last, at 1."""
        first, last = self.ends
        return (step - first) / (last - first) if last > first else 0.5

    def choose_steps(self, room: float) -> list[int]:
        """Return the steps to write below the line where `room` characters fit: round ones, and the last."""
        first, last = self.ends
        width = len(f"{last:,}") + 2
        steps = [int(tick) for tick in _ticks(first, last) if first <= tick <= last and tick == int(tick)]
        while steps[2:] and len(steps) * width > room:  # keep both ends
            steps = steps[::2]
        if steps[-1:] != [last]:  # its label ends there
            steps = [step for step in steps if (self.along(last) - self.along(step)) * room > 1.5 * width]
            steps = [*(steps or {first} - {last}), last]
        return steps if len(steps) > 1 else sorted({first, last})

    @property
    def parts(self) -> list[list[tuple[int, float]]]:
        """The points between the gaps."""
        groups = itertools.groupby(self.points, lambda point: bisect.bisect(self.gaps, point[0]))
        return [list(points) for _, points in groups]

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value to draw. Quantities with a unit are drawn from 0."""
        values = [value for _, value in self.points]
        low, high = min([*values, 0.0] if self.unit else values), max(values)
        return (low, high) if high - low > _MIN_RANGE else (low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1))


def draw_series(series: Series) -> Figure:
    """Draw a line with a dot for each step."""
    left, right, top, bottom = 60, PANEL_WIDTH - 14, 40, PANEL_HEIGHT - 26
    scale = math.log10 if series.is_log else float
    low, high = map(scale, series.bounds)
    ticks = _powers(low, high) if series.is_log else _ticks(low, high)
    low, high = min(low, *map(scale, ticks)), max(high, *map(scale, ticks))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = left + series.along(point[0]) * (right - left)
        return x, bottom - (scale(point[1]) - low) / (high - low) * (bottom - top)

    shapes: list[Shape] = [Text(0, 14, _fit(series.title, 200, 13), "ink", 13, is_bold=True)]
    for tick in ticks:
        y = place((series.points[0][0], tick))[1]
        shapes += [Line([(left, y), (right, y)], "grid"), Text(left - 8, y + 4, _number(tick), size=11, anchor="end")]
    shapes.append(Line([(left, bottom), (right, bottom)], "grid"))
    shapes.append(Text(left - 8, PANEL_HEIGHT - 8, "step", size=11, anchor="end"))
    for step in series.choose_steps((right - left) / (11 * _CHARACTER)):
        x, half = place((step, ticks[0]))[0], len(f"{step:,}") * 11 * _CHARACTER / 2
        anchor: Anchor = "start" if x - half < left else "end" if x + half > PANEL_WIDTH else "middle"
        shapes.append(Line([(x, bottom), (x, bottom + 4)], "muted"))
        shapes.append(Text(x, PANEL_HEIGHT - 8, f"{step:,}", size=11, anchor=anchor))
    shapes += [Line([place(point) for point in part], "series", 2) for part in series.parts]
    radius = 3.0 if len(series.points) <= 60 else 1.5  # noqa: PLR2004  # more dots would touch each other
    for step, value in series.points:
        is_removed = step in series.removed
        title = f"step {step:,}{' (removed)' * is_removed}: {value:.6g} {series.unit}".rstrip()
        shapes.append(Dot(*place((step, value)), radius, "muted" if is_removed else "series", title))
    note = f"last {_number(series.points[-1][1], 4)}"
    if series.best is not None:
        note = f"best {_number(series.best[1], 4)} at step {series.best[0]:,}"
        shapes.append(Dot(*place(series.best), 5, "best", note))
    shapes.append(Text(right, 14, note, "muted" if series.best is None else "best", 12, "end"))
    return Figure(series.title, PANEL_WIDTH, PANEL_HEIGHT, shapes)


def draw_bars(title: str, rows: Sequence[tuple[str, float, str]]) -> Figure:
    """Draw a bar for each row of a label, a value and its text. Labels are above the bars, so they may be long."""
    most = max((value for _, value, _ in rows), default=0) or 1
    longest = max((len(text) for _, _, text in rows), default=0)
    width = max(PANEL_WIDTH - longest * 12 * _CHARACTER - _GAP, PANEL_WIDTH / 4)
    shapes: list[Shape] = [Text(0, 14, title, "ink", 13, is_bold=True)]
    for number, (label, value, text) in enumerate(rows):
        y = 24 + number * _ROW_HEIGHT
        shapes += [
            Text(0, y + 12, _fit(label, PANEL_WIDTH, 12), "ink"),
            Text(PANEL_WIDTH, y + 26, text, anchor="end"),
            Rect(0, y + 18, width, 6, "grid"),
            Rect(0, y + 18, max(width * value / most, 1), 6, "series", f"{label}: {text}"),
        ]
    return Figure(title, PANEL_WIDTH, 24 + len(rows) * _ROW_HEIGHT, shapes)


def draw_timeline(title: str, events: Iterable[Mapping[str, Any]]) -> Figure:
    """Draw the spans of timelines: for each rank its steps, and below them a lane for each of its threads."""
    spans = sorted((span for span in events if span.get("ph") == "X"), key=lambda span: (span["ts"], -span["dur"]))
    if not spans:
        raise ValueError("no span")
    begin_us, end_us = spans[0]["ts"], max(span["ts"] + span["dur"] for span in spans)
    scale = (_TIMELINE_WIDTH - _LABEL_WIDTH) / max(end_us - begin_us, 1)
    lanes: dict[tuple[str, int], dict[int, list[Mapping[str, Any]]]] = {}
    for span in spans:
        lane = -1 if span["name"] in _PHASES else span["tid"]
        lanes.setdefault((str(span.get("cat", "")), span["pid"]), {}).setdefault(lane, []).append(span)
    shapes: list[Shape] = []
    x = 0.0
    for color, text in _LEGEND:
        shapes += [Rect(x, 2, 12, 12, color), Text(x + 17, 12, text)]
        x += 17 + len(text) * 12 * _CHARACTER + 18
    top = y = 40.0
    num_lanes = sum(map(len, lanes.values()))
    for (verb, rank), threads in sorted(lanes.items()):
        shapes.append(
            Text(
                0,
                y + 12,
                f"{verb} {rank}" if len({verb_and_rank[0] for verb_and_rank in lanes}) > 1 else f"rank {rank}",
                "ink",
            )
        )
        for lane, spans_of_lane in sorted(threads.items()):
            if lane >= 0 and num_lanes > _MAX_LANES:
                continue
            height = 16 if lane < 0 else 7
            shapes += _draw_lane(spans_of_lane, y, height, lambda us: _LABEL_WIDTH + (us - begin_us) * scale)
            y += height + 2
        y += 8
    for tick in _ticks(0, (end_us - begin_us) / 1e6):
        if (x := _LABEL_WIDTH + tick * 1e6 * scale) <= _TIMELINE_WIDTH - 8:
            shapes.insert(0, Line([(x, top - 4), (x, y)], "grid"))
            shapes.append(Text(x, top - 8, f"{tick:g} s", size=11))
    if num_lanes > _MAX_LANES:
        shapes.append(
            Text(0, y + 12, f"The lanes of {num_lanes:,} threads are left out. Draw fewer ranks to see them.")
        )
        y += 18
    return Figure(title, _TIMELINE_WIDTH, y, shapes)


def _draw_lane(
    spans: Sequence[Mapping[str, Any]], y: float, height: float, place: Callable[[float], float]
) -> Iterable[Shape]:
    """Draw the spans of one lane in the order of their begin, so nested ones are on top. Tiny ones are joined."""
    ends: dict[Color, float] = {}
    for span in spans:
        color = _COLORS.get(span["name"], "transfer")
        details = span.get("args", {})
        if details.get("error"):
            color = "error"
        begin, end = place(span["ts"]), place(span["ts"] + span["dur"])
        if end - begin < _MIN_SPAN and begin < ends.get(color, -1.0) + _MIN_SPAN:
            continue
        ends[color] = max(end, begin + _MIN_SPAN)
        note = "".join(f", {name} {value}" for name, value in details.items())
        yield Rect(
            begin, y, max(end - begin, _MIN_SPAN), height, color, f"{span['name']}: {seconds(span['dur'] / 1e6)}{note}"
        )


def arrange(title: str, figures: Sequence[Figure], num_columns: int = 2) -> Figure:
    """Put figures of one size side by side, and below one another."""
    shapes: list[Shape] = []
    width, height = (max(sizes) for sizes in zip(*((figure.width, figure.height) for figure in figures), strict=True))
    num_columns = min(num_columns, len(figures))
    for number, figure in enumerate(figures):
        right = _GAP + number % num_columns * (width + 2 * _GAP)
        down = 2.5 * _GAP + number // num_columns * (height + 2 * _GAP)
        for shape in figure.shapes:
            if isinstance(shape, Line):
                shapes.append(shape._replace(points=[(x + right, y + down) for x, y in shape.points]))
            else:
                shapes.append(shape._replace(x=shape.x + right, y=shape.y + down))
    num_rows = math.ceil(len(figures) / num_columns)
    full_width = num_columns * (width + 2 * _GAP)
    shapes.append(Text(_GAP, 22, _fit(title, full_width - 2 * _GAP, 12)))
    return Figure(title, full_width, 2 * _GAP + num_rows * (height + 2 * _GAP), shapes)


def style() -> str:
    """Return the CSS of all colours, light and dark."""
    rules = [
        "".join(
            f".{name}{{fill:{colors[i]}}}.{name}-line{{stroke:{colors[i]};fill:none}}"
            for name, colors in _PALETTE.items()
        )
        for i in (0, 1)
    ]
    return f"{rules[0]}@media screen and (prefers-color-scheme:dark){{{rules[1]}}}"


def to_svg(figure: Figure, *, is_file: bool = True) -> str:
    """Return the figure as an SVG. Without `is_file`, the page around it brings `style` and the surface."""
    full = f'width="{figure.width:g}" height="{figure.height:g}"'
    font = "font-family=\"system-ui,'Segoe UI',Helvetica,Arial,sans-serif\""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {figure.width:g} {figure.height:g}" role="img" {font}'
    parts = [f"{head}{f' {full}' if is_file else ''}>", f"<title>{escape(figure.title)}</title>"]
    if is_file:
        parts.append(f'<style>{style()}</style><rect class="surface" {full}/>')
    for shape in figure.shapes:
        match shape:
            case Rect(x, y, width, height, color, tooltip):
                place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}"'
                parts.append(f'<rect class="{color}" {place}>{_tooltip(tooltip)}</rect>')
            case Line(points, color, width):
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                parts.append(f'<polyline class="{color}-line" stroke-width="{width:g}" points="{path}"/>')
            case Dot(x, y, radius, color, tooltip):
                parts.append(
                    f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{_tooltip(tooltip)}</circle>'
                )
            case Text(x, y, text, color, font_size, anchor, is_bold):
                look = f'font-size="{font_size:g}" text-anchor="{anchor}"' + (' font-weight="600"' if is_bold else "")
                parts.append(f'<text class="{color}" x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def write_png(figure: Figure, file: IO[bytes]) -> None:
    """Write the figure as a PNG, in the light palette. Raises `MissingDependencyError` without matplotlib."""
    try:
        from matplotlib import figure as plot
        from matplotlib import lines, patches
    except ImportError as error:
        raise MissingDependencyError(
            f"A PNG needs matplotlib: {install_advice('plot')}. An .svg needs nothing"
        ) from error
    canvas = plot.Figure(figsize=(figure.width / 100, figure.height / 100), dpi=200)
    axes = canvas.add_axes((0, 0, 1, 1), xlim=(0, figure.width), ylim=(figure.height, 0))
    axes.axis("off")
    for order, shape in enumerate(figure.shapes):
        look: dict[str, Any] = {"color": _PALETTE[shape.color][0], "zorder": order}
        match shape:
            case Rect(x, y, width, height):
                axes.add_patch(patches.Rectangle((x, y), width, height, linewidth=0, **look))
            case Line(points, _, width):
                axes.add_line(lines.Line2D(*zip(*points, strict=True), linewidth=width * 0.72, **look))
            case Dot(x, y, radius):
                axes.add_patch(patches.Circle((x, y), radius, linewidth=0, **look))
            case Text(x, y, text, _, size, anchor, is_bold):
                look |= {
                    "ha": {"start": "left", "middle": "center", "end": "right"}[anchor],
                    "weight": "bold" if is_bold else "normal",
                }
                axes.text(x, y, plain_line(text), size=size * 0.66, parse_math=False, **look)
    canvas.savefig(file, format="png")


def to_lines(series: Series, width: int = 60, height: int = 8) -> list[str]:
    """Draw a series with characters, for a terminal."""
    scale = math.log10 if series.is_log else float
    low, high = map(scale, series.bounds)
    rows = [[" "] * width for _ in range(height)]

    def place(point: tuple[float, float]) -> tuple[int, int]:
        y = (high - scale(point[1])) / (high - low)
        return round(series.along(point[0]) * (width - 1)), round(y * (height - 1))

    pairs = itertools.chain.from_iterable(itertools.pairwise(map(place, part)) for part in series.parts)
    for (x, y), (next_x, next_y) in pairs:
        for between in range(x + 1, next_x):
            rows[round(y + (next_y - y) * (between - x) / (next_x - x))][between] = "·"
    for point in series.points:
        x, y = place(point)
        rows[y][x] = "◦" if point[0] in series.removed else "•"
    note = ""
    if series.best is not None:
        x, y = place(series.best)
        rows[y][x] = "*"
        note = f"   * best: {_number(series.best[1], 4)} at step {series.best[0]:,}"
    low, high = series.bounds
    labels = [_number(high, 4), *[""] * (height - 2), _number(low, 4)]
    margin = max(map(len, labels))
    lines = [f"{label:>{margin}} │{''.join(row).rstrip()}" for label, row in zip(labels, rows, strict=True)]
    axis, step_line = ["─"] * width, ""
    for step in series.choose_steps(width):
        x, text = round(series.along(step) * (width - 1)), f"{step:,}"
        axis[x] = "┬"
        step_line = step_line.ljust(min(max(x - len(text) // 2, 0), width - len(text))) + text
    return [series.title + note, *lines, f"{'':>{margin}} └{''.join(axis)}", f"{'step':>{margin}}  {step_line}"]


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round values from about `low` to about `high`."""
    rough_step = (high - low) / 4 or 1.0
    unit = 10.0 ** math.floor(math.log10(rough_step))
    step = unit * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough_step * 0.999)
    begin, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(begin, end + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return up to five powers of ten from ``10**low`` to ``10**high``."""
    powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
    return [10.0**power for power in powers[:: math.ceil(len(powers) / _MAX_POWERS)]]


def _number(value: float, digits: int = 6) -> str:
    """Return a number as short text: ``0.25``, ``1.236M``."""
    unit, factor = next((pair for pair in _UNITS if pair[1] <= abs(value) < _MAX_SHORTENED), ("", 1.0))
    return f"{value / factor:,.{digits}g}{unit}"


def _fit(text: str, room: float, size: float) -> str:
    """Cut a part out of a text that is wider than `room` pixels. Names differ more at the end than at the beginning."""
    most = max(int(room / (size * _CHARACTER)), 8)
    text, num_first = plain_line(text), most // 5
    return text if len(text) <= most else f"{text[:num_first]}…{text[len(text) - (most - num_first - 1) :]}"


def _tooltip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def escape(text: str) -> str:
    """Return `text` as one line of HTML or XML, without markup and control characters."""
    return html.escape(plain_line(text))
