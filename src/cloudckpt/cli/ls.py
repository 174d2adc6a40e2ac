"""``cloudckpt ls``, ``latest``, ``du`` and ``watch``."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt._display import count, date, seconds, size, title_of
from cloudckpt.cli._console import DENIED, Console, age
from cloudckpt.cli._metrics import BEST, choose_modes, describe_modes, find_best, find_metrics, mark_best, step_of
from cloudckpt.cli._options import CommonOptions, parse_duration

if TYPE_CHECKING:
    from cloudckpt.inspect.catalog import CheckpointInfo
    from cloudckpt.options import Options

_USUAL, _LONG = 5, 10
"""The number of columns without an option, and with ``--long``."""
_PLACE = "place"
"""The column that ``--fast`` adds."""
_RIGHT = ("AGE", "SIZE", "RANKS", "OBJECTS", "TENSORS", "MANIFEST", "DURATION")
_WHOLE = "(whole)"
"""The word for a checkpoint at a bucket itself, which has no name."""
_HOUR: Any = "1h"  # Typer parses it
_INTERVAL: Any = "10s"
_MIN_INTERVAL, _MAX_INTERVAL = timedelta(seconds=1), timedelta(hours=1)


class _Order(str, Enum):
    date = "date"
    name = "name"
    size = "size"


_COLUMNS: dict[str, Callable[[CheckpointInfo], str]] = {
    "name": lambda info: info.name or _WHOLE,
    "age": lambda info: "" if info.state == "denied" else age(info.committed_at),
    "size": lambda info: "" if info.num_bytes is None else size(info.num_bytes),
    "ranks": lambda info: _number(info.world_size),
    "state": lambda info: info.state + _describe(info),
    "committed_at": lambda info: "" if info.state == "denied" else date(info.committed_at),
    "objects": lambda info: _number(info.num_objects),
    "tensors": lambda info: _number(info.num_tensors),
    "manifest": lambda info: f"{info.manifest_number:,}",
    "attempt": lambda info: info.attempt,
    "uri": lambda info: info.uri,
    "metadata": lambda info: json.dumps(metadata) if (metadata := users_metadata(info.metadata)) else "",
    "duration": lambda info: "" if info.save_s is None else seconds(info.save_s),
}


def _describe(info: CheckpointInfo) -> str:
    """Return what else to say of the state of a checkpoint, in parentheses; "" if there is nothing."""
    from cloudckpt.format.model import find_published_numbers

    if info.num_uploads:
        return f" ({count(info.num_uploads, 'upload')})"
    numbers = find_published_numbers(info.metadata)
    return "" if numbers is None else f" ({'anchor' if numbers[0] == numbers[1] else 'difference'})"


def users_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata without the records of a manager and of a publisher."""
    from cloudckpt.format.model import PUBLICATION_KEY
    from cloudckpt.inspect.catalog import EARLIER_KEY
    from cloudckpt.report import FAST_KEY

    records = (FAST_KEY, EARLIER_KEY, PUBLICATION_KEY)
    return {key: value for key, value in metadata.items() if key not in records or not isinstance(value, dict)}


def _parse_columns(text: str, *, has_places: bool) -> list[str]:
    columns = [column.strip() for column in text.split(",")]
    all_columns = [*_COLUMNS, *([_PLACE] if has_places else [])]
    unknown = [column for column in columns if column not in all_columns]
    if unknown:
        raise typer.BadParameter(
            f"there is no column {unknown[0]!r}; the columns are {', '.join(all_columns)}", param_hint="--columns"
        )
    return columns


