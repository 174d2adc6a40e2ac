"""Places for the commands and the doctor to work on, and a way to run commands as the entry point does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.conftest import (  # noqa: F401  # fixtures
    _chosen,
    _places_of,
    local,
    on_server,
    place,
    s3,
    s3_server,
    servers,
)
from tests.kit.places import Place

import cloudckpt
from cloudckpt.cli import main

PYTHON = re.compile(
    r"\b(?:overwrite|skip_non_tensors|dry_run|allow_pickle|anonymous)(?:=| is )(?:True|False)\b"
    r"|\b(?:storage_options|older_than|timeout_s|deadline_s|max_shard_bytes)\b|\b(?:cloudckpt\.[a-z_]+|ObjectStoreReader)\("
)
"""Advice that nobody can follow at a prompt."""

HERE = Path(__file__).parent


OLD_ATTEMPT = "20200101T000000000Z-0123456789ab"
"""The id of an attempt that began long ago."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `place` on each place that ``--places`` names."""
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", _chosen(metafunc.config), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is tied to a place that ``--places`` does not name, such as ``--places rgw``."""
    names = set(_chosen(config))
    left_out = {item for item in items if item.path.is_relative_to(HERE) and not _places_of(item) <= names}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@dataclass(frozen=True)
class Ended:
    """A command that has run."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The entry point, in this process; nothing here is a terminal."""

    def call(*arguments: str) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        code = end.value.code
        assert "Traceback" not in err
        assert not PYTHON.search(err), err  # there is nobody who could pass an argument
        return Ended(code=code if isinstance(code, int) else 0, out=out, err=err)

    return call


def state_of(fill: float = 1.0) -> dict[str, Any]:
    """Tensors of several kinds, and a value."""
    return {
        "model": {"w": torch.full((300, 10), fill), "b": torch.arange(7, dtype=torch.bfloat16)},
        "optim": {"step": 17, "lr": [0.5, float("nan")]},
    }


def save(uri: str, state: dict[str, Any] | None = None, **settings: Any) -> None:
    """A checkpoint there."""
    cloudckpt.save(state if state is not None else state_of(), uri, no_dist=True, **settings)


def leave_unfinished(at: Place, name: str, *, attempt: str) -> None:
    """What a save that died has left."""
    at.write(f"{name}/data/{attempt}/0-0.safetensors", b"x" * 1000)
    at.write(f"{name}/data/{attempt}/1-0.safetensors", b"x" * 500)
