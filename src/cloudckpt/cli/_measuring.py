"""What ``cloudckpt bench`` measures."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from cloudckpt._uri import Location
    from cloudckpt.options import Options
    from cloudckpt.report import Event

_SMALL_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of one operation, measured several times."""

    p50: float
    p99: float
    number: int

    @staticmethod
    def of(measured: Sequence[float]) -> Seconds:
        """Of at least one."""
        ordered = sorted(measured)
        last = len(ordered) - 1
        p99 = ordered[min(int(len(ordered) * 0.99), last)]
        return Seconds(p50=statistics.median(ordered), p99=p99, number=len(ordered))


def measure_requests(location: Location, options: Options, *, num_requests: int) -> Mapping[str, Seconds]:
    """Small requests one after the other: what the store itself takes to answer."""
    from awscrt.checksums import crc32c

    from cloudckpt._transfer.retry import Retrier
    from cloudckpt.stores.open import open_store

    store = open_store(location, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    content = bytes(_SMALL_BYTES)
    keys = [f"small-{number}" for number in range(num_requests)]
    checksum = crc32c(content)
    calls: dict[str, Callable[[str], object]] = {
        "put 1 KiB": lambda key: store.put(key, [memoryview(content)], crc32c=checksum),
        "get 1 KiB": lambda key: store.read(key, max_bytes=_SMALL_BYTES),
        "head": store.head,
        "list": lambda key: list(store.list(key)),
        "delete": lambda key: store.delete([key]),
    }
    measured: dict[str, Seconds] = {}
    for name, call in calls.items():
        times: list[float] = []
        for key in keys:
            begun = time.perf_counter()
            retrier.call(lambda call=call, key=key: call(key))  # type: ignore[misc]  # mypy cannot see the defaults
            times.append(time.perf_counter() - begun)
        measured[name] = Seconds.of(times)
    return measured


def measure_checkpoints(
    location: Location,
    options: Options,
    *,
    num_bytes: int,
    num_tensors: int,
    num_rounds: int,
    on_bytes: Callable[[int], None],
) -> Mapping[str, Seconds]:
    """Saves and loads of tensors of `num_bytes` together, from committed to committed; every byte checked."""
    import torch

    from cloudckpt.api import load, save
    from cloudckpt.housekeeping import delete

    def on_event(event: Event) -> None:
        if event.name in ("save.part_uploaded", "load.range_read"):
            on_bytes(event.num_bytes)

    options = dataclasses.replace(options, on_event=on_event)
    state = random_state(num_bytes, num_tensors)
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    saves: list[float] = []
    loads: list[float] = []
    for number in range(num_rounds):
        uri = location.child(f"round-{number}").uri
        begun = time.perf_counter()
        save(dict(state), uri, no_dist=True, options=options)
        saves.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        load(into, uri, no_dist=True, options=options)
        loads.append(time.perf_counter() - begun)
        delete(uri, options=options)
    return {"save": Seconds.of(saves), "load": Seconds.of(loads)}


def random_state(num_bytes: int, num_tensors: int, *, prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors of random bytes: a store or a network that compresses would look too good."""
    import torch

    ends = [num_bytes * number // num_tensors for number in range(num_tensors + 1)]
    return {
        f"{prefix}tensor.{number}": torch.empty(ends[number + 1] - ends[number], dtype=torch.uint8).random_()
        for number in range(num_tensors)
    }
