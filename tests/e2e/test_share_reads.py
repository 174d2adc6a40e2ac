"""Ranks that share reads load what each would read for itself, read each byte once, and fail together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.test_waiting import MeetsItsFate, assert_lost, options_with, outcome_of, ranks
from tests.kit.models import assert_same
from tests.kit.options import make_options
from tests.kit.places import LocalPlace
from tests.kit.ranks import on_ranks, run_ranks
from tests.kit.wrapped import FaultyStore, permanent
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cloudckpt
from cloudckpt.errors import StoreError
from cloudckpt.options import Options
from cloudckpt.report import LoadReport
from cloudckpt.stores.base import Store
from cloudckpt.testing.faults import Call

pytestmark = pytest.mark.multirank

KIB = 1024
MAX_TIME_S = 30.0
"""For a load that fails; no bound of the library, whose timeout is longer."""


def options_for(on_event: Callable[[cloudckpt.Event], None] | None = None, **settings: Any) -> Options:
    """Return options with which a load of a megabyte takes several rounds."""
    defaults = {"tile_bytes": 4 * KIB, "part_bytes": 64 * KIB, "request_bytes": 64 * KIB, "read_bytes": 512 * KIB}
    return make_options(**{"share_reads": "always", "on_event": on_event, **defaults, **settings})


def load(state: dict[str, Any], uri: str, **settings: Any) -> LoadReport:
    """Load, and return the report."""
    reports: list[LoadReport] = []

    def keep(event: cloudckpt.Event) -> None:
        if isinstance(event.report, LoadReport):
            reports.append(event.report)

    keywords = {name: settings.pop(name) for name in ("planner",) if name in settings}
    cloudckpt.load(state, uri, options=options_for(keep, **settings), **keywords)
    return reports[-1]


def replicated(fill: int = 1) -> dict[str, Any]:
    """A megabyte that each rank has: large and small tensors, strided ones, and values."""
    strided = (torch.arange(80_000, dtype=torch.float32).reshape(200, 400) * fill).t()
    small = {f"small{number}": torch.full((50,), float(number * fill)) for number in range(200)}
    return {"large": torch.arange(150_000, dtype=torch.float32) * fill, "strided": strided, "step": fill, **small}


def total_over_ranks(value: int) -> int:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(total)


def load_replicated(uri: str) -> None:
    cloudckpt.save(replicated(), uri, options=options_for())
    state = replicated(0)
    report = load(state, uri)
    assert_same(state, replicated())
    unique_bytes = report.num_bytes_read + report.num_bytes_received  # of this rank, which wants all
    assert total_over_ranks(report.num_bytes_read) <= 1.02 * unique_bytes
    assert report.num_bytes_read <= 1.3 * unique_bytes / dist.get_world_size()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicated_entries_are_read_once_in_equal_parts(local: LocalPlace, num_ranks: int) -> None:
    """If this fails, a load under DDP reads bytes several times, or fills tensors with wrong ones."""
    run_ranks(load_replicated, local.uri(), world_size=num_ranks)


@on_ranks(4)
def test_replicas_of_shards_are_read_once(local: LocalPlace) -> None:
    """If this fails, a load under HSDP reads each shard as often as there are replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def state(fill: int) -> dict[str, Any]:
        whole = torch.arange(300_000, dtype=torch.float32).reshape(600, 500) * fill
        return {"sharded": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]), "norm": torch.full((99,), fill)}

    cloudckpt.save(state(1), local.uri(), options=options_for())
    loaded = state(0)
    report = load(loaded, local.uri())
    assert torch.equal(loaded["sharded"].to_local(), state(1)["sharded"].to_local())
    assert torch.equal(loaded["norm"], torch.full((99,), 1))
    assert total_over_ranks(report.num_bytes_read) <= 1.02 * 600 * 500 * 4


