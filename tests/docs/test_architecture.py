"""The inventory in architecture.md of the places where a call waits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "cloudckpt"
WAITS = re.compile(
    r"\.(?:wait|wait_for|acquire|synchronize|result)\(|\btime\.sleep\(|(?<!['\"])\.join\((?:timeout\S*)?\)"
)
"""A wait for an event, a lock, a stream, a thread or a future. ``"".join`` and ``path.join`` wait for nothing."""
NOT_OF_A_CALL = ("cli", "integrations", "telemetry", "testing")


def waiting_modules() -> list[str]:
    modules = (path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in NOT_OF_A_CALL)
    return sorted(str(path.relative_to(PACKAGE)) for path in modules if WAITS.search(path.read_text()))


@pytest.mark.parametrize("module", waiting_modules())
def test_a_module_that_waits_is_named(module: str) -> None:
    """If this fails, who looks for the reason of a wait does not find the place."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## Where a call waits")[2].partition("\n## ")[0]
    assert f"`{module}`" in section
