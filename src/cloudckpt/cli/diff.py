"""``cloudckpt diff``."""

from __future__ import annotations

import fnmatch
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._errors import NO, NOT_FOUND
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, Timeout
from cloudckpt.cli._sides import TargetEndpointURL, options_of_both
from cloudckpt.cli._text import count, size

if TYPE_CHECKING:
    from cloudckpt.comparison import Comparison, Difference

_RIGHT = ("ELEMENTS", "LARGEST", "RELATIVE")


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    *,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only names like this: 'model.*'. Several: any of them."),
    ] = None,
    rtol: Annotated[float, typer.Option(help="Ignore changes of up to this share of A's value.")] = 0.0,
    atol: Annotated[float, typer.Option(help="Ignore changes of up to this much.")] = 0.0,
    storage_option: StorageOptions = None,
    endpoint_url: EndpointURL = None,
    target_storage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--target-storage-option",
            metavar="NAME=VALUE",
            help="As --storage-option, for B alone; --storage-option is then for A alone. Without, that is for both, "
            "or for the one of the two that is no path.",
            show_default=False,
        ),
    ] = None,
    target_endpoint_url: TargetEndpointURL = None,
    timeout: Timeout = 60.0,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints by value, however they are sharded; exit 1 where they differ.

    Example: cloudckpt diff s3://bucket/run/step-100 s3://bucket/run/step-200 --rtol 1e-5
    """
    from cloudckpt.comparison import compare

    console = Console(as_json=as_json, quiet=quiet)
    options, options_after = options_of_both(
        before,
        after,
        storage_option,
        endpoint_url,
        target_storage_option=target_storage_option,
        target_endpoint_url=target_endpoint_url,
        timeout_s=timeout,
    )
    patterns = name or ["*"]
    with console.progress("comparing") as progress:
        seen = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal seen
            progress.set_total(total)
            progress.advance(done - seen)
            seen = done

        found = compare(
            before,
            after,
            rtol=rtol,
            atol=atol,
            only=lambda each: any(fnmatch.fnmatchcase(each, pattern) for pattern in patterns),
            options=options,
            options_after=options_after,
            on_progress=on_progress,
        )
    if as_json:
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
    console.line(
        f"{count(len(found.differences), 'difference')}, {count(found.num_same, 'entry')} "
        f"the same; {size(found.num_bytes_compared)} compared"
    )


def _row(one: Difference) -> list[str]:
    figures = ["", "", ""]
    if one.num_different:
        largest = [f"{one.max_absolute:.4g}", f"{one.max_relative:.4g}"]
        figures = [f"{one.num_different:,} of {one.num_elements:,}", *largest]
    return [one.name, one.kind, one.before, one.after, *figures]


def _document_of(found: Comparison) -> dict[str, Any]:
    return {
        "before": found.before,
        "after": found.after,
        "is_same": found.is_same,
        "num_same": found.num_same,
        "num_bytes_compared": found.num_bytes_compared,
        "differences": [
            {
                "name": one.name,
                "kind": one.kind,
                "before": one.before,
                "after": one.after,
                "num_elements": one.num_elements,
                "num_different": one.num_different,
                "max_absolute": _number(one.max_absolute),
                "max_relative": _number(one.max_relative),
            }
            for one in found.differences
        ],
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "infinity"
