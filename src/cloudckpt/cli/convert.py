"""``cloudckpt cp``, ``export``, ``import`` and ``merge``."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cloudckpt._display import count, rate, size
from cloudckpt._messages import join_first
from cloudckpt.cli._console import NO, Console, advising_all, describe_report, message_of
from cloudckpt.cli._options import PairOptions, parse_size
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)

if TYPE_CHECKING:
    from cloudckpt.convert.transfer import ConversionReport, CopyReport
    from cloudckpt.options import Options

_OF_ONE_CHECKPOINT = (
    CheckpointExistsError,
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
"""Errors that do not keep cp --all from copying the other checkpoints."""
_MAX_NAMED = 3
_SUFFIX = re.compile(r"\.(?:safetensors(?:\.index\.json)?|pt|pth|bin|ckpt)$")
"""The endings of the files that ``import`` reads."""
_SHARD_SIZE: Any = "5GB"  # Typer parses it

Source = Annotated[str, typer.Argument(metavar="SRC", help="The source.")]
Target = Annotated[str, typer.Argument(metavar="DST", help="The target.")]


Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Take only entries with such names ('model.*'); may be given several times.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions(PairOptions):
    """The options of ``cp``, ``export`` and ``import``."""

    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at the target already.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions(CopyOptions):
    """The options of ``export`` and ``import``."""

    include: Include = None
    unsafe_pickle: Annotated[
        bool,
        typer.Option("--unsafe-pickle", help="Read pickles, which can run any code: only if you trust who wrote them."),
    ] = False


def cp(
    source: Source,
    target: Target,
    *,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Copy every checkpoint under the folder SRC into the folder DST, the oldest first. Leaves alone those "
            "that exist in DST. Reports those that are damaged or vanish, and copies the others.",
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an earlier cp --resume of the same checkpoint to the same place: what it copied is read and "
            "compared, not sent again. If this one fails, what it copied is kept. If the copy is complete, nothing is "
            "written.",
        ),
    ] = False,
    common: CopyOptions,
) -> None:
    """Copy a checkpoint to another place, on any store: each byte checked, committed last.

    Example: cloudckpt cp s3://bucket/run/step-100 gs://other/run/step-100
    """
    console = common.console
    options, target_options = common.options_of_both(source, target)
    both = options, dataclasses.replace(target_options, resume=resume)
    if not every:
        target = _find_place(source, target, target_options, verb="cp")
        with advising_all(source, options):
            report = _copy(console, source, target, both, overwrite=common.overwrite)
        if common.as_json:
            console.document(describe_report(report, report.copy_s))
        return
    documents: list[dict[str, Any]] = []
    try:
        for one_source, one_target in _pairs(source, target, options):
            documents.append(_copy_unless_there(console, one_source, one_target, both, overwrite=common.overwrite))
    finally:
        if common.as_json and documents:  # a script learns the progress, whatever ends the command
            console.document(documents)
    num_failed = sum("problem" in document for document in documents)
    if num_failed:
        console.say(f"{count(num_failed, 'checkpoint')} of {len(documents):,} could not be copied.")
        raise typer.Exit(NO)


def _find_place(source: str, target: str, options: Options, *, verb: Literal["cp", "import"]) -> str:
    """Return the URI of the checkpoint: in a target that ends with a slash, as for ``cp``, it has the source's name.

    A file's checkpoint is called as the file without its suffix. Raises `CheckpointExistsError` for another folder with
    other things in it, which would become a checkpoint.
    """
    from cloudckpt.convert.copying import is_taken, list_others
    from cloudckpt.uri import parse_location

    folder, name = parse_location(target), parse_location(source).name
    name = name if verb == "cp" else _SUFFIX.sub("", name)
    inside = folder.child(name).uri if name else target
    if target.endswith("/"):
        if is_taken(target, options=options):
            raise CheckpointExistsError(
                f"{folder.uri} is a checkpoint, so no other one can be put into it. Name another folder", uri=folder.uri
            )
        return inside
    if others := list_others(target, options=options):
        raise CheckpointExistsError(
            f"{folder.uri} is a folder with {join_first(others, _MAX_NAMED, separator=', ')} in it, and would become a "
            f"checkpoint itself. To put a checkpoint into it, run with the same options: cloudckpt {verb} "
            f"{shlex.join([source, inside])}",
            uri=folder.uri,
        )
    return target


def _pairs(source: str, target: str, options: Options) -> list[tuple[str, str]]:
    from cloudckpt.inspect.catalog import list_checkpoints
    from cloudckpt.uri import parse_location

    uri, checkpoints = parse_location(source).uri, list_checkpoints(source, options=options)
    if not checkpoints:
        raise CheckpointNotFoundError(f"no checkpoint is committed directly under {uri}", uri=uri)
    folder = parse_location(target)
    return [(info.uri, folder.child(info.name).uri) for info in checkpoints]


def _copy_unless_there(
    console: Console, source: str, target: str, options: tuple[Options, Options], *, overwrite: bool
) -> dict[str, Any]:
    from cloudckpt.convert.copying import is_copy, is_taken

    not_copied = {"copied": False, "source": source, "target": target}
    try:
        if overwrite or not is_taken(target, options=options[1]):
            report = _copy(console, source, target, options, overwrite=overwrite)
            return {"copied": True, **describe_report(report, report.copy_s)}
        if not is_copy(source, target, options=options):
            raise CheckpointExistsError(
                f"{target} is another checkpoint, and no copy of {source}. Copy into another folder, or replace it by "
                "--overwrite",
                uri=target,
            )
    except _OF_ONE_CHECKPOINT as error:
        console.warn(message_of(error))
        return {**not_copied, "problem": str(error)}
    console.say(f"{target} exists already.")
    return not_copied


def _copy(
    console: Console, source: str, target: str, options: tuple[Options, Options], *, overwrite: bool
) -> CopyReport:
    from cloudckpt.convert.copying import copy

    with console.progress(f"copying {source}") as on_progress:
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
        console.say(f"It exists already, and was compared in {report.copy_s:.1f} s, {rate(report.bytes_per_s)}.")
        return report
    reused = f", {size(report.num_reused_bytes)} were there already" if report.num_reused_bytes else ""
    console.say(f"Copied in {report.copy_s:.1f} s, {rate(report.bytes_per_s)}{_name_service_bytes(report)}{reused}.")
    return report


def _parse_part(text: str) -> tuple[int, int]:
    """Parse ``0/4``, for ``typer.Option(parser=…)``."""
    rank, _, size = text.partition("/")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise typer.BadParameter(f"{text!r} is not a rank and a number of parts, such as 0/4 to 3/4")
    return int(rank), int(size)


def export(
    source: Source,
    target: Target,
    *,
    format_: Annotated[
        str, typer.Option("--format", "-f", metavar="FORMAT", help="safetensors, or torch (one file).")
    ] = "safetensors",
    strip_prefix: Annotated[
        str,
        typer.Option(metavar="PREFIX", help="Leave this first part out of the dotted names.", show_default=False),
    ] = "",
    max_shard_size: Annotated[
        int,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Largest safetensors file: 5GB (10^9), 5GiB (2^30), or bytes."
        ),
    ] = _SHARD_SIZE,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Cast floating-point tensors of 16 bits or more, such as to bfloat16.",
            show_default=False,
        ),
    ] = None,
    config_from: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Copy the files there that hold no weights, such as config.json.", show_default=False
        ),
    ] = None,
    part: Annotated[
        Any,  # Typer would take a tuple for two arguments
        typer.Option(
            parser=_parse_part,
            metavar="RANK/SIZE",
            help="Write one part of an export that SIZE commands share, such as 0/4. The last one writes the index.",
            show_default=False,
        ),
    ] = None,
    skip_non_tensors: Annotated[
        bool, typer.Option("--skip-non-tensors", help="Leave out what safetensors files cannot hold.")
    ] = False,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Write the values of quantized tensors, not their parts.")
    ] = False,
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Import this first, for its classes of tensors.", show_default=False),
    ] = None,
    common: ConversionOptions,
) -> None:
    """Write a checkpoint as files that other programs read: Hugging Face's safetensors, or a file of torch.save.

    Example: cloudckpt export s3://bucket/run/step-100 ./model --include 'model.*' --strip-prefix model
    """
    from cloudckpt.convert.exports import export_checkpoint

    for name in module or ():
        importlib.import_module(name)
    report = _convert(
        export_checkpoint,
        source,
        target,
        common,
        verb="export",
        format=format_,
        strip_prefix=strip_prefix,
        max_shard_bytes=max_shard_size,
        dtype=dtype,
        config_from=config_from,
        part=part,
        skip_non_tensors=skip_non_tensors,
        dequantize=dequantize,
    )
    if not report.is_whole and not common.as_json:
        common.console.say("Other parts are missing, and so is the index. The last command writes it.")
    if report.left_out and not common.as_json:
        common.console.say(f"Left out {count(len(report.left_out), 'value')}: {', '.join(report.left_out)}")


def import_(
    source: Source,
    target: Target,
    *,
    format_: Annotated[
        str,
        typer.Option("--format", "-f", metavar="FORMAT", help="safetensors, torch (one file), or dcp (torch's own)."),
    ] = "safetensors",
    add_prefix: Annotated[
        str,
        typer.Option(metavar="PREFIX", help="Put this first part before the dotted names.", show_default=False),
    ] = "",
    tie: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TENSOR",
            help="Give a tensor of safetensors files another name, too ('lm_head.weight=model.embed_tokens.weight'); "
            "may be given several times.",
            show_default=False,
        ),
    ] = None,
    common: ConversionOptions,
) -> None:
    """Save files of other programs as a checkpoint: Hugging Face's safetensors, or torch's own formats.

    Example: cloudckpt import ./model s3://bucket/run/step-0 --add-prefix model
    """
    from cloudckpt.convert.imports import import_checkpoint

    _convert(
        import_checkpoint,
        source,
        target,
        common,
        verb="import",
        format=format_,
        add_prefix=add_prefix,
        tie=_parse_ties(tie or ()),
    )


def merge(
    uris: Annotated[list[str], typer.Argument(metavar="SRC SRC… DST", help="The sources, and last the target.")],
    *,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="W,W,…",
            help="A number for each source, such as 0.7,0.3. They are divided by their sum. Default: equal weights; "
            "may be given several times.",
            show_default=False,
        ),
    ] = None,
    include: Include = None,
    from_first: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Take such entries from the first source alone, also if the others differ ('*.num_batches_tracked'); "
            "may be given several times.",
            show_default=False,
        ),
    ] = None,
    common: CopyOptions,
) -> None:
    """Save the weighted mean of checkpoints as a checkpoint: float tensors are averaged, all else must be the same.

    Example: cloudckpt merge s3://bucket/a/step-9 s3://bucket/b/step-9 s3://bucket/mean/step-0 --weights 0.7,0.3
    """
    from cloudckpt.convert.merging import merge as merge_checkpoints

    *sources, target = uris
    options, target_options = common.options_of_both(sources[0] if sources else target, target)
    with common.console.progress(f"merging into {target}") as on_progress:
        report = merge_checkpoints(
            sources,
            target,
            weights=_parse_weights(None if weights is None else ",".join(weights)),
            include=include or (),
            from_first=from_first or (),
            overwrite=common.overwrite,
            options=options,
            target_options=target_options,
            on_progress=on_progress,
        )
    if common.as_json:
        common.console.document(describe_report(report, report.merge_s))
        return
    common.console.line(
        f"{report.target}: the mean of {count(report.num_averaged, 'tensor')} of {count(len(sources), 'checkpoint')}, "
        f"and {count(report.num_copied, 'entry')} that they share, {size(report.num_bytes)}"
    )


def _parse_weights(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(number) for number in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.7,0.3", param_hint="--weights") from None


def _convert(
    convert: Callable[..., ConversionReport],
    source: str,
    target: str,
    common: ConversionOptions,
    *,
    verb: Literal["export", "import"],
    **arguments: Any,
) -> ConversionReport:
    console = common.console
    options, target_options = common.options_of_both(source, target)
    if verb == "import":
        target = _find_place(source, target, target_options, verb=verb)
    with console.telling_warnings(), console.progress(f"{verb}ing {source}") as on_progress:
        report = convert(
            source,
            target,
            include=common.include or (),
            overwrite=common.overwrite,
            allow_pickle=common.unsafe_pickle,
            options=options,
            target_options=target_options,
            on_progress=on_progress,
            **arguments,
        )
    if common.as_json:
        console.document(describe_report(report, report.convert_s))
        return report
    num_indices = sum(name.endswith(".index.json") for name in report.files)
    num_files = count(len(report.files) - num_indices, "file" if verb == "export" else "object")
    console.line(
        f"{report.target}: {count(report.num_tensors, 'tensor')} and {count(report.num_values, 'value')} in "
        f"{num_files}{' and an index' if num_indices else ''}, {size(report.num_bytes)}"
    )
    rate_text = f"{rate(report.bytes_per_s)}{_name_service_bytes(report)}"
    console.say(f"{verb.capitalize()}ed in {report.convert_s:.1f} s, {rate_text}.")
    return report


def _name_service_bytes(report: ConversionReport | CopyReport) -> str:
    num_bytes = report.num_service_bytes + report.num_read_back_bytes
    return f", {size(num_bytes)} of it by the service itself" if num_bytes else ""


def _parse_ties(assignments: Sequence[str]) -> dict[str, str]:
    ties: dict[str, str] = {}
    for assignment in assignments:
        name, _, tensor = assignment.partition("=")
        if not name or not tensor:
            raise typer.BadParameter(f"{assignment!r} is not of the form NAME=TENSOR", param_hint="--tie")
        if name in ties:
            raise typer.BadParameter(f"the name {name!r} is given twice", param_hint="--tie")
        ties[name] = tensor
    return ties
