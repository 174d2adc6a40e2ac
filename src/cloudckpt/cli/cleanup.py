"""``cloudckpt rm`` and ``gc``."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._console import Console, age, count, size
from cloudckpt.cli._errors import NO, WRONG_USAGE
from cloudckpt.cli._options import CommonOptions, parse_duration
from cloudckpt.cli.ls import document_of

if TYPE_CHECKING:
    from cloudckpt.inspect.catalog import CheckpointInfo
    from cloudckpt.inspect.removal import GarbageReport
    from cloudckpt.options import Options

_MAX_NAMED = 5
_MEMBERS = ("root", "dry_run", "num_objects", "num_uploads", "num_bytes", "locations", "skipped", "failed")
_CHECKPOINTS = ("committed", "damaged", "newer")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Remove without a question.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be removed.")]


def rm(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="The checkpoints.")],
    *,
    yes: Yes = False,
    dry_run: DryRun = False,
    common: CommonOptions,
) -> None:
    """Delete checkpoints, and what saves left beside them. Asks first; without a terminal, --yes is needed.

    Example: cloudckpt rm s3://bucket/run/step-100
    """
    from cloudckpt.inspect.removal import delete

    console = common.console
    if not (yes or dry_run or console.is_interactive):
        console.warn("Error: there is nobody to ask: pass --yes to delete, or --dry-run to see what would go.")
        raise typer.Exit(WRONG_USAGE)
    options = common.options()
    doomed = {uri: _find_checkpoint(uri, options) for uri in dict.fromkeys(uris)}
    if not common.as_json:
        what = "would be deleted" if dry_run else "is to be deleted"
        for one in itertools.chain.from_iterable(doomed.values()):
            objects = f"{size(one.num_bytes or 0)} in {count(one.num_objects or 0, 'object')}"
            console.line(f"{one.uri}: {one.state}, {age(one.committed_at)} old, {objects}: {what}")
    if not (yes or dry_run or console.confirm(f"Delete {count(len(doomed), 'checkpoint')} for good?")):
        console.say("Nothing was deleted.")
        raise typer.Exit(NO)
    documents: list[dict[str, Any]] = [
        {"uri": uri, "deleted": False, "found": [document_of(one) for one in found]} for uri, found in doomed.items()
    ]
    try:
        for document in [] if dry_run else documents:
            delete(document["uri"], options=options)
            document["deleted"] = True
            if not common.as_json:
                console.line(f"Deleted {document['uri']}.")
    finally:
        if common.as_json:  # a script learns what is gone, whatever ends this
            console.document(documents)


def _find_checkpoint(uri: str, options: Options) -> list[CheckpointInfo]:
    """Return everything that a deletion of `uri` removes. Raises `CheckpointNotFoundError`."""
    from cloudckpt.errors import AccessDeniedError, CheckpointNotFoundError, gc_advice
    from cloudckpt.inspect.catalog import list_checkpoints
    from cloudckpt.uri import parse_location

    location = parse_location(uri)
    everything = list_checkpoints(uri, all=True, options=options)
    found = [one for one in everything if one.uri == location.uri]
    for one in found:
        if one.state == "denied":
            raise AccessDeniedError(one.problem, key=one.uri, operation="list")
    if any(one.state in _CHECKPOINTS for one in found):
        return found
    below = [one.name for one in everything if one.state in _CHECKPOINTS]
    if below:
        more = f" and {len(below) - _MAX_NAMED:,} more" if len(below) > _MAX_NAMED else ""
        advice = f"It is a folder of {', '.join(below[:_MAX_NAMED])}{more}: name each checkpoint by its URI"
    elif any(one.state == "torch" for one in everything):
        advice = "It is a checkpoint of torch's own writer, which cloudckpt does not delete: use another tool"
    elif everything:
        advice = f"Failed saves left data there. {gc_advice(uri)}"
    else:
        advice = "Nothing is there: check the URI"
    raise CheckpointNotFoundError(f"no checkpoint is committed at {location.uri}. {advice}", uri=location.uri)


def gc(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A checkpoint, a folder of them, or anything above.")],
    *,
    older_than: Annotated[
        timedelta,
        typer.Option(
            parser=parse_duration,
            metavar="TIME",
            help="Keep what belongs to a save with a sign of life in this time: longer than any save takes.",
        ),
    ] = "24h",  # type: ignore[assignment]  # Typer parses it
    yes: Yes = False,
    dry_run: DryRun = False,
    common: CommonOptions,
) -> None:
    """Find what saves that died, failed or were overwritten left, and remove it: with --yes, or after a question.

    Example: cloudckpt gc s3://bucket/run --older-than 2d
    """
    console = common.console
    options = common.options()
    removes = yes and not dry_run
    report = _collect(root, older_than, options, dry_run=not removes)
    _print_report(console, report)
    if not removes and report.locations:
        if console.is_interactive and not dry_run and not common.as_json and console.confirm("Remove it?"):
            report = _collect(root, older_than, options, dry_run=False)
            _print_report(console, report)
        else:
            console.say("Nothing was removed: pass --yes to remove it.")
    if report.failed:
        raise typer.Exit(NO)


def _collect(root: str, older_than: timedelta, options: Options, *, dry_run: bool) -> GarbageReport:
    from cloudckpt.errors import GarbageLeftError
    from cloudckpt.inspect.removal import gc as collect

    try:
        return collect(root, older_than=older_than, dry_run=dry_run, quiet=True, options=options)
    except GarbageLeftError as error:
        if error.report is None:
            raise
        report: GarbageReport = error.report
        return report


def _print_report(console: Console, report: GarbageReport) -> None:
    if console.as_json:
        console.document({name: getattr(report, name) for name in _MEMBERS})
        return
    for garbage in report.locations:
        of_size = f" ({size(garbage.num_bytes)})" if garbage.keys else ""  # that of uploads is unknown
        console.line(f"{garbage.uri}: {', '.join(garbage.reasons)}{of_size}")
    for kept in report.skipped:
        console.line(f"{kept.uri}: left alone: {kept.reason}")
    for kept in report.failed:
        console.warn(f"{kept.uri}: failed: {kept.reason}")
    done = "would be removed" if report.dry_run else "removed"
    console.line(
        f"{report.root}: {count(report.num_objects, 'object')} of {size(report.num_bytes)} and "
        f"{count(report.num_uploads, 'unfinished upload')} {done}"
    )
    if report.is_nothing_there:
        console.say(f"{report.root}: cloudckpt has written nothing there; is it the right place?")
