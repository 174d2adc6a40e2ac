"""A store that takes requests and never answers, or stops in the middle: every step of a save or load on two ranks ends
in time, on both of them, in an error that says where.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from tests.kit.moto import locked_s3_server
from tests.kit.options import make_options
from tests.kit.ranks import run_ranks
from tests.kit.wire import Action, CutAnswer, CutRequest, Wire, WireRule

import cloudckpt
from cloudckpt.options import MIB
from cloudckpt.testing.servers import Server, fake_gcs_server

pytestmark = [pytest.mark.faults, pytest.mark.multirank]

TIMEOUT_S = 3.0
"""Long enough for a loaded machine to come to the request that stalls."""
MAX_CALLS = 4
"""One after the other that are given up in a save: the commit, a look whether it is there, the ranks' cleaning up."""
SLACK_S = 12.0
"""For a loaded machine, and for all that does not stall."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Step:
    """Requests of one kind, and what becomes of them."""

    name: str
    way: Literal["save", "load"]
    method: str
    path: str
    action: Action


# Each call of the stores has tests of its own; of whole saves and loads, one of each kind.
STEPS = [
    ("s3", Step("part-stops", "save", "PUT", r"/data/.*partNumber=", CutRequest(after_bytes=MIB, stalls=True))),
    ("s3", Step("commit", "save", "PUT", r"/manifest\.json", CutRequest(after_bytes=10, stalls=True))),
    ("s3", Step("read-stops", "load", "GET", r"/data/", CutAnswer(after_bytes=MIB, stalls=True))),
    ("gs", Step("put", "save", "POST", r"/upload/", CutAnswer(stalls=True))),
    ("gs", Step("manifest", "load", "GET", r"/download/.*manifest\.json", CutAnswer(stalls=True))),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with contextlib.ExitStack() as stack:
        yield {"s3": stack.enter_context(locked_s3_server()), "gs": stack.enter_context(fake_gcs_server())}


def values() -> dict[str, torch.Tensor]:
    return {f"own-{dist.get_rank()}": torch.arange(3 * MIB, dtype=torch.float32)}  # three parts


def go(way: str, uri: str, options: cloudckpt.Options) -> tuple[float, BaseException | None]:
    begun_s = time.monotonic()
    try:
        (cloudckpt.save if way == "save" else cloudckpt.load)(values(), uri, options=options)
    except BaseException as error:  # noqa: BLE001  # the test looks at it
        return time.monotonic() - begun_s, error
    return time.monotonic() - begun_s, None


def options_at(server: Server, url: str, *, timeout_s: float) -> Any:
    return make_options(
        storage_options={**server.storage_options, "endpoint_url": url}, timeout_s=timeout_s, part_bytes=5 * MIB
    )


@pytest.mark.parametrize(
    ("scheme", "step"),
    STEPS,
    ids=lambda value: getattr(value, "name", value),
)
def test_a_store_that_stalls_is_given_up_in_time_on_all_ranks(
    servers: dict[str, Server], scheme: str, step: Step
) -> None:
    """If this fails, one request without an answer stops a training for as long as nobody looks."""
    server = servers[scheme]
    bucket = f"bounds-{next(_numbers)}"
    server.create_bucket(bucket)
    uri = f"{scheme}://{bucket}/run"
    if step.way == "load":
        run_ranks(go, "save", uri, options_at(server, server.endpoint_url, timeout_s=60), world_size=2)
    rule = WireRule(action=step.action, method=step.method, path=step.path, times=None)
    with Wire(server.endpoint_url, rule) as wire:
        results = run_ranks(go, step.way, uri, options_at(server, wire.url, timeout_s=TIMEOUT_S), world_size=2)
        assert wire.num_acted > 0
    for elapsed_s, error in results:
        assert isinstance(error, cloudckpt.errors.StoreTimeoutError | cloudckpt.CommitUnknownError), error
        assert uri in str(error)
        assert elapsed_s < MAX_CALLS * TIMEOUT_S + SLACK_S
