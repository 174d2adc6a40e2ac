"""``cloudckpt gc``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._errors import NO
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, Timeout, options_of, parse_duration
from cloudckpt.cli._text import count, size

if TYPE_CHECKING:
    from cloudckpt.housekeeping import GarbageReport
    from cloudckpt.options import Options


def gc(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A checkpoint, a folder of them, or anything above.")],
    *,
    older_than: Annotated[
        timedelta,
        typer.Option(
            parser=parse_duration,
            metavar="TIME",
            help="What belongs to a save with a sign of life in this time stays: longer than any save takes.",
        ),
    ] = "24h",  # type: ignore[assignment]  # Typer parses it
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove it, and do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would go, and do not ask.")] = False,
    storage_option: StorageOptions = None,
    endpoint_url: EndpointURL = None,
    timeout: Timeout = 60.0,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Find what saves that died, failed or were overwritten have left, and with --yes remove it.

    On a terminal it shows what it has found, and asks. Example: cloudckpt gc s3://bucket/run --older-than 2d
    """
    console = Console(as_json=as_json, quiet=quiet)
    options = options_of(storage_option, endpoint_url, timeout_s=timeout)
    removes = yes and not dry_run
    if not removes:
        report = _collected(root, older_than, options, dry_run=True)
        may_ask = console.is_interactive and not (dry_run or as_json)
        if not may_ask or not report.locations:
            _tell(console, report)
            if report.locations:
                console.say("Nothing was removed: pass --yes to remove it.")
            _exit(report)
            return
        _tell(console, report)
        if not console.confirms("Remove it?"):
            console.say("Nothing was removed.")
            _exit(report)
            return
    report = _collected(root, older_than, options, dry_run=False)
    _tell(console, report)
    _exit(report)


def _collected(root: str, older_than: timedelta, options: Options, *, dry_run: bool) -> GarbageReport:
    from cloudckpt.errors import GarbageLeftError
    from cloudckpt.housekeeping import gc as collected

    try:
        return collected(root, older_than=older_than, dry_run=dry_run, quiet=True, options=options)
    except GarbageLeftError as error:
        if error.report is None:
            raise
        report: GarbageReport = error.report
        return report


def _tell(console: Console, report: GarbageReport) -> None:
    if console.as_json:
        console.document(_document_of(report))
        return
    for garbage in report.locations:
        console.line(f"{garbage.uri}: {', '.join(garbage.reasons)} ({size(garbage.num_bytes)})")
    for spared in report.skipped:
        console.line(f"{spared.uri}: left alone: {spared.reason}")
    for spared in report.failed:
        console.warn(f"{spared.uri}: failed: {spared.reason}")
    done = "would be removed" if report.dry_run else "removed"
    console.line(
        f"{report.root}: {count(report.num_objects, 'object')} of {size(report.num_bytes)} and "
        f"{count(report.num_uploads, 'unfinished upload')} {done}"
    )
    if report.is_nothing_there:
        console.say(f"{report.root}: nothing of cloudckpt's lies there; is it the right place?")


def _exit(report: GarbageReport) -> None:
    if report.failed:
        raise typer.Exit(NO)


def _document_of(report: GarbageReport) -> dict[str, Any]:
    return {
        "root": report.root,
        "dry_run": report.dry_run,
        "num_objects": report.num_objects,
        "num_uploads": report.num_uploads,
        "num_bytes": report.num_bytes,
        "locations": [
            {
                "uri": garbage.uri,
                "keys": list(garbage.keys),
                "uploads": list(garbage.uploads),
                "num_bytes": garbage.num_bytes,
                "reasons": list(garbage.reasons),
            }
            for garbage in report.locations
        ],
        "skipped": [{"uri": spared.uri, "reason": spared.reason} for spared in report.skipped],
        "failed": [{"uri": spared.uri, "reason": spared.reason} for spared in report.failed],
    }
