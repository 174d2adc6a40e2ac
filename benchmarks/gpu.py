"""Saves and loads of a GPU's tensors beside what its link to the host gives: ``python -m benchmarks.gpu``.

Everything is measured in one process, on one device, into a store in this process's memory: saves into one that takes
the bytes and keeps none, so that nothing but the link, the checksums and our own work can be slow. What is compared
takes turns; medians count. Without a CUDA device nothing is measured, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager

import cloudckpt
from benchmarks.figures import Figure, text
from benchmarks.measure import HighWaterPeak, NoPeak, PeakWatch, SampledPeak
from benchmarks.provenance import provenance
from benchmarks.sinks import Discarding, PacedSink, Sink

MIB = 1 << 20
GIB = 1 << 30
TENSOR_BYTES = 64 * MIB
ROOT = Path(__file__).resolve().parent.parent
NO_DEVICE = 2
_WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the state dicts."""

    save_bytes: int
    load_bytes: int
    async_bytes: int


class Bench:
    """The measures. On a CPU its figures mean nothing; that it runs there is for its tests."""

    training_s = 3.0
    """Length of the window before an upload, and of the one after it."""

    def __init__(self, device: torch.device, *, sizes: Sizes, repetitions: int) -> None:
        self._device = device
        self._sizes = sizes
        self._repetitions = repetitions
        self.gb_per_s: dict[str, list[float]] = {}
        """Rates from which the ratios are computed."""

    def figures(self) -> Iterator[Figure]:
        """Each as it is there. Memory comes first, while no pinned memory lies about that a save could take."""
        yield self._memory_of_a_save()
        yield self._save()
        yield from self._blocking()
        yield self._load()
        yield self._training()

    def _memory_of_a_save(self) -> Figure:
        options = cloudckpt.Options(advanced=cloudckpt.AdvancedOptions(wrap_store=Sink))
        cloudckpt.save(self._state(MIB), _uri(), options=options, no_dist=True)  # imports and contexts
        state = self._state(self._sizes.save_bytes)
        with _forgotten():
            peak = _peak_watch()
            cloudckpt.save(state, _uri(), options=options, no_dist=True)
            extra_bytes = peak.extra_bytes()
        return Figure(
            name=f"save, {_shown(self._sizes.save_bytes)}",
            formula="host memory at its peak over that before, MiB (staging_bytes + 256)",
            sense="≤",
            bar=options.staging_bytes / MIB + 256,
            values=() if extra_bytes is None else (extra_bytes / MIB,),
            failed="this system does not tell" if extra_bytes is None else None,
        )

    def _save(self) -> Figure:
        state = self._state(self._sizes.save_bytes)
        options = cloudckpt.Options(advanced=cloudckpt.AdvancedOptions(wrap_store=Sink))
        ratios = self._by_turns(
            "save",
            lambda: cloudckpt.save(state, _uri(), options=options, no_dist=True),
            "device to host",
            self._copy_to_host(state),
        )
        return Figure(
            name=f"save, {_shown(self._sizes.save_bytes)}",
            formula="GB/s into memory ÷ device-to-host rate, pinned",
            sense="≥",
            bar=0.85,
            values=tuple(1 / ratio for ratio in ratios),
        )

    def _blocking(self) -> Iterator[Figure]:
        state = self._state(self._sizes.async_bytes)
        options = cloudckpt.Options(advanced=cloudckpt.AdvancedOptions(wrap_store=Sink))
        formula = "seconds that it blocks ÷ one copy to pinned memory"
        name = f"async save, {_shown(self._sizes.async_bytes)}"

        def ours() -> Callable[[], object]:
            handle = cloudckpt.async_save(state, _uri(), options=options, no_dist=True)
            handle.staged.result(_WAIT_S)
            return lambda: handle.result(_WAIT_S)

        copy = self._copy_to_host(state)
        values = self._by_turns("async save, until staged", ours, "device to host", copy)
        yield Figure(name=name, formula=formula, sense="≤", bar=1.1, values=tuple(values))
        for theirs_name, new_stager in (("torch's own stager", lambda: None), ("torch's DefaultStager", DefaultStager)):

            def theirs(new_stager: Callable[[], Any] = new_stager) -> Callable[[], object]:
                # One for each save: torch 2.11's cannot stage a second time.
                response: Any = state_dict_saver.async_save(
                    state, storage_writer=Discarding(), async_stager=new_stager(), no_dist=True
                )
                if not hasattr(response, "staging_completion"):
                    return lambda: response.result(_WAIT_S)
                response.staging_completion.result(_WAIT_S)
                return lambda: response.upload_completion.result(_WAIT_S)

            try:
                values, failed = self._by_turns(f"{theirs_name}, until staged", theirs, "device to host", copy), None
            except Exception as error:  # noqa: BLE001  # torch's may refuse this machine; ours stands without it
                values, failed = [], f"{type(error).__name__}: {error}"
            yield Figure(
                name=f"{name}, {theirs_name}", formula=formula, sense="≤", bar=None, values=tuple(values), failed=failed
            )

    def _load(self) -> Figure:
        state = self._state(self._sizes.load_bytes)
        uri = _uri()
        cloudckpt.save(state, uri, no_dist=True)
        wanted = [tensor.sum().item() for tensor in state.values()]
        for tensor in state.values():
            tensor.zero_()
        ratios = self._by_turns(
            "load", lambda: cloudckpt.load(state, uri, no_dist=True), "host to device", self._copy_to_device(state)
        )
        cloudckpt.load(state, uri, no_dist=True)  # the copies have written over what was loaded
        if [tensor.sum().item() for tensor in state.values()] != wanted:
            raise RuntimeError("what was loaded is not what was saved")
        cloudckpt.delete(uri)
        return Figure(
            name=f"load, {_shown(self._sizes.load_bytes)}",
            formula="GB/s from memory ÷ host-to-device rate, pinned",
            sense="≥",
            bar=0.8,
            values=tuple(1 / ratio for ratio in ratios),
        )

    def _training(self) -> Figure:
        """Steps of a small model beside an upload at the rate of a network, and without it just before and after."""
        state = self._state(self._sizes.async_bytes)
        options = cloudckpt.Options(advanced=cloudckpt.AdvancedOptions(wrap_store=PacedSink))
        step = _training_step(self._device)
        self._steps_per_s(step, _for_s(1.0))
        ratios = []
        for repetition in range(self._repetitions + 1):
            before = self._steps_per_s(step, _for_s(self.training_s))
            handle = cloudckpt.async_save(state, _uri(), options=options, no_dist=True)
            handle.staged.result(_WAIT_S)
            beside = self._steps_per_s(step, handle.done)
            handle.result(_WAIT_S)
            after = self._steps_per_s(step, _for_s(self.training_s))
            if repetition:
                ratios.append(beside / ((before + after) / 2))
        return Figure(
            name=f"training beside an upload of {_shown(self._sizes.async_bytes)}",
            formula=f"steps a second at {PacedSink.BYTES_PER_S / 1e9:g} GB/s ÷ those without an upload",
            sense="≥",
            bar=0.97,
            values=tuple(ratios),
        )

    def _steps_per_s(self, step: Callable[[], None], is_over: Callable[[], bool]) -> float:
        self._finish()
        num_steps, started_s = 0, time.perf_counter()
        while not is_over():
            step()
            self._finish()
            num_steps += 1
        return num_steps / (time.perf_counter() - started_s)

    def _by_turns(self, name: str, operation: Callable[[], Any], base: str, copy: Callable[[], int]) -> list[float]:
        """Seconds for a byte of `operation` ÷ those of `copy`, turn by turn; the first turn warms up.

        What `operation` returns and can be called is its rest, which does not count.
        """
        num_bytes = {
            "save": self._sizes.save_bytes,
            "load": self._sizes.load_bytes,
        }.get(name, self._sizes.async_bytes)
        ratios = []
        for repetition in range(self._repetitions + 1):
            copied_bytes, copy_s = self._timed(copy)
            rest, operation_s = self._timed(operation)
            if callable(rest):
                rest()
            if repetition:
                self.gb_per_s.setdefault(base, []).append(copied_bytes / copy_s / 1e9)
                self.gb_per_s.setdefault(name, []).append(num_bytes / operation_s / 1e9)
                ratios.append((operation_s / num_bytes) / (copy_s / copied_bytes))
        return ratios

    def _timed(self, operation: Callable[[], Any]) -> tuple[Any, float]:
        gc.collect()
        self._finish()
        started_s = time.perf_counter()
        result = operation()
        self._finish()
        return result, time.perf_counter() - started_s

    def _copy_to_host(self, state: dict[str, torch.Tensor]) -> Callable[[], int]:
        """One copy of up to 4 GiB of the state into pinned memory that is in use already."""
        sources, buffers = self._pinned(state)

        def copy() -> int:
            for source, buffer in zip(sources, buffers, strict=True):
                buffer.copy_(source, non_blocking=True)
            return sum(source.nbytes for source in sources)

        return copy

    def _copy_to_device(self, state: dict[str, torch.Tensor]) -> Callable[[], int]:
        """The other way."""
        targets, buffers = self._pinned(state)

        def copy() -> int:
            for target, buffer in zip(targets, buffers, strict=True):
                target.copy_(buffer, non_blocking=True)
            return sum(target.nbytes for target in targets)

        return copy

    def _pinned(self, state: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tensors = list(state.values())[: 4 * GIB // TENSOR_BYTES]
        pinned = self._device.type == "cuda"
        return tensors, [torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in tensors]

    def _state(self, num_bytes: int) -> dict[str, torch.Tensor]:
        sizes = [TENSOR_BYTES] * (num_bytes // TENSOR_BYTES) + [num_bytes % TENSOR_BYTES] * (
            num_bytes % TENSOR_BYTES > 0
        )
        return {
            f"weight.{number}": torch.arange(size // 4, dtype=torch.int32, device=self._device) + number
            for number, size in enumerate(sizes)
        }

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _training_step(device: torch.device) -> Callable[[], None]:
    """A step of a decoder so small that Python limits it: the hardest case for a training loop."""
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(4, 64, 256, device=device)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _for_s(seconds: float) -> Callable[[], bool]:
    end_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end_s


@contextlib.contextmanager
def _forgotten() -> Iterator[None]:
    """Without garbage that could be freed, or lie about, meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _peak_watch() -> PeakWatch:
    for kind in (HighWaterPeak, SampledPeak):
        with contextlib.suppress(OSError):
            return kind()
    return NoPeak()


def _uri() -> str:
    return f"memory://gpu-benchmark/{uuid.uuid4().hex}"


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / GIB:g} GiB"


def main(argv: list[str] | None = None) -> int:
    """Return 0 where all bars are met, 1 where one is missed, 2 where there is no device, or one that is too small."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--gib", type=float, default=20, help="of the state that is saved (default: %(default)s)")
    parser.add_argument("--load-gib", type=float, default=8, help="of the one that is loaded (default: %(default)s)")
    parser.add_argument("--async-gib", type=float, default=4, help="of the one saved asynchronously (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="after one that warms up (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="write everything there as JSON")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured, and nothing is estimated", file=sys.stderr)
        return NO_DEVICE
    sizes = Sizes(
        save_bytes=int(arguments.gib * GIB),
        load_bytes=int(arguments.load_gib * GIB),
        async_bytes=int(arguments.async_gib * GIB),
    )
    free_bytes, _ = torch.cuda.mem_get_info()
    needed_bytes = 2 * max(sizes.save_bytes, sizes.load_bytes, sizes.async_bytes)
    if free_bytes < needed_bytes // 2 + GIB:
        print(f"{_shown(free_bytes)} are free on the device; ask for less: --gib, --load-gib", file=sys.stderr)
        return NO_DEVICE
    bench = Bench(torch.device("cuda"), sizes=sizes, repetitions=arguments.repetitions)
    about = {**provenance(ROOT), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    figures = []
    for figure in bench.figures():
        print(f"{figure.name}: {figure.formula}: {figure.verdict}", file=sys.stderr, flush=True)
        figures.append(figure)
        if arguments.results is not None:  # after each: a run that is interrupted keeps those that are complete
            document = {"provenance": about, "gb_per_s": bench.gb_per_s, "figures": [asdict(one) for one in figures]}
            arguments.results.write_text(json.dumps(document, indent=1) + "\n")
    print(text(figures, bench.gb_per_s))
    return int(any(figure.verdict.startswith(("MISSED", "not")) for figure in figures if figure.bar is not None))


if __name__ == "__main__":
    sys.exit(main())
