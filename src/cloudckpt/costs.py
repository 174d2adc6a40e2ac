"""What checkpoints cost: requests, GiB and dollars for a given model and cadence.

Run as a program, it prints them: ``python -m cloudckpt.costs --gib 140 --ranks 64 --every-minutes 30 --keep 5``.
Estimates: tensors are taken to be spread evenly over ranks and objects, and nothing fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from cloudckpt._plan.sizes import request_bytes_for
from cloudckpt._transfer.width import bounds_of
from cloudckpt.options import GIB, MIB, Options

__all__ = [
    "GCS_STANDARD",
    "S3_STANDARD",
    "MonthlyCost",
    "Prices",
    "Requests",
    "load_requests",
    "monthly",
    "save_requests",
]

_HOURS_PER_MONTH = 730
_MOST_COMPOSED = 32
_FOR_EACH_CONNECTION = 4
_LEAST_PART_BYTES = 16 * MIB
_LEAST_REQUEST_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """How many requests are made, by what they are billed as. Deletions and aborts are free, and not counted."""

    num_writes: int = 0
    """Puts, parts, listings, completions: Amazon's "PUT, COPY, POST, LIST", Google's Class A."""
    num_reads: int = 0
    """Gets and heads: Amazon's "GET and all other", Google's Class B."""

    def __add__(self, other: Requests) -> Requests:
        return Requests(num_writes=self.num_writes + other.num_writes, num_reads=self.num_reads + other.num_reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """List prices in dollars. The services' GB is a GiB of 2**30 bytes."""

    name: str
    composes: bool
    """Whether parts are objects that are joined, as on GCS, or parts of a multipart upload, as on S3."""
    per_1000_writes: float
    per_1000_reads: float
    per_gib_month: float
    source: str
    """The page that said so."""
    as_of: str


