"""Keys that expire while a save is under way, and a server that refuses those that have."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from moto.server import DomainDispatcherApplication, create_backend_app
from tests.e2e.servers import serve

import cloudckpt
from cloudckpt.options import MIB

LIFE_S = 3
_KEY = re.compile(r"Credential=EXPIRES(\d+)/")
# What `credential_process` of an AWS profile runs (https://docs.aws.amazon.com/sdkref/latest/guide/feature-process-credentials.html).
_PROVIDER = f"""#!/bin/sh
now=$(date +%s)
end=$((now + {LIFE_S}))
printf '{{"Version": 1, "AccessKeyId": "EXPIRES%s", "SecretAccessKey": "key-hush", "SessionToken": "token-hush", ' $end
printf '"Expiration": "%s"}}' "$(date -u -d @$end +%Y-%m-%dT%H:%M:%SZ)"
"""


class RefusesExpiredKeys:
    """moto, behind what S3 does with keys whose time is up: their end is in their names."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.keys: list[int] = []
        self.num_refused = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._lock:
            match = _KEY.search(environ.get("HTTP_AUTHORIZATION", ""))
            if match is not None:
                self.keys.append(int(match[1]))
            if match is not None and time.time() >= int(match[1]) + 1:  # the names have whole seconds
                self.num_refused += 1
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("400 Bad Request", [("Content-Type", "application/xml")])
                return [b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"]
            return self._moto(environ, start_response)


class TakesItsTime:
    """After each part, until the keys of that time have expired."""

    def __init__(self, server: RefusesExpiredKeys) -> None:
        self._server = server

    def __call__(self, event: cloudckpt.Event) -> None:
        if event.name == "save.part_uploaded":
            end_s = self._server.keys[-1] + 1
            while time.time() <= end_s:
                os.sched_yield()


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.slow
def test_keys_that_expire_during_a_save_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, saves that take longer than a role's session fail, hours into a training."""
    provider = tmp_path / "provider"
    provider.write_text(_PROVIDER)
    provider.chmod(0o700)
    config = tmp_path / "config"
    config.write_text(f"[profile trainer]\nregion = us-east-1\ncredential_process = {provider}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    refusing = RefusesExpiredKeys()
    with serve(refusing) as server:  # type: ignore[arg-type]  # another application
        server.create_bucket("bucket")
        options = cloudckpt.Options(
            storage_options={"endpoint_url": server.endpoint_url, "profile": "trainer"},
            connections=1,
            part_bytes=5 * MIB,
            on_event=TakesItsTime(refusing),
        )
        state = {"x": torch.arange(3 * MIB, dtype=torch.float32)}  # three parts
        cloudckpt.save(state, "s3://bucket/run", options=options)
        assert len(set(refusing.keys)) >= 3
        assert refusing.num_refused == 0
        loaded = {"x": torch.zeros_like(state["x"])}
        cloudckpt.load(loaded, "s3://bucket/run", options=options)
        assert torch.equal(loaded["x"], state["x"])
