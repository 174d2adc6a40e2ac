"""Writers and readers at once against Ceph's gateway, one call in twenty going wrong: ``tests/soak`` for seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.resources import MIB
from tests.soak.clients import Shape
from tests.soak.load import check_history, check_resources, check_store, run_load

from cloudckpt.testing.servers import Server

SHAPE = Shape(num_processes=2, stepping=1, overwriting=1, racing=1, contesting=1, loading=4)
SECONDS = 10.0


@pytest.mark.parametrize("seed", [1])
def test_eight_writers_and_eight_readers(rgw: Server, use: Callable[[Server], str], tmp_path: Path, seed: int) -> None:
    """If this fails, a busy bucket loses, mixes or hides checkpoints, or clients hang or grow."""
    root = f"{use(rgw)}/run"
    outcome = run_load(rgw, root, tmp_path, shape=SHAPE, seconds=SECONDS, seed=seed)
    print(outcome.summary())
    check_history(outcome, root)
    print(check_store(outcome, rgw, root))
    check_resources(outcome, most_growth_bytes=48 * MIB, most_sockets=14)
