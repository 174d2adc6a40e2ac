"""Copies, exports and imports that are interrupted, that race, and whose source goes away."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.convert.conftest import Root
from tests.convert.states import bits, contents, loaded, save, store_at

import cloudckpt
from cloudckpt.options import KIB, MIB, Options
from cloudckpt.stores.s3 import store as s3_store
from cloudckpt.stores.s3.client import S3Session
from cloudckpt.testing.faults import BrokenConnection, Faults, FlippedBits, Rule, Tell, TruncatedBody

KINDS = ["path", "s3", "gs", "memory"]
_ENDS_WITHIN_S = 120
_WAIT_S = 60

_INTERRUPTED = """
import os, signal, sys
from cloudckpt.cli import convert, main
from cloudckpt.testing.faults import Faults, Rule, Tell
import dataclasses

command, source, target, operation, skip = sys.argv[1:6]
interrupt = Tell(before=lambda call: os.kill(os.getpid(), signal.SIGINT))
faults = Faults(Rule(fault=interrupt, operations={operation}, skip=int(skip)))
of_both = convert.options_of_both

def faulty(*arguments, **more):
    one, other = of_both(*arguments, **more)
    return one, dataclasses.replace(other, wrap_store=faults, connections=2)

convert.options_of_both = faulty
main([command, source, target, *sys.argv[6:]])
"""


@pytest.mark.parametrize(("command", "skip"), [("cp", 0), ("cp", 2), ("export", 0), ("export", 2), ("import", 0)])
@pytest.mark.slow
def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path: Path, command: str, skip: int) -> None:
    """If this fails, a command that is interrupted hangs, or leaves a half of what it was to make."""
    state = {f"w{i}": torch.full((5000,), i) for i in range(6)}
    save(state, f"{tmp_path}/step-1", object_bytes=20 * KIB)
    source = tmp_path / "step-1"
    if command == "import":
        cloudckpt.export_checkpoint(source, tmp_path / "hub", max_shard_bytes=50_000)
        source = tmp_path / "hub"
    more = ["--max-shard-size", "50kB"] if command == "export" else []
    script = tmp_path / "interrupted.py"
    script.write_text(_INTERRUPTED)
    at = [command, str(source), str(tmp_path / "out"), "put", str(skip), *more]
    ended = subprocess.run(
        [sys.executable, script, *at], check=False, capture_output=True, text=True, timeout=_ENDS_WITHIN_S
    )
    assert (ended.returncode, ended.stdout) == (130, ""), ended.stderr
    assert "Traceback" not in ended.stderr
    assert not contents(str(tmp_path / "out"))


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_copies_to_one_place_one_wins(root_of: Root, kind: str) -> None:
    """If this fails, two copies that run at once make a checkpoint of both, or both are told that theirs is there."""
    root, target = root_of("path"), f"{root_of(kind)}/step-1"
    states = [{f"w{i}": torch.full((3000,), 10 * number + i) for i in range(4)} for number in range(2)]
    for number, state in enumerate(states):
        save(state, f"{root}/{number}", object_bytes=20 * KIB)
    both_have_looked = threading.Barrier(2)
    outcomes: dict[int, Any] = {}

    def copy(number: int) -> None:
        met = Tell(before=lambda _call: both_have_looked.wait(_WAIT_S))
        options = Options(wrap_store=Faults(Rule(fault=met, operations={"put"}, key="data/")))
        try:
            outcomes[number] = cloudckpt.copy(f"{root}/{number}", target, target_options=options)
        except cloudckpt.CloudckptError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)
    (winner,) = (number for number in outcomes if isinstance(outcomes[number], cloudckpt.types.CopyReport))
    assert isinstance(outcomes[1 - winner], cloudckpt.CheckpointExistsError)
    assert bits(loaded(states[winner], target)) == bits(states[winner])
    (attempt,) = outcomes[winner].attempts
    assert {key.split("/")[1] for key in contents(target) if key.startswith("data/")} == {attempt}


@pytest.mark.parametrize("what", ["copy", "export"])
def test_a_source_that_is_deleted_meanwhile(root_of: Root, what: str) -> None:
    """If this fails, retention at the source makes a copy that speaks of damage, or half of an export."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    save({f"w{i}": torch.full((3000,), i) for i in range(4)}, source, object_bytes=20 * KIB)
    gone = Tell(before=lambda _call: cloudckpt.delete(source))
    options = Options(wrap_store=Faults(Rule(fault=gone, operations={"read_into"}, key="data/")))
    if what == "copy":
        with pytest.raises(cloudckpt.errors.CheckpointChangedError, match="was removed while it was being copied"):
            cloudckpt.copy(source, target, options=options)
    else:
        with pytest.raises(cloudckpt.CloudckptError) as caught:
            cloudckpt.export_checkpoint(source, target, options=options)
        assert source in str(caught.value)
    assert not contents(target)


