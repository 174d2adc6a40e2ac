"""``cloudckpt cp``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._errors import NO, message_of
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, Timeout
from cloudckpt.cli._sides import (
    Overwrite,
    Source,
    Target,
    TargetEndpointURL,
    TargetStorageOptions,
    options_of_both,
    shown_progress,
)
from cloudckpt.cli._text import count, rate, size

if TYPE_CHECKING:
    from cloudckpt._convert.reports import CopyReport
    from cloudckpt.options import Options


def cp(
    source: Source,
    target: Target,
    *,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Copy every checkpoint under the folder SRC into the folder DST, the oldest first; those that "
            "are there already are left alone, and those that are damaged or vanish are told, and left out.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on where an earlier cp --resume of the same checkpoint to the same place ended: what it left "
            "there is read and compared, and not sent again. If this one ends too, what it has copied is kept. Where "
            "it had come to its end, that is success, too, and nothing is written.",
        ),
    ] = False,
    storage_option: StorageOptions = None,
    endpoint_url: EndpointURL = None,
    target_storage_option: TargetStorageOptions = None,
    target_endpoint_url: TargetEndpointURL = None,
    timeout: Timeout = 60.0,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Copy a checkpoint to another place, on any store: each byte checked, committed last.

    Example: cloudckpt cp s3://bucket/run/step-100 gs://other/run/step-100
    """
    console = Console(as_json=as_json, quiet=quiet)
    options = options_of_both(
        source,
        target,
        storage_option,
        endpoint_url,
        target_storage_option=target_storage_option,
        target_endpoint_url=target_endpoint_url,
        timeout_s=timeout,
    )
    options = options[0], dataclasses.replace(options[1], resume=resume)
    if not every:
        report = _copied(console, source, target, options, overwrite=overwrite)
        if as_json:
            console.document(_document_of(report))
        return
    documents: list[dict[str, Any]] = []
    try:
        for one, other in _pairs(source, target, options[0]):
            documents.append(_copied_unless_there(console, one, other, options, overwrite=overwrite))
    finally:
        if as_json and documents:  # what was done is told, whatever ends it
            console.document(documents)
    num_failed = sum("problem" in each for each in documents)
    if num_failed:
        console.say(f"{count(num_failed, 'checkpoint')} of {len(documents):,} could not be copied.")
        raise typer.Exit(NO)


def _pairs(source: str, target: str, options: Options) -> list[tuple[str, str]]:
    from cloudckpt._uri import parse_location
    from cloudckpt.catalog import list_checkpoints
    from cloudckpt.errors import CheckpointNotFoundError

    found = list_checkpoints(source, options=options)
    if not found:
        uri = parse_location(source).uri
        raise CheckpointNotFoundError(f"no checkpoint is committed directly under {uri}", uri=uri)
    folder = parse_location(target)
    return [(one.uri, folder.child(one.name).uri) for one in found]


def _copied_unless_there(
    console: Console, source: str, target: str, options: tuple[Options, Options], *, overwrite: bool
) -> dict[str, Any]:
    from cloudckpt._convert.copying import is_taken
    from cloudckpt.errors import (
        CheckpointChangedError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        CorruptCheckpointError,
        UnsupportedFormatError,
    )

    try:
        if not overwrite and is_taken(target, options=options[1]):
            return _left_alone(console, source, target)
        return {"copied": True, **_document_of(_copied(console, source, target, options, overwrite=overwrite))}
    except CheckpointExistsError:
        return _left_alone(console, source, target)
    except (
        CheckpointChangedError,
        CheckpointNotFoundError,
        CorruptCheckpointError,
        UnsupportedFormatError,
    ) as error:  # a matter of this one: the others can be copied all the same
        console.warn(message_of(error))
        return {"copied": False, "source": source, "target": target, "problem": str(error)}


def _left_alone(console: Console, source: str, target: str) -> dict[str, Any]:
    console.say(f"{target} is there already.")
    return {"copied": False, "source": source, "target": target}


def _copied(
    console: Console, source: str, target: str, options: tuple[Options, Options], *, overwrite: bool
) -> CopyReport:
    from cloudckpt._convert.copying import copy

    with shown_progress(console, f"copying {source}") as on_progress:
        report = copy(
            source,
            target,
            overwrite=overwrite,
            options=options[0],
            target_options=options[1],
            on_progress=on_progress,
        )
    if not console.as_json:
        console.line(f"{report.target}: {size(report.num_bytes)} in {count(report.num_objects, 'object')}")
    if report.was_there:
        console.say(f"It is there already, and was compared in {report.copy_s:.1f} s, {rate(report.bytes_per_s)}.")
        return report
    by_service_bytes = report.num_service_bytes + report.num_read_back_bytes
    how = f", {size(by_service_bytes)} of it by the service itself" if by_service_bytes else ""
    kept = f", {size(report.num_reused_bytes)} were there already" if report.num_reused_bytes else ""
    console.say(f"Copied in {report.copy_s:.1f} s, {rate(report.bytes_per_s)}{how}{kept}.")
    return report


def _document_of(report: CopyReport) -> dict[str, Any]:
    return {
        "source": report.source,
        "target": report.target,
        "attempts": list(report.attempts),
        "num_objects": report.num_objects,
        "num_bytes": report.num_bytes,
        "num_service_bytes": report.num_service_bytes,
        "num_read_back_bytes": report.num_read_back_bytes,
        "num_reused_bytes": report.num_reused_bytes,
        "was_there": report.was_there,
        "num_requests": report.num_requests,
        "num_retries": report.num_retries,
        "seconds": report.copy_s,
    }
