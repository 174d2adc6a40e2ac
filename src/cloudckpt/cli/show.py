"""``cloudckpt show``, ``cat`` and ``diff``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cloudckpt._display import count, find_shown_begin, size
from cloudckpt._messages import did_you_mean, find_near_entry
from cloudckpt.cli._console import NO, NOT_FOUND, Console
from cloudckpt.cli._options import CommonOptions, PairOptions
from cloudckpt.cli.ls import users_metadata

if TYPE_CHECKING:
    import torch

    from cloudckpt.inspect.comparison import Comparison, Difference
    from cloudckpt.inspect.description import CheckpointDescription, TensorDescription, ValueDescription
    from cloudckpt.options import Options

_HEAD = ("uri", "attempt", "created_at", "world_size", "manifest_number", "num_bytes", "software", "metadata")
_BLOCK_ELEMENTS = 2**22
_RIGHT = ("BYTES", "CHUNKS", "OBJECTS", "TENSORS", "ELEMENTS", "VALUES")
_MAX_CELL_CHARS = 32
_FEW_ELEMENTS = 8
"""A tensor with at most so many elements is shown whole below a name."""


def show(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The checkpoint.")],
    *,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Only names like this: 'model.*.weight'. 'model' takes all that is below it. Several: any of them.",
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Sum up by module: by the first N parts of the names, instead of each."),
    ] = None,
    objects: Annotated[bool, typer.Option("--objects", help="Also the data objects.")] = False,
    values: Annotated[
        bool,
        typer.Option("--values", help="Also read and show the values that are not tensors. No stored code is run."),
    ] = False,
    common: CommonOptions,
) -> None:
    """Show what is in a checkpoint: tensors with their shapes and sharding, values, metadata.

    Example: cloudckpt show s3://bucket/run/step-100 --name 'model.*'
    """
    from cloudckpt.inspect.description import describe, group_by_module, matches

    console = common.console
    options = common.options()
    description = describe(uri, options=options)
    patterns = name or ["*"]
    tensors = [tensor for tensor in description.tensors if matches(tensor.name, patterns)]
    others = [value for value in _values_of(description) if matches(value.name, patterns)]
    wrappers = [wrapper for wrapper in description.wrappers if matches(wrapper.name, patterns)]
    groups = [] if depth is None else group_by_module([*tensors, *others], depth)
    read = _read_values(description, [value.name for value in others], options) if values else {}
    if common.as_json:
        console.document(
            {
                **{name: getattr(description, name) for name in _HEAD},
                "objects": description.objects,
                "tensors": tensors,
                "wrappers": wrappers,
                "values": [
                    {**dataclasses.asdict(value), **({"value": read[value.name]} if values else {})} for value in others
                ],
                **({} if depth is None else {"modules": groups}),
            }
        )
    else:
        _print_head(console, description, options)
        if name:
            num_bytes = sum(tensor.num_bytes for tensor in tensors) + sum(value.num_bytes for value in others)
            console.line(f"shown: {count(len(tensors), 'tensor')}, {count(len(others), 'value')}; {size(num_bytes)}")
        if objects:
            console.line()
            console.table(
                ["OBJECT", "BYTES"],
                [[stored.key, size(stored.num_bytes)] for stored in description.objects],
                right=_RIGHT,
            )
        if depth is not None:
            console.line()
            rows = [
                [
                    module.name,
                    *(f"{n:,}" for n in (module.num_tensors, module.num_elements, module.num_values)),
                    size(module.num_bytes),
                ]
                for module in groups
            ]
            console.table(["MODULE", "TENSORS", "ELEMENTS", "VALUES", "BYTES"], rows, right=_RIGHT)
        if tensors and depth is None:
            console.line()
            console.table(
                ["TENSOR", "DTYPE", "SHAPE", "BYTES", "CHUNKS", "GRID", "OBJECTS"], [*map(_row, tensors)], right=_RIGHT
            )
        if wrappers and depth is None:
            console.line()
            console.table(
                ["WRAPPER", "CLASS", "SHAPE", "PARTS"],
                [
                    [
                        wrapper.name,
                        wrapper.kind,
                        str(list(wrapper.shape)),
                        ", ".join(part[len(wrapper.name) + 1 :] for part in wrapper.parts),
                    ]
                    for wrapper in wrappers
                ],
            )
        if others and depth is None:
            console.line()
            console.table(
                ["VALUE", "BYTES", *(["IS"] if values else [])],
                [[value.name, size(value.num_bytes), *([read[value.name]] if values else [])] for value in others],
                right=_RIGHT,
            )
    if name and not tensors and not others and not wrappers:
        _exit_without_match(console, description.uri, name, _names_of(description))


def _exit_without_match(console: Console, where: str, patterns: Sequence[str], names: Collection[str]) -> NoReturn:
    near = dict.fromkeys(find_near_entry(pattern.rstrip("*").rstrip("."), names) for pattern in patterns)
    console.warn(f"Nothing in {where} has a name like {' or '.join(patterns)}{did_you_mean(*near) or '.'}")
    raise typer.Exit(NOT_FOUND)


def cat(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The checkpoint.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="An entry, or the beginning of some: extra.scaler.")],
    *,
    common: CommonOptions,
) -> None:
    """Show one value, or a tensor's shape, dtype, smallest and largest element, mean, and number of NaNs.

    For a name with entries below it, show all of these: values, small tensors, and the shape and dtype of larger ones.
    Reads these entries alone. No stored code is run.

    Example: cloudckpt cat s3://bucket/run/step-100 model.layer.weight
    """
    from cloudckpt.inspect.description import describe

    console = common.console
    options = common.options()
    description = describe(uri, options=options)
    tensor = next((entry for entry in description.tensors if entry.name == name), None)
    names = _names_of(description)
    if name not in names and any(other.startswith(f"{name}.") for other in names):
        _cat_subtree(description, name, common, options)
        return
    if name not in names:
        hint = did_you_mean(find_near_entry(name, names)) or f". cloudckpt show {uri} lists the names."
        console.warn(f"Error: {description.uri} has no entry {name!r}{hint}")
        raise typer.Exit(NOT_FOUND)
    state = _load_entries(description, [name], options, tensors={} if tensor is None else {name: tensor})
    members: dict[str, Any] = {"dtype": None, "shape": None, "min": None, "max": None, "mean": None, "num_nan": None}
    if tensor is not None:
        members |= {"dtype": tensor.dtype, "shape": list(tensor.shape), **_statistics(state[name])}
    if common.as_json:
        for key, member in members.items():
            if isinstance(member, float) and not math.isfinite(member):  # JSON has none
                members[key] = "infinity" if member > 0 else "-infinity"
        value = None if tensor is not None else repr(state[name])
        console.document({"uri": description.uri, "name": name, "value": value, **members})
    elif tensor is None:
        console.line(repr(state[name]))
    else:
        for key, member in members.items():
            console.line(f"{key:<8} {'' if member is None else member}".rstrip())


def _cat_subtree(description: CheckpointDescription, name: str, common: CommonOptions, options: Options) -> None:
    """Print the entries below `name`, in one read: values and small tensors; of the others the dtype and the shape."""
    entries: list[TensorDescription | ValueDescription] = [*description.tensors, *_values_of(description)]
    entries = [entry for entry in entries if entry.name.startswith(f"{name}.")]
    tensors = {tensor.name: tensor for tensor in description.tensors}
    small = {tensor.name: tensor for tensor in description.tensors if math.prod(tensor.shape) <= _FEW_ELEMENTS}
    names = [entry.name for entry in entries if entry.name in small or entry.name not in tensors]
    read = _read_values(description, names, options, tensors=small)
    if common.as_json:
        rows = [
            {"name": entry.name, "value": read.get(entry.name)}
            | {key: getattr(tensors.get(entry.name), key, None) for key in ("dtype", "shape")}
            for entry in entries
        ]
        common.console.document({"uri": description.uri, "name": name, "entries": rows})
        return
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        text = read[entry.name] if entry.name in read else " ".join(_row(tensors[entry.name])[1:3])
        common.console.line(f"{entry.name:<{width}}  {text}")
    if len(read) < len(entries):
        common.console.say("To see the figures of a larger tensor, name it.")


def _statistics(tensor: torch.Tensor) -> dict[str, float | None]:
    """Return the statistics of all elements but NaNs, block by block; None for those that the tensor does not have."""
    if tensor.is_complex():
        return {}
    lowest, highest, total, num_nan = math.inf, -math.inf, 0.0, 0
    for block in tensor.flatten().split(_BLOCK_ELEMENTS):
        elements = block.double()
        numbers = elements[~elements.isnan()]
        num_nan += len(elements) - len(numbers)
        if len(numbers):
            lowest, highest = min(lowest, numbers.min().item()), max(highest, numbers.max().item())
            total += numbers.sum().item()
    num_numbers = tensor.numel() - num_nan
    if not num_numbers:
        return {"num_nan": num_nan}
    return {"min": lowest, "max": highest, "mean": total / num_numbers, "num_nan": num_nan}


def _names_of(description: CheckpointDescription) -> list[str]:
    return [*(tensor.name for tensor in description.tensors), *(value.name for value in _values_of(description))]


def _values_of(description: CheckpointDescription) -> list[ValueDescription]:
    """Return the values, and the dicts that were saved empty, of which only the manifest knows."""
    from cloudckpt.inspect.description import ValueDescription

    empty = (ValueDescription(name=name, num_bytes=0) for name in description.empty_dicts)
    return [*description.values, *empty]


def _read_values(
    description: CheckpointDescription,
    names: list[str],
    options: Options,
    *,
    tensors: Mapping[str, TensorDescription] | None = None,
) -> dict[str, str]:
    """Show each value as Python does. Those that are tensors are in `tensors`."""
    import reprlib

    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = 200
    state = _load_entries(description, names, options, tensors=tensors or {})
    return {name: shown.repr(state[name]) for name in names}


def _load_entries(
    description: CheckpointDescription,
    names: list[str],
    options: Options,
    *,
    tensors: Mapping[str, TensorDescription],
) -> dict[str, Any]:
    """Read the entries `names`, as tensors where `tensors` has them."""
    import torch

    from cloudckpt.api import load
    from cloudckpt.dcp.storage_reader import ObjectStoreReader

    empty: dict[str, Any] = {name: {} for name in names if name in description.empty_dicts}
    state: dict[str, Any] = dict.fromkeys(name for name in names if name not in empty)
    for name in state.keys() & tensors.keys():
        state[name] = torch.empty(tensors[name].shape, dtype=getattr(torch, tensors[name].dtype))
    if state:
        load(state, storage_reader=ObjectStoreReader(description.uri, options=options, _is_part=True), no_dist=True)
    return {**state, **empty}


def _print_head(console: Console, info: CheckpointDescription, options: Options) -> None:
    from cloudckpt.manager.drain import explain_owed, root_of

    console.line(f"{info.uri}")
    console.line(
        f"{count(len(info.tensors), 'tensor')} with {count(info.num_elements, 'element')}, "
        f"{count(len(_values_of(info)), 'value')}; {size(info.num_bytes)} in {count(len(info.objects), 'object')}"
    )
    number = f", manifest {info.manifest_number}" if info.manifest_number else ""
    console.line(f"saved {info.created_at} by {count(info.world_size, 'rank')}{number}; attempt {info.attempt}")
    console.line(", ".join(f"{name} {version}" for name, version in info.software.items()))
    if metadata := users_metadata(info.metadata):
        console.line(f"metadata: {json.dumps(metadata)}")
    # The copy has the commit time of the save, which is later than its manifest was made.
    if reason := explain_owed(info.uri, info.metadata, datetime.fromisoformat(info.created_at), options):
        console.line(f"{reason}.")
    elif (root := root_of(info.metadata)) not in ("", info.uri.rpartition("/")[0]):
        console.line(f"saved in a fast place of {root}, which is owed no copy of it.")


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


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    *,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only names like this, or below it: 'model'. Several: any of them."),
    ] = None,
    rtol: Annotated[float, typer.Option(min=0, help="Ignore changes of up to this share of A's value.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Ignore changes of up to this much.")] = 0.0,
    common: PairOptions,
) -> None:
    """Compare two checkpoints by value, however they are sharded; exit with 1 if they differ.

    Example: cloudckpt diff s3://bucket/run/step-100 s3://bucket/run/step-200 --rtol 1e-5
    """
    from cloudckpt.inspect.comparison import compare
    from cloudckpt.inspect.description import matches

    console = common.console
    options, options_after = common.options_of_both(before, after)
    patterns = name or ["*"]
    all_names: list[str] = []

    def is_chosen(name_seen: str) -> bool:
        all_names.append(name_seen)
        return matches(name_seen, patterns)

    with console.progress("comparing") as on_progress:
        comparison = compare(
            before,
            after,
            rtol=rtol,
            atol=atol,
            only=is_chosen,
            options=options,
            options_after=options_after,
            on_progress=on_progress,
        )
    if common.as_json:
        console.document(_document_of(comparison))
    else:
        _print_differences(console, comparison)
    if name and not comparison.differences and not comparison.num_same:
        _exit_without_match(console, f"{comparison.before} or {comparison.after}", name, all_names)
    if not comparison.is_same:
        raise typer.Exit(NO)


def _print_differences(console: Console, comparison: Comparison) -> None:
    if comparison.differences:
        console.table(
            ["NAME", "CHANGE", "A", "B", "ELEMENTS", "LARGEST", "RELATIVE"],
            [row_of_difference(difference) for difference in comparison.differences],
            right=("ELEMENTS", "LARGEST", "RELATIVE"),
        )
        console.line()
    if any(difference.kind == "dtype" for difference in comparison.differences):
        console.say("Values of different dtypes are not compared.")
    console.line(
        f"{count(len(comparison.differences), 'difference')}, {count(comparison.num_same, 'entry')} "
        f"the same; {size(comparison.num_bytes_compared)} compared"
    )


def row_of_difference(difference: Difference) -> list[str]:
    figures = ["", "", ""]
    if difference.num_different:
        largest = [f"{difference.max_absolute:.4g}", f"{difference.max_relative:.4g}"]
        figures = [f"{difference.num_different:,} of {difference.num_elements:,}", *largest]
    begin = find_shown_begin(difference.before, difference.after, max_chars=_MAX_CELL_CHARS)
    where = f" at {difference.where}" if difference.where else ""
    return [
        difference.name,
        f"{difference.kind}{where}",
        _cut(difference.before, begin),
        _cut(difference.after, begin),
        *figures,
    ]


def _cut(text: str, begin: int) -> str:
    end = begin + _MAX_CELL_CHARS
    return ("…" if begin and text else "") + text[begin:end] + ("…" if end < len(text) else "")


def _document_of(comparison: Comparison) -> dict[str, Any]:
    document = dataclasses.asdict(comparison)
    for difference in document["differences"]:
        for name in ("max_absolute", "max_relative"):
            if not math.isfinite(difference[name]):
                difference[name] = "infinity"  # JSON has none
    return {"is_same": comparison.is_same, **document}
