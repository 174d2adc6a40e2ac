"""``cloudckpt bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, Timeout, options_of, parse_size
from cloudckpt.cli._text import count, milliseconds, rate, size


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
    """Measure saves, loads and small requests at a place, from one process, and remove everything again.

    Example: cloudckpt bench s3://bucket/scratch --size 4GiB
    """
    from cloudckpt.cli._measuring import measure_checkpoints, measure_requests
    from cloudckpt.cli._scratch import scratch

    console = Console(as_json=as_json, quiet=quiet)
    options = options_of(storage_option, endpoint_url, timeout_s=timeout, connections=connections)
    with scratch(uri, "cloudckpt-bench", options, console) as location:
        console.say(f"Measuring under {location.uri}; everything is removed again.")
        requests = measure_requests(location.child("requests"), options, num_requests=num_requests)
        with console.progress("saving and loading", total_bytes=2 * num_rounds * size_bytes) as progress:
            checkpoints = measure_checkpoints(
                location,
                options,
                num_bytes=size_bytes,
                num_tensors=num_tensors,
                num_rounds=num_rounds,
                on_bytes=progress.advance,
            )
    if as_json:
        console.document(
            {
                "uri": uri,
                "num_bytes": size_bytes,
                "num_tensors": num_tensors,
                "checkpoints": {
                    name: {
                        "p50_s": one.p50,
                        "p99_s": one.p99,
                        "number": one.number,
                        "bytes_per_s": size_bytes / one.p50,
                    }
                    for name, one in checkpoints.items()
                },
                "requests": {
                    name: {"p50_s": one.p50, "p99_s": one.p99, "number": one.number} for name, one in requests.items()
                },
            }
        )
        return
    console.line(f"{size(size_bytes)} in {count(num_tensors, 'tensor')}, {count(num_rounds, 'round')}")
    console.table(
        ["CHECKPOINT", "P50", "P99", "RATE"],
        [
            [name, f"{one.p50:.2f} s", f"{one.p99:.2f} s", rate(size_bytes / one.p50)]
            for name, one in checkpoints.items()
        ],
        right=("P50", "P99", "RATE"),
    )
    console.line()
    console.table(
        ["REQUEST", "P50", "P99"],
        [[name, milliseconds(one.p50), milliseconds(one.p99)] for name, one in requests.items()],
        right=("P50", "P99"),
    )
