"""A store in memory that can be watched and disturbed, behind the public calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from tests.kit.wrapped import FaultyStore
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

import cloudckpt
from cloudckpt.stores.memory import MemoryStore


class Memory:
    """Every ``memory://`` store that is opened, each a `FaultyStore` in front of the real one."""

    def __init__(self, name: str) -> None:
        self.root = f"memory://{name}"
        self.stores: dict[str, FaultyStore] = {}

    def open(self, name: str, prefix: str = "", **settings: Any) -> FaultyStore:
        """Open a store, in place of `MemoryStore`."""
        return self.stores.setdefault(f"memory://{name}/{prefix}", FaultyStore(MemoryStore(name, prefix, **settings)))

    def uri(self, name: str = "checkpoint") -> str:
        return f"{self.root}/{name}"

    def at(self, name: str = "checkpoint") -> FaultyStore:
        """The store of one checkpoint."""
        return self.open(self.root.removeprefix("memory://"), name)

    def all_keys(self, name: str = "checkpoint") -> list[str]:
        return sorted(info.key for info in self.at(name).inner.list())

    def data_keys(self, name: str = "checkpoint") -> list[str]:
        return [key for key in self.all_keys(name) if key.startswith("data/")]


def state_of(fill: float = 1.0) -> dict[str, Any]:
    """A state dict with tensors, contiguous and not, and an object."""
    return {
        "w": torch.full((300, 10), fill),
        "t": torch.full((20, 30), fill).t(),
        "b": torch.full((7,), fill, dtype=torch.bfloat16),
        "one": torch.full((6,), fill)[3::4],
        "step": int(fill),
    }


def loaded(uri: str, **settings: Any) -> dict[str, Any]:
    """Return the state dict at `uri`."""
    state = state_of(-1.0)
    cloudckpt.load(state, uri, **settings)
    return state


def assert_holds(state: dict[str, Any], fill: float) -> None:
    """Fail unless the state dict has all values of one save, and none of another."""
    assert state["step"] == int(fill)
    for name in ("w", "t", "b", "one"):
        assert bool((state[name] == fill).all()), name


def written(
    writer: cloudckpt.ObjectStoreWriter, state: dict[str, Any], **settings: Any
) -> tuple[Metadata, list[WriteResult]]:
    """Run a save on one rank up to its commit, with the calls that torch's `dcp.save` makes."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True, **settings)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    return metadata, writer.write_data(planner.finish_plan(plan), planner).value()


class Gate:
    """A point at which a thread waits until the test lets it pass."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(60.0)

    def at_event(self, name: str) -> Callable[[cloudckpt.Event], None]:
        return lambda event: self() if event.name == name else None
