"""``cloudckpt export``."""

from __future__ import annotations

from typing import Annotated

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, Timeout, parse_size
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


def export(
    source: Source,
    target: Target,
    *,
    format_: Annotated[
        str,
        typer.Option("--format", "-f", metavar="FORMAT", help="safetensors, torch (one file), or dcp (torch's own)."),
    ] = "safetensors",
    include: Include = None,
    strip_prefix: Annotated[
        str, typer.Option("--strip-prefix", metavar="PREFIX", help="Leave this out of the names.", show_default=False)
    ] = "",
    max_shard_size: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="Largest safetensors file.")
    ] = "5GB",  # type: ignore[assignment]  # Typer parses it
    skip_non_tensors: Annotated[
        bool, typer.Option("--skip-non-tensors", help="Leave out what safetensors files cannot hold.")
    ] = False,
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
    """Write a checkpoint as files that other programs read: safetensors as of Hugging Face, or torch's own.

    Example: cloudckpt export s3://bucket/run/step-100 ./model --include 'model.*' --strip-prefix model.
    """
    from cloudckpt._convert.exporting import export_checkpoint

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
    with alone(), shown_progress(console, f"exporting {source}") as on_progress:
        report = export_checkpoint(
            source,
            target,
            format=format_,  # type: ignore[arg-type]  # it says which there are
            include=include or (),
            strip_prefix=strip_prefix,
            max_shard_bytes=max_shard_size,
            skip_non_tensors=skip_non_tensors,
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
        f"{report.target}: {count(report.num_tensors, 'tensor')} and {count(report.num_values, 'value')} in "
        f"{count(len(report.files), 'file')}, {size(report.num_bytes)}"
    )
    if report.left_out:
        console.say(f"Left out {count(len(report.left_out), 'value')}: {', '.join(report.left_out)}")
    console.say(f"Exported in {report.convert_s:.1f} s, {rate(report.bytes_per_s)}.")
