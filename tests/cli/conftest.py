"""Places for the commands and the doctor to work on, and a way to run commands as the entry point does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.e2e.conftest import (  # noqa: F401  # fixtures and hooks
    local,
    on_server,
    place,
    pytest_collection_modifyitems,
    pytest_generate_tests,
    s3,
    s3_server,
)
from tests.kit.places import Place

import cloudckpt
from cloudckpt.cli import main

PYTHON = re.compile(
    r"\b(?:overwrite|skip_non_tensors|dry_run|allow_pickle|anonymous)(?:=| is )(?:True|False)\b"
    r"|\b(?:storage_options|older_than|timeout_s|deadline_s|max_shard_bytes)\b|\b(?:cloudckpt\.[a-z_]+|ObjectStoreReader)\("
)
"""Advice that nobody can follow at a prompt."""

OLD_ATTEMPT = "20200101T000000000Z-0123456789ab"
"""The id of an attempt that began long ago."""


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
    """Write the remains of a save that died."""
    at.write(f"{name}/data/{attempt}/0-0.safetensors", b"x" * 1000)
    at.write(f"{name}/data/{attempt}/1-0.safetensors", b"x" * 500)
