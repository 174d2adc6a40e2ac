"""The coordinator reads the manifest for all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.models import assert_same
from tests.kit.options import make_options
from tests.kit.places import Place
from tests.kit.ranks import run_ranks
from tests.kit.wrapped import FaultyStore

import cloudckpt
from cloudckpt.stores.base import Store

pytestmark = pytest.mark.multirank


class Watched:
    """Puts a store that remembers its calls in front of each that is opened."""

    def __init__(self) -> None:
        self.stores: list[FaultyStore] = []

    def __call__(self, store: Store) -> Store:
        self.stores.append(FaultyStore(store))
        return self.stores[-1]

    def count(self, operation: str, key_part: str) -> int:
        return sum(
            call.operation == operation and key_part in call.key for store in self.stores for call in store.calls
        )


def values(fill: float = 1.0) -> dict[str, Any]:
    return {"shared": torch.full((1000,), fill), f"own-{dist.get_rank()}": torch.full((100,), fill), "step": int(fill)}


def manifest_reads(uri: str) -> list[int]:
    """Count this rank's listings and reads of manifests: in a load, in a repeated one, and in `load_latest`."""
    root = uri.rpartition("/")[0]
    cloudckpt.save(values(), uri)
    found = []
    for load in (
        lambda state, options: cloudckpt.load(state, uri, options=options),
        lambda state, options: cloudckpt.load(state, uri, options=options, process_group=dist.new_group()),
        lambda state, options: cloudckpt.load_latest(state, root, options=options),
    ):
        watched, state = Watched(), values(0.0)
        load(state, make_options(wrap_store=watched))
        assert_same(state, values())
        found.append(watched.count("read", "manifest") + watched.count("list", "manifest"))
        dist.barrier()
    return found


def test_the_manifest_is_read_by_the_coordinator_alone(place: Place) -> None:
    """If this fails, a thousand ranks fetch and list one manifest a thousand times."""
    coordinator, *others = run_ranks(manifest_reads, place.uri(), world_size=3)
    assert coordinator[0] == coordinator[1] == 2  # a listing and a read
    assert others == [[0, 0, 0]] * 2