def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of the checkpoints.")],
    *,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also dates, attempts, numbers of manifests, tensors and metadata.")
    ] = False,
    columns: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help=f"The columns to show, with commas: of {', '.join(_COLUMNS)}."),
    ] = None,
    sort: Annotated[_Order, typer.Option("--sort", help="The order; size is that of all data objects.")] = _Order.date,
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="The last one first.")] = False,
    alive_within: Annotated[
        timedelta,
        typer.Option(
            parser=parse_duration,
            metavar="TIME",
            help="A save that is not committed, and of which nothing was written for so long, is garbage.",
        ),
    ] = _HOUR,
    metrics: Annotated[
        bool, typer.Option("--metrics", "-m", help="Also a column for each metric, with a mark at the best value.")
    ] = False,
    best: BEST = None,
    fast: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Also the steps in this fast place of the run, and where each step is."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also check each manifest's entries of tensors; `verify` checks the data.")
    ] = False,
    common: CommonOptions,
) -> None:
    """List the checkpoints in ROOT, oldest first: committed, damaged, in progress, garbage, and more.

    Example: cloudckpt ls s3://bucket/run
    """
    from cloudckpt.inspect.catalog import list_with_fences

    console = common.console
    usual = [*list(_COLUMNS)[: _LONG if long else _USUAL], *([] if fast is None else [_PLACE])]
    names = _parse_columns(columns, has_places=fast is not None) if columns is not None else usual
    options = common.options()
    settings: dict[str, Any] = {"alive_within": alive_within, "check": check}
    infos, num_fences = list_with_fences(root, all=True, options=options, **settings)
    places = {} if fast is None else add_fast(infos, fast, root, common=common, **settings)
    if not infos:
        _print_no_checkpoint(console, root, options)
    modes = choose_modes(infos, best) if metrics or best else None
    best_of = None if modes is None else find_best(infos, modes)
    if sort is _Order.name:
        infos.sort(key=lambda info: info.name)
    elif sort is _Order.size:
        infos.sort(key=lambda info: info.num_bytes or 0)
    shown = infos[::-1] if reverse else infos
    _print_list(console, root, shown, names, long=long, best_of=best_of, places=places, fast=fast)
    if long and num_fences and not common.as_json:
        console.say(
            f"Besides, {count(num_fences, 'folder')} of removed checkpoints: a fence of about a hundred bytes stays in "
            "each, until a gc a day later."
        )
    if modes and best_of and not common.as_json:
        console.say(f"* marks the best: {describe_modes(modes, best_of)}. For others: --best min:METRIC or max:METRIC.")
    elif modes is not None and infos and not find_metrics(infos):
        console.say("No checkpoint here has metrics. A manager saves them: save(step, state, metrics={…}).")
    if any(info.state == "denied" for info in infos):
        raise typer.Exit(DENIED)


def latest(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of the checkpoints.")],
    *,
    common: CommonOptions,
) -> None:
    """Print the URI of the checkpoint in ROOT that was committed last, even if damaged; exit with 3 if there is none.

    Example: cloudckpt latest s3://bucket/run
    """
    from cloudckpt.errors import CheckpointNotFoundError
    from cloudckpt.inspect.catalog import latest as find_latest
    from cloudckpt.uri import parse_location

    console = common.console
    infos = find_latest(root, options=common.options())
    if infos is None:
        _list_folders(root, common.options())  # raises if nothing is there
        uri = parse_location(root).uri
        raise CheckpointNotFoundError(
            f"no checkpoint is committed directly under {uri}. Run `cloudckpt ls {uri}` to see what is there",
            uri=uri,
        )
    if common.as_json:
        console.document({"name": infos.name, "uri": infos.uri, "time": infos.committed_at.isoformat()})
    else:
        console.line(infos.uri)


def du(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of the checkpoints.")],
    *,
    common: CommonOptions,
) -> None:
    """Sum up the data objects of each checkpoint in ROOT, garbage included, and of all of them.

    Example: cloudckpt du s3://bucket/run
    """
    from cloudckpt.inspect.catalog import list_checkpoints

    console = common.console
    options = common.options()
    infos = list_checkpoints(root, all=True, options=options)
    if not infos:
        _print_no_checkpoint(console, root, options)
        if not common.as_json:
            return
    sums: dict[str, list[int]] = {}
    for info in infos:
        num_bytes, num_objects = sums.get(info.name, (0, 0))
        own_bytes = (info.num_bytes or 0) - info.num_bytes_elsewhere
        own_objects = (info.num_objects or 0) - info.num_objects_elsewhere
        sums[info.name] = [num_bytes + own_bytes, num_objects + own_objects]
    total_bytes, num_objects = (sum(column) for column in zip([0, 0], *sums.values(), strict=True))
    if common.as_json:
        checkpoints = [{"name": name, "num_bytes": sizes[0], "num_objects": sizes[1]} for name, sizes in sums.items()]
        console.document(
            {"root": root, "num_bytes": total_bytes, "num_objects": num_objects, "checkpoints": checkpoints}
        )
    else:
        rows = [[size(sizes[0]), f"{sizes[1]:,}", name or _WHOLE] for name, sizes in sums.items()]
        console.table(
            ["SIZE", "OBJECTS", "NAME"], [*rows, [size(total_bytes), f"{num_objects:,}", "(all)"]], right=_RIGHT
        )
        _print_advice(console, root, infos)
    for info in infos:
        if info.num_bytes is None:
            console.warn(f"{info.name}: its size is not known ({info.state})")
    if any(info.state == "denied" for info in infos):
        raise typer.Exit(DENIED)


