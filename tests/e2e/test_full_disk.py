"""A disk that is full, or a limit that is reached, just as a save comes to its commit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SAVE = """
import json, os, resource, signal, sys
import torch
import cloudckpt

folder, how = sys.argv[1:]
if how == "full":
    import ctypes
    mount = ctypes.CDLL(None, use_errno=True).mount
    if mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=8m"):
        raise SystemExit(77)
usual = resource.getrlimit(resource.RLIMIT_FSIZE)

def take_all(event):
    if event.name != "save.committing":
        return
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, usual[1]))
        return
    with open(folder + "/others", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

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
    if os.path.exists(folder + "/others"):
        os.remove(folder + "/others")
state = {"w": torch.zeros(1000)}
cloudckpt.load(state, uri, no_dist=True)
left = [key for key in keys() if key not in before]
print(json.dumps({"told": told, "left": left, "w": state["w"].unique().tolist()}))
"""


@pytest.mark.parametrize("how", ["limit", "full"])
@pytest.mark.slow
def test_a_manifest_that_does_not_fit_was_not_committed(tmp_path: Path, how: str) -> None:
    """If this fails, a full disk looks like a commit that may have arrived: the data of a save that did not is left
    there, on the very disk that is full, and a supervisor has to look before it may try again.
    """
    if how == "full" and shutil.which("unshare") is None:
        pytest.skip("a disk of its own cannot be mounted without unshare")
    alone = ["unshare", "--user", "--map-root-user", "--mount"] if how == "full" else []
    done = subprocess.run(
        [*alone, sys.executable, "-c", _SAVE, tmp_path, how],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TORCH_DISTRIBUTED_DEBUG": "OFF"},
    )
    if how == "full" and (done.returncode == 77 or done.stderr.startswith("unshare:")):
        pytest.skip("this user can mount nothing")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    words = "ulimit -f" if how == "limit" else "free some space"
    for name, (kind, message) in found["told"].items():
        assert kind == "StoreError", (name, kind, message)
        assert words in message
    assert sorted(found["told"]) == ["new", "overwritten"]
    assert found["left"] == []
    assert found["w"] == [1.0]
