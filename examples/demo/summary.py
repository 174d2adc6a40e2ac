"""Compares the runs, and tells in a short table what was saved and loaded and what it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .ranks import read_record

MEGABYTE = 1_000_000

Check = Callable[[bool, str], None]


def losses_by_step(records: Path, name: str) -> dict[int, float]:
    """The losses of a run, as its first rank noted them; JSON keeps every bit of a float."""
    return {line["step"]: line["loss"] for line in read_record(records / f"{name}-0.jsonl", "loss")}


def compare_losses(records: Path, *, names: Sequence[str], num_steps: int, check: Check) -> None:
    """Hold the runs of one job, the last of which ends well, against the one that nothing interrupted."""
    expected = losses_by_step(records, "undisturbed")
    runs = [losses_by_step(records, name) for name in names]
    check(sorted(expected) == list(range(1, num_steps + 1)), "the undisturbed run lacks steps")
    missing = sorted(set(expected).difference(*runs))
    different = sorted(step for losses in runs for step, loss in losses.items() if loss != expected.get(step))
    check(not missing, f"no run but the undisturbed one got to steps {missing}")
    check(num_steps in runs[-1], f"the {names[-1]} run did not get to step {num_steps}")
    check(not different, f"the losses of {names} differ at steps {different}")
    equal = "no" if missing or different else "yes"
    last_loss = expected.get(num_steps, float("nan"))
    print(f"    losses equal: {equal:<4} ({num_steps} steps, the last {last_loss:.6f}, of: {', '.join(names)})")


def compare_logits(records: Path, *, names: Sequence[str], check: Check) -> None:
    """Hold the logits that each run computed on the fixed batch against the first one's."""
    tensors = [torch.load(records / f"{name}.logits.pt", weights_only=True) for name in names]
    different = [
        name
        for name, logits in zip(names, tensors, strict=True)
        if not torch.equal(logits, tensors[0]) or not logits.isfinite().all()
    ]
    check(not different, f"the logits of {different} differ from those of {names[0]}")
    shape = " x ".join(map(str, tensors[0].shape))
    print(f"    logits equal: {'no' if different else 'yes':<4} ({shape}, of: {', '.join(names)})")


def print_table(records: Path, *, num_ranks: int, other_num_ranks: Iterable[int]) -> None:
    """One line for each run: what it saved or loaded, and the seconds of its slowest rank in each phase."""
    print(f"\n    {'saving':<13}{'steps':>8}{'saves':>7}{'MB':>8}{'training stood':>16}", end="")
    print(f"{'plan':>8}{'upload':>8}{'commit':>8}   seconds per save")
    for name in ("killed", "resumed"):
        ranks = [read_record(records / f"{name}-{rank}.jsonl", "saved") for rank in range(num_ranks)]
        staged = [read_record(records / f"{name}-{rank}.jsonl", "staged") for rank in range(num_ranks)]
        all_steps = sorted(losses_by_step(records, name))
        steps = f"{all_steps[0]}-{all_steps[-1]}"
        print(
            f"    {name:<13}{steps:>8}{len(ranks[0]):>7}{_megabytes(ranks, 'num_bytes'):>8.1f}"
            f"{_mean_of_slowest(staged, 'seconds'):>16.3f}{_mean_of_slowest(ranks, 'plan_s'):>8.3f}"
            f"{_mean_of_slowest(ranks, 'write_s'):>8.3f}{_mean_of_slowest(ranks, 'commit_s'):>8.3f}"
        )
    print(f"\n    {'loading':<13}{'ranks':>8}{'':>7}{'MB':>8}{'':>16}{'plan':>8}{'read':>8}{'':>8}   seconds")
    loads = [("resumed", num_ranks), *((f"logits-{number}", number) for number in other_num_ranks)]
    for name, number in loads:
        ranks = [read_record(records / f"{name}-{rank}.jsonl", "loaded") for rank in range(number)]
        print(
            f"    {name:<13}{number:>8}{'':>7}{_megabytes(ranks, 'num_bytes_read'):>8.1f}{'':>16}"
            f"{_mean_of_slowest(ranks, 'plan_s'):>8.3f}{_mean_of_slowest(ranks, 'read_s'):>8.3f}"
        )


def _megabytes(lines_by_rank: list[list[dict[str, Any]]], name: str) -> float:
    return sum(line[name] for lines in lines_by_rank for line in lines) / MEGABYTE


def _mean_of_slowest(lines_by_rank: list[list[dict[str, Any]]], name: str) -> float:
    """Over the saves, the mean of the time that the slowest rank took."""
    slowest = [max(line[name] for line in lines) for lines in zip(*lines_by_rank, strict=False)]
    return sum(slowest) / len(slowest) if slowest else float("nan")
