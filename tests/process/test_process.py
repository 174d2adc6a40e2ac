"""Saves that a process of their own carries out: they are as others, and fail cleanly whatever dies."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.models import assert_same
from tests.process.wrappers import Dying, NotImportable, Noting, Refusing, Waiting
from tests.resources import open_files
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import cloudckpt
from cloudckpt import Event, Options
from cloudckpt._process import host
from cloudckpt._process.host import UploadProcess
from cloudckpt._process.messages import Alive
from cloudckpt._stage.stager import PinnedStager
from cloudckpt.options import KIB

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

WAIT_S = 60.0
SMALL = {"part_bytes": 64 * KIB, "tile_bytes": 4 * KIB, "staging_bytes": 1 << 20}


@pytest.fixture(scope="module")
def process() -> Iterator[UploadProcess]:
    """One for all tests, which start it anew where they end it: that takes seconds."""
    made = UploadProcess()
    yield made
    made.close()


def values(fill: float = 1.0) -> dict[str, Any]:
    return {"a": torch.full((50_000,), fill), "b": torch.arange(35.0).view(5, 7).t(), "step": 7, "name": "run"}


def save(process: UploadProcess, uri: str, state: dict[str, Any] | None = None, **options: Any) -> Any:
    """By `process`, from a snapshot."""
    stager = PinnedStager(shared=True)
    try:
        staging = stager.begin(values() if state is None else state)
        writer = cloudckpt.ObjectStoreWriter(uri, options=Options(**{**SMALL, **options}))
        writer.run_in(process, staging)
        return cloudckpt.save(staging.state_dict, storage_writer=writer)
    finally:
        stager.close()


def assert_holds(uri: str, fill: float = 1.0) -> None:
    loaded = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for name, value in values().items()
    }
    cloudckpt.load(loaded, uri)
    assert_same(loaded, values(fill))


def assert_nothing_there(uri: str) -> None:
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.load(values(), uri)


def pid_of(process: UploadProcess) -> int:
    process.start()
    assert process.pid is not None
    return process.pid


def test_a_save_is_the_same_as_one_of_this_process(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, checkpoints depend on which process wrote them, or say less of how they were made."""
    uris = [str(tmp_path / name) for name in ("here", "there")]
    events: list[list[Event]] = [[], []]
    reports = []
    for number, uri in enumerate(uris):
        options: dict[str, Any] = {"on_event": events[number].append, "metadata": {"epoch": 3}}
        if number:
            reports.append(save(process, uri, **options).report)
        else:
            reports.append(cloudckpt.save(values(), uri, options=Options(**SMALL, **options)).report)
        assert_holds(uri)
    here, there = reports
    assert (here.num_bytes, here.num_objects, here.rank) == (there.num_bytes, there.num_objects, there.rank)
    assert there.uri == uris[1]
    assert there.attempt in "".join(str(path) for path in Path(uris[1]).rglob("*"))
    assert there.num_requests > 0
    assert min(there.plan_s, there.write_s, there.stage_s, there.transfer_s, there.commit_s) > 0
    data = [sorted(path.read_bytes() for path in Path(uri).rglob("*.safetensors")) for uri in uris]
    assert data[0] == data[1]
    told = [sorted((event.name, event.num_bytes) for event in of_one) for of_one in events]
    assert told[0] == told[1]
    assert {event.uri for event in events[1]} == {uris[1]}
    assert json.loads((tmp_path / "there" / "manifest.json").read_text())["metadata"] == {"epoch": 3}


@pytest.mark.parametrize("flatten", [True, False], ids=["tuples", "dicts"])
def test_what_is_serialised_does_not_take_the_whole_snapshot_along(
    process: UploadProcess, tmp_path: Path, *, flatten: bool
) -> None:
    """If this fails, each tuple with a tensor in it, such as a state of a generator, stores all of the model again."""
    state: dict[str, Any] = {"large": torch.ones(1 << 20), "pair": (torch.arange(5), torch.ones(3)[1:], "x")}
    if not flatten:
        state = {"one": state, "two": {"small": torch.arange(7)}}
    with closing(PinnedStager(shared=True)) as stager:
        staging = stager.begin(state)
        staging.completed.result(WAIT_S)
        writer = cloudckpt.ObjectStoreWriter(tmp_path / "c", options=Options(**SMALL))
        writer.run_in(process, staging)
        planner = DefaultSavePlanner(flatten_state_dict=flatten)
        cloudckpt.save(staging.state_dict, storage_writer=writer, planner=planner)
        del staging, writer, planner
    num_bytes = sum(path.stat().st_size for path in tmp_path.glob("c/data/*/*"))
    assert num_bytes < 4 * (1 << 20) + 64 * KIB


