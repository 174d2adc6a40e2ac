"""What several ranks need is read from the store once: the manifest by the coordinator, shared bytes by one rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import Place
from tests.options import make_options
from tests.wrapped import FaultyStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from cloudckpt.distributed.shared_reads.ring import SharedMemoryRing
from cloudckpt.errors import AccessDeniedError
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


def save(uri: str) -> None:
    cloudckpt.save(values(), uri)


# --- The bytes


TIMEOUT_S = 100.0
"""Nobody waits so long for a rank that fails: what takes as long has waited in vain, however busy the machine is."""
SMALL = {"tile_bytes": 4096, "part_bytes": 65536, "request_bytes": 65536, "read_bytes": 4 * 65536, "max_gap_bytes": 0}


def options(**settings: Any) -> cloudckpt.Options:
    return make_options(**{"share_reads": "always"} | SMALL | settings)  # type: ignore[arg-type]


def same(fill: float) -> torch.Tensor:
    return torch.arange(1_000_000.0).reshape(1000, 1000) * fill


def model(fill: float) -> dict[str, Any]:
    """What all ranks have alike, what is sharded, what one rank alone has, of all kinds of memory, and objects."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(99_000.0).reshape(990, 100) * fill
    return {
        "same": same(fill),
        "turned": (torch.arange(60_000.0).reshape(200, 300) * fill).t(),
        "half": torch.full((5001,), fill, dtype=torch.bfloat16),
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        f"own-{dist.get_rank()}": torch.full((10_000,), fill + dist.get_rank()),
        "step": int(fill),
    }


def save_model(uri: str) -> None:
    cloudckpt.save(model(2.0), uri, options=make_options(tile_bytes=4096, part_bytes=65536))


def load_model(uri: str) -> tuple[int, int, int]:
    watched, state = Watched(), model(-1.0)
    report = cloudckpt.load(state, uri, options=options(wrap_store=watched))
    assert_same(state, model(2.0))
    assert report is not None
    calls = [call for store in watched.stores for call in store.calls if call.operation == "read_into"]
    num_bytes = sum(call.num_bytes for call in calls)
    if report.num_retries or report.num_hedges:  # a slow server: what was asked for again counts once
        assert num_bytes >= report.num_bytes_read, (num_bytes, report)
    else:
        assert num_bytes == report.num_bytes_read, (num_bytes, report)
    return report.num_bytes_wanted, report.num_bytes_read, report.num_bytes_received


def test_what_several_ranks_want_is_read_once(place: Place) -> None:
    """If this fails, every replica fetches the whole model from the store, or some rank gets other bytes than saved."""
    num_ranks = 3
    run_ranks(save_model, place.uri(), world_size=num_ranks)
    told = run_ranks(load_model, place.uri(), world_size=num_ranks)
    num_unique = 4 * (1_000_000 + 60_000 + 99_000 + num_ranks * 10_000) + 2 * 5001
    assert sum(read for _, read, _ in told) <= 1.1 * num_unique
    for wanted, read, received in told:
        assert read + received >= wanted
        assert read <= 1.3 * num_unique / num_ranks  # none reads what is for all
        assert received > 0.9 * (wanted - read)


def load_while_a_reader_fails(uri: str) -> tuple[tuple[int, ...], bool]:
    """The ranks that are named, and whether this rank has what all share."""

    def break_rank_1(store: Store) -> Store:
        faulty = FaultyStore(store)
        if dist.get_rank() == 1:
            error = AccessDeniedError("no longer allowed", key="data/", operation="read_into")
            faulty.fail("read_into", error=lambda: error, skip=5, times=-1)
        return faulty

    state, begun_s = model(-1.0), time.monotonic()
    with pytest.raises(AccessDeniedError) as caught:
        cloudckpt.load(state, uri, options=options(wrap_store=break_rank_1, timeout_s=TIMEOUT_S))
    assert time.monotonic() - begun_s < TIMEOUT_S
    failures: dict[int, Any] = caught.value.failures  # type: ignore[attr-defined]  # it is torch's exception, too
    return tuple(failures), torch.equal(state["same"], same(2.0))


def test_where_a_reader_fails_the_others_read_for_themselves(place: Place) -> None:
    """If this fails, one rank's failed read leaves the others waiting for bytes, or with wrong ones."""
    run_ranks(save_model, place.uri(), world_size=3)
    told = run_ranks(load_while_a_reader_fails, place.uri(), world_size=3)
    assert [failed for failed, _ in told] == [(1,)] * 3
    assert told[0][1]
    assert told[2][1]


def load_with_damage_on_the_way(uri: str) -> tuple[int, int, int]:
    write = SharedMemoryRing.write

    def damaged(ring: SharedMemoryRing, number: int, views: Any, *, position: int) -> None:
        write(ring, number, [memoryview(bytearray(sum(map(len, views))))], position=position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemoryRing, "write", damaged)
        return load_model(uri)


def test_bytes_that_are_damaged_between_ranks_are_read_again(place: Place) -> None:
    """If this fails, what one rank checked and another got is loaded unchecked (G4)."""
    run_ranks(save_model, place.uri(), world_size=2)
    for wanted, read, received in run_ranks(load_with_damage_on_the_way, place.uri(), world_size=2):
        assert received == 0
        assert read >= wanted


def load_damaged(uri: str) -> str:
    state = model(-1.0)
    with pytest.raises(cloudckpt.CorruptCheckpointError) as caught:
        cloudckpt.load(state, uri, options=options())
    return str(caught.value)


def test_damage_to_what_ranks_share_is_named_on_each_of_them(place: Place) -> None:
    """If this fails, damage that one rank finds for all is loaded by another, or nobody says what it is."""
    run_ranks(save_model, place.uri(), world_size=2)
    contents = same(2.0).numpy().tobytes()[-4000:]
    (key,) = [key for key in place.data_keys() if contents in place.read(key)]
    place.write(key, place.read(key).replace(contents, bytes(4000)))
    for message in run_ranks(load_damaged, place.uri(), world_size=2):
        assert key.rpartition("/")[2] in message
        assert "same" in message