def mixed(fill: int) -> dict[str, Any]:
    """Return what all ranks have, what two have, and what one has."""
    rank = dist.get_rank()
    state: dict[str, Any] = {"all": torch.arange(70_000, dtype=torch.float32) * fill, f"own{rank}": rank * fill}
    state[f"of-{rank // 2}"] = torch.full((60_000,), float((1 + rank // 2) * fill))
    state[f"shard{rank}"] = torch.full((30_000,), float((1 + rank) * fill))
    return state


@on_ranks(4)
def test_rank_with_other_wishes_reads_for_itself(local: LocalPlace) -> None:
    """If this fails, ranks that want other things, cast, or do not share hang the others or get their bytes."""
    cloudckpt.save(mixed(1), local.uri(), options=options_for())
    rank = dist.get_rank()
    for settings in ({}, {"share_reads": "never"} if rank == 1 else {}, {"verify": rank != 2}):
        state = mixed(0)
        if rank == 3:
            state["all"] = torch.zeros(70_000, dtype=torch.float64)  # cast
            del state["of-1"]
        received = load(state, local.uri(), **settings).num_bytes_received
        expected = {name: value for name, value in mixed(1).items() if name in state}
        expected["all"] = expected["all"].to(state["all"].dtype)
        assert_same(state, expected)
        assert (received > 0) == (settings in ({}, {"verify": True}))


@on_ranks(2)
def test_partial_load_shares_what_it_wants(local: LocalPlace) -> None:
    """If this fails, a load of some entries reads or receives more than these."""
    cloudckpt.save(replicated(), local.uri(), options=options_for())
    state = {"large": torch.zeros(150_000)}
    report = load(state, local.uri())
    assert torch.equal(state["large"], replicated()["large"])
    assert report.num_bytes_read + report.num_bytes_received <= 1.05 * state["large"].nbytes
    assert 0 < report.num_bytes_received <= 0.6 * state["large"].nbytes


@on_ranks(2)
def test_shards_alone_are_read_as_without_the_option(local: LocalPlace) -> None:
    """If this fails, a load in which ranks have nothing in common makes many small requests."""

    def state(fill: float) -> dict[str, Any]:
        return {f"own{dist.get_rank()}": torch.full((2 * KIB * KIB,), fill)}

    large = {"request_bytes": 16 * KIB * KIB, "read_bytes": 64 * KIB * KIB}
    cloudckpt.save(state(1.0), local.uri(), options=options_for())
    reports = []
    for share_reads in ("never", "always"):
        loaded = state(0.0)
        reports.append(load(loaded, local.uri(), share_reads=share_reads, **large))
        assert_same(loaded, state(1.0))
    # One rank, which looks for the manifest, may ask again.
    assert reports[1].num_requests <= reports[0].num_requests + 1
    assert reports[1].num_bytes_received == 0


class Refusing:
    """Refuses reads of data from the `skip`-th on, with an error that no retry helps against."""

    def __init__(self, skip: int) -> None:
        self.num_left = skip

    def __call__(self, store: Store) -> Store:
        return FaultyStore(store, find_error=self._find_error)

    def _find_error(self, call: Call) -> BaseException | None:
        if call.operation != "read_into" or "data/" not in call.key:
            return None
        self.num_left -= 1
        return permanent(call.operation) if self.num_left < 0 else None


@on_ranks(3)
def test_rank_that_fails_fails_all_with_its_cause(local: LocalPlace) -> None:
    """If this fails, ranks wait for bytes that a failed rank does not send, or for its next load."""
    cloudckpt.save(replicated(), local.uri(), options=options_for())
    for skip in (0, 1, 3):
        begun_s = time.monotonic()
        wrap = {"wrap_store": Refusing(skip)} if dist.get_rank() == 1 else {}
        with pytest.raises(StoreError) as caught:
            load(replicated(0), local.uri(), **wrap)
        assert list(caught.value.failures) == [1]  # type: ignore[attr-defined]
        assert time.monotonic() - begun_s < MAX_TIME_S
    state = replicated(0)
    load(state, local.uri())
    assert_same(state, replicated())


class Refuser(DefaultLoadPlanner):
    """Fails on rank 1 before it reads, or once the first tensor has arrived."""

    moment = "finish_plan"

    def finish_plan(self, new_plan: Any) -> Any:
        self._fail("finish_plan")
        return super().finish_plan(new_plan)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self._fail("commit_tensor")

    def _fail(self, moment: str) -> None:
        if dist.get_rank() == 1 and moment == self.moment:
            raise ValueError("the planner refuses")


class LateRefuser(Refuser):
    """Fails on rank 1 in the middle of the exchange."""

    moment = "commit_tensor"


@on_ranks(2)
def test_planner_that_fails_on_one_rank_fails_both(local: LocalPlace) -> None:
    """If this fails, an error in code of the user outside of the reads hangs the ranks that wait for bytes."""
    cloudckpt.save(replicated(), local.uri(), options=options_for())
    for planner in (Refuser(), LateRefuser()):
        _, error = outcome_of(lambda planner=planner: load(replicated(0), local.uri(), planner=planner))
        assert error is not None
        assert list(error.failures) == [1]  # type: ignore[attr-defined]
        assert "the planner refuses" in str(error)
    state = replicated(0)
    load(state, local.uri())
    assert_same(state, replicated())


def load_damaged(root: str) -> None:
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=r"failed on rank 1: .*is damaged"):
        load(replicated(0), f"{root}/step-2")
    state = replicated(0)
    found = cloudckpt.load_latest(state, root, options=options_for())
    assert found.uri == f"{root}/step-1"
    assert_same(state, replicated())


def test_damage_that_one_rank_finds_is_damage_for_all(local: LocalPlace) -> None:
    """If this fails, ranks get damaged bytes from another one, or do not go back to an older step together."""
    run_ranks(save_two_steps, local.root, world_size=2)
    for key in local.data_keys():
        body = bytearray(local.read(key))
        if "step-2/" in key and len(body) > 300_000:
            body[200_000] ^= 1
            local.write(key, bytes(body))
    run_ranks(load_damaged, local.root, world_size=2)


def save_two_steps(root: str) -> None:
    for step in (1, 2):
        cloudckpt.save(replicated(), f"{root}/step-{step}", options=options_for())


@on_ranks(2)
def test_load_beside_a_background_save(local: LocalPlace) -> None:
    """If this fails, the exchange and the collectives of a background save take each other's messages."""
    cloudckpt.save(replicated(), local.uri("first"), options=options_for())
    save = cloudckpt.async_save(replicated(2), local.uri("second"), options=options_for())
    state = replicated(0)
    load(state, local.uri("first"))
    save.result(60)
    assert_same(state, replicated())
    load(state, local.uri("second"))
    assert_same(state, replicated(2))


def load_and_die(uri: str, listener: MeetsItsFate) -> tuple[float, BaseException | None]:
    cloudckpt.save(replicated(), uri, options=options_with(None))
    load(replicated(0), uri)  # so that the group is there
    timeout_s = options_with(None).timeout_s
    return outcome_of(lambda: cloudckpt.load(replicated(0), uri, options=options_for(listener, timeout_s=timeout_s)))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("moment", "fate", "rank"), [("load.range_read", "killed", 1), ("load.range_read", "stopped", 2)]
)
def test_rank_that_is_lost_in_the_exchange_is_named(
    local: LocalPlace, tmp_path: Path, moment: str, fate: Any, rank: int
) -> None:
    """If this fails, ranks wait for the bytes of a dead one for half an hour."""
    listener = MeetsItsFate(rank=rank, moment=moment, fate=fate)
    with ranks(load_and_die, local.uri(), listener, size=3, scratch=tmp_path) as running:
        for other in {0, 1, 2} - {rank}:
            assert_lost(running.told_by(other), (rank,), local.uri())