@pytest.mark.parametrize("fault", [FlippedBits, TruncatedBody, BrokenConnection])
@pytest.mark.parametrize("what", ["copy", "export"])
def test_what_breaks_once_on_the_way_is_read_again(root_of: Root, what: str, fault: Callable[[], Any]) -> None:
    """If this fails, a bit that flips on the network is copied, or costs all that was sent before it."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    state = {f"w{i}": torch.full((30_000,), i) for i in range(4)}
    save(state, source, tile_bytes=4 * KIB, object_bytes=20 * KIB)
    options = Options(wrap_store=Faults(Rule(fault=fault(), operations={"read_into"}, key="data/")))
    if what == "copy":
        cloudckpt.copy(source, target, options=options)
    else:
        cloudckpt.export_checkpoint(source, f"{target}-export", options=options)
        cloudckpt.import_checkpoint(f"{target}-export", target)
    assert bits(loaded(state, target)) == bits(state)


def test_bits_that_always_flip_are_not_committed(root_of: Root) -> None:
    """If this fails, a network card or a cache that is broken makes a copy that is, too."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    save({"w": torch.arange(30_000)}, source, tile_bytes=4 * KIB)
    options = Options(wrap_store=Faults(Rule(fault=FlippedBits(), operations={"read_into"}, key="data/", times=None)))
    for convert in (cloudckpt.copy, cloudckpt.export_checkpoint):
        with pytest.raises(cloudckpt.CorruptCheckpointError, match="'w'"):
            convert(source, target, options=options)
        assert not contents(target)


@pytest.mark.parametrize("kind", ["s3"])
def test_a_large_object_is_copied_by_the_service_in_parts(
    root_of: Root, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """If this fails, objects of more than 5 GiB cannot be copied by S3, which takes no larger ones in one request."""
    monkeypatch.setattr(s3_store, "CHECKED_PART_BYTES", 5 * MIB)
    ranges: list[str] = []
    call = S3Session.call

    def counted(self: S3Session, operation: str, api: str, *arguments: Any, **members: Any) -> Any:
        if api == "UploadPartCopy":
            ranges.append(members["CopySourceRange"].removeprefix("bytes="))
        return call(self, operation, api, *arguments, **members)

    monkeypatch.setattr(S3Session, "call", counted)
    root = root_of(kind)
    state = {"w": torch.arange(3 * MIB, dtype=torch.int32)}
    save(state, f"{root}/a")
    report = cloudckpt.copy(f"{root}/a", f"{root}/b")
    assert report.num_service_bytes + report.num_read_back_bytes == report.num_bytes
    assert sorted(ranges, key=lambda each: int(each.partition("-")[0])) == [
        f"0-{5 * MIB - 1}",
        f"{5 * MIB}-{10 * MIB - 1}",
        f"{10 * MIB}-{report.num_bytes - 1}",
    ]
    assert bits(loaded(state, f"{root}/b")) == bits(state)
    assert not list(store_at(f"{root}/b").list_uploads())
