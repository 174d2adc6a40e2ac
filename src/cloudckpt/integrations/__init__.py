"""Integrations with training frameworks: one module for each framework, and only that module imports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cloudckpt.errors import MissingDependencyError

TESTED_VERSIONS = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "ray[train]": "2.60.0",
    "torchtitan": "0.3.0",
    "transformers": "5.23.0",
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
