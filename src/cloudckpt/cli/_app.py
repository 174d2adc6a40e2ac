"""The Typer app with all commands. It prints their errors, and exits with their codes."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from cloudckpt._version import __version__
from cloudckpt.cli import convert, ls, maintenance, plot, report, show
from cloudckpt.cli._console import INTERRUPTED, PIPE_CLOSED, exit_code_of, message_of, usage_message
from cloudckpt.cli._options import QUIET, VERBOSE, expand_options

_OTHER_NAMES = {
    "best": "ls ROOT --metrics",
    "metrics": "ls ROOT --metrics",
    "list": "ls",
    "info": "show",
    "describe": "show",
    "compare": "diff",
    "check": "verify",
    "copy": "cp",
    "mirror": "cp --all",
    "sync": "cp --all",
    "delete": "rm",
    "remove": "rm",
    "prune": "rm --keep-last",
    "clean": "gc",
}
"""The command for each name that users try."""


class _Commands(TyperGroup):
    """Shows expected errors in a line, and exits as ``docs/command-line.md`` says."""

    def main(self, *arguments: Any, **more: Any) -> NoReturn:
        try:
            code = super().main(*arguments, **more | {"standalone_mode": False})
        except typer.Abort:
            typer.echo("Aborted.", err=True)
            sys.exit(1)
        except Exception as error:
            message = usage_message(error)
            if message is None:
                raise
            typer.echo(message, err=True)
            sys.exit(error.exit_code)  # type: ignore[attr-defined]  # Click's, of which Typer exports no class
        sys.exit(code)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Suggest a command also for `_OTHER_NAMES`."""
        if not ctx.resilient_parsing and (other := _OTHER_NAMES.get(args[0])):  # a shell's completion is no call
            ctx.fail(f"No such command {args[0]!r}. Did you mean 'cloudckpt {other}'?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the options before the name of a command behind it: ``cloudckpt --timeout 8 ls ROOT``."""
        group_params = self.get_params(ctx)
        params = [param for command in self.commands.values() for param in command.params] + group_params
        params_by_flag = {flag: param for param in params for flag in param.opts}
        of_group, of_command, unread = list[str](), list[str](), list(args)
        while unread and unread[0].startswith("-"):
            flag, has_value, _ = unread[0].partition("=")
            option: Any = params_by_flag.get(flag)
            num_words = 1 if option is None or option.is_flag or has_value else 2
            is_of_group = option is None or option in group_params
            (of_group if is_of_group else of_command).extend(unread[:num_words])
            unread = unread[num_words:]
        return super().parse_args(ctx, [*of_group, *unread[:1], *(of_command if unread else ()), *unread[1:]])

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here a failure is still reported
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # of stdout: a store's would be a StoreError
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python's own flush at exit must not fail
            raise typer.Exit(PIPE_CLOSED) from None
        except BaseException as error:
            code = exit_code_of(error)
            if code is None:
                raise
            if ctx.params.get("verbose"):
                typer.echo(traceback.format_exc(), err=True)
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            flags = {flag for parameter in (command.params if command else ()) for flag in parameter.opts}
            typer.echo(message_of(error, flags=flags), err=True)
            raise typer.Exit(code) from None
        return result


logging.getLogger("cloudckpt").addHandler(logging.NullHandler())  # commands show problems; --verbose adds the log

app = typer.Typer(
    cls=_Commands,
    name="cloudckpt",
    help="Look at, check, compare, copy and clean up PyTorch checkpoints on object stores.",
    epilog="Options of a command may stand before it: cloudckpt --timeout 8 ls ROOT.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:  # noqa: FBT001  # Typer calls it so
    if is_asked:
        typer.echo(f"cloudckpt {__version__}")
        raise typer.Exit


@app.callback()
def _configure(
    *,
    verbose: Annotated[bool, VERBOSE] = False,
    quiet: Annotated[bool, QUIET] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del verbose, quiet, version  # their callbacks have acted
    # A command is one process, so torch's remark that it saves without other ranks is no help.
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")


_COMMANDS: dict[str, Callable[..., None]] = {
    "ls": ls.ls,
    "latest": ls.latest,
    "watch": ls.watch,
    "du": ls.du,
    "plot": plot.plot,
    "report": report.report,
    "show": show.show,
    "cat": show.cat,
    "diff": show.diff,
    "verify": maintenance.verify,
    "rm": maintenance.rm,
    "gc": maintenance.gc,
    "drain": maintenance.drain,
    "doctor": maintenance.doctor,
    "cp": convert.cp,
    "export": convert.export,
    "import": convert.import_,
    "merge": convert.merge,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(expand_options(_command))
app.command("timeline")(plot.timeline)  # these take no options of a store
app.command("dev-server")(maintenance.dev_server)
