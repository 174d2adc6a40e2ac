"""``cloudckpt verify`` and ``doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cloudckpt.cli._console import count, describe_report, rate, size
from cloudckpt.cli._errors import NO
from cloudckpt.cli._options import CommonOptions

if TYPE_CHECKING:
    from cloudckpt.events import Event


def verify(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The checkpoint.")],
    *,
    common: CommonOptions,
) -> None:
    """Read every byte of a checkpoint and compare it with what was saved; exit with 1 if anything is damaged.

    Example: cloudckpt verify s3://bucket/run/step-100
    """
    from cloudckpt.errors import CorruptCheckpointError
    from cloudckpt.inspect.verification import verify as verify_checkpoint

    console = common.console
    problems: list[str] = []
    with console.progress("verifying") as show_progress:
        done_bytes = total_bytes = 0

        def on_event(event: Event) -> None:
            nonlocal done_bytes, total_bytes
            if event.name == "verify.planned":
                total_bytes += event.num_bytes
            elif event.name == "verify.range_read":
                done_bytes += event.num_bytes
            show_progress(done_bytes, total_bytes)

        options = common.options(on_event=on_event)
        try:
            report = verify_checkpoint(uri, options=options)
        except CorruptCheckpointError as error:
            problems += error.problems
    if problems:
        if common.as_json:
            console.document({"uri": uri, "is_whole": False, "problems": problems})
        else:
            for problem in problems:
                console.line(problem)
            console.say(f"{uri} is damaged: {count(len(problems), 'problem')}. Load an older checkpoint.")
        raise typer.Exit(NO)
    if common.as_json:
        found = describe_report(report, report.verify_s)
        console.document({"uri": report.uri, "is_whole": True, "problems": [], **found})
        return
    console.line(
        f"{report.uri} is whole: {size(report.num_bytes)} in {count(report.num_objects, 'object')}, "
        f"{count(report.num_tensors, 'tensor')} and {count(report.num_values, 'value')}"
    )
    console.say(f"Read in {report.verify_s:.1f} s, {rate(report.bytes_per_s)}.")


def doctor(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The folder of the checkpoints.")],
    *,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing, and check only what loads need.", show_default=False)
    ] = False,
    deadline: Annotated[
        float, typer.Option("--deadline", min=0.1, metavar="SECONDS", help="Begin no check after this time.")
    ] = 60.0,
    common: CommonOptions,
) -> None:
    """Find out if saves to URI will work: credentials, clock, bucket, permissions, promises of the store.

    What it writes lies below URI, and is removed again. Exits with 1 if a check failed that matters.

    Example: cloudckpt doctor s3://bucket/run
    """
    from cloudckpt.doctor import examine

    console = common.console
    if not common.as_json:
        console.say(f"Examining {uri} …")
    options = common.options()
    report = examine(uri, read_only=read_only, deadline_s=deadline, options=options)
    if common.as_json:
        document = {"uri": report.uri, "is_healthy": report.is_healthy, "checks": report.checks}
        console.document({**document, "service": report.service})
    else:
        for line in str(report).split("\n"):
            console.line(line)
    if not report.is_healthy:
        raise typer.Exit(NO)
