"""torchrun starts examples/elastic.py again after a rank died in the middle of a save, at each place.

``tests/examples/test_elastic.py`` looks closer, at one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.examples.test_elastic import lives_in, losses_in, train

from cloudckpt.testing.servers import clean_environment

if TYPE_CHECKING:
    from tests.frameworks.conftest import Place


def test_a_job_goes_on_after_a_rank_died(
    place: str, all_places: dict[str, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some store, a life that follows a death would begin anew, or with half a save."""
    wanted = clean_environment() | dict(all_places[place].environment)
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    output = train(f"{all_places[place].uri}/elastic", "--steps", "4", "--die-at", "3", num_ranks=2)
    first, second = lives_in(output)
    assert first == (0, 2, 1)
    assert second[1:] in {(2, 3), (2, 4)}, "step 2 was committed, and 3 is whole or not there"
    assert sorted(losses_in(output)) == [1, 2, 3, 4]
