"""``cloudckpt doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from cloudckpt.cli._errors import NO
from cloudckpt.cli._options import CommonOptions


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
        console.document({"uri": report.uri, "is_healthy": report.is_healthy, "checks": report.checks})
    else:
        for line in str(report).split("\n"):
            console.line(line)
    if not report.is_healthy:
        raise typer.Exit(NO)