S3_STANDARD = Prices(
    name="S3 Standard, us-east-1",
    composes=False,
    per_1000_writes=0.005,
    per_1000_reads=0.0004,
    per_gib_month=0.023,  # the first 50 TB
    source="https://aws.amazon.com/s3/pricing/",
    as_of="November 2026",
)
GCS_STANDARD = Prices(
    name="GCS Standard, us-east1",
    composes=True,
    per_1000_writes=0.005,
    per_1000_reads=0.0004,
    per_gib_month=0.020,
    source="https://cloud.google.com/storage/pricing-examples",
    as_of="November 2026",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthlyCost:
    """Of a month (730 hours) of training."""

    num_saves: float
    per_save: Requests
    stored_gib: float
    """On average, removed data that soft delete keeps included."""
    request_dollars: float
    storage_dollars: float

    @property
    def dollars(self) -> float:
        """Requests and storage together. Traffic within the region is free; out of it, it is not, and not counted."""
        return self.request_dollars + self.storage_dollars


def save_requests(
    num_bytes: int,
    *,
    ranks: int = 1,
    ranks_per_host: int = 8,
    composes: bool = False,
    on_gpu: bool = False,
    options: Options | None = None,
) -> Requests:
    """Of one save of `num_bytes` in all that overwrites nothing; `on_gpu` where tensors are sent from a GPU at once.

    An async save sends from its copy on the CPU. Each rank has at least one object.
    """
    options = Options() if options is None else options
    share_bytes = -(-num_bytes // ranks)
    part_bytes = _part_bytes(share_bytes, min(ranks, ranks_per_host), options, on_gpu=on_gpu)
    num_full, rest_bytes = divmod(share_bytes, options.object_bytes)
    # The coordinator: three listings at the beginning; at the end two listings and the manifest.
    requests = Requests(num_writes=3 + 2 + 1)
    for _ in range(ranks):
        for size_bytes, count in (
            (options.object_bytes, num_full),
            (rest_bytes, int(bool(rest_bytes or not num_full))),
        ):
            one = _object_requests(size_bytes, part_bytes, composes=composes)
            requests += Requests(num_writes=count * one.num_writes, num_reads=count * one.num_reads)
    return requests


def load_requests(
    num_bytes: int, *, ranks: int = 1, ranks_per_host: int = 8, options: Options | None = None
) -> Requests:
    """Of one load, by ranks of which each wants its share of `num_bytes`."""
    options = Options() if options is None else options
    share_bytes = -(-num_bytes // ranks)
    request_bytes = request_bytes_for(
        share_bytes,
        connections=bounds_of(options.connections, ranks_of_host=min(ranks, ranks_per_host), is_remote=True).first,
        for_each=_FOR_EACH_CONNECTION,
        least_bytes=_LEAST_REQUEST_BYTES,
        most_bytes=options.request_bytes,
    )
    return Requests(num_writes=1, num_reads=1 + ranks * max(-(-share_bytes // request_bytes), 1))


def monthly(
    num_bytes: int,
    *,
    every_minutes: float,
    keep: int,
    prices: Prices = S3_STANDARD,
    ranks: int = 1,
    ranks_per_host: int = 8,
    on_gpu: bool = False,
    soft_delete_days: float = 0,
    options: Options | None = None,
) -> MonthlyCost:
    """Of saves of `num_bytes` every so often, of which `keep` stay. `soft_delete_days` is the bucket's own."""
    each = save_requests(
        num_bytes, ranks=ranks, ranks_per_host=ranks_per_host, composes=prices.composes, on_gpu=on_gpu, options=options
    )
    num_saves = _HOURS_PER_MONTH * 60 / every_minutes
    gib = num_bytes / GIB
    # What is removed meanwhile: a superseded checkpoint for each save, and the parts that it was composed of.
    removed_gib = gib * (2 if prices.composes else 1) * soft_delete_days * 24 * 60 / every_minutes
    request_dollars = num_saves * (
        each.num_writes / 1000 * prices.per_1000_writes + each.num_reads / 1000 * prices.per_1000_reads
    )
    stored_gib = keep * gib + removed_gib
    return MonthlyCost(
        num_saves=num_saves,
        per_save=each,
        stored_gib=stored_gib,
        request_dollars=request_dollars,
        storage_dollars=stored_gib * prices.per_gib_month,
    )


def _part_bytes(share_bytes: int, ranks_of_host: int, options: Options, *, on_gpu: bool) -> int:
    bounds = bounds_of(options.connections, ranks_of_host=ranks_of_host, is_remote=True)
    most_bytes = min(options.part_bytes, options.staging_bytes // bounds.most) if on_gpu else options.part_bytes
    return request_bytes_for(
        share_bytes,
        connections=bounds.first,
        for_each=_FOR_EACH_CONNECTION,
        least_bytes=_LEAST_PART_BYTES,
        most_bytes=most_bytes,
    )


def _object_requests(size_bytes: int, part_bytes: int, *, composes: bool) -> Requests:
    num_parts = size_bytes // part_bytes + 1  # the header lies before the tensors
    if num_parts <= 1:
        return Requests(num_writes=1)
    if not composes:  # to begin, to complete, and to look at its size
        return Requests(num_writes=num_parts + 2, num_reads=1)
    num_composed, left = 1, num_parts
    while left > _MOST_COMPOSED:
        left = -(-left // _MOST_COMPOSED)
        num_composed += left
    return Requests(num_writes=num_parts + num_composed + 1, num_reads=1)  # one listing, of what is to be removed


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what a month costs."""
    parser = argparse.ArgumentParser(prog="python -m cloudckpt.costs", description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, required=True, help="a checkpoint's size, all ranks together")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--every-minutes", type=float, default=30)
    parser.add_argument("--keep", type=int, default=3, help="checkpoints that stay")
    parser.add_argument("--service", choices=["s3", "gcs"], default="s3")
    parser.add_argument("--on-gpu", action="store_true", help="synchronous saves of tensors on a GPU")
    parser.add_argument("--soft-delete-days", type=float, default=0, help="how long the bucket keeps what is removed")
    asked = parser.parse_args(arguments)
    prices = {"s3": S3_STANDARD, "gcs": GCS_STANDARD}[asked.service]
    num_bytes = int(asked.gib * GIB)
    cost = monthly(
        num_bytes,
        every_minutes=asked.every_minutes,
        keep=asked.keep,
        prices=prices,
        ranks=asked.ranks,
        ranks_per_host=asked.ranks_per_host,
        on_gpu=asked.on_gpu,
        soft_delete_days=asked.soft_delete_days,
    )
    load = load_requests(num_bytes, ranks=asked.ranks, ranks_per_host=asked.ranks_per_host)
    print(f"{prices.name}, list prices of {prices.as_of}: {prices.source}")  # noqa: T201  # what it is run for
    for what, value in (
        ("requests of a save", f"{cost.per_save.num_writes:,} writes, {cost.per_save.num_reads:,} reads"),
        ("requests of a load", f"{load.num_writes:,} write, {load.num_reads:,} reads"),
        ("saves a month", f"{cost.num_saves:,.0f}"),
        ("stored on average", f"{cost.stored_gib:,.0f} GiB"),
        ("requests of saves", f"${cost.request_dollars:,.2f} a month"),
        ("storage", f"${cost.storage_dollars:,.2f} a month"),
        ("together", f"${cost.dollars:,.2f} a month"),
    ):
        print(f"  {what:<20}{value}")  # noqa: T201  # as above


if __name__ == "__main__":
    main()
