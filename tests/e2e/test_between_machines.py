"""Ranks that are taken to be on different machines: what they all want is read from the store once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import LocalPlace, Place
from tests.e2e.test_read_once import Disturbed, Watched, model, options, same, save_model
from tests.e2e.test_waiting import ranks
from tests.resources import held, python_threads

import cloudckpt
from cloudckpt._ranks import signs
from cloudckpt._share.inlet import _Body
from cloudckpt._share.outlet import Outlet

pytestmark = pytest.mark.multirank

TIMEOUT_S = {"killed": 30.0, "failed": 100.0}
"""On another machine a killed rank is one that is silent so long. A failure is told, and never waited for."""
NUM_UNIQUE = 4 * (1_000_000 + 60_000 + 99_000 + 4 * 10_000) + 2 * 5001
LAYOUTS = pytest.mark.parametrize("ranks_each", [1, 2], ids=["4 machines", "2 machines"])


def live_apart(ranks_each: int) -> None:
    """From now on this process counts as on another machine than those of other ranks, but for `ranks_each`."""
    machine = f"machine-{dist.get_rank() // ranks_each}:1"
    signs._process_numbers = lambda: machine  # type: ignore[assignment]  # what a rank knows it by


def load_model(uri: str, ranks_each: int, settings: dict[str, Any]) -> tuple[int, int, int]:
    live_apart(ranks_each)
    return load_again(uri, settings)


def load_again(uri: str, settings: dict[str, Any]) -> tuple[int, int, int]:
    watched, state = Watched(), model(-1.0)
    report = cloudckpt.load(state, uri, options=options(wrap_store=watched, **settings))
    assert_same(state, model(2.0))
    assert report is not None
    return report.num_bytes_wanted, report.num_bytes_read, report.num_bytes_received


@LAYOUTS
def test_what_ranks_on_several_machines_want_is_read_once(place: Place, ranks_each: int) -> None:
    """If this fails, each machine of replicas fetches the whole model, or some rank gets other bytes than saved."""
    run_ranks(save_model, place.uri(), world_size=4)
    told = run_ranks(load_model, place.uri(), ranks_each, {}, world_size=4)
    assert sum(read for _, read, _ in told) <= 1.1 * NUM_UNIQUE
    for wanted, read, received in told:
        assert read + received >= wanted
        assert read <= 1.3 * NUM_UNIQUE / 4  # none reads what is for all
        assert received > 0.9 * (wanted - read)


@pytest.mark.parametrize("settings", [{"share_reads": "auto"}, {"verify": False}], ids=str)
def test_machines_do_not_share_by_themselves_where_they_are_few_nor_without_checksums(
    local: LocalPlace, settings: dict[str, Any]
) -> None:
    """If this fails, loads on few machines get slower, or bytes of who knows whom are taken unchecked."""
    run_ranks(save_model, local.uri(), world_size=2)
    for wanted, read, received in run_ranks(load_model, local.uri(), 1, settings, world_size=2):
        assert (received, read >= wanted) == (0, True)


def load_over_and_over(uri: str) -> list[str]:
    live_apart(2)
    found = []
    for _ in range(4):
        load_again(uri, {})
        dist.barrier()
        now = held()
        found.append(f"{now.num_sockets} {now.num_other_files} {now.num_threads} {python_threads()}")
    return found


def test_nothing_is_left_of_a_load(local: LocalPlace) -> None:
    """If this fails, each load leaves a socket, a thread or shared memory behind."""
    run_ranks(save_model, local.uri(), world_size=4)
    for found in run_ranks(load_over_and_over, local.uri(), world_size=4):
        assert found[1] == found[2] == found[3], found


# --- One of them fails, ends, hangs, or sends something else


def load_or_fail(uri: str, ranks_each: int, deed: str) -> tuple[float, str, tuple[int, ...], bool]:
    live_apart(ranks_each)
    begun_s, state = time.monotonic(), model(-1.0)
    try:
        cloudckpt.load(state, uri, options=options(wrap_store=Disturbed(1, 5, deed), timeout_s=TIMEOUT_S[deed]))
    except cloudckpt.CloudckptError as error:
        failures: dict[int, Any] = getattr(error, "failures", {})
        is_whole = dist.get_rank() == 1 or torch.equal(state["same"], same(2.0))
        return time.monotonic() - begun_s, type(error).__name__, tuple(sorted(failures)), is_whole
    return time.monotonic() - begun_s, "", (), False


@LAYOUTS
def test_where_a_reader_fails_other_machines_read_for_themselves(local: LocalPlace, ranks_each: int) -> None:
    """If this fails, one rank's failed read leaves other machines waiting for bytes, or with wrong ones."""
    run_ranks(save_model, local.uri(), world_size=4)
    for elapsed_s, *told in run_ranks(load_or_fail, local.uri(), ranks_each, "failed", world_size=4):
        assert told == ["AccessDeniedError", (1,), True]
        assert elapsed_s < TIMEOUT_S["failed"]


def save_and_load_disturbed(uri: str, ranks_each: int) -> tuple[float, str, tuple[int, ...], bool]:
    save_model(uri)
    return load_or_fail(uri, ranks_each, "killed")


@LAYOUTS
def test_a_reader_that_is_killed_is_named_in_time(local: LocalPlace, tmp_path: Path, ranks_each: int) -> None:
    """If this fails, a killed rank leaves other machines waiting for the bytes that it was to read."""
    with ranks(save_and_load_disturbed, local.uri(), ranks_each, size=4, scratch=tmp_path) as running:
        for rank in (0, 2, 3):
            elapsed_s, name, failures, is_whole = running.told_by(rank)
            assert (name, failures, is_whole) == ("RankLostError", (1,), True)
            assert elapsed_s < 3 * TIMEOUT_S["killed"]


def load_beside_one_that_sends_nothing(uri: str) -> tuple[int, int, int]:
    live_apart(1)
    begun_s = time.monotonic()
    load_again(uri, {})
    # Nobody who sends is to be taken for one that does not, however busy the machine is.
    calm_s = torch.tensor([time.monotonic() - begun_s])
    dist.all_reduce(calm_s, dist.ReduceOp.MAX)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Outlet, "_accept", lambda _: None)
        return load_again(uri, {"timeout_s": max(2.0, 4 * calm_s.item())})


def test_a_rank_that_sends_nothing_is_done_without(local: LocalPlace) -> None:
    """If this fails, a hanging rank on another machine holds up a load without end."""
    run_ranks(save_model, local.uri(), world_size=3)
    told = run_ranks(load_beside_one_that_sends_nothing, local.uri(), world_size=3)
    assert all(read + received >= wanted for wanted, read, received in told)
    assert all(received > 0 for _, _, received in told)  # those that send are taken from as before


def load_with_damage_on_the_way(uri: str, ranks_each: int) -> tuple[int, int, int]:
    fill = _Body.fill

    def damaged(body: _Body, views: Any) -> bool:
        is_whole = fill(body, views)
        views[0][0] ^= 1
        return is_whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Body, "fill", damaged)
        return load_model(uri, ranks_each, {})


@LAYOUTS
def test_bytes_that_are_damaged_between_machines_are_read_again(local: LocalPlace, ranks_each: int) -> None:
    """If this fails, what one machine checked and another got is loaded unchecked (G4), or handed on there."""
    run_ranks(save_model, local.uri(), world_size=4)
    for wanted, read, received in run_ranks(load_with_damage_on_the_way, local.uri(), ranks_each, world_size=4):
        assert read + received >= wanted
        assert received <= wanted * (ranks_each - 1) / ranks_each
