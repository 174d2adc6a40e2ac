"""The metrics of a run's checkpoints, and the best checkpoint by each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from cloudckpt._display import title_of
from cloudckpt._messages import did_you_mean, find_near
from cloudckpt.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from cloudckpt.inspect.catalog import CheckpointInfo, Mode

BEST: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[min:|max:]METRIC",
        help="Mark the lowest (min:) or highest (max:) value of METRIC; may be given several times.",
        show_default=False,
    ),
]
_STEP = re.compile(r"step[-_=]?([0-9]+)|([0-9]+)$")


def step_of(info: CheckpointInfo) -> int | None:
    """Return the step of a manager's checkpoint, or the number that ends its name."""
    step = info.metadata.get("step")
    if isinstance(step, int) and not isinstance(step, bool):
        return step
    match = _STEP.search(info.name)
    return None if match is None else int(match[1] or match[2])


def find_metrics(infos: Sequence[CheckpointInfo]) -> list[str]:
    """Return the names of all metrics, in the order of their first appearance."""
    return list(dict.fromkeys(name for info in infos for name in info.metrics))


def choose_modes(infos: Sequence[CheckpointInfo], texts: Sequence[str] | None) -> dict[str, Mode]:
    """Return the direction of each metric that has one: `texts` as ``min:NAME``, or known by a word of its name.

    Raises `CheckpointNotFoundError` for a metric that no checkpoint has, and Typer's error without a direction.
    """
    from cloudckpt.inspect.catalog import mode_of_name

    names = find_metrics(infos)
    modes: dict[str, Mode] = {name: mode for name in names if (mode := mode_of_name(name)) is not None}
    for text in texts or ():
        prefix, _, name = text.partition(":")
        name = name if prefix in ("min", "max") else text
        if name not in names:
            near = find_near(
                name, [*names, *(f"{mode}:{metric}" for mode in ("min", "max") for metric in names if ":" in text)]
            )
            hint = did_you_mean(near) or f". There are: {', '.join(map(title_of, names)) or 'none'}."
            raise CheckpointNotFoundError(f"no checkpoint has the metric {name!r}{hint}", uri="")
        if name == text and name not in modes:
            raise typer.BadParameter(
                f"say which value of {name} is the best: min:{name} or max:{name}", param_hint="--best"
            )
        if name != text:
            modes[name] = "min" if prefix == "min" else "max"
    return modes


def find_removed(infos: Sequence[CheckpointInfo]) -> dict[int, dict[str, float]]:
    """Return the metrics of steps that exist no longer, by step, as the newest checkpoint has them."""
    from cloudckpt.inspect.catalog import parse_earlier_metrics

    metadata = next((info.metadata for info in reversed(infos) if info.state == "committed"), {})
    existing = {step_of(info) for info in infos if info.state not in ("garbage", "referenced")}
    return {step: metrics for step, metrics in parse_earlier_metrics(metadata).items() if step not in existing}


REMOVED_NOTE = (
    "Points in grey, or ◦, are removed steps: the newest step keeps their metrics, up to the last 1,000 values. The "
    "best is a step that exists."
)


def find_best(infos: Sequence[CheckpointInfo], modes: Mapping[str, Mode]) -> dict[str, CheckpointInfo]:
    """Return the best checkpoint by each metric. `infos` is sorted by time; of equal ones the newest is the best."""
    best: dict[str, CheckpointInfo] = {}
    committed = (info for info in infos if info.state == "committed")
    # A step that was saved again counts once.
    newest = {info.name if (step := step_of(info)) is None else step: info for info in committed}
    for name, mode in modes.items():
        sign = 1 if mode == "min" else -1
        for info in newest.values():
            value = info.metrics.get(name, math.nan)
            if math.isfinite(value) and (name not in best or sign * value <= sign * best[name].metrics[name]):
                best[name] = info
    return best


def describe_modes(modes: Mapping[str, Mode], best_of: Mapping[str, CheckpointInfo]) -> str:
    """Describe the metrics with a best value: ``lowest val_loss, highest accuracy``."""
    return ", ".join(f"{'lowest' if modes[name] == 'min' else 'highest'} {title_of(name)}" for name in best_of)


def mark_best(info: CheckpointInfo, name: str, best_of: Mapping[str, CheckpointInfo]) -> str:
    """Return the value of a metric as a cell of a table, with ``*`` at the best one."""
    value = info.metrics.get(name)
    return "" if value is None else f"{'* ' if best_of.get(name) is info else ''}{value:.6g}"
