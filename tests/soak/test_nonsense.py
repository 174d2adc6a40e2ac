"""Trouble is never taken for absence or damage: a real gateway behind a proxy that answers nonsense.

``CLOUDCKPT_SOAK_S`` says for how many seconds, ``CLOUDCKPT_SOAK_SEED`` which answers are replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tests.soak.nonsense import check_nonsense

from cloudckpt.testing.servers import Server

SECONDS = float(os.environ.get("CLOUDCKPT_SOAK_S", "180"))
SEED = int(os.environ.get("CLOUDCKPT_SOAK_SEED", "1"))


@pytest.mark.timeout(SECONDS + 1800)
def test_nonsense_loses_no_step_and_replaces_none(rgw: Server, use: Callable[[Server], str]) -> None:
    """If this fails, a proxy's nonsense made a job start afresh, go back, or lose or replace a committed step."""
    check_nonsense(rgw, f"{use(rgw)}/run", seconds=SECONDS, seed=SEED)
