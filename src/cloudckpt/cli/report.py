"""``cloudckpt report``: a run on one HTML page, without scripts and without anything from a network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloudckpt._display import count, date, seconds, size, title_of
from cloudckpt._messages import join_first
from cloudckpt._version import __version__
from cloudckpt.cli._console import DENIED
from cloudckpt.cli._draw import Figure, draw_bars, draw_series, escape, style, to_svg
from cloudckpt.cli._metrics import (
    BEST,
    REMOVED_NOTE,
    choose_modes,
    describe_modes,
    find_best,
    find_metrics,
    mark_best,
    step_of,
)
from cloudckpt.cli.ls import add_fast
from cloudckpt.cli.plot import (
    OutputOptions,
    find_checkpoints,
    keep_drawable,
    name_place,
    series_of,
    timeline_of,
    write_file,
)
from cloudckpt.cli.show import row_of_difference
from cloudckpt.errors import CheckpointNotFoundError, InvalidOptionError

if TYPE_CHECKING:
    from cloudckpt.inspect.catalog import CheckpointInfo
    from cloudckpt.inspect.comparison import Difference
    from cloudckpt.inspect.description import (
        CheckpointDescription,
        ModuleDescription,
        TensorDescription,
        ValueDescription,
    )

_MAX_BARS, _MAX_TOTALS, _MAX_DIFFERENCES = 14, 8, 60
_FIRST = ("model", "optimizer")
_NEARLY_ALL = 99.9
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root{{--paper:#f4f5f7;--surface:#fff;--ink:#1c1d20;--muted:#63666d;--line:#e3e5e8}}
@media screen and (prefers-color-scheme:dark){{
:root{{--paper:#0f1012;--surface:#17181b;--ink:#eceef1;--muted:#a2a6ae;--line:#34373d}}}}
body{{margin:0 auto;padding:1rem;max-width:76rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Helvetica,Arial,sans-serif}}
h1{{font-size:1.3rem;margin:.5rem 0;overflow-wrap:anywhere}}
h2{{font-size:1.05rem;margin:2rem 0 .5rem;overflow-wrap:anywhere}}
p{{color:var(--muted);margin:.3rem 0;overflow-wrap:anywhere}}
.grid{{margin-top:1rem;display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,20rem),1fr))}}
figure,.table{{margin:0;padding:1rem;background:var(--surface);border:1px solid var(--line);border-radius:8px}}
.table{{margin:.5rem 0;width:fit-content;max-width:100%;box-sizing:border-box}}
svg{{display:block;width:100%;height:auto}}
.wide{{overflow-x:auto}}.wide svg{{min-width:50rem}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th,td{{text-align:left;vertical-align:top;padding:.25rem 1.2rem .25rem 0;border-bottom:1px solid var(--line)}}
th,td.number{{white-space:nowrap}}td{{overflow-wrap:anywhere}}
td>div{{width:max-content;max-width:clamp(12rem,100vw - 42rem,36rem)}}
th{{color:var(--muted);font-weight:600}}.number{{text-align:right}}.marked{{font-weight:700}}
tr:last-child td{{border-bottom:0}}th:last-child,td:last-child{{padding-right:0}}
@media(max-width:45rem){{
table,tbody,tr{{display:block}}thead{{display:none}}.table{{width:auto}}
tr{{padding:.4rem 0;border-bottom:1px solid var(--line)}}tr:last-child{{border-bottom:0}}
td,td.number{{display:inline-block;margin-right:.9rem;padding:0;border:0;white-space:normal}}td:empty{{display:none}}
td::before{{content:attr(data-title) " ";color:var(--muted);font-weight:400}}
td:first-child{{display:block;font-weight:600}}td:first-child::before{{content:none}}
td>div{{width:auto;max-width:none}}}}
@media print{{body{{max-width:none;background:none;font-size:12px}}
figure,tr{{break-inside:avoid}}h2{{break-after:avoid}}
.grid{{grid-template-columns:1fr 1fr}}.wide svg{{min-width:0}}}}
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def report(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of the checkpoints.")],
    *,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="The names or steps of two checkpoints to compare, else the last two."),
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Compare their values, too, which reads both of them wholly.")
    ] = False,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Also draw this timeline that Options(trace=…) wrote; one for each rank."),
    ] = None,
    best: BEST = None,
    title: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The title of the page. ROOT without it, relative to the current directory."),
    ] = None,
    fast: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Also the steps in this fast place of the run, and where each step is."),
    ] = None,
    common: OutputOptions,
) -> None:
    """Write a page about the checkpoints in ROOT that can be sent to others: one HTML file, by default report.html.

    Example: cloudckpt report s3://bucket/run -o report.html
    """
    from cloudckpt.inspect.description import describe
    from cloudckpt.uri import parse_location

    output = common.output or Path("report.html")
    if output.suffix.lower() not in (".html", ".htm"):
        raise InvalidOptionError(f"--output must end in .html, not {output.name!r}. -o is short for --output here")
    options = common.options()
    drawn = timeline_of(trace) if trace else None
    infos = find_checkpoints(root, common)
    committed = {info.name: info for info in infos if info.state == "committed"}
    pair = [_find(name, committed, root) for name in compare or list(committed)[-2:]]
    root = parse_location(root).uri
    title = title or name_place(root)
    listed = [*infos]  # the rest of the page is about the steps of the root
    places = {} if fast is None else add_fast(listed, fast, root, common=common)
    newest = describe(list(committed.values())[-1].uri, options=options)
    series = keep_drawable(series_of(infos, best), common)
    note = f"<p>{REMOVED_NOTE}</p>" if any(curve.removed for curve in series) else ""
    parts = [_head(title, infos, newest), note, _figures(map(draw_series, series))]
    parts += ["<h2>Checkpoints</h2>", _checkpoints(listed, best, places)]
    parts += [f"<h2>Contents of {escape(newest.uri.rpartition('/')[2])}</h2>", _totals(newest)]
    parts.append(_figures(_contents(newest)))
    if len(pair) > 1:
        before, after = (describe(info.uri, options=options) for info in pair)
        parts.append(_differences(before, after, common, has_values=values))
    if drawn is not None:
        parts += [f"<h2>{escape(drawn.title)}</h2>", f'<div class="table wide">{to_svg(drawn, is_file=False)}</div>']
    page = _PAGE.format(title=escape(title), style=style(), body="\n".join(parts))
    write_file(output, page.encode(), common.console)
    if common.as_json:
        common.console.document({"root": root, "output": str(output), "num_checkpoints": len(committed)})
    if any(info.state == "denied" for info in infos):
        raise typer.Exit(DENIED)


def _find(name: str, committed: Mapping[str, CheckpointInfo], root: str) -> CheckpointInfo:
    """Return the checkpoint that ``--compare`` names, or whose step it names: the newest of them."""
    of_step = [info for info in committed.values() if str(step_of(info)) == name]
    found = committed.get(name) or next(reversed(of_step), None)
    if found is None:
        near = join_first([*committed][::-1], 3, separator=", ")
        raise CheckpointNotFoundError(
            f"--compare takes the names or the steps of two checkpoints directly under {root}, and none that is "
            f"committed there is {name!r}. There are: {near}",
            uri=root,
        )
    return found


def _head(title: str, infos: Sequence[CheckpointInfo], newest: CheckpointDescription) -> str:
    sizes = [(info.state == "committed", (info.num_bytes or 0) - info.num_bytes_elsewhere) for info in infos]
    num_bytes, num_others = (sum(num for is_committed, num in sizes if is_committed is kind) for kind in (True, False))
    others = f"; {size(num_others)} of other saves, such as unfinished ones" if num_others else ""
    facts = (
        f"{count(sum(is_committed for is_committed, _ in sizes), 'checkpoint')}, {size(num_bytes)}{others}",
        f"newest {newest.uri.rpartition('/')[2]}: {count(len(newest.tensors), 'tensor')} with "
        f"{count(newest.num_elements, 'element')}, saved by {count(newest.world_size, 'rank')} with "
        + ", ".join(f"{name} {version}" for name, version in newest.software.items()),
        f"read {date(datetime.now(timezone.utc))} by cloudckpt {__version__}",
    )
    return f"<h1>{escape(title)}</h1>" + "".join(f"<p>{escape(fact)}</p>" for fact in facts)


def _checkpoints(infos: Sequence[CheckpointInfo], best: Sequence[str] | None, places: Mapping[int, str]) -> str:
    modes = choose_modes(infos, best)
    best_of = find_best(infos, modes)
    names = find_metrics(infos)
    titles = ["name", *map(title_of, names), "size", "duration", "ranks", "committed", "state"]
    titles += ["place"] * bool(places)
    rows = [
        [
            info.name,
            *(mark_best(info, name, best_of) for name in names),
            "" if info.num_bytes is None else size(info.num_bytes),
            "" if info.save_s is None else seconds(info.save_s),
            "" if info.world_size is None else f"{info.world_size:,}",
            date(info.committed_at),
            info.state,
            *([places[id(info)]] if places else []),
        ]
        for info in infos
    ]
    note = f"<p>* marks the best: {escape(describe_modes(modes, best_of))}.</p>" if best_of else ""
    return _table(titles, rows, numbers=range(1, titles.index("committed"))) + note


def _totals(newest: CheckpointDescription) -> str:
    """Return the sums of the model, the optimizer and so on, the model first."""
    from cloudckpt.inspect.description import group_by_module

    groups = sorted(group_by_module([*newest.tensors, *newest.values], 1), key=_place_of)
    facts = [
        f"{group.name}: {size(group.num_bytes)} in "
        + f"{count(group.num_tensors, 'tensor')} with {count(group.num_elements, 'element')}" * (group.num_tensors > 0)
        + " and " * (group.num_tensors > 0 < group.num_values)
        + count(group.num_values, "value") * (group.num_values > 0)
        for group in groups[:_MAX_TOTALS]
    ]
    if num_bytes := sum(group.num_bytes for group in groups[_MAX_TOTALS:]):
        facts.append(f"{len(groups) - _MAX_TOTALS:,} others: {size(num_bytes)}")
    return "".join(f"<p>{escape(fact)}</p>" for fact in facts)


def _place_of(group: ModuleDescription) -> tuple[int, int]:
    """Return a sort key: the model, the optimizer, all else; in each of them the largest first."""
    return _rank_of(group.name), -group.num_bytes


def _rank_of(name: str) -> int:
    top = re.split(r"[. ]", name)[0]
    return _FIRST.index(top) if top in _FIRST else len(_FIRST)


def _contents(newest: CheckpointDescription) -> Iterable[Figure]:
    from cloudckpt.inspect.description import group_by_module

    entries: list[TensorDescription | ValueDescription] = [*newest.tensors, *newest.values]
    groups = [group_by_module(entries, depth) for depth in (1, 2, 3)]
    few = [description for description in groups if len(description) <= _MAX_BARS]
    modules = sorted((few or groups)[-1 if few else 0], key=lambda group: -group.num_bytes)
    shown = sorted(modules[:_MAX_BARS], key=_place_of)
    rows = [(group.name, group.num_bytes, size(group.num_bytes)) for group in shown]
    if others := modules[_MAX_BARS:]:
        num_bytes = sum(group.num_bytes for group in others)
        where = join_first([*dict.fromkeys(group.name.partition(".")[0] for group in others)], 3, separator=", ")
        rows.append((f"{count(len(others), 'other')} in {where}", num_bytes, size(num_bytes)))
    yield draw_bars("size by module", rows)
    largest = sorted(newest.tensors, key=lambda tensor: -tensor.num_bytes)[:_MAX_BARS]
    dtypes = {tensor.dtype for tensor in largest}
    kind = f" ({dtypes.pop()})" if len(dtypes) == 1 else ""  # once, so that there is room for the names
    texts = [f"{'' if kind else entry.dtype} {[*entry.shape]}  {size(entry.num_bytes)}".strip() for entry in largest]
    rows = [(tensor.name, tensor.num_bytes, text) for tensor, text in zip(largest, texts, strict=True)]
    yield draw_bars(f"largest tensors{kind}", rows)


def _differences(
    before: CheckpointDescription, after: CheckpointDescription, common: OutputOptions, *, has_values: bool
) -> str:
    from cloudckpt.inspect.comparison import Difference, compare

    if has_values:
        with common.console.progress("comparing") as on_progress:
            infos = compare(before.uri, after.uri, options=common.options(), on_progress=on_progress)
        differences, scope, note = list(infos.differences), "", f"{count(infos.num_same, 'entry')} the same."
    else:
        olds, news = (
            {tensor.name: f"{tensor.dtype} {[*tensor.shape]}" for tensor in description.tensors}
            | {value.name: "value" for value in description.values}
            for description in (before, after)
        )
        differences = [
            Difference(
                name=name,
                kind="added" if name not in olds else "removed" if name not in news else "type",
                before=olds.get(name, ""),
                after=news.get(name, ""),
            )
            for name in {**olds, **news}
            if olds.get(name) != news.get(name)
        ]
        scope, note = " in names, shapes and dtypes (values not compared)", "report --values compares the values, too."
    title = f"<h2>{escape(before.uri.rpartition('/')[2])} to {escape(after.uri.rpartition('/')[2])}</h2>"
    parts = Counter(difference.name.partition(".")[0] for difference in differences)
    where = ", ".join(f"{number:,} in {part}" for part, number in parts.items() if len(parts) <= _MAX_TOTALS)
    note = f"{count(len(differences), 'difference')}{scope}{where and ': '}{where}. {note}"
    left_out = len(differences) - _MAX_DIFFERENCES
    end = f"<p>The table leaves out {count(left_out, 'more difference')}: cloudckpt diff lists all.</p>" * (
        left_out > 0
    )
    differences.sort(
        key=lambda difference: (difference.kind == "values", _rank_of(difference.name), -difference.max_absolute)
    )
    titles = ["name", *(["max difference", "changed", "relative"] if has_values else []), "change"]
    rows = [_row_of_difference(difference, len(titles)) for difference in differences[:_MAX_DIFFERENCES]]
    numbers = range(1, len(titles) - 1)
    return f"{title}<p>{escape(note)}</p>" + (_table(titles, rows, numbers=numbers) if rows else "") + end


def _row_of_difference(difference: Difference, num_columns: int) -> list[str]:
    """Return the cells of a difference: its figures if there is room for them, and in words what has changed."""
    name, kind, before, after, *_ = row_of_difference(difference)
    figures = [""] * (num_columns - 2)
    change = f"{before} → {after}" if before and after else before or after
    if difference.num_different:
        share = 100 * difference.num_different / difference.num_elements
        is_nearly_all = share > _NEARLY_ALL and difference.num_different < difference.num_elements
        changed = f"> {_NEARLY_ALL:g} %" if is_nearly_all else f"{share:.3g} %"
        figures = [f"{difference.max_absolute:.4g}", changed, f"{difference.max_relative:.4g}"]
        change = difference.after
    return [name, *figures, f"{kind}: {change}"]


def _figures(figures: Iterable[Figure]) -> str:
    drawn = "".join(f"<figure>{to_svg(figure, is_file=False)}</figure>" for figure in figures)
    return f'<div class="grid">{drawn}</div>'


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: range) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        # The <div> keeps a name on one line; only one longer than its maximum is broken, at its dots.
        name = f"<div>{escape(row[0]).replace('.', '.<wbr>')}</div>"
        kinds = ["number" * (column in numbers) + " marked" * text.startswith("* ") for column, text in enumerate(row)]
        return "".join(
            f'<{tag} class="{kind}" data-title="{escape(title)}">{shown}</{tag}>'
            for title, kind, shown in zip(titles, kinds, [name, *map(escape, row[1:])], strict=True)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{cells(titles, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
