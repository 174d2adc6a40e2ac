"""``cloudckpt plot`` and ``timeline``: pictures of a run and of a save."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt._display import title_of
from cloudckpt.cli._console import DENIED, Console
from cloudckpt.cli._draw import Figure, Series, arrange, draw_series, draw_timeline, to_lines, to_svg, write_png
from cloudckpt.cli._metrics import BEST, REMOVED_NOTE, choose_modes, find_best, find_metrics, find_removed, step_of
from cloudckpt.cli._options import CommonOptions
from cloudckpt.errors import CheckpointNotFoundError, InvalidOptionError

if TYPE_CHECKING:
    from cloudckpt.inspect.catalog import CheckpointInfo

_MAX_VALUE = 1e300  # a span of two such values is finite
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions(CommonOptions):
    """The options of a command that writes a file, whose ``-o`` names it."""

    storage_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="As for other commands, which call it -o, too.", show_default=False),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write; one there is replaced.")
    ] = None


def plot(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of the checkpoints.")],
    *,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Only what is named like this: 'val_*', 'size', 'duration'. Several: any."
        ),
    ] = None,
    best: BEST = None,
    common: OutputOptions,
) -> None:
    """Plot metrics, sizes and durations of saves over the steps in ROOT: in the terminal, or to an .svg or a .png.

    Example: cloudckpt plot s3://bucket/run -o run.svg
    """
    from cloudckpt.inspect.description import matches

    write = None if common.output is None else writer_of(common.output, common.console)
    infos = find_checkpoints(root, common)
    all_series = series_of(infos, best)
    named = [curve for curve in all_series if matches(curve.name, name or ["*"])]
    if not named:
        have = ", ".join(title_of(curve.name) for curve in all_series)
        raise CheckpointNotFoundError(f"nothing is named like {' or '.join(name or ())}. There are: {have}", uri=root)
    shown = {text for curve in named for text in (curve.name, f"min:{curve.name}", f"max:{curve.name}")}
    if hidden := sorted({*(best or ())} - shown):
        raise InvalidOptionError(f"--best {hidden[0]}: --name leaves this metric out. Name it, too, or omit --best")
    series = keep_drawable(named, common)
    if not series:
        raise CheckpointNotFoundError("nothing is left to draw. `cloudckpt ls --metrics` shows the values", uri=root)
    if write is not None:
        grey = " (grey: removed steps)" if any(curve.removed for curve in series) else ""
        write(arrange(f"{root}{grey}", [draw_series(curve) for curve in series]))
    if common.as_json:
        rows = [{name: value for name, value in curve._asdict().items() if name != "span"} for curve in named]
        common.console.document({"root": root, "series": rows})
    elif write is None:
        for text in itertools.chain.from_iterable([*to_lines(curve), ""] for curve in series):
            common.console.line(text)
    if any(curve.removed for curve in series):
        common.console.say(REMOVED_NOTE)
    if any(info.state == "denied" for info in infos):
        raise typer.Exit(DENIED)


def timeline(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files of Options(trace=…), one for each rank.")
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The .svg or .png to write.")],
) -> None:
    """Draw the timeline of a save or a load by rank: its steps, and the calls to the store in each thread.

    Example: cloudckpt timeline trace-save-*.json -o save.svg
    """
    write, drawn = writer_of(output, Console()), timeline_of(files)
    write(arrange(drawn.title, [drawn]))


def writer_of(output: Path, console: Console) -> Callable[[Figure], None]:
    """Return a function that writes a figure in the format of the file's name. Raises `InvalidOptionError`."""
    suffix = output.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise InvalidOptionError(
            f"--output must end in .svg or .png, not {output.name!r}. -o is short for --output here"
        )

    def write(figure: Figure) -> None:
        png = io.BytesIO()
        if suffix == ".png":
            write_png(figure, png)
        write_file(output, png.getvalue() or to_svg(figure).encode(), console)

    return write


def write_file(output: Path, data: bytes, console: Console) -> None:
    """Write a file and print its path. Raises `InvalidOptionError` if its folder does not allow that."""
    try:
        is_replaced = output.exists()
        output.write_bytes(data)
    except OSError as error:
        raise InvalidOptionError(f"--output: {output} cannot be written ({error.strerror})") from error
    if not console.as_json:
        console.line(str(output))
    if is_replaced:
        console.say(f"It replaced the {output.name} that was there.")


