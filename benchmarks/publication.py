"""Versions of a model in training, published and pulled, beside saves and loads of the whole model.

``python -m benchmarks.publication --fasts3-binary …``. The bucket is a server on loopback, with 30 ms to the first byte
and 80 MB/s a connection. Weights in float32 are trained by AdamW with random gradients, and published as bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cloudckpt
from benchmarks import servers
from benchmarks.figures import Figure, text
from benchmarks.provenance import write_results

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
_LATENCY_S = 0.03
_STD = 0.02
"""The standard deviation of the weights, as in language models."""


class Training:
    """Master weights in float32, AdamW, and the model in bfloat16 that is published."""

    def __init__(self, *, num_bytes: int, num_tensors: int, lr: float) -> None:
        torch.manual_seed(0)
        rows = num_bytes // num_tensors // 2 // 2048
        self._masters = [nn.Parameter(torch.randn(rows, 2048) * _STD) for _ in range(num_tensors)]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr)
        self.model = model_like(self._masters)
        self.num_bytes = sum(parameter.nbytes for parameter in self.model.parameters())

    def step(self) -> None:
        """Take a step, and cast its weights."""
        for master in self._masters:
            master.grad = torch.randn_like(master)
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self._masters, strict=True):
                parameter.copy_(master)


def model_like(masters: list[nn.Parameter]) -> nn.Module:
    """Return a model in bfloat16 with tensors of these shapes."""
    return nn.ParameterList([nn.Parameter(master.detach().bfloat16()) for master in masters])


def figures_of(training: Training, root: str, options: cloudckpt.Options, *, repetitions: int) -> Iterator[Figure]:
    """Measure, by turns, and give each figure."""
    publisher = cloudckpt.Publisher(f"{root}/policy", anchor_every=20, options=options)
    reading, whole = model_like([*training.model.parameters()]), model_like([*training.model.parameters()])
    values: dict[str, list[float]] = {}
    sent_bytes = 0
    for version in range(repetitions + 1):
        training.step()
        gc.collect()
        report, publish_s = timed(publisher.publish, model=training.model, version=version)
        weights, pull_s = timed(cloudckpt.pull, f"{root}/policy", model=reading, options=options)
        saved_at = f"{root}/whole/step-{version}"
        _, save_s = timed(cloudckpt.save, saved_at, model=training.model, random_state=False, options=options)
        _, load_s = timed(cloudckpt.load, saved_at, model=whole, options=options)
        for one, two in zip(reading.parameters(), training.model.parameters(), strict=True):
            if not torch.equal(one.view(torch.int16), two.view(torch.int16)):
                raise RuntimeError(f"version {version} is not what was published")
        cloudckpt.delete(saved_at, options=options)
        sent_bytes += report.num_bytes
        if version and not weights.starts_at_anchor and report.num_bytes_unchanged:
            for name, value in (
                ("bytes sent ÷ bytes of the model, of a difference", report.num_bytes / training.num_bytes),
                ("seconds to publish ÷ to save whole", publish_s / save_s),
                ("seconds to pull ÷ to load whole", pull_s / load_s),
                ("seconds to publish", publish_s),
                ("seconds to pull", pull_s),
                ("seconds to save whole", save_s),
                ("seconds to load whole", load_s),
            ):
                values.setdefault(name, []).append(value)
    bars = {"bytes sent ÷ bytes of the model, of a difference": 0.1, "seconds to pull ÷ to load whole": 0.3}
    name = f"{training.num_bytes / MIB:g} MiB"
    for formula, measured in values.items():
        yield Figure(name=name, formula=formula, sense="≤", bar=bars.get(formula), values=tuple(measured))
    share = sent_bytes / training.num_bytes / (repetitions + 1)
    formula = f"bytes sent ÷ bytes of the model, over {repetitions + 1} versions with anchors"
    yield Figure(name=name, formula=formula, sense="≤", bar=0.1, values=(share,))


def timed(act: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Any, float]:
    """Return the result of a call, and the seconds that it takes."""
    begun_s = time.perf_counter()
    result = act(*args, **settings)
    return result, time.perf_counter() - begun_s


def main(argv: list[str] | None = None) -> int:
    """Return 0 where all bars are met, 1 where one is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publication", description=__doc__)
    parser.add_argument("--fasts3-binary", type=Path, required=True, help="the server")
    parser.add_argument("--mib", type=int, default=1000, help="of the model (default: %(default)s)")
    parser.add_argument("--tensors", type=int, default=50, help="of the model (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-6, help="of AdamW (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=19, help="after the first (default: %(default)s)")
    parser.add_argument("--mb-per-s", type=float, default=80, help="of a connection (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="write everything there as JSON")
    arguments = parser.parse_args(argv)
    bytes_per_s = arguments.mb_per_s * 1e6
    training = Training(num_bytes=arguments.mib * MIB, num_tensors=arguments.tensors, lr=arguments.lr)
    with servers.fasts3(arguments.fasts3_binary, latency_s=_LATENCY_S, bytes_per_s=bytes_per_s) as server:
        os.environ |= servers.environment(None)
        storage_options = {"endpoint_url": server.endpoint_url, "region": server.region}
        options = cloudckpt.Options(storage_options=storage_options)
        figures = list(figures_of(training, server.uri, options, repetitions=arguments.repetitions))
    print(text(figures, {}))
    if arguments.results is not None:
        write_results(arguments.results, ROOT, figures=[*map(asdict, figures)])
    return int(any(not figure.verdict.startswith("met") for figure in figures if figure.bar is not None))


if __name__ == "__main__":
    sys.exit(main())
