"""What a module here says where its framework is not installed, or another than it was tried with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cloudckpt.errors import MissingDependencyError

TRIED = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "ray[train]": "2.60.0",
    "torchtitan": "0.3.0",
    "transformers": "5.23.0",
}
"""The versions that ``make frameworks`` runs."""


@contextmanager
def needed(distribution: str, *, beside: str = "") -> Iterator[None]:
    """Imports of that package's, below. Raises `MissingDependencyError` for what is not there.

    `beside` is what to say of a package that is easily taken for it.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(
            f"this needs {distribution}, and was tried with its version {TRIED[distribution]}: {error}. "
            f"pip install '{distribution}=={TRIED[distribution]}'{beside}"
        ) from error
