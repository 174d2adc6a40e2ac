"""Options that several commands have, and what the library makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from cloudckpt.stores.storage_options import parse_assignments

if TYPE_CHECKING:
    from cloudckpt.options import Options

StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        "-o",
        metavar="NAME=VALUE",
        help="An option of the store's client, such as region=eu-west-1; may be given several times. Keep credentials "
        "out of the command line: they come from the environment, a profile or a role.",
        show_default=False,
    ),
]
EndpointURL = Annotated[
    str | None,
    typer.Option(
        "--endpoint-url",
        metavar="URL",
        help="Short for -o endpoint_url=URL: a server of another provider.",
    ),
]
TargetStorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--target-storage-option",
        metavar="NAME=VALUE",
        help="As --storage-option, for the second place alone; --storage-option is then for the first alone. Without "
        "it, that is for both, or for the one of the two that is no path.",
        show_default=False,
    ),
]
TargetEndpointURL = Annotated[
    str | None,
    typer.Option("--target-endpoint-url", metavar="URL", help="Short for --target-storage-option endpoint_url=URL."),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Longest wait without progress.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/command-line.md).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors: no progress, no remarks.")]

_MAX_VALUE = 2**63
_SIZES = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}
_SECONDS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_WITHOUT_OPTIONS = ("file", "memory")

_Side: TypeAlias = tuple[str, Sequence[str] | None, str | None]
"""A URI, and the values of --storage-option and --endpoint-url for it."""


def options_of(
    storage_option: Sequence[str] | None, endpoint_url: str | None, *, timeout_s: float, **more: Any
) -> Options:
    """Return the library's `Options`. Raises `InvalidOptionError`."""
    from cloudckpt.options import Options

    storage_options = parse_assignments(storage_option or (), flag="--storage-option")
    if endpoint_url is not None:
        storage_options["endpoint_url"] = endpoint_url
    return Options(storage_options=storage_options, timeout_s=timeout_s, **more)


def options_of_both(source: _Side, target: _Side, *, timeout_s: float) -> tuple[Options, Options]:
    """Return the library's `Options` for the source and the target.

    Raises `InvalidOptionError` and `InvalidURIError`.
    """
    from cloudckpt.uri import parse_location

    given = options_of(*source[1:], timeout_s=timeout_s)
    if any(target[1:]):
        return given, options_of(*target[1:], timeout_s=timeout_s)
    source_scheme, target_scheme = (parse_location(side[0]).scheme for side in (source, target))
    if source_scheme == target_scheme:
        return given, given
    none = options_of(None, None, timeout_s=timeout_s)
    if source_scheme in _WITHOUT_OPTIONS and target_scheme not in _WITHOUT_OPTIONS:
        return none, given
    return given, none


def parse_size(text: str) -> int:
    """Parse ``64MiB``, ``2GB`` or ``1000`` to bytes, for ``typer.Option(parser=…)``."""
    return _parse_number(
        text, text.strip().lower().removesuffix("b"), _SIZES, at_least=1, what="a size, such as 512MiB"
    )


def parse_duration(text: str) -> timedelta:
    """Parse ``90s``, ``30min``, ``24h``, ``7d`` or a number of seconds, for ``typer.Option(parser=…)``."""
    seconds = _parse_number(text, text.strip().lower(), _SECONDS, at_least=0, what="a time, such as 24h or 7d")
    try:
        return timedelta(seconds=seconds)
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is too long") from None


def _parse_number(text: str, lowered: str, units: Mapping[str, int], *, at_least: int, what: str) -> int:
    number = lowered.rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        value = float(number) * units[lowered[len(number) :].strip()]
    except (ValueError, KeyError):
        value = math.nan
    if not at_least <= value < _MAX_VALUE:
        raise typer.BadParameter(f"{text!r} is not {what}")
    return int(value)
