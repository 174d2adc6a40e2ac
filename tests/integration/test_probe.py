"""A store that only pretends to create if absent is found out before a save relies on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.integration.servers import Servers
from tests.kit.models import assert_same
from tests.kit.options import make_options

import cloudckpt
from cloudckpt.stores import open_store
from cloudckpt.testing.servers import Server

Use = Callable[[Server], str]


def values() -> dict[str, object]:
    return {"weight": torch.arange(3_000_000.0), "step": 7}


def zeros() -> dict[str, object]:
    return {"weight": torch.zeros(3_000_000), "step": 0}


def everything(uri: str) -> list[str]:
    """All keys, whoever wrote them."""
    return [info.key for info in open_store(uri, cloudckpt.Options()).list()]


def test_a_server_that_ignores_the_condition_is_refused(servers: Servers, use: Use) -> None:
    """If this fails, two jobs that save to one URI on such a server both believe that they have."""
    server = servers.up("gcp-emulator")
    bucket = use(server)
    with pytest.raises(cloudckpt.errors.NoConditionalCommitError) as caught:
        cloudckpt.save(values(), f"{bucket}/run/step-1")
    assert server.endpoint_url in str(caught.value)
    assert "commit='unconditional'" in str(caught.value)
    assert everything(bucket) == []


def test_a_server_that_ignores_the_condition_can_be_accepted(servers: Servers, use: Use) -> None:
    """If this fails, users of such a server cannot save at all, though they accept the risk."""
    bucket = use(servers.up("gcp-emulator"))
    options = make_options(commit="unconditional", part_bytes=5 << 20)
    for _ in range(2):
        cloudckpt.save(values(), f"{bucket}/run/step-1", overwrite=True, options=options)
    state = zeros()
    cloudckpt.load(state, f"{bucket}/run/step-1")
    assert_same(state, values())
    assert cloudckpt.latest(f"{bucket}/run") is not None
    assert len(everything(bucket)) == 2  # one manifest, one object
