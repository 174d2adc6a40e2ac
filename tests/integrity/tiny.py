"""A checkpoint of a few kilobytes in memory, which can be damaged and read thousands of times within seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.kit.options import make_options
from tests.kit.ranks import ROOT, run_ranks
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import cloudckpt
from cloudckpt import ObjectStoreReader
from cloudckpt.commit.log import resolve
from cloudckpt.inspect.verification import Verification
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.stores.base import crc32c_of
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.uri import parse_location

OPTIONS = make_options(tile_bytes=4096, connections=1)
MANIFEST = "manifest.json"


def values(rank: int, fill: int = 0) -> dict[str, Any]:
    """Return what a rank saves; no two bytes in a row are the same, so that nothing can be swapped unseen."""
    numbers = torch.arange(1 + fill, 21 + fill)
    if rank == 0:
        return {
            "weight": numbers.to(torch.float32).sqrt().view(4, 5),
            "half": numbers[:7].to(torch.bfloat16) / 3,
            "step": 1234 + fill,
        }
    return {
        "index": numbers * 1_000_003,
        "mask": numbers % 3 == 0,
        "wave": torch.complex(numbers[:5].float(), -numbers[:5].float()),
    }


NAMES = [list(values(rank)) for rank in range(2)]


def blank() -> dict[str, Any]:
    """Return a blank state dict of the whole checkpoint, to load into."""
    state = values(0) | values(1)
    return {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for name, value in state.items()}


def save_on_ranks(directory: str, fill: int) -> None:
    cloudckpt.save(values(dist.get_rank(), fill), directory, options=OPTIONS)


def saved_on_two_ranks(directory: Path, fill: int = 0) -> dict[str, bytes]:
    """The objects of such a save, by their keys."""
    run_ranks(save_on_ranks, str(directory), fill, world_size=2)
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def told_by_module(name: str, *args: str) -> Any:
    """Run ``tests.integrity.NAME`` in a process of its own, and return what it prints as JSON."""
    answer = subprocess.run(
        [sys.executable, "-m", f"tests.integrity.{name}", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    return json.loads(answer.stdout.splitlines()[-1])


class Tiny:
    """The checkpoint, read again and again without a process group or a new plan."""

    def __init__(self, name: str, objects: dict[str, bytes]) -> None:
        self.good = dict(objects)
        self.uri = f"memory://{name}/checkpoint"
        self.store = MemoryStore(name, "checkpoint")
        for key in objects:
            self.restore(key)
        self.data_keys = sorted(key for key in objects if key.startswith("data/"))
        self.state = blank()
        self._reader = ObjectStoreReader(self.uri, options=OPTIONS)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._planner = DefaultLoadPlanner()
        self._planner.set_up_planner(self.state, metadata, is_coordinator=True)
        plans = [self._reader.prepare_local_plan(self._planner.create_local_plan())]
        (plan,) = self._reader.prepare_global_plan(self._planner.create_global_plan(plans))
        self._plan = self._planner.finish_plan(plan)
        context = Context(parse_location(self.uri), OPTIONS, rank=0)
        self._verified = CheckpointReader(context, resolve(context.client).manifest)

    def put(self, key: str, data: bytes) -> None:
        self.store.put(key, [memoryview(data)], crc32c=crc32c_of([memoryview(data)]))

    def restore(self, key: str) -> None:
        self.put(key, self.good[key])

    def read(self) -> dict[str, Any]:
        """Everything, by `ObjectStoreReader.read_data`, with the manifest that was read at first."""
        for value in self.state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        self.state["step"] = 0
        self._reader.read_data(self._plan, self._planner).wait()
        return self.state

    def problems(self) -> list[str]:
        """Return what `verify` finds, with the manifest that was read at first."""
        return Verification(self._verified).run()

    def names_in(self, key: str) -> list[str]:
        """The entries of the object that a rank wrote."""
        return NAMES[int(key.rpartition("/")[2].split("-")[0])]
