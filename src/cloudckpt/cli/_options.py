"""Options that several commands have, and the library's `Options` that they stand for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from cloudckpt.cli._console import Console
from cloudckpt.stores.storage_options import parse_assignments

if TYPE_CHECKING:
    from cloudckpt.options import Options

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


def _share(ctx: typer.Context, param: typer.CallbackParam, value: bool) -> bool:  # noqa: FBT001  # Typer calls it so
    """Accept a flag before the command's name and after it."""
    shared = ctx.find_root().params
    name = str(param.name)
    shared[name] = value or shared.get(name, False)
    if name == "verbose" and value:
        logging.Formatter.converter = time.gmtime  # basicConfig takes none, and the process is the command's own
        logging.basicConfig(
            level=logging.INFO,
            format="%(asctime)s.%(msecs)03dZ %(name)s %(levelname)s %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )
    return bool(shared[name])


VERBOSE: Any = typer.Option(
    "--verbose", "-v", callback=_share, help="Log what the library does, and show errors with their tracebacks."
)
QUIET: Any = typer.Option("--quiet", "-q", callback=_share, help="Only the result and errors: no progress, no remarks.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """The options that every command has, as the user gave them. Each field is one option."""

    storage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--storage-option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of the store's client, such as region=eu-west-1; may be given several times. Keep "
            "credentials out of the command line: they come from the environment, a profile or a role.",
            show_default=False,
        ),
    ] = None
    endpoint_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Short for -o endpoint_url=URL: a server of another provider."),
    ] = None
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Short for -o profile=NAME: a profile of ~/.aws.")
    ] = None
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Longest wait without progress.")] = 60.0
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/command-line.md).")] = False
    quiet: Annotated[bool, QUIET] = False
    verbose: Annotated[bool, VERBOSE] = False

    @property
    def console(self) -> Console:
        """The output of the command."""
        return Console(as_json=self.as_json, quiet=self.quiet, is_verbose=self.verbose)

    def options(self, **more: Any) -> Options:
        """Return the library's `Options`. Raises `InvalidOptionError`."""
        return self._options(self.storage_option, {"endpoint_url": self.endpoint_url, "profile": self.profile}, **more)

    def _options(self, storage_option: Sequence[str] | None, short: Mapping[str, str | None], **more: Any) -> Options:
        from cloudckpt.options import Options

        storage_options = parse_assignments(storage_option or (), flag="--storage-option")
        storage_options |= {name: value for name, value in short.items() if value is not None}
        return Options(storage_options=storage_options, timeout_s=self.timeout, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions(CommonOptions):
    """The options of a command with a source and a target."""

    target_storage_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Like --storage-option, for the second place alone; --storage-option is then for the first alone. "
            "Without it, --storage-option is for both places, or for the one that is not a path.",
            show_default=False,
        ),
    ] = None
    target_endpoint_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Short for --target-storage-option endpoint_url=URL.")
    ] = None

    def options_of_both(self, source: str, target: str) -> tuple[Options, Options]:
        """Return the library's `Options` for the source and the target, which are URIs.

        Raises `InvalidOptionError` and `InvalidURIError`.
        """
        from cloudckpt.uri import parse_location

        options = self.options()
        if self.target_storage_option or self.target_endpoint_url:
            return options, self._options(self.target_storage_option, {"endpoint_url": self.target_endpoint_url})
        source_location, target_location = parse_location(source), parse_location(target)
        if source_location.is_of_kind(target_location):
            return options, options
        defaults = self._options(None, {})
        if target_location.service.takes_options and not source_location.service.takes_options:
            return defaults, options
        return options, defaults


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the fields of its parameter `common` as parameters, as Typer needs them."""
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["common"].annotation
    hints = get_type_hints(kind, include_extras=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "common"]
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(kind)
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        common = kind(**{parameter.name: arguments.pop(parameter.name) for parameter in shared})
        with common.console.waiting(f"cloudckpt {command.__name__.rstrip('_')} …"):
            command(**arguments, common=common)

    vars(run)["__signature__"] = signature.replace(parameters=[*own, *shared])
    return run


def parse_size(text: str) -> int:
    """Parse ``64MiB``, ``2GB`` or ``1000`` to bytes, for ``typer.Option(parser=…)``."""
    return _parse_number(
        text, text.strip().lower().removesuffix("b"), _SIZES, at_least=1, expected="a size, such as 512MiB"
    )


def parse_duration(text: str) -> timedelta:
    """Parse ``90s``, ``30min``, ``24h``, ``7d`` or a number of seconds, for ``typer.Option(parser=…)``."""
    seconds = _parse_number(text, text.strip().lower(), _SECONDS, at_least=0, expected="a time, such as 24h or 7d")
    try:
        return timedelta(seconds=seconds)
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is too long") from None


def _parse_number(text: str, lowered: str, units: Mapping[str, int], *, at_least: int, expected: str) -> int:
    number = lowered.rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        value = float(number) * units[lowered[len(number) :].strip()]
    except (ValueError, KeyError):
        value = math.nan
    if not at_least <= value < _MAX_VALUE:
        raise typer.BadParameter(f"{text!r} is not {expected}")
    return int(value)
