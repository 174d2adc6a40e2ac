"""Integrations with training frameworks: one module for each framework, and only that module imports it.

Here is what several of them need: errors for a framework that is not installed, and for a training that would meet
steps that exist already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from cloudckpt.dcp.protocol import Coordinator
from cloudckpt.errors import CheckpointExistsError, MissingDependencyError
from cloudckpt.manager.steps import Steps
from cloudckpt.options import Options
from cloudckpt.uri import parse_location

TESTED_VERSIONS = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "megatron-core": "0.19.2",
    "ray[train]": "2.60.0",
    "torch_checkpointing": "0.1.1",
    "torchtitan": "0.3.0",
    "transformers": "5.23.0",
    "verl": "0.9.1",
}
"""The versions that ``make frameworks`` tests."""
_MAX_SHOWN = 5


@contextmanager
def require(distribution: str, *, note: str = "") -> Iterator[None]:
    """Raise `MissingDependencyError` if an import from `distribution` inside the context fails.

    `note` is appended to the message, for example to name a package that is easily confused with `distribution`.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(
            f"{distribution} cannot be imported: {error}. This integration is tested with version "
            f"{TESTED_VERSIONS[distribution]}: pip install '{distribution}=={TESTED_VERSIONS[distribution]}'{note}"
        ) from error


def find_steps(root: str, options: Options) -> list[int]:
    """Return the committed steps on all ranks, lowest first. Rank 0 lists them and reads only the manifests' heads.

    Steps of torch's own writer are included, because a save would collide with them too. Raises torch's
    ``CheckpointException`` on all ranks if the store fails.
    """

    def find() -> list[int]:
        steps = Steps(parse_location(root), options)
        return sorted({*(info.step for info in steps.find_committed(with_metrics=False)), *steps.find_torch_steps()})

    return Coordinator(None, no_dist=False, root=root, timeout_s=options.timeout_s).broadcast("find", find)


def refuse_existing_steps(root: str, steps: Collection[int], *, after: int | None, hint: str) -> None:
    """Raise `CheckpointExistsError` if there are steps above `after`, or any step if `after` is None.

    Without this check, training would collide with them hours later, or its retention would remove them.
    """
    existing = [step for step in sorted(steps) if after is None or step > after]
    if not existing:
        return
    shown = ", ".join(map(str, existing[:_MAX_SHOWN])) + (", …" if len(existing) > _MAX_SHOWN else "")
    starts = "starts from scratch" if after is None else f"continues from step {after}"
    raise CheckpointExistsError(
        f"training {starts}, but {root} already has step{'s' if len(existing) > 1 else ''} {shown}. {hint}", uri=root
    )