def _print_list(
    console: Console,
    root: str,
    infos: Sequence[CheckpointInfo],
    columns: Sequence[str],
    *,
    long: bool,
    best_of: Mapping[str, CheckpointInfo] | None,
    places: Mapping[int, str],
    fast: str | None,
) -> None:
    if console.as_json:
        documents = [document_of(info) for info in infos]
        for info, document in zip(infos, documents, strict=True) if best_of is not None else ():
            document["best"] = [name for name, best in (best_of or {}).items() if best is info]
        for info, document in zip(infos, documents, strict=True) if places else ():
            document[_PLACE] = places[id(info)]
        console.document(documents)
        return
    if not infos:
        return
    metrics = find_metrics(infos) if best_of is not None else []
    titles = [*map(title_of, metrics)]
    cell_of: dict[str, Callable[[CheckpointInfo], str]] = {**_COLUMNS, _PLACE: lambda info: places[id(info)]}
    rows = [
        [*(cell_of[name](info) for name in columns), *(mark_best(info, name, best_of or {}) for name in metrics)]
        for info in infos
    ]
    console.table([*(name.upper() for name in columns), *titles], rows, right=[*_RIGHT, *titles])
    if long:
        for info in infos:
            if metadata := users_metadata(info.metadata):
                console.line(f"{info.name}: {json.dumps(metadata)}")
    for info in infos:
        if info.problem:
            console.warn(f"{info.name}: {info.problem}")
    near = [info for info in infos if places.get(id(info), "root") not in ("root", "both")]
    _print_advice(console, fast or root, near)
    _print_advice(console, root, [info for info in infos if places.get(id(info), "root") in ("root", "both")])


def add_fast(
    infos: list[CheckpointInfo], fast: str, root: str, *, common: CommonOptions, **settings: Any
) -> dict[int, str]:
    """Add to the checkpoints of a root those that only its fast place has. Return where each is, by its `id`.

    `settings` are those of `list_checkpoints` for the fast place.
    """
    from cloudckpt.inspect.catalog import list_checkpoints
    from cloudckpt.report import record_of
    from cloudckpt.stores import options_at
    from cloudckpt.uri import parse_location

    options = options_at(parse_location(fast), parse_location(root), common.options())
    near = list_checkpoints(fast, all=True, options=options, **settings)
    committed = {(info.name, info.committed_at): info for info in infos if info.state == "committed"}
    newest = dict(sorted(committed))
    places = {id(info): "root" for info in infos}
    for info in near:
        record = record_of(info.metadata)
        copy = committed.get((info.name, info.committed_at)) if info.state == "committed" else None
        if copy is not None:
            places[id(copy)] = "both"
            continue
        is_owed = record.get("is_owed") is True and not (info.name in newest and newest[info.name] >= info.committed_at)
        is_own = record.get("root", parse_location(root).uri) == parse_location(root).uri
        places[id(info)] = ("owed" if is_owed else "fast") if is_own else f"fast, of {record['root']}"
        infos.append(info)
    infos.sort(key=lambda info: info.committed_at)
    if not any(place in ("both", "fast", "owed") for place in places.values()):
        common.console.say(f"No step of this run is in {fast}: check the path.")
    return places


def _print_advice(console: Console, root: str, infos: Sequence[CheckpointInfo]) -> None:
    """Print how to remove the remains of dead saves."""
    from cloudckpt._messages import gc_advice

    states = {info.state for info in infos}
    if "garbage" in states:
        console.say(f"{gc_advice(root)}.")
    elif "in progress" in states:
        console.say(f"The save of a job that is dead stays unfinished. {gc_advice(root)}.")


def _print_no_checkpoint(console: Console, root: str, options: Options) -> None:
    """Name the folders that are there instead. Raises `CheckpointNotFoundError` if nothing is there."""
    from cloudckpt.commit.log import describe_folders
    from cloudckpt.uri import parse_location

    folders = _list_folders(root, options)
    text = f"{parse_location(root).uri} has no checkpoint directly in it, and nothing that a save has left."
    if folders:
        text += f" It has the {describe_folders(folders)}: name the one that holds the checkpoints."
    console.say(text)


