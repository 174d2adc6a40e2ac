"""What commands with a source and a target have in common."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._options import options_of

if TYPE_CHECKING:
    from cloudckpt.cli._console import Console
    from cloudckpt.options import Options

TargetStorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--target-storage-option",
        metavar="NAME=VALUE",
        help="As --storage-option, for the target alone; --storage-option is then for the source alone. Without, that "
        "is for both, or for the one of the two that is no path.",
        show_default=False,
    ),
]
TargetEndpointURL = Annotated[
    str | None,
    typer.Option("--target-endpoint-url", metavar="URL", help="Short for --target-storage-option endpoint_url=URL."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at the target already.")]
UnsafePickle = Annotated[
    bool,
    typer.Option("--unsafe-pickle", help="Read pickles, which can run any code: only if you trust who wrote them."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Take only entries with such names ('model.*'); may be given several times.",
        show_default=False,
    ),
]
Source = Annotated[str, typer.Argument(metavar="SRC", help="Where it is.")]
Target = Annotated[str, typer.Argument(metavar="DST", help="Where it is to be.")]

_WITHOUT_OPTIONS = ("file", "memory")


def options_of_both(
    source: str,
    target: str,
    storage_option: Sequence[str] | None,
    endpoint_url: str | None,
    *,
    target_storage_option: Sequence[str] | None,
    target_endpoint_url: str | None,
    timeout_s: float,
) -> tuple[Options, Options]:
    """The library's `Options` for the source and the target. Raises `InvalidOptionError` and `InvalidURIError`."""
    from cloudckpt._uri import parse_location

    one, other = parse_location(source).scheme, parse_location(target).scheme
    given = options_of(storage_option, endpoint_url, timeout_s=timeout_s)
    none = options_of(None, None, timeout_s=timeout_s)
    if target_storage_option or target_endpoint_url:
        return given, options_of(target_storage_option, target_endpoint_url, timeout_s=timeout_s)
    if one == other:
        return given, given
    if one in _WITHOUT_OPTIONS and other not in _WITHOUT_OPTIONS:
        return none, given
    return given, none


@contextlib.contextmanager
def shown_progress(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """What the library tells its progress."""
    with console.progress(what) as progress:
        before = [0, 0]

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            if total_bytes != before[1]:
                progress.set_total(total_bytes)
            progress.advance(done_bytes - before[0])
            before[:] = done_bytes, total_bytes

        yield on_progress


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without torch's remark that one process saves by itself, which is what a command does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield


def document_of(report: Any, **more: Any) -> dict[str, Any]:
    """A report of a conversion as JSON has it."""
    return {
        "source": report.source,
        "target": report.target,
        "format": report.format,
        "num_tensors": report.num_tensors,
        "num_values": report.num_values,
        "left_out": list(report.left_out),
        "files": list(report.files),
        "num_bytes": report.num_bytes,
        "seconds": report.convert_s,
        **more,
    }
