"""OLMo-core with its real package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.frameworks.conftest import Jobs


def test_olmo_core(one_place: str, jobs: Jobs) -> None:
    """With the lines of the document, OLMo-core would save through its own writer, or load other values."""
    found = jobs.at(one_place, "olmo_fsdp")
    assert found["weights"][0] == found["weights"][1]
    assert found["moments"][0] == found["moments"][1]
