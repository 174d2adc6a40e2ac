"""Options that many commands have, and what the library makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.stores._assignments import values_of

if TYPE_CHECKING:
    from cloudckpt.options import Options

StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        "-o",
        metavar="NAME=VALUE",
        help="What the store's own client takes, such as region=eu-west-1; may be given several times. Credentials "
        "come from where they always do: keep them out of the command line.",
        show_default=False,
    ),
]
EndpointURL = Annotated[
    str | None,
    typer.Option(
        "--endpoint-url",
        metavar="URL",
        help="Short for -o endpoint_url=URL: a server that is not Amazon's or Google's.",
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="The longest that anything waits without progress.")
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/command-line.md).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors: no progress, no remarks.")]

_MOST = 2**63
_SIZES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_SIZES = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}
_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def options_of(
    storage_option: Sequence[str] | None, endpoint_url: str | None, *, timeout_s: float | None = None, **more: Any
) -> Options:
    """The library's `Options`. Raises `InvalidOptionError`."""
    from cloudckpt.options import Options

    if timeout_s is not None:
        more["timeout_s"] = timeout_s
    return Options(storage_options=storage_options_of(storage_option, endpoint_url), **more)


def storage_options_of(storage_option: Sequence[str] | None, endpoint_url: str | None) -> Mapping[str, Any]:
    """``Options.storage_options``."""
    values = values_of(storage_option or (), flag="--storage-option")
    return values if endpoint_url is None else {**values, "endpoint_url": endpoint_url}


def parse_size(text: str) -> int:
    """Bytes: ``64MiB``, ``2GB``, ``1000``. For ``typer.Option(parser=…)``."""
    return _parsed(text, {**_SIZES, **_BINARY_SIZES}, suffix="b", what="a size, such as 512MiB")


def parse_duration(text: str) -> timedelta:
    """``90s``, ``30min``, ``24h``, ``7d``; a bare number is seconds. For ``typer.Option(parser=…)``."""
    try:
        return timedelta(seconds=_parsed(text, _SECONDS, suffix="", what="a time, such as 24h or 7d"))
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is too long") from None


def _parsed(text: str, units: Mapping[str, float], *, suffix: str, what: str) -> int:
    lowered = text.strip().lower()
    number = lowered.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = lowered[len(number) :].strip()
    if suffix and unit.endswith(suffix):
        unit = unit.removesuffix(suffix)
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 <= value < _MOST:
        raise typer.BadParameter(f"{text!r} is not {what}")
    return int(value)
