"""Saves of a model of which 2 % train, with and without references to what has not changed.

``python -m benchmarks.unchanged --fasts3-binary …``. The bucket is a server on loopback, with 30 ms to the first byte.
Both take turns, each save after a small step of training. Medians count.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import cloudckpt
from benchmarks import servers
from benchmarks.figures import Figure, text

MIB = 1 << 20
NUM_TENSORS = 50
_LATENCY_S = 0.03


class Bench:
    """The measures, over two runs in one bucket: one that refers, and one that sends all."""

    def __init__(self, server: servers.Server, *, num_bytes: int, repetitions: int) -> None:
        self._num_bytes, self._repetitions = num_bytes, repetitions
        numel = num_bytes // NUM_TENSORS // 4
        self._state = {
            f"layer.{number}": torch.arange(numel, dtype=torch.int32) + number for number in range(NUM_TENSORS)
        }
        storage_options = {"endpoint_url": server.endpoint_url, "region": server.region}
        self._managers = {
            kind: cloudckpt.CheckpointManager(
                f"{server.uri}/{kind}",
                keep_last=1,
                options=cloudckpt.Options(storage_options=storage_options, unchanged=kind),
            )
            for kind in ("reference", "send")
        }
        self._steps = itertools.count(1)
        self.gb_per_s: dict[str, list[float]] = {}

    def figures(self) -> Iterator[Figure]:
        """Measure everything, and give each figure."""
        shares: list[float] = []
        blocked: list[float] = []
        whole: list[float] = []
        hash_s_per_gb = [self._hash_seconds() / self._num_bytes * 1e9 for _ in range(self._repetitions)]
        for turn in range(self._repetitions + 1):
            sent, blocked_s, taken_s = {}, {}, {}
            for kind in ("reference", "send") if turn % 2 else ("send", "reference"):
                sent[kind], blocked_s[kind], taken_s[kind] = self._save(kind)
            if turn:  # the first turn has nothing to refer to
                shares.append(sent["reference"] / sent["send"])
                blocked.append(blocked_s["reference"] / blocked_s["send"])
                whole.append(taken_s["reference"] / taken_s["send"])
                for kind, seconds in taken_s.items():
                    self.gb_per_s.setdefault(f"checkpoint committed, {kind}", []).append(
                        self._num_bytes / seconds / 1e9
                    )
        name = f"{self._num_bytes / MIB:g} MiB, {100 / NUM_TENSORS:g} % train"
        for formula, sense, bar, values in (
            ("bytes sent ÷ bytes of the checkpoint", "≤", 0.03, shares),
            ("seconds that `async_save` blocks, with references ÷ without", "≤", 1.05, blocked),
            ("seconds until the commit, with references ÷ without", "≤", None, whole),
            ("CPU seconds of hashing per GB", "≤", 0.06, hash_s_per_gb),
        ):
            yield Figure(name=name, formula=formula, sense=sense, bar=bar, values=tuple(values))

    def _save(self, kind: str) -> tuple[int, float, float]:
        """Return the bytes that one save sends, the seconds that it blocks, and those until its commit."""
        self._state["layer.0"] += 1
        gc.collect()
        begun_s = time.perf_counter()
        handle = self._managers[kind].save(next(self._steps), self._state)
        blocked_s = time.perf_counter() - begun_s
        if not isinstance(handle, cloudckpt.AsyncSave):
            raise TypeError(f"the save of {kind} gave {handle!r}")
        report = handle.result(600).report
        taken_s = time.perf_counter() - begun_s
        self._managers[kind].wait(600)
        if report is None:
            raise RuntimeError("the save has no report")
        return report.num_bytes, blocked_s, taken_s

    def _hash_seconds(self) -> float:
        """Return the CPU seconds of hashing the state as a save does."""
        import xxhash  # noqa: PLC0415

        begun_s = time.process_time()
        for tensor in self._state.values():
            hasher = xxhash.xxh3_128()
            view = memoryview(tensor.numpy()).cast("B")
            for begin in range(0, len(view), 8 * MIB):
                hasher.update(view[begin : begin + 8 * MIB])
        return time.process_time() - begun_s


def main(argv: list[str] | None = None) -> int:
    """Return 0 where all bars are met, 1 where one is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unchanged", description=__doc__)
    parser.add_argument("--fasts3-binary", type=Path, required=True, help="the server")
    parser.add_argument("--mib", type=int, default=1000, help="of the state (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=7, help="after one that warms up (default: %(default)s)")
    parser.add_argument("--mb-per-s", type=float, default=0, help="of a connection (default: as loopback gives)")
    arguments = parser.parse_args(argv)
    bytes_per_s = arguments.mb_per_s * 1e6
    with servers.fasts3(arguments.fasts3_binary, latency_s=_LATENCY_S, bytes_per_s=bytes_per_s) as server:
        os.environ |= servers.environment(None)
        bench = Bench(server, num_bytes=arguments.mib * MIB, repetitions=arguments.repetitions)
        figures = list(bench.figures())
    print(text(figures, bench.gb_per_s))
    return int(any(not figure.verdict.startswith("met") for figure in figures if figure.bar is not None))


if __name__ == "__main__":
    sys.exit(main())
