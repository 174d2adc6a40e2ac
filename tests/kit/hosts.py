"""Hosts with a fast place each: ranks on one machine, with a directory for each host."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.kit.options import make_options

import cloudckpt
from cloudckpt import CheckpointManager
from cloudckpt.manager.steps import build_metadata

WAIT_S = 60.0
NUM_OBJECTS = 5


class Warnings(logging.Handler):
    """The warnings of this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("cloudckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def host_of(tmp_path: Path, host: int | None = None) -> Path:
    """The fast place of a host; by default, of this rank's, which has a host alone."""
    return tmp_path / f"host-{dist.get_rank() if host is None else host}" / "fast"


def manager_of(tmp_path: Path, host: int | None = None, root: str = "bucket", **settings: Any) -> CheckpointManager:
    return CheckpointManager(
        tmp_path / root, **{"fast": host_of(tmp_path, host), "fast_every": 1, "save_every": 10, **settings}
    )


def state_of(value: float, rank: int | None = None) -> dict[str, Any]:
    """A shard of this rank, a tensor that all ranks hold, and a value."""
    own = dist.get_rank() if rank is None else rank
    return {
        f"own-{own}": torch.full((3000,), value),
        "shared": torch.full((2000,), value),
        "other": torch.full((2000,), value),
        "step": int(value),
    }


def save_all(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, state_of(float(step)))
        manager.wait(WAIT_S)


def restore(manager: CheckpointManager, **settings: Any) -> tuple[int, str] | None:
    """The step, and the name of its place. Checks that all of it is of one save."""
    state = state_of(-1.0)
    found = manager.restore(state, **settings)
    if found is None:
        return None
    for name, value in state.items():
        numbers = set(value.tolist()) if isinstance(value, torch.Tensor) else {value}
        assert numbers == {found.step}, name
    return found.step, Path(found.uri).parent.name


def on_rank(rank: int, action: Callable[[], object]) -> None:
    """Let one rank act while the others wait."""
    dist.barrier()
    if dist.get_rank() == rank:
        action()
    dist.barrier()


def hosts_of(tmp_path: Path, root: str | Path, *, value: float = 1.0) -> list[Path]:
    """Two hosts, each with the manifest and about half the objects of one owed step."""
    whole = tmp_path / "whole"
    record = {"root": str(root), "is_owed": True, "may_overwrite": False}
    options = make_options(object_bytes=4096, tile_bytes=4096, metadata={**build_metadata(5, {}), "fast": record})
    state = {f"t{number}": torch.full((1000,), value + number) for number in range(NUM_OBJECTS)}
    cloudckpt.save(state, whole / "step-5", no_dist=True, options=options)
    objects = sorted((whole / "step-5/data").rglob("*.safetensors"))
    assert len(objects) == NUM_OBJECTS
    hosts = [tmp_path / "a", tmp_path / "b"]
    for number, host in enumerate(hosts):
        shutil.copytree(whole, host)
        for path in objects[number::2]:
            (host / path.relative_to(whole)).unlink()
    shutil.rmtree(whole)
    return hosts
