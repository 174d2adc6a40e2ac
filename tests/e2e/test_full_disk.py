"""A limit of the disk is reached just as a save comes to its commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SAVE = """
import json, os, resource, signal, sys
import torch
import cloudckpt

folder = sys.argv[1]
usual = resource.getrlimit(resource.RLIMIT_FSIZE)

def take_all(event):
    if event.name == "save.committing":
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, usual[1]))

def keys():
    return sorted(
        os.path.relpath(os.path.join(above, name), folder) for above, _, names in os.walk(folder) for name in names
    )

uri = folder + "/run/step-1"
cloudckpt.save({"w": torch.full((1000,), 1.0)}, uri, no_dist=True)
before = keys()
told = {}
for name in ("overwritten", "new"):
    try:
        cloudckpt.save(
            {"w": torch.full((1000,), 2.0)},
            uri if name == "overwritten" else folder + "/run/step-2",
            overwrite=True,
            no_dist=True,
            options=cloudckpt.Options(on_event=take_all),
        )
    except cloudckpt.CloudckptError as error:
        told[name] = [type(error).__name__, str(error)]
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)
state = {"w": torch.zeros(1000)}
cloudckpt.load(state, uri, no_dist=True)
left = [key for key in keys() if key not in before]
print(json.dumps({"told": told, "left": left, "w": state["w"].unique().tolist()}))
"""


@pytest.mark.slow
def test_a_manifest_that_does_not_fit_was_not_committed(tmp_path: Path) -> None:
    """If this fails, a full disk looks like a commit that may have arrived: the data of a save that did not is left
    there, on the very disk that is full, and a supervisor has to look before it may try again.
    """
    done = subprocess.run(
        [sys.executable, "-c", _SAVE, tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TORCH_DISTRIBUTED_DEBUG": "OFF"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(found["told"]) == ["new", "overwritten"]
    for name, (kind, message) in found["told"].items():
        assert kind == "StoreError", (name, kind, message)
        assert "ulimit -f" in message
    assert found["left"] == []
    assert found["w"] == [1.0]
