"""A short run of `tests/soak/test_nonsense.py`."""

from __future__ import annotations

from collections.abc import Callable

from tests.soak.nonsense import check_nonsense

from cloudckpt.testing.servers import Server


def test_nonsense_loses_no_step_and_replaces_none(rgw: Server, use: Callable[[Server], str]) -> None:
    """If this fails, a proxy's nonsense made a job start afresh, go back, or lose or replace a committed step."""
    check_nonsense(rgw, f"{use(rgw)}/run", seconds=20, seed=1)