def find_checkpoints(root: str, common: CommonOptions) -> list[CheckpointInfo]:
    """List the checkpoints at `root`, and warn of damage. Raises `CheckpointNotFoundError` if nothing is committed."""
    from cloudckpt.commit.log import describe_siblings
    from cloudckpt.inspect.catalog import list_checkpoints
    from cloudckpt.io.client import open_client

    infos = list_checkpoints(root, all=True, options=common.options())
    for info in infos:
        if info.problem:
            common.console.warn(f"{info.name}: {info.problem}")
    if not any(info.state == "committed" for info in infos):
        client = open_client(root, common.options())
        near = f"`cloudckpt ls {root}` shows what is there" if infos else describe_siblings(client)
        raise CheckpointNotFoundError(f"no checkpoint is committed at {root}. {near}", uri=root)
    return infos


def series_of(infos: Sequence[CheckpointInfo], best: Sequence[str] | None) -> list[Series]:
    """Return each metric, the size and the duration over the steps of the committed checkpoints.

    Unless each of them has a step, they are numbered by time. The metrics have removed steps, too.
    """
    by_step = [(step_of(info), info) for info in infos if info.state == "committed"]
    removed = find_removed(infos)
    if any(step is None for step, _ in by_step):
        removed = {}
        by_step = [(number, info) for number, (_, info) in enumerate(by_step, start=1)]
    newest = sorted({step or 0: info for step, info in by_step}.items())  # a step that was saved again counts once
    infos = [info for _, info in newest]
    best_of = find_best([info for _, info in by_step], choose_modes(infos, best))
    units = [unit for unit, num_bytes in _BYTES.items() if any((info.num_bytes or 0) >= num_bytes for info in infos)]
    size_unit = units[-1] if units else "B"
    metrics = dict.fromkeys([*find_metrics(infos), *itertools.chain.from_iterable(removed.values())])
    values: dict[tuple[str, str], list[float | None]] = {
        **{(name, ""): [info.metrics.get(name) for info in infos] for name in metrics},
        ("size", size_unit): [None if info.num_bytes is None else info.num_bytes / _BYTES[size_unit] for info in infos],
        ("duration", "s"): [info.save_s for info in infos],
    }
    all_series = []
    for (name, unit), numbers in values.items():
        pairs = [(step, number) for (step, _), number in zip(newest, numbers, strict=True) if number is not None]
        gone = {} if unit else {step: own[name] for step, own in removed.items() if name in own}
        pairs = sorted([*pairs, *gone.items()], key=lambda pair: pair[0])
        points = [(step, number) for step, number in pairs if abs(number) < _MAX_VALUE]
        gaps = [step for step, number in pairs if not abs(number) < _MAX_VALUE]
        marked = [(step, info.metrics[name]) for step, info in newest if not unit and info is best_of.get(name)]
        if pairs:
            best_point = marked[0] if marked and marked[0] in points else None
            all_series.append(Series(name, unit, points, best_point, gaps, [*gone]))
    return all_series


def keep_drawable(all_series: Sequence[Series], common: CommonOptions) -> list[Series]:
    """Return the series with a value that can be drawn, over the same steps, and warn of the others."""
    if empty := [title_of(curve.name) for curve in all_series if not curve.points]:
        common.console.warn(f"not drawn, since every value is NaN or beyond ±{_MAX_VALUE:g}: {', '.join(empty)}")
    drawn = [curve for curve in all_series if curve.points]
    steps = [step for curve in drawn for step in curve.ends]
    return [curve._replace(span=(min(steps), max(steps))) for curve in drawn]


def name_place(uri: str) -> str:
    """Return a name for the title of a picture that others see: no absolute path, if there is a shorter one."""
    if not uri.startswith("/"):
        return uri
    path, here = Path(uri), Path.cwd()
    return str(path.relative_to(here)) if here in path.parents else path.name or uri


def timeline_of(files: Sequence[Path]) -> Figure:
    """Draw the timelines in `files`. Raises `InvalidOptionError` for a file that is none."""
    events: list[dict[str, Any]] = []
    titles = []
    file = None
    try:
        for file in files:
            document = json.loads(file.read_bytes())
            events += document["traceEvents"]
            about = document.get("otherData", {})
            place = " (fast place)" * (about.get("place") == "fast")
            titles.append(f"{about.get('verb', '')} {name_place(about.get('uri', ''))}{place}".strip())
        return draw_timeline(", ".join(dict.fromkeys(filter(None, titles))) or "timeline", events)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        why = error.strerror if isinstance(error, OSError) else "it has no timeline that Options(trace=…) wrote"
        raise InvalidOptionError(f"{file} cannot be drawn: {why}") from error
