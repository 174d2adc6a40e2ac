"""The demo on real servers and on a path: a rank killed in the middle of an upload, and nothing lost."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import Servers

import cloudckpt
from cloudckpt.stores import open_store
from cloudckpt.testing.servers import Server

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_TIMEOUT_S = 500.0


def run_demo(uri: str) -> str:
    """What it says, to the end; it exits with 1 where anything differs by a bit."""
    process = subprocess.run(
        # Fewer steps than `make demo` trains: it takes as many checkpoints, in a third of the time.
        [sys.executable, "-m", "examples.demo", "--steps", "8", "--uri", uri],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEMO_TIMEOUT_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


def check(said: str, uri: str) -> None:
    for line in (
        f"2 ranks on cpu, at {uri}/demo-",
        "resumed from step-4, the newest checkpoint",
        "losses equal: yes  (8 steps",
        "logits equal: yes  (4 x 64 x 256, of: undisturbed, resumed, logits-1, logits-4)",
    ):
        assert line in said, said
    # The other rank may have been stopped in the middle of its upload, too.
    assert re.search(r"step-6   not a checkpoint: no manifest, [12] unfinished upload", said), said
    # It lists and sweeps through the same store, so what is gone for it may only be hidden: ask for everything.
    store = open_store(uri, cloudckpt.Options())
    assert [info.key for info in store.list()] == []
    assert list(store.list_uploads()) == []


@pytest.mark.multirank
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["moto", "rgw", "ministack", "fake-gcs"])
def test_the_demo_on_a_server(servers: Servers, use: Callable[[Server], str], name: str) -> None:
    """Somebody who tries cloudckpt on their own store by its demo would see it fail, or find the bucket littered."""
    uri = f"{use(servers.up(name))}/run"
    check(run_demo(uri), uri)


@pytest.mark.multirank
@pytest.mark.timeout(600)
def test_the_demo_on_a_path(tmp_path: Path) -> None:
    """The same without any server."""
    uri = str(tmp_path / "run")
    check(run_demo(uri), uri)
