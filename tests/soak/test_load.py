"""64 writers and 64 readers at once against Ceph's gateway, for minutes, one call in twenty going wrong.

``CLOUDCKPT_SOAK_S`` says for how many seconds, ``CLOUDCKPT_SOAK_SEED`` with which faults.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.resources import MIB
from tests.soak.clients import CALL_BOUND_S, PHASES, Shape
from tests.soak.load import check_history, check_resources, check_store, run_load

from cloudckpt.testing.servers import Server

SHAPE = Shape(num_processes=4, stepping=6, overwriting=4, racing=3, contesting=3, loading=16)
SECONDS = float(os.environ.get("CLOUDCKPT_SOAK_S", "180"))
SEED = int(os.environ.get("CLOUDCKPT_SOAK_SEED", "1"))
_JUDGING_S = 600.0


@pytest.mark.timeout(2 * SECONDS + (len(PHASES) + 1) * CALL_BOUND_S + _JUDGING_S)
def test_64_writers_and_64_readers(rgw: Server, use: Callable[[Server], str], tmp_path: Path) -> None:
    """If this fails, a busy bucket loses, mixes or hides checkpoints, or clients hang or grow."""
    assert (SHAPE.num_writers, SHAPE.num_readers) == (64, 64)
    root = f"{use(rgw)}/run"
    outcome = run_load(rgw, root, tmp_path, shape=SHAPE, seconds=SECONDS, seed=SEED)
    print(outcome.summary())
    check_history(outcome, root)
    print(check_store(outcome, rgw, root))
    check_resources(outcome, most_growth_bytes=64 * MIB, most_sockets=14)
