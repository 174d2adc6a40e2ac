"""A bucket full of pickles that leave a mark where they run, and every call that opens a bucket, in one process.

Run as ``python -m tests.integrity.malicious DIRECTORY``; prints what happened as JSON. A process of its own, because an
audit hook cannot be taken back.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import cloudckpt

WATCHED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen")
OUR_OWN = ("cloudckpt.", "torch.distributed.checkpoint.")
"""Modules of the errors that cloudckpt pickles and unpickles itself, to see whether they would reach other ranks."""

NAMES = ("$(touch MARK)", "`touch MARK`", "; touch MARK", "__import__('os').system('touch MARK')", "%s%n", "a\nb")


class BySystem:
    """Runs a shell command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


class ByExec(BySystem):
    """Runs Python code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.mark)!r}, 'w').close()",)


def fill(root: Path, mark: Path) -> dict[str, set[str]]:
    """The checkpoints in it, and for each the classes of errors that a load may give."""
    plain = [pickle.dumps(kind(mark), protocol) for kind in (BySystem, ByExec) for protocol in (0, 2, 4)]
    expected: dict[str, set[str]] = {}
    # checkpoints that are what they say, but for a value
    for kind in (BySystem, ByExec):
        name = f"value-{kind.__name__}"
        cloudckpt.save({"x": torch.ones(3), "evil": kind(mark)}, str(root / name), no_dist=True)
        expected[name] = {"UnsafePickleError"}
    # pickles in place of everything
    for number, content in enumerate(plain):
        for place, kinds in (
            ("manifest.json", {"InvalidManifestError"}),
            ("manifest.7.json", {"InvalidManifestError"}),
            (".metadata", {"UnsafePickleError"}),
        ):
            name = f"pickle-{number}-{place.replace('/', '-')}"
            path = root / name / place
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            (path.parent / "__0_0.distcp").write_bytes(content)
            (root / name / "data" / "a").mkdir(parents=True)
            (root / name / "data" / "a" / "0-0.safetensors").write_bytes(content)
            expected[name] = kinds
    # one long enough to be no fence, and one that ends like a manifest
    for number, content in enumerate((plain[0] + b" " * 500, plain[0] + b',"crc32c":"00000000"}')):
        (root / f"padded-{number}").mkdir()
        (root / f"padded-{number}" / "manifest.json").write_bytes(content)
        expected[f"padded-{number}"] = {"InvalidManifestError"}
    # a data object that is a pickle, under a good manifest
    cloudckpt.save({"x": torch.ones(3), "evil": 1}, str(root / "data"), no_dist=True)
    (path,) = (root / "data").glob("data/*/*")
    size = path.stat().st_size
    path.write_bytes((plain[0] + torch.ones(size).numpy().tobytes())[:size])
    expected["data"] = {"CorruptCheckpointError"}
    # names that a shell or a formatter would run
    for name in NAMES:
        path = root / name.replace("MARK", mark.name) / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(plain[0])
        expected[path.parent.name] = {"InvalidManifestError", "InvalidURIError"}
    return expected


def outcome(call: Callable[[], Any]) -> str:
    """The class of the error, which has to be one of ours; empty where there is none."""
    try:
        call()
    except (cloudckpt.CloudckptError, CheckpointException) as error:
        if not isinstance(error, cloudckpt.CloudckptError):
            (error, _), *_ = error.failures.values()
        return type(error).__name__ if isinstance(error, cloudckpt.CloudckptError) else f"foreign {error!r}"
    return ""


def main(directory: Path) -> dict[str, Any]:
    root, mark = directory / "root", directory / "mark"
    root.mkdir()
    os.chdir(directory)
    expected = fill(root, mark)
    seen: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in WATCHED or (event == "pickle.find_class" and not str(args[0]).startswith(OUR_OWN)):
            seen.append(f"{event} {args!r}")

    sys.addaudithook(watch)
    outcomes: dict[str, list[str]] = {}
    for name in expected:
        uri = str(root / name)
        calls = {
            "load": lambda uri=uri: cloudckpt.load(state(), uri, no_dist=True),
            "load by dcp": lambda uri=uri: dcp.load(
                state(), storage_reader=cloudckpt.ObjectStoreReader(uri), no_dist=True
            ),
            "load by keys": lambda uri=uri: _load_state_dict_from_keys(storage_reader=cloudckpt.ObjectStoreReader(uri)),
            "verify": lambda uri=uri: cloudckpt.verify(uri),
        }
        outcomes[name] = [outcome(call) for call in calls.values()]
    calls = [
        lambda: cloudckpt.list_checkpoints(root),
        lambda: cloudckpt.latest(root),
        lambda: cloudckpt.load_latest(state(), root, no_dist=True),
        lambda: cloudckpt.load_latest(state(), root, no_dist=True, verify_first=True),
    ]
    for at in (root, *(root / name for name in expected)):
        for settings in ({}, {"older_than": dt.timedelta(0), "dry_run": False}):
            calls.append(lambda at=at, settings=settings: cloudckpt.gc(at, **settings))
    of_root = [outcome(call) for call in calls]
    harmless = {"mark": mark.exists(), "seen": list(seen)}
    cloudckpt.load(state(), str(root / "value-BySystem"), no_dist=True, allow_pickle=True)
    return {
        "expected": {name: sorted(kinds) for name, kinds in expected.items()},
        "outcomes": outcomes,
        "of_root": of_root,
        **harmless,
        "with_consent": {"mark": mark.exists(), "seen": seen[len(harmless["seen"]) :]},
    }


def state() -> dict[str, Any]:
    return {"x": torch.zeros(3), "evil": None}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(Path(sys.argv[1]))))
