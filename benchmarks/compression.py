"""Measure the cost and the gain of compressing a checkpoint here.

``python -m benchmarks.compression`` saves and loads, plainly and through `cloudckpt.Zstandard`, by turns in one run,
in memory or at ``--uri``: tensors of a model's weights as training has them (bfloat16 and float32), and what
compresses (masks, tokens, weights of which most are zero).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import uuid
from collections.abc import Callable

import torch

import cloudckpt

MIB = 1 << 20


def payloads(num_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    """One tensor for each kind of content."""
    torch.manual_seed(seed)
    weights = torch.randn(num_bytes // 4)
    sparse = weights.clone()
    sparse[torch.rand(len(sparse)) < 0.9] = 0.0
    return {
        "weights, float32": weights * 0.02,
        "weights, bfloat16": (torch.randn(num_bytes // 2) * 0.02).to(torch.bfloat16),
        "weights, 90 % zeros": sparse,
        "tokens below 50,000, int64": torch.randint(0, 50_000, (num_bytes // 8,)),
        "zeros": torch.zeros(num_bytes // 4),
    }


def measured(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of CPU time."""
    begun_s, before = time.monotonic(), os.times()
    call()
    after = os.times()
    return time.monotonic() - begun_s, after.user + after.system - before.user - before.system


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__)
    parser.add_argument("--uri", default=f"memory://compression-{uuid.uuid4().hex[:8]}", help="where to save; removed")
    parser.add_argument("--mib", type=int, default=64, help="size of each tensor")
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    zstd = cloudckpt.Options(extensions=[cloudckpt.Zstandard(level=args.level, threads=args.threads)])
    print(f"{args.mib} MiB of each, level {args.level}, {args.threads} threads, torch {torch.__version__}, medians of "
          f"{args.repetitions}, seed {args.seed}")  # fmt: skip
    print(f"{'content':28} {'how':6} {'stored':>8} {'save MB/s':>10} {'CPU s/GB':>9} {'load MB/s':>10} {'CPU s/GB':>9}")
    for content, tensor in payloads(args.mib * MIB, args.seed).items():
        num_gb = tensor.numel() * tensor.element_size() / 1e9
        found: dict[str, list[tuple[float, ...]]] = {"plain": [], "zstd": []}
        for number in range(args.repetitions):
            for how, options in (("plain", cloudckpt.Options()), ("zstd", zstd)):
                uri = f"{args.uri}/{content.split(',')[0].replace(' ', '-')}-{how}-{number}"
                save = measured(lambda: cloudckpt.save({"t": tensor}, uri, no_dist=True, options=options))  # noqa: B023  # called at once
                into = torch.ones_like(tensor)
                load = measured(lambda: cloudckpt.load({"t": into}, uri, no_dist=True))  # noqa: B023  # as above
                if not torch.equal(into, tensor):
                    raise SystemExit(f"{content} came back changed")
                found[how].append((cloudckpt.verify(uri).num_bytes / 1e9, *save, *load))
                cloudckpt.delete(uri)
        for how, rows in found.items():
            stored_gb, save_s, save_cpu_s, load_s, load_cpu_s = map(statistics.median, zip(*rows, strict=True))
            rates = f"{num_gb / save_s * 1e3:10.0f} {save_cpu_s / num_gb:9.2f} {num_gb / load_s * 1e3:10.0f}"
            print(f"{content:28} {how:6} {stored_gb / num_gb:8.1%} {rates} {load_cpu_s / num_gb:9.2f}")


if __name__ == "__main__":
    main()
