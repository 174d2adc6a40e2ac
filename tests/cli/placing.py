"""On which places the commands are tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.conftest import _places_of


def names_of(config: pytest.Config) -> tuple[str, ...]:
    """Return the places that ``--places`` names."""
    return tuple(name.strip() for name in config.getoption("--places").split(","))


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Each place in turn, for whoever asks for one."""
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", names_of(metafunc.config), indirect=True)


def leave_out_others(config: pytest.Config, items: list[pytest.Item], here: Path) -> None:
    """What is tied to a place that is not chosen, of the tests that lie `here`; as the end-to-end tests do."""
    names = set(names_of(config))
    left_out = {item for item in items if item.path.is_relative_to(here) and not _places_of(item) <= names}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
