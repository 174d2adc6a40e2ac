"""All commands, and what happens to the errors of any."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cloudckpt._version import __version__
from cloudckpt.cli import bench, cp, diff, doctor, export, gc, import_, ls, rm, show, verify
from cloudckpt.cli._console import tell
from cloudckpt.cli._errors import INTERRUPTED, PIPE_CLOSED, exit_code_of, message_of


class _Commands(TyperGroup):
    """Tells expected errors in a line, and exits as ``docs/command-line.md`` says."""

    def invoke(self, ctx: Any) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()  # while a failure of it can be told
        except KeyboardInterrupt:
            tell("Interrupted.\n")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # of a command's own output; all others are told as errors of a store
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing more fails when Python flushes at its end
            raise typer.Exit(PIPE_CLOSED) from None
        except Exception as error:
            self._tell(ctx, error)
            raise
        except BaseException as error:
            if hasattr(error, "failures"):  # torch's CheckpointException is no Exception
                self._tell(ctx, error)
            raise
        return found

    def _tell(self, ctx: Any, error: BaseException) -> None:
        """End with its code, unless it is Typer's own."""
        code = exit_code_of(error)
        if code is None:
            return
        if ctx.params.get("verbose"):
            tell(traceback.format_exc())
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        flags = {name for parameter in (command.params if command else ()) for name in parameter.opts}
        tell(message_of(error, flags=flags) + "\n")
        raise typer.Exit(code) from None


app = typer.Typer(
    cls=_Commands,
    name="cloudckpt",
    help="Look at, check, compare, copy and clean up PyTorch checkpoints on object stores.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:  # noqa: FBT001  # Typer's way
    if is_asked:
        print(f"cloudckpt {__version__}")  # noqa: T201  # as a command does
        raise typer.Exit


@app.callback()
def _everywhere(
    *,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what the library does, and show errors with their tracebacks.")
    ] = False,
    version: Annotated[  # noqa: ARG001  # the callback answers
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")


app.command("ls")(ls.ls)
app.command("show")(show.show)
app.command("diff")(diff.diff)
app.command("verify")(verify.verify)
app.command("rm")(rm.rm)
app.command("gc")(gc.gc)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("cp")(cp.cp)
app.command("export")(export.export)
app.command("import")(import_.import_)
