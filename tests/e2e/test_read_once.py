"""What several ranks need is read from the store once: the manifest by the coordinator, shared bytes by one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import Place
from tests.wrapped import FaultyStore

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


# --- The manifest


def manifest_reads(uri: str) -> list[int]:
    """How often this rank lists and reads manifests, in a load, in one that is made again, and in `load_latest`."""
    root = uri.rpartition("/")[0]
    cloudckpt.save(values(), uri)
    found = []
    for load in (
        lambda state, options: cloudckpt.load(state, uri, options=options),
        lambda state, options: cloudckpt.load(state, uri, options=options, process_group=dist.new_group()),
        lambda state, options: cloudckpt.load_latest(state, root, options=options),
    ):
        watched, state = Watched(), values(0.0)
        load(state, cloudckpt.Options(wrap_store=watched))
        assert_same(state, values())
        found.append(watched.count("read", "manifest") + watched.count("list", "manifest"))
        dist.barrier()
    return found


def test_the_manifest_is_read_by_the_coordinator_alone(place: Place) -> None:
    """If this fails, a thousand ranks fetch and list one manifest a thousand times."""
    coordinator, *others = run_ranks(manifest_reads, place.uri(), world_size=3)
    assert coordinator[0] == coordinator[1] == 2  # a listing and a read
    assert others == [[0, 0, 0]] * 2


def load_what_is_damaged(uri: str) -> tuple[list[int], list[str], bool]:
    with pytest.raises(cloudckpt.InvalidManifestError) as caught:
        cloudckpt.load(values(0.0), uri)
    failures: dict[int, Any] = caught.value.failures  # type: ignore[attr-defined]  # it is torch's exception, too
    names = [type(error).__name__ for error, _ in failures.values()]
    return sorted(failures), names, "checksum" in str(caught.value)


def test_what_the_coordinator_finds_wrong_is_raised_on_every_rank(place: Place) -> None:
    """If this fails, the others wait, or guess, where the coordinator finds a damaged manifest."""
    run_ranks(save, place.uri(), world_size=2)
    (key,) = place.manifest_keys()
    document = place.read(key)
    place.write(key, document.replace(b'"world_size":2', b'"world_size":3'))
    for told in run_ranks(load_what_is_damaged, place.uri(), world_size=2):
        assert told == ([0, 1], ["InvalidManifestError"] * 2, True)


def save(uri: str) -> None:
    cloudckpt.save(values(), uri)


def load_from_a_copy(root: str) -> int:
    watched, state = Watched(), values(0.0)
    cloudckpt.load(state, f"{root}/copy-{dist.get_rank()}", options=cloudckpt.Options(wrap_store=watched))
    assert_same(state, values())
    return watched.count("read", "manifest")


def test_ranks_that_load_from_copies_read_their_own(place: Place) -> None:
    """If this fails, a rank fills its tensors from another place than it was told."""
    run_ranks(save, place.uri("original"), world_size=2)
    for key in place.keys():  # noqa: SIM118  # no dict
        for rank in range(2):
            place.write(key.replace("original", f"copy-{rank}"), place.read(key))
    assert run_ranks(load_from_a_copy, place.root, world_size=2) == [1, 1]
