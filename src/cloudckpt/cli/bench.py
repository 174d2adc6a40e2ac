"""``cloudckpt bench``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, Timeout, options_of, parse_size
from cloudckpt.cli._text import count, milliseconds, rate, size

if TYPE_CHECKING:
    from cloudckpt.cli._measuring import Seconds


def bench(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Where to measure: a bucket, a folder in it, a path.")],
    *,
    size_bytes: Annotated[
        int,
        typer.Option(
            "--size", parser=parse_size, metavar="SIZE", help="Of each checkpoint, such as 4GiB. Fits memory twice."
        ),
    ] = "256MiB",  # type: ignore[assignment]  # Typer parses it
    num_tensors: Annotated[int, typer.Option("--tensors", min=1, help="How many tensors it is made of.")] = 32,
    num_rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often it is saved and loaded.")] = 3,
    num_ranks: Annotated[
        int,
        typer.Option("--ranks", min=1, help="Processes of this machine that save and load together, each its share."),
    ] = 1,
    num_requests: Annotated[int, typer.Option("--requests", min=1, help="Small requests of each kind.")] = 30,
    connections: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight at once; as many as pay where it is left out.")
    ] = None,
    storage_option: StorageOptions = None,
    endpoint_url: EndpointURL = None,
    timeout: Timeout = 60.0,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Measure saves, loads and small requests at a place, and remove everything again.

    Example: cloudckpt bench s3://bucket/scratch --size 4GiB --ranks 8
    """
    from cloudckpt._uri import parse_location
    from cloudckpt.cli._measuring import measure_checkpoints, measure_requests
    from cloudckpt.cli._scratch import scratch

    if size_bytes < num_tensors * num_ranks:
        raise typer.BadParameter(
            f"{size(size_bytes)} is too little for {count(num_tensors * num_ranks, 'tensor')}: a byte for each, at "
            "least",
            param_hint="--size",
        )
    if num_ranks > 1 and parse_location(uri).scheme == "memory":
        raise typer.BadParameter("memory:// is of one process: several ranks cannot share it", param_hint="--ranks")
    console = Console(as_json=as_json, quiet=quiet)
    options = options_of(storage_option, endpoint_url, timeout_s=timeout, connections=connections)
    with scratch(uri, "cloudckpt-bench", options, console) as location:
        console.say(f"Measuring under {location.uri}; everything is removed again.")
        requests = measure_requests(location.child("requests"), options, num_requests=num_requests)
        with console.progress("saving and loading", total_bytes=2 * num_rounds * size_bytes) as progress:
            sizes = {"num_bytes": size_bytes, "num_tensors": num_tensors, "num_rounds": num_rounds}
            by_rank: Sequence[Mapping[str, Seconds]] = ()
            if num_ranks == 1:
                checkpoints = measure_checkpoints(location, options, **sizes, on_bytes=progress.advance)
            else:
                from cloudckpt.cli._local_ranks import measure_ranks

                found = measure_ranks(location, options, num_ranks=num_ranks, **sizes, on_bytes=progress.advance)
                checkpoints, by_rank = found.together, found.by_rank
    if as_json:
        console.document(
            {
                "uri": uri,
                "num_bytes": size_bytes,
                "num_tensors": num_tensors,
                "checkpoints": _document_of(checkpoints, size_bytes),
                "requests": {
                    name: {"p50_s": one.p50, "p99_s": one.p99, "number": one.number} for name, one in requests.items()
                },
                "num_ranks": num_ranks,
                "ranks": [_document_of(one, size_bytes // num_ranks) for one in by_rank],
            }
        )
        return
    together = f", {count(num_ranks, 'rank')} together" if by_rank else ""
    console.line(
        f"{size(size_bytes)} in {count(num_tensors * num_ranks, 'tensor')}, {count(num_rounds, 'round')}{together}"
    )
    rows = [_row(name, one, size_bytes) for name, one in checkpoints.items()]
    for rank, of_rank in enumerate(by_rank):
        rows += [_row(f"{name} of rank {rank}", one, size_bytes // num_ranks) for name, one in of_rank.items()]
    console.table(["CHECKPOINT", "P50", "P99", "RATE"], rows, right=("P50", "P99", "RATE"))
    console.line()
    console.table(
        ["REQUEST", "P50", "P99"],
        [[name, milliseconds(one.p50), milliseconds(one.p99)] for name, one in requests.items()],
        right=("P50", "P99"),
    )


def _row(name: str, one: Seconds, num_bytes: int) -> list[str]:
    return [name, f"{one.p50:.2f} s", f"{one.p99:.2f} s", rate(num_bytes / one.p50)]


def _document_of(measured: Mapping[str, Seconds], num_bytes: int) -> dict[str, Any]:
    return {
        name: {"p50_s": one.p50, "p99_s": one.p99, "number": one.number, "bytes_per_s": num_bytes / one.p50}
        for name, one in measured.items()
    }