def _list_folders(root: str, options: Options) -> list[str]:
    """Return the last folders by name. Raises `CheckpointNotFoundError` if nothing is there."""
    from cloudckpt.commit.log import describe_siblings, list_kept_folders
    from cloudckpt.errors import CheckpointNotFoundError
    from cloudckpt.io.client import open_client
    from cloudckpt.uri import parse_location

    location = parse_location(root)
    client = open_client(location, options)
    folders = list_kept_folders(client)
    is_folder = location.local_path is not None and os.path.isdir(location.local_path)  # noqa: PTH112  # as URIs have it
    if not folders and not is_folder and not client.list(max_results=1):
        is_relative = "/" in root and root[0] not in "/.~" and "://" not in root
        advice = f" To name a bucket, write s3://{root} or gs://{root}." if is_relative else ""
        advice = f" {describe_siblings(client)}.{advice}"
        raise CheckpointNotFoundError(f"There is nothing at {location.uri}.{advice}", uri=location.uri)
    return folders


def document_of(info: CheckpointInfo) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    return {
        "name": info.name,
        "uri": info.uri,
        "state": info.state,
        "time": info.committed_at.isoformat() if info.state != "denied" else None,
        "num_bytes": info.num_bytes,
        "num_objects": info.num_objects,
        "num_bytes_elsewhere": info.num_bytes_elsewhere,
        "num_objects_elsewhere": info.num_objects_elsewhere,
        "num_uploads": info.num_uploads,
        "world_size": info.world_size,
        "num_tensors": info.num_tensors,
        "manifest_number": info.manifest_number,
        "attempt": info.attempt,
        "metadata": dict(info.metadata),
        "problem": info.problem,
        "metrics": {name: value if math.isfinite(value) else None for name, value in info.metrics.items()},
        "save_s": info.save_s,
    }


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def parse_interval(text: str) -> timedelta:
    """Parse a time between two listings, for ``typer.Option(parser=…)``."""
    interval = parse_duration(text)
    if not _MIN_INTERVAL <= interval <= _MAX_INTERVAL:
        raise typer.BadParameter(f"{text!r} is not between 1s and 1h")
    return interval


def watch(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of the checkpoints.")],
    *,
    interval: Annotated[
        timedelta, typer.Option(parser=parse_interval, metavar="TIME", help="From one listing to the next: 1s to 1h.")
    ] = _INTERVAL,
    until_step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="End once step N or a later one is committed."),
    ] = None,
    common: CommonOptions,
) -> None:
    """Follow a run: print each checkpoint in ROOT, and each save under way, when its state changes; until Ctrl-C.

    Example: cloudckpt watch s3://bucket/run --until-step 1000
    """
    from cloudckpt.errors import CheckpointChangedError, TransientStoreError
    from cloudckpt.inspect.catalog import list_checkpoints

    console = common.console
    options = common.options()
    printed: dict[tuple[str, str], CheckpointInfo] = {}
    end = "Ctrl-C" if until_step is None else f"step {until_step} or a later one is committed"
    console.say(f"Listing {root} every {interval.total_seconds():g} s until {end}.")
    is_first = True
    while True:
        try:
            listed = list_checkpoints(root, all=True, options=options)
        except (TransientStoreError, CheckpointChangedError) as error:
            console.warn(error.with_advice("The next listing is the next try."))
            time.sleep(interval.total_seconds())
            continue
        if is_first and not listed:
            console.say(f"Nothing is at {root} yet. 'cloudckpt ls {root}' names what is near.")
        is_first = False
        # An attempt can be listed twice: committed, and as garbage for objects that its manifest does not name.
        listed.sort(key=lambda info: info.state == "committed")
        infos = {(info.name, info.attempt): info for info in listed}
        for key in printed.keys() - infos.keys():
            _print_change(console, printed.pop(key), is_gone=True)
        for key, info in infos.items():
            if key not in printed or printed[key].state != info.state:
                _print_change(console, info)
            printed[key] = info
        steps = [step_of(info) for info in infos.values() if info.state == "committed"]
        if until_step is not None and any(step is not None and step >= until_step for step in steps):
            return
        time.sleep(interval.total_seconds())


def _print_change(console: Console, info: CheckpointInfo, *, is_gone: bool = False) -> None:
    state = "gone" if is_gone else info.state
    if console.as_json:
        typer.echo(json.dumps(document_of(info) | {"state": state}))
        return
    moment = datetime.now(timezone.utc) if is_gone else info.committed_at
    size_text = "" if info.num_bytes is None else f"  {size(info.num_bytes)}"
    console.line(f"{date(moment)}  {info.name or _WHOLE}  {state}{size_text}{info.problem and '  '}{info.problem}")
