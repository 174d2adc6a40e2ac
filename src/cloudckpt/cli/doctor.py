"""``cloudckpt doctor``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._errors import NO
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, Timeout, options_of

if TYPE_CHECKING:
    from cloudckpt.doctor import Examination


def doctor(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The folder that checkpoints are to lie in.")],
    *,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing: for whoever only loads.", show_default=False)
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure latency and throughput: about 150 MB are moved.")
    ] = True,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", help="Begin nothing more after this time.")
    ] = 60.0,
    storage_option: StorageOptions = None,
    endpoint_url: EndpointURL = None,
    timeout: Timeout = 10.0,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Try out whether saves to URI will work: credentials, clock, permissions, promises, speed. Say what to do if not.

    What it writes lies below URI, and is removed again. Ends with 1 where something failed that matters.

    Example: cloudckpt doctor s3://bucket/run
    """
    from cloudckpt.doctor import examine

    console = Console(as_json=as_json, quiet=quiet)
    if not as_json:
        console.say(f"Examining {uri} …")
    examination = examine(
        uri,
        read_only=read_only,
        measure=measure,
        deadline_s=deadline,
        options=options_of(storage_option, endpoint_url, timeout_s=timeout),
    )
    if as_json:
        console.document(
            {
                "uri": examination.uri,
                "is_healthy": examination.is_healthy,
                "checks": [dataclasses.asdict(check) for check in examination.checks],
            }
        )
    else:
        _show(console, examination)
    if not examination.is_healthy:
        raise typer.Exit(NO)


def _show(console: Console, examination: Examination) -> None:
    console.table(["", "CHECK", "FOUND"], [[check.mark, check.name, check.found] for check in examination.checks])
    for check in examination.failures:
        console.line()
        console.line(f"{check.mark} {check.name}{'' if check.matters else ' (saves and loads work all the same)'}")
        console.line(f"  {check.advice or check.found}")
    console.line()
    num_failures = len(examination.failures)
    if not num_failures:
        console.line("All is well.")
    elif examination.is_healthy:
        console.line("Saves and loads will work. What is marked ✗ costs money, time or comfort.")
    else:
        console.line("Something stands in the way: see above.")
