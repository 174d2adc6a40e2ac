"""``cloudckpt diff``."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._console import Console, count, size
from cloudckpt.cli._errors import NO, NOT_FOUND
from cloudckpt.cli._options import PairOptions

if TYPE_CHECKING:
    from cloudckpt.inspect.comparison import Comparison, Difference

_RIGHT = ("ELEMENTS", "LARGEST", "RELATIVE")
_MAX_CELL_CHARS = 32


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    *,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only names like this, or below it: 'model'. Several: any of them."),
    ] = None,
    rtol: Annotated[float, typer.Option(min=0, help="Ignore changes of up to this share of A's value.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Ignore changes of up to this much.")] = 0.0,
    common: PairOptions,
) -> None:
    """Compare two checkpoints by value, however they are sharded; exit with 1 if they differ.

    Example: cloudckpt diff s3://bucket/run/step-100 s3://bucket/run/step-200 --rtol 1e-5
    """
    from cloudckpt.inspect.comparison import compare
    from cloudckpt.inspect.description import matches

    console = common.console
    options, options_after = common.options_of_both(before, after)
    patterns = name or ["*"]
    with console.progress("comparing") as on_progress:
        found = compare(
            before,
            after,
            rtol=rtol,
            atol=atol,
            only=lambda each: matches(each, patterns),
            options=options,
            options_after=options_after,
            on_progress=on_progress,
        )
    if common.as_json:
        console.document(_document_of(found))
    else:
        _print(console, found)
    if name and not found.differences and not found.num_same:
        console.warn(f"Nothing in {found.before} or {found.after} has a name like {' or '.join(name)}.")
        raise typer.Exit(NOT_FOUND)
    if not found.is_same:
        raise typer.Exit(NO)


def _print(console: Console, found: Comparison) -> None:
    if found.differences:
        console.table(
            ["NAME", "CHANGE", "A", "B", "ELEMENTS", "LARGEST", "RELATIVE"],
            [_row(one) for one in found.differences],
            right=_RIGHT,
        )
        console.line()
    if any(one.kind == "dtype" for one in found.differences):
        console.say("Values of different dtypes are not compared.")
    console.line(
        f"{count(len(found.differences), 'difference')}, {count(found.num_same, 'entry')} "
        f"the same; {size(found.num_bytes_compared)} compared"
    )


def _row(one: Difference) -> list[str]:
    figures = ["", "", ""]
    if one.num_different:
        largest = [f"{one.max_absolute:.4g}", f"{one.max_relative:.4g}"]
        figures = [f"{one.num_different:,} of {one.num_elements:,}", *largest]
    return [one.name, one.kind, *_shorten(one.before, one.after), *figures]


def _shorten(before: str, after: str) -> tuple[str, str]:
    """Cut both texts to the place of their first difference, since long values often begin alike."""
    begin = 0
    if max(len(before), len(after)) > _MAX_CELL_CHARS:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
        begin = max(sum(1 for _ in same) - _MAX_CELL_CHARS // 2, 0)
    return _cut(before, begin), _cut(after, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + _MAX_CELL_CHARS
    return ("…" if begin and text else "") + text[begin:end] + ("…" if end < len(text) else "")


def _document_of(found: Comparison) -> dict[str, Any]:
    document = dataclasses.asdict(found)
    for difference in document["differences"]:
        for name in ("max_absolute", "max_relative"):
            if not math.isfinite(difference[name]):
                difference[name] = "infinity"  # JSON has none
    return {"is_same": found.is_same, **document}