def test_another_process_does_the_work_with_the_environment_of_now(
    process: UploadProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, uploads burden the training process, miss credentials that were renewed, or warn nobody."""
    for name in ("one", "two"):
        noted = tmp_path / f"noted-{name}"
        monkeypatch.setenv("NOTED_IN", str(noted))
        save(process, str(tmp_path / name), wrap_store=Noting)
        assert int(noted.read_text()) == process.pid != os.getpid()
        assert f"written by {process.pid}" in caplog.text


def test_an_error_of_the_other_process_is_the_same_here(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, handlers of a store's errors do not meet them in saves by process."""
    uri = str(tmp_path / "c")
    with pytest.raises(cloudckpt.AccessDeniedError, match="no right to write this"):
        save(process, uri, wrap_store=Refusing)
    save(process, uri)
    with pytest.raises(cloudckpt.CheckpointExistsError, match="already exists"):
        save(process, uri, values(2.0))
    assert_holds(uri)


class OwnError(Exception):
    """Of the training program, which no other process knows."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


@pytest.mark.parametrize("name", ["save.set_up", "save.part_uploaded", "save.written", "save.committing"])
def test_what_on_event_raises_fails_the_save_there(process: UploadProcess, tmp_path: Path, name: str) -> None:
    """If this fails, a program cannot stop a save by process at its own word, or does not see its own error."""
    uri = str(tmp_path / "c")

    def stop(event: Event) -> None:
        if event.name == name:
            raise OwnError("stop here")

    with pytest.raises(Exception, match="stop here"):
        save(process, uri, on_event=stop)
    assert_nothing_there(uri)
    assert list(Path(uri).rglob("*.safetensors")) == []
    save(process, uri)
    assert_holds(uri)


EVENTS = ["save.part_uploaded", "save.completing", "save.object_uploaded", "save.written", "save.committing"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["save.set_up", *EVENTS])
def test_a_process_killed_before_the_commit_fails_the_save(process: UploadProcess, tmp_path: Path, name: str) -> None:
    """If this fails, a save whose process runs out of memory hangs, says nothing, or leaves something visible."""
    uri = str(tmp_path / "c")
    pid = pid_of(process)

    def kill(event: Event) -> None:
        if event.name == name:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(cloudckpt.UploadProcessError, match="killed by SIGKILL, as the kernel does") as caught:
        save(process, uri, on_event=kill)
    assert "rank 0" in str(caught.value)
    assert uri in str(caught.value)
    assert_nothing_there(uri)
    save(process, uri)
    assert process.pid != pid
    assert_holds(uri)


@pytest.mark.slow
def test_a_process_killed_in_the_commit_leaves_it_unknown(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, a save that was committed is taken for one that failed, and its data is removed."""
    uri = str(tmp_path / "c")
    with pytest.raises(cloudckpt.CommitUnknownError, match="killed by SIGKILL"):
        save(process, uri, wrap_store=Dying)
    assert_holds(uri)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
def test_a_process_that_stops_is_given_up(
    process: UploadProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """If this fails, a process that hangs makes the save hang, or goes on with it after it was given up."""
    monkeypatch.setattr(host, "_LEAST_SILENCE_S", 2.0)
    uri = str(tmp_path / "c")
    pid = pid_of(process)

    def stop(event: Event) -> None:
        if event.name == name:
            os.kill(pid, signal.SIGSTOP)

    with pytest.raises(cloudckpt.UploadProcessError, match="gave no sign of life for 2 s and was ended"):
        save(process, uri, on_event=stop, timeout_s=1.0)
    assert not Path(f"/proc/{pid}").exists()
    assert_nothing_there(uri)


def test_a_process_that_only_takes_long_says_that_it_lives(
    process: UploadProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a store that takes its time is taken for a process that hangs, and the save is given up."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("AWAITED_PIPE", str(tmp_path / "pipe"))
    pipe = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)  # neither end ever waits here
    num_signs = 0
    take = host._Asked.take

    def counting(asked: Any, message: object, *, timeout_s: float) -> None:
        nonlocal num_signs
        take(asked, message, timeout_s=timeout_s)
        if asked.is_committing and isinstance(message, Alive):
            num_signs += 1
            os.write(pipe, b"." if num_signs == 2 else b"")

    monkeypatch.setattr(host._Asked, "take", counting)
    try:
        save(process, str(tmp_path / "c"), wrap_store=Waiting)
    finally:
        os.close(pipe)
    assert num_signs >= 2
    assert_holds(str(tmp_path / "c"))


def test_a_frozen_program_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a program that was packed into one file starts itself again and again."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    process = UploadProcess()
    with pytest.raises(cloudckpt.InvalidOptionError, match="needs a Python"):
        save(process, str(tmp_path / "c"))
    assert process.pid is None


def test_a_process_that_is_closed_in_a_save_ends_it(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, `cloudckpt.close` in another thread makes a save hang, or leaves half of it visible."""
    uri = str(tmp_path / "c")

    def close(event: Event) -> None:
        if event.name == "save.part_uploaded":
            process.close()

    with pytest.raises(cloudckpt.UploadProcessError, match="was closed, while it was writing"):
        save(process, uri, on_event=close)
    assert_nothing_there(uri)


def test_signals_to_all_of_a_job_do_not_end_it(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, Ctrl-C or a preemption ends the upload that the training process wants to complete."""
    save(process, str(tmp_path / "warm"))
    pid = pid_of(process)

    def interrupt(event: Event) -> None:
        if event.name == "save.part_uploaded":
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)

    save(process, str(tmp_path / "c"), on_event=interrupt)
    assert process.pid == pid
    assert os.getpgid(pid) != os.getpgid(0)
    assert_holds(str(tmp_path / "c"))


@pytest.mark.slow
def test_a_process_that_ended_between_saves_is_replaced(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, one crash makes every later save fail."""
    pid = pid_of(process)
    os.kill(pid, signal.SIGKILL)
    save(process, str(tmp_path / "c"))
    assert process.pid != pid
    assert_holds(str(tmp_path / "c"))


def test_what_cannot_be_sent_is_refused_before_anything_is_written(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, options of the program's own file come out as a riddle, or after half of the upload."""
    uri = str(tmp_path / "c")
    with pytest.raises(cloudckpt.InvalidOptionError, match=r"cannot be pickled: .*wrap_store"):
        save(process, uri, wrap_store=lambda store: store)
    with pytest.raises(cloudckpt.InvalidOptionError, match="a_module_of_the_training_program_alone"):
        save(process, uri, wrap_store=NotImportable())
    with pytest.raises(cloudckpt.InvalidOptionError, match="own memory"):
        save(process, "memory://here/c")
    assert not Path(uri).exists()


@pytest.mark.parametrize("why", ["missing", "broken"])
def test_a_process_that_cannot_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """If this fails, a machine without memory for another process makes saves hang or end in a riddle."""
    program = tmp_path / "python"
    if why == "broken":
        program.write_text("#!/bin/sh\nexit 3\n")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    process = UploadProcess()
    try:
        said = "could not be started" if why == "missing" else "ended by itself, with status 3"
        with pytest.raises(cloudckpt.UploadProcessError, match=said):
            save(process, str(tmp_path / "c"))
    finally:
        process.close()
    assert not (tmp_path / "c").exists()


def test_a_process_that_hangs_when_it_starts_is_given_up_once_and_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a process that does not come up holds each save for minutes, whatever `timeout_s` says."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho >> {tmp_path}/starts\nexec tail -f /dev/null\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(host, "_LEAST_START_S", 1.0)
    process = UploadProcess()
    try:
        with pytest.raises(cloudckpt.UploadProcessError, match="no sign of life for 2 s and was ended"):
            save(process, str(tmp_path / "c"), timeout_s=2.0)
    finally:
        process.close()
    assert len((tmp_path / "starts").read_text().splitlines()) == 1
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_nothing_is_left_of_a_process_that_is_closed(tmp_path: Path) -> None:
    """If this fails, every program that closes its checkpoints leaves a zombie or a descriptor."""
    files = open_files()
    process = UploadProcess()
    save(process, str(tmp_path / "c"))
    pid = pid_of(process)
    process.close()
    process.close()
    assert process.pid is None
    assert not Path(f"/proc/{pid}").exists()
    assert not open_files() - files


def test_many_saves_leave_nothing_behind_in_either_process(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, long runs end for want of descriptors or memory."""

    def num_maps(pid: int) -> int:
        return sum("memfd:cloudckpt" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())

    def round_(number: int) -> None:
        save(process, str(tmp_path / f"{number}"))
        with pytest.raises(cloudckpt.CheckpointExistsError):
            save(process, str(tmp_path / f"{number}"))
        with pytest.raises(cloudckpt.AccessDeniedError):
            save(process, str(tmp_path / f"refused-{number}"), wrap_store=Refusing)

    for number in range(3):
        round_(number)
    pid = pid_of(process)
    both = (os.getpid(), pid)
    gc.collect()
    maps, files = [num_maps(each) for each in both], [open_files(each) for each in both]
    assert maps[1] <= 1, "memory of earlier snapshots is kept"
    for number in range(3, 15):
        round_(number)
    gc.collect()
    assert [num_maps(each) for each in both] == maps
    assert [open_files(each) - earlier for each, earlier in zip(both, files, strict=True)] == [Counter(), Counter()]
    assert process.pid == pid


def test_memory_of_a_snapshot_is_mapped_once_and_let_go_when_another_takes_its_place(
    process: UploadProcess, tmp_path: Path
) -> None:
    """If this fails, each save maps the snapshot anew, or one that has grown is held beside the old one."""

    seen: list[list[str]] = []

    def save_all(stager: PinnedStager, num_elements: int) -> None:
        staging = stager.begin({"a": torch.zeros(num_elements)})
        writer = cloudckpt.ObjectStoreWriter(str(tmp_path / f"{len(seen)}"), options=Options(**SMALL))
        writer.run_in(process, staging)
        cloudckpt.save(staging.state_dict, storage_writer=writer)
        lines = Path(f"/proc/{pid_of(process)}/maps").read_text().splitlines()
        seen.append([line for line in lines if "memfd:cloudckpt" in line])
        alive = {os.fstat(file).st_ino for file in staging.files}
        assert {int(line.split()[4]) for line in seen[-1]} <= alive
        assert seen[-1]

    with closing(PinnedStager(shared=True)) as stager:
        for num_elements in (50_000, 50_000, 5_000_000, 50_000):
            save_all(stager, num_elements)
    with closing(PinnedStager(shared=True)) as stager:
        save_all(stager, 50_000)
    assert seen[1] == seen[0]


def test_the_timeline_has_both_processes(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, a trace of a save by process shows nothing of what took its time."""
    save(process, str(tmp_path / "c"), trace=tmp_path / "trace.json")
    names = {span["name"] for span in spans_of(tmp_path / "trace.json")}
    cloudckpt.save(values(), str(tmp_path / "d"), options=Options(**SMALL, trace=tmp_path / "own.json"))
    own = {span["name"] for span in spans_of(tmp_path / "own.json")}
    assert own <= names


def spans_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


_PROGRAM = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, cloudckpt
from cloudckpt._process.host import upload_process
uri, moment, has_fork = sys.argv[1], sys.argv[2], sys.argv[3] == "fork"
process = upload_process()

def die(event):
    if event.name != moment:
        return
    forked = os.fork() if has_fork else 0
    if has_fork and forked == 0:
        os.close(1)  # else who reads this waits for it, too
        signal.pause()
    print(process.pid, forked, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

options = cloudckpt.Options(on_event=die, part_bytes=65536, tile_bytes=4096)
writer = cloudckpt.ObjectStoreWriter(uri, options=options)
writer.run_in(process)
cloudckpt.save({"a": torch.zeros(50_000)}, storage_writer=writer)
"""


@contextmanager
def watched(pid: int) -> Iterator[Callable[[float], bool]]:
    """Says whether a process, which need not be a child, ends in time."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        yield lambda _: True
        return
    poller = select.poll()
    poller.register(file, select.POLLIN)
    try:
        yield lambda wait_s: bool(poller.poll(wait_s * 1000))
    finally:
        os.close(file)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "company"), [("save.part_uploaded", "alone"), ("save.committing", "fork")])
def test_it_ends_with_the_training_process(tmp_path: Path, moment: str, company: str) -> None:
    """If this fails, a job that crashed goes on uploading, and may commit while its successor runs."""
    uri = str(tmp_path / "c")
    command = [sys.executable, "-c", _PROGRAM, uri, moment, company]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    pid, forked = map(int, done.stdout.split())
    try:
        with watched(pid) as ends:
            assert ends(20.0), "it outlives the training process"
    finally:
        if forked:
            os.kill(forked, signal.SIGKILL)
    assert_nothing_there(uri)


def test_a_forked_process_leaves_it_alone(process: UploadProcess, tmp_path: Path) -> None:
    """If this fails, a data loader's worker that ends takes the upload process with it."""
    save(process, str(tmp_path / "one"))
    pid = pid_of(process)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            process.close()
            code = 0 if process.pid is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    save(process, str(tmp_path / "two"))
    assert process.pid == pid
