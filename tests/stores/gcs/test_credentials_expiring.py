"""Tokens that expire while a save is under way, and a server that refuses those that have."""

from __future__ import annotations

import datetime as dt
import os
import re
import threading
import time
from typing import Any

import pytest
import torch
from google.auth.credentials import Credentials

import cloudckpt

LIFE_S = 1.5
_TOKEN = re.compile(r"Bearer TOKEN-(\d+)-HUSH")


class ShortLived(Credentials):
    """Tokens with their end, in milliseconds, in their names."""

    def refresh(self, request: Any) -> None:
        end_s = time.time() + LIFE_S
        self.token = f"TOKEN-{int(1000 * end_s)}-HUSH"
        # google.auth renews well before the end that it knows of; this one comes as a surprise.
        self.expiry = dt.datetime.fromtimestamp(end_s + 3600, dt.timezone.utc).replace(tzinfo=None)


class TakesItsTime:
    """After each object, until the token has expired."""

    def __call__(self, event: cloudckpt.Event) -> None:
        if event.name == "save.object_uploaded":
            end_s = time.time() + 1.2 * LIFE_S
            while time.time() < end_s:
                os.sched_yield()


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.slow
def test_tokens_that_expire_during_a_save_are_renewed(scripted: Any) -> None:
    """If this fails, a save that outlives its token fails, though the next one was to be had for the asking."""
    gcs = scripted.any_gcs()
    lock = threading.Lock()
    accepted, refused = set[str](), list[str]()

    def expiring(connection: Any, request: Any) -> None:
        match = _TOKEN.fullmatch(request.headers["authorization"])
        assert match is not None
        is_over = 1000 * time.time() >= int(match[1])
        with lock:
            refused.append(match[1]) if is_over else accepted.add(match[1])
        (scripted.error(401, "authError") if is_over else gcs)(connection, request)

    server = scripted.serve(expiring)
    options = cloudckpt.Options(
        storage_options={"endpoint_url": server.endpoint_url, "credentials": ShortLived(), "project": "p"},
        commit="unconditional",  # the server reads as zeros, whatever was put
        object_bytes=4096,
        connections=1,
        on_event=TakesItsTime(),
    )
    state = {str(number): torch.ones(2048) for number in range(3)}
    cloudckpt.save(state, "gs://bucket/run", options=options)
    assert "run/manifest.json" in gcs.objects
    assert len([name for name in gcs.objects if name.endswith(".safetensors")]) == 3
    assert len(accepted) >= 3
    assert len(refused) == len(set(refused)) >= 2  # no token is tried again that was refused
