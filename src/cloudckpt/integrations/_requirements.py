"""The versions of frameworks that are tested, and the error for a framework that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cloudckpt.errors import MissingDependencyError

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
