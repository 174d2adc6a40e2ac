"""``cloudckpt rm``."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._errors import NO, WRONG_USAGE
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, Timeout, options_of
from cloudckpt.cli._text import age, count, size
from cloudckpt.cli.ls import document_of

if TYPE_CHECKING:
    from cloudckpt.options import Options
    from cloudckpt.overview import CheckpointStatus

_MOST_NAMED = 5
_CHECKPOINTS = ("committed", "damaged", "newer")
_RANK = re.compile(r"rank-[0-9]+")


def rm(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="The checkpoints.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be deleted.")] = False,
    storage_option: StorageOptions = None,
    endpoint_url: EndpointURL = None,
    timeout: Timeout = 60.0,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Delete checkpoints, with what saves have left beside them. Asks first; without a terminal, --yes is needed.

    Example: cloudckpt rm s3://bucket/run/step-100
    """
    from cloudckpt.housekeeping import delete

    console = Console(as_json=as_json, quiet=quiet)
    if not (yes or dry_run or console.is_interactive):
        console.warn("Error: there is nobody to ask: pass --yes to delete, or --dry-run to see what would go.")
        raise typer.Exit(WRONG_USAGE)
    options = options_of(storage_option, endpoint_url, timeout_s=timeout)
    doomed = {uri: _lying_at(uri, options) for uri in dict.fromkeys(uris)}
    if not as_json:
        for one in itertools.chain.from_iterable(doomed.values()):
            console.line(_told(one, is_dry=dry_run))
    if not (yes or dry_run or console.confirms(f"Delete {count(len(doomed), 'checkpoint')} for good?")):
        console.say("Nothing was deleted.")
        raise typer.Exit(NO)
    documents: list[dict[str, Any]] = [
        {"uri": uri, "deleted": False, "found": [document_of(one) for one in found]} for uri, found in doomed.items()
    ]
    try:
        for document in [] if dry_run else documents:
            delete(document["uri"], options=options)
            document["deleted"] = True
            console.say(f"Deleted {document['uri']}.")
    finally:
        if as_json:  # what is gone is told, whatever ends it
            console.document(documents)


def _lying_at(uri: str, options: Options) -> list[CheckpointStatus]:
    """What goes with the checkpoint. Raises `CheckpointNotFoundError`."""
    from cloudckpt._uri import parse_location
    from cloudckpt.errors import AccessDeniedError, CheckpointNotFoundError
    from cloudckpt.overview import survey

    location = parse_location(uri)
    there = survey(uri, options=options)
    found = [one for one in there if one.uri == location.uri or _RANK.fullmatch(one.name)]
    for one in found:
        if one.state == "denied":
            raise AccessDeniedError(one.problem, key=one.uri, operation="list")
    if not any(one.state in _CHECKPOINTS for one in found):
        below = [one.name for one in there if one.state in _CHECKPOINTS]
        if below:
            more = f" and {len(below) - _MOST_NAMED:,} more" if len(below) > _MOST_NAMED else ""
            advice = f"Under it lie {', '.join(below[:_MOST_NAMED])}{more}: name those that are to go, each by its URI"
        elif any(one.state == "torch" for one in there):
            advice = "One of torch's own writer lies there, which cloudckpt leaves alone: remove it by other means"
        elif there:
            advice = f"What failed saves have left there, cloudckpt gc {uri} removes"
        else:
            advice = "Nothing lies there. Check the URI"
        raise CheckpointNotFoundError(
            f"no checkpoint is committed at {location.uri}, so there is nothing to delete. {advice}", uri=location.uri
        )
    return found


def _told(one: CheckpointStatus, *, is_dry: bool) -> str:
    what = "would be deleted" if is_dry else "is to be deleted"
    return (
        f"{one.uri}: {one.state}, {age(one.moment)} old, {size(one.num_bytes)} in "
        f"{count(one.num_objects, 'object')}: {what}"
    )
