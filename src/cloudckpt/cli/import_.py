"""``cloudckpt import``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, Timeout
from cloudckpt.cli._sides import (
    Include,
    Overwrite,
    Source,
    Target,
    TargetEndpointURL,
    TargetStorageOptions,
    UnsafePickle,
    alone,
    document_of,
    options_of_both,
    shown_progress,
)
from cloudckpt.cli._text import count, rate, size


def import_(
    source: Source,
    target: Target,
    *,
    format_: Annotated[
        str,
        typer.Option("--format", "-f", metavar="FORMAT", help="safetensors, torch (one file), or dcp (torch's own)."),
    ] = "safetensors",
    include: Include = None,
    add_prefix: Annotated[
        str, typer.Option("--add-prefix", metavar="PREFIX", help="Put this before the names.", show_default=False)
    ] = "",
    tie: Annotated[
        list[str] | None,
        typer.Option(
            "--tie",
            metavar="NAME=TENSOR",
            help="Give a tensor of safetensors files another name, too ('lm_head.weight=model.embed_tokens.weight'); "
            "may be given several times.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    unsafe_pickle: UnsafePickle = False,
    storage_option: StorageOptions = None,
    endpoint_url: EndpointURL = None,
    target_storage_option: TargetStorageOptions = None,
    target_endpoint_url: TargetEndpointURL = None,
    timeout: Timeout = 60.0,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Save files of other programs as a checkpoint: safetensors as of Hugging Face, or torch's own.

    Example: cloudckpt import ./model s3://bucket/run/step-0 --add-prefix model.
    """
    from cloudckpt._convert.importing import import_checkpoint

    console = Console(as_json=as_json, quiet=quiet)
    options, target_options = options_of_both(
        source,
        target,
        storage_option,
        endpoint_url,
        target_storage_option=target_storage_option,
        target_endpoint_url=target_endpoint_url,
        timeout_s=timeout,
    )
    with alone(), shown_progress(console, f"importing {source}") as on_progress:
        report = import_checkpoint(
            source,
            target,
            format=format_,  # type: ignore[arg-type]  # it says which there are
            include=include or (),
            add_prefix=add_prefix,
            tie=_ties_of(tie or ()),
            overwrite=overwrite,
            allow_pickle=unsafe_pickle,
            options=options,
            target_options=target_options,
            on_progress=on_progress,
        )
    if as_json:
        console.document(document_of(report))
        return
    console.line(
        f"{report.target}: {count(report.num_tensors, 'tensor')} and {count(report.num_values, 'value')}, "
        f"{size(report.num_bytes)}"
    )
    console.say(f"Imported in {report.convert_s:.1f} s, {rate(report.bytes_per_s)}.")


def _ties_of(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if not all(pair.partition("=")):
            raise typer.BadParameter(f"{pair!r} is not of the form NAME=TENSOR", param_hint="--tie")
    ties = {pair.partition("=")[0]: pair.partition("=")[2] for pair in pairs}
    if len(ties) < len(pairs):
        raise typer.BadParameter("a NAME is given twice", param_hint="--tie")
    return ties
