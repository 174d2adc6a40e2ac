"""``cloudckpt show``."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._console import Console, count, size
from cloudckpt.cli._errors import NOT_FOUND
from cloudckpt.cli._options import CommonOptions

if TYPE_CHECKING:
    from cloudckpt.inspect.description import CheckpointDescription, TensorDescription
    from cloudckpt.options import Options

_HEAD = ("uri", "attempt", "created_at", "world_size", "num_overwrites", "num_bytes", "software", "metadata")
_RIGHT = ("BYTES", "CHUNKS", "OBJECTS")


def show(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The checkpoint.")],
    *,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only names like this: 'model.*.weight'. Several: any of them."),
    ] = None,
    objects: Annotated[bool, typer.Option("--objects", help="Also the data objects.")] = False,
    values: Annotated[
        bool, typer.Option("--values", help="Also read what is no tensor, and show it. Nothing that lies there is run.")
    ] = False,
    common: CommonOptions,
) -> None:
    """Show what is in a checkpoint: tensors with their shapes and sharding, values, metadata.

    Example: cloudckpt show s3://bucket/run/step-100 --name 'model.*'
    """
    from cloudckpt.inspect.description import describe

    console = common.console
    options = common.options()
    found = describe(uri, options=options)
    patterns = name or ["*"]
    tensors = [one for one in found.tensors if _fits(one.name, patterns)]
    others = [one for one in found.values if _fits(one.name, patterns)]
    read = _read_values(found.uri, [one.name for one in others], options) if values else {}
    if common.as_json:
        console.document(
            {
                **{name: getattr(found, name) for name in _HEAD},
                "objects": found.objects,
                "tensors": tensors,
                "values": [
                    {**dataclasses.asdict(one), **({"value": read[one.name]} if values else {})} for one in others
                ],
            }
        )
    else:
        _print_head(console, found)
        if objects:
            console.line()
            console.table(["OBJECT", "BYTES"], [[one.key, size(one.num_bytes)] for one in found.objects], right=_RIGHT)
        if tensors:
            console.line()
            console.table(
                ["TENSOR", "DTYPE", "SHAPE", "BYTES", "CHUNKS", "GRID", "OBJECTS"], [*map(_row, tensors)], right=_RIGHT
            )
        if others:
            console.line()
            console.table(
                ["VALUE", "BYTES", *(["IS"] if values else [])],
                [[one.name, size(one.num_bytes), *([read[one.name]] if values else [])] for one in others],
                right=_RIGHT,
            )
    if name and not tensors and not others:
        console.warn(f"Nothing in {found.uri} has a name like {' or '.join(name)}.")
        raise typer.Exit(NOT_FOUND)


def _fits(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _read_values(uri: str, names: list[str], options: Options) -> dict[str, str]:
    """What each is, as Python shows it."""
    import reprlib

    from cloudckpt.api import load

    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = 200
    state: dict[str, Any] = dict.fromkeys(names, 0)
    if names:
        load(state, uri, no_dist=True, options=options)
    return {name: shown.repr(state[name]) for name in names}


def _print_head(console: Console, found: CheckpointDescription) -> None:
    console.line(f"{found.uri}")
    console.line(
        f"{count(len(found.tensors), 'tensor')} with {count(found.num_elements, 'element')}, "
        f"{count(len(found.values), 'value')}; {size(found.num_bytes)} in {count(len(found.objects), 'object')}"
    )
    overwritten = f", overwritten {count(found.num_overwrites, 'time')}" if found.num_overwrites else ""
    console.line(f"saved {found.created_at} by {count(found.world_size, 'rank')}{overwritten}; attempt {found.attempt}")
    console.line(", ".join(f"{name} {version}" for name, version in found.software.items()))
    if found.metadata:
        console.line(f"metadata: {json.dumps(found.metadata)}")


def _row(tensor: TensorDescription) -> list[str]:
    grid = " x ".join(map(str, tensor.grid)) if tensor.grid else ""
    dtype = " ".join([tensor.dtype, *(f"({transform})" for transform in tensor.transforms)])
    return [
        tensor.name,
        dtype,
        str(list(tensor.shape)),
        size(tensor.num_bytes),
        f"{tensor.num_chunks:,}",
        grid,
        f"{len(tensor.objects):,}",
    ]
