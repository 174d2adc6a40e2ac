"""``cloudckpt bench``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._console import count, rate, size
from cloudckpt.cli._options import CommonOptions, parse_size

if TYPE_CHECKING:
    from cloudckpt.cli._measurement import Timing


def bench(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Where to measure: a bucket, a folder in it, a path.")],
    *,
    size_bytes: Annotated[
        int,
        typer.Option(
            "--size", parser=parse_size, metavar="SIZE", help="Size of a checkpoint, at most half of the memory."
        ),
    ] = "256MiB",  # type: ignore[assignment]  # Typer parses it
    num_tensors: Annotated[int, typer.Option("--tensors", min=1, help="Number of its tensors, for each rank.")] = 32,
    num_rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of saves and of loads.")] = 3,
    num_ranks: Annotated[
        int,
        typer.Option("--ranks", min=1, help="Processes of this machine that save and load together, each its share."),
    ] = 1,
    num_requests: Annotated[int, typer.Option("--requests", min=1, help="Small requests of each kind.")] = 30,
    connections: Annotated[int | None, typer.Option(min=1, help="Requests in flight at once, for each rank.")] = None,
    common: CommonOptions,
) -> None:
    """Measure saves, loads and small requests at a place, and remove everything again.

    Example: cloudckpt bench s3://bucket/scratch --size 4GiB --ranks 8
    """
    from cloudckpt.cli import _measurement
    from cloudckpt.doctor.environment import scratch_location
    from cloudckpt.uri import parse_location

    if size_bytes < num_tensors * num_ranks:
        raise typer.BadParameter(
            f"{size(size_bytes)} is too little for {count(num_tensors * num_ranks, 'tensor')} of at least a byte",
            param_hint="--size",
        )
    if num_ranks > 1 and parse_location(uri).scheme == "memory":
        raise typer.BadParameter("several ranks cannot share memory://, which is of one process", param_hint="--ranks")
    console = common.console
    options = common.options(connections=connections)
    with scratch_location(uri, options, name="cloudckpt-bench", warn=console.warn) as location:
        console.say(f"Measuring under {location.uri}; everything is removed again.")
        requests = _measurement.measure_requests(location.child("requests"), options, num_requests=num_requests)
        job = _measurement.Job(
            uris=tuple(location.child(f"round-{number}").uri for number in range(num_rounds)),
            options=options,
            world_size=num_ranks,
            num_bytes=size_bytes,
            num_tensors=num_tensors,
        )
        with console.progress("saving and loading"):
            measured = _measurement.measure_checkpoints(job)
    by_rank = measured.by_rank if num_ranks > 1 else ()
    rank_bytes = size_bytes // num_ranks
    if common.as_json:
        console.document(
            {
                "uri": uri,
                "num_bytes": size_bytes,
                "num_tensors": num_tensors,
                "checkpoints": _document_of(measured.together, size_bytes),
                "requests": requests,
                "num_ranks": num_ranks,
                "ranks": [_document_of(timings, rank_bytes) for timings in by_rank],
            }
        )
        return
    together = f", {count(num_ranks, 'rank')} together" if by_rank else ""
    console.line(
        f"{size(size_bytes)} in {count(num_tensors * num_ranks, 'tensor')}, {count(num_rounds, 'round')}{together}"
    )
    rows = [_row(name, timing, size_bytes) for name, timing in measured.together.items()]
    for rank, timings in enumerate(by_rank):
        rows += [_row(f"{name} of rank {rank}", timing, rank_bytes) for name, timing in timings.items()]
    console.table(["CHECKPOINT", "P50", "P99", "RATE"], rows, right=("P50", "P99", "RATE"))
    console.line()
    console.table(
        ["REQUEST", "P50", "P99"],
        [[name, f"{one.p50_s * 1000:.1f} ms", f"{one.p99_s * 1000:.1f} ms"] for name, one in requests.items()],
        right=("P50", "P99"),
    )


def _row(name: str, timing: Timing, num_bytes: int) -> list[str]:
    return [name, f"{timing.p50_s:.2f} s", f"{timing.p99_s:.2f} s", rate(num_bytes / timing.p50_s)]


def _document_of(timings: Mapping[str, Timing], num_bytes: int) -> dict[str, Any]:
    return {
        name: {**dataclasses.asdict(timing), "bytes_per_s": num_bytes / timing.p50_s}
        for name, timing in timings.items()
    }
