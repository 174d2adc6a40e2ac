"""Files that ranks write as streams, and one rank commits. With the package torch_checkpointing: tests/frameworks."""

from __future__ import annotations

import dataclasses
import gc
import io
import mmap
import random
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors
from tests.kit.in_memory import Memory
from tests.kit.wrapped import permanent

import cloudckpt
from cloudckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteSaveError,
    InvalidOptionError,
    StoreError,
)
from cloudckpt.inspect.file_tree import FileTree
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.file_saves import FilesJob, Membership
from cloudckpt.stores.base import crc32c_of
from cloudckpt.uri import parse_location

TILE_BYTES = 4096
PART_BYTES = 16 * 1024
OPTIONS = cloudckpt.Options(
    staging_bytes=64 * PART_BYTES,
    connections=2,
    read_bytes=64 * PART_BYTES,
    advanced=cloudckpt.AdvancedOptions(
        part_bytes=PART_BYTES, tile_bytes=TILE_BYTES, request_bytes=PART_BYTES, object_bytes=3 * PART_BYTES
    ),
)


def job_at(uri: str, me: Membership, *, save: int = 1, options: cloudckpt.Options = OPTIONS) -> FilesJob:
    job = FilesJob(Context(parse_location(uri), options, rank=me.rank), me, save=save)
    job.begin()
    return job


def ranks(num_ranks: int) -> list[Membership]:
    """Return the memberships of the ranks of a new job."""
    first = Membership(num_ranks=num_ranks)
    return [Membership(attempt=first.attempt, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def write(job: FilesJob, path: str, data: bytes, *, step_bytes: int = 5000) -> None:
    with job.open(path) as file:
        for begin in range(0, len(data), step_bytes):
            file.write(data[begin : begin + step_bytes])


def save(uri: str, files: list[dict[str, bytes]], me: list[Membership] | None = None) -> None:
    """One dict for each rank."""
    jobs = [job_at(uri, each) for each in me or ranks(len(files))]
    for job, of_rank in zip(jobs, files, strict=True):
        for path, data in of_rank.items():
            write(job, path, data)
    jobs[0].commit_files()


def read(memory: Memory, path: str) -> bytes:
    return FileTree(parse_location(memory.root), OPTIONS, rank=0).open(path).readall()


def data_of(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


_SIZES = st.one_of(
    st.integers(0, 3 * TILE_BYTES),
    st.builds(lambda n, d: max(n * PART_BYTES + d, 0), st.integers(1, 7), st.integers(-300, 300)),
)


@settings(deadline=None, max_examples=60)
@given(size_bytes=_SIZES, step_bytes=st.integers(500, 3 * PART_BYTES), seed=st.integers(0, 2**20))
def test_a_file_is_read_as_it_was_written(size_bytes: int, step_bytes: int, seed: int) -> None:
    """Bytes at the bounds of parts, objects or tiles would be lost, or stand in another place, for some size."""
    root = f"memory://files-{size_bytes}-{step_bytes}-{seed}"
    data = data_of(size_bytes, seed)
    job = job_at(f"{root}/step-1", Membership())
    write(job, "model_0.pt", data, step_bytes=step_bytes)
    job.commit_files(["model_0.pt"])
    reader = FileTree(parse_location(root), OPTIONS, rank=0).open("step-1/model_0.pt")
    assert reader.readall() == data
    draw = random.Random(seed)
    for _ in range(5):
        begin = draw.randrange(size_bytes + 1)
        length = draw.choice([draw.randrange(40), draw.randrange(size_bytes + 2)])
        assert reader.seek(begin) == reader.tell() == begin
        assert io.BufferedReader(reader, 16).read(length) == data[begin : begin + length]
        reader = FileTree(parse_location(root), OPTIONS, rank=0).open("step-1/model_0.pt")
    assert cloudckpt.verify(f"{root}/step-1", options=OPTIONS).num_tensors == 1


def test_the_files_of_all_ranks_are_one_checkpoint(memory: Memory) -> None:
    """A rank's file would be missing; or another program could not open the objects; or what the ranks said of their
    files would be left behind.
    """
    big = data_of(7 * PART_BYTES)
    save(memory.uri(), [{"model_0.pt": big, "sub/x.json": b"{}"}, {"model_1.pt": b"one"}])
    tree = FileTree(parse_location(memory.root), OPTIONS, rank=0)
    assert tree.stat("checkpoint") == ["model_0.pt", "model_1.pt", "sub"]
    assert tree.stat("checkpoint/sub") == ["x.json"]
    assert tree.stat("checkpoint/model_1.pt") == 3
    assert tree.stat("") == ["checkpoint"]
    (info,) = cloudckpt.list_checkpoints(memory.root, all=True)
    assert (info.state, info.world_size, info.num_tensors) == ("committed", 2, 3)
    found: dict[str, bytes] = {}
    for key in memory.data_keys():
        document = memory.at().inner.read(key, max_bytes=2**20)
        found |= {name: array.tobytes() for name, array in load_safetensors(document).items()}
    parts = sorted((name for name in found if "model_0.pt[" in name), key=lambda name: int(name[11:].partition(":")[0]))
    assert len(parts) == 3
    assert b"".join(found[name] for name in parts) == big
    assert found["sub/x.json"] == b"{}"


def test_the_seconds_of_a_save_are_not_the_age_of_its_job(memory: Memory) -> None:
    """If this fails, a list of checkpoints says that each save took as long as the job had run."""
    save(memory.uri(), [{"model_0.pt": b"zero"}], [Membership(attempt="20200101T000000000Z-0123456789ab")])
    (info,) = cloudckpt.list_checkpoints(memory.root, all=True)
    assert info.save_s is not None
    assert 0 <= info.save_s < 600.0


def test_a_store_without_parts_takes_a_file_in_many_objects(memory: Memory) -> None:
    """A large file would be held in memory as a whole, or not be saved there."""
    store = memory.at()
    store.capabilities = dataclasses.replace(store.capabilities, multipart=False)
    data = data_of(7 * PART_BYTES)
    save(memory.uri(), [{"model_0.pt": data}])
    assert store.count("create_multipart") == 0
    assert max(store.inner.head(key).size_bytes for key in memory.data_keys()) <= PART_BYTES
    assert read(memory, "checkpoint/model_0.pt") == data


def test_uncommitted_files_do_not_exist(memory: Memory) -> None:
    """A resume would take half a checkpoint for a whole one."""
    jobs = [job_at(memory.uri(), me) for me in ranks(2)]
    write(jobs[0], "model_0.pt", b"zero")
    write(jobs[1], "model_1.pt", b"one")
    tree = FileTree(parse_location(memory.root), OPTIONS, rank=0)
    for path in ("", "checkpoint", "checkpoint/model_0.pt", "checkpoint/data"):
        assert tree.stat(path) is None, path
    with pytest.raises(FileNotFoundError):
        tree.open("checkpoint/model_0.pt")
    with pytest.raises(CheckpointNotFoundError):
        cloudckpt.verify(memory.uri())
    jobs[0].commit_files()
    assert tree.stat("checkpoint") == ["model_0.pt", "model_1.pt"]


def test_files_that_another_rank_deleted_are_gone(memory: Memory) -> None:
    """A rank would go on to see a checkpoint that was deleted, and never see the one that was saved in its place."""
    tree = FileTree(parse_location(memory.root), OPTIONS, rank=1)
    save(memory.uri(), [{"model_0.pt": b"zero"}])
    assert tree.stat("checkpoint/model_0.pt") == 4
    cloudckpt.delete(memory.uri())
    assert tree.stat("checkpoint") is None
    assert tree.stat("checkpoint/model_0.pt") is None
    save(memory.uri(), [{"model_0.pt": b"other"}])
    assert tree.open("checkpoint/model_0.pt").readall() == b"other"


def test_an_error_of_the_store_is_not_absence(memory: Memory) -> None:
    """A store that refuses to list would make a job begin anew, beside its checkpoints."""
    save(memory.uri("run/step-1"), [{"model_0.pt": b"zero"}])
    for name in ("run/step-1", "run", ""):
        memory.at(name).fail("list", error=lambda: permanent("list"), times=100)
    for path in ("run", "run/step-1", "run/step-1/model_0.pt"):
        with pytest.raises(StoreError):
            FileTree(parse_location(memory.root), OPTIONS, rank=0).stat(path)


@pytest.mark.parametrize("operation", ["create_multipart", "upload_part", "complete_multipart", "put"])
def test_a_file_that_cannot_be_written_is_not_there(operation: str, memory: Memory) -> None:
    """A part that the store refused would be missing in the checkpoint, or what was sent of the file be left behind."""
    job = job_at(memory.uri(), Membership())
    memory.at().fail(operation, error=lambda: permanent(operation), skip=operation == "upload_part")
    size_bytes = 100 if operation == "put" else 7 * PART_BYTES
    with pytest.raises(StoreError):
        write(job, "model_0.pt", data_of(size_bytes))
    assert memory.all_keys() == []
    assert list(memory.at().inner.list_uploads()) == []
    with pytest.raises(IncompleteSaveError, match="no rank has written a file"):
        job.commit_files()


def test_nothing_but_close_completes_a_file(memory: Memory) -> None:
    """If this fails, the part of a file that a failed serializer has written is committed as a whole file."""
    job = job_at(memory.uri(), Membership())

    def fail(size_bytes: int) -> None:
        with job.open("model_0.pt") as file:
            file.write(data_of(size_bytes))
            raise ZeroDivisionError

    for size_bytes in (10, 4 * PART_BYTES):
        with pytest.raises(ZeroDivisionError):
            fail(size_bytes)
        abandoned = job.open("model_1.pt")
        abandoned.write(data_of(size_bytes))
        del abandoned
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "cloudckpt-abort":
                thread.join()
    assert memory.all_keys() == []
    assert list(memory.at().inner.list_uploads()) == []
    with pytest.raises(IncompleteSaveError):
        job.commit_files()


@pytest.mark.parametrize("ending", ["sys.exit(3)", "file.itself = file; sys.exit(3)", "atexit.register(end)"])
def test_a_process_ends_beside_an_open_file(ending: str, tmp_path: Path) -> None:
    """A script that fails while it writes a file would hang instead of ending, and keep its machines; or it would print
    an error that is none.
    """
    script = """
import atexit
import os
import sys
import cloudckpt
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.file_saves import FilesJob, Membership
from cloudckpt.uri import parse_location
job = FilesJob(Context(parse_location(sys.argv[1]), cloudckpt.Options(), rank=0), Membership(), save=1)
job.begin()
file = job.open("model_0.pt")
file.write(bytes(2**26))
def end():
    global file
    del file
    sys.stderr.flush()
    os._exit(3)
"""
    command = [sys.executable, "-c", script + ending, str(tmp_path)]
    done = subprocess.run(command, timeout=120, check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (3, b"")
    assert cloudckpt.gc(tmp_path, older_than=0).num_objects == 0  # nothing is complete


def test_a_file_that_is_collected_in_its_own_thread_holds_up_nothing(memory: Memory) -> None:
    """The thread would wait for itself, and garbage never be collected again in the process."""
    job = job_at(memory.uri(), Membership())
    files, is_the_last = [job.open("model_0.pt")], threading.Event()

    def collect() -> None:
        assert is_the_last.wait(60.0)
        files.clear()

    memory.at().once_before("upload_part", "", collect)
    files[0].write(data_of(2 * PART_BYTES))
    is_the_last.set()
    for _ in range(2):  # the second ones are begun by the first
        for thread in threading.enumerate():
            if thread.name.startswith("cloudckpt-"):
                thread.join(10.0)
                assert not thread.is_alive()
    assert memory.all_keys() == list(memory.at().inner.list_uploads()) == []


def test_a_file_that_has_failed_or_ended_takes_no_more(memory: Memory) -> None:
    """A writer that goes on after an error would be told that the file is whole; or one after the end would hang."""
    job = job_at(memory.uri(), Membership())
    memory.at().fail("create_multipart", error=lambda: permanent("create_multipart"))
    failed = job.open("model_0.pt")
    with pytest.raises(StoreError):
        failed.write(data_of(3 * PART_BYTES))
    with pytest.raises(StoreError):
        failed.close()
    whole = job.open("model_1.pt")
    whole.write(b"one")
    whole.close()
    for closed in (failed, whole):
        closed.close()
        with pytest.raises(ValueError, match="is closed"):
            closed.write(data_of(9 * PART_BYTES))
    job.commit_files()
    assert FileTree(parse_location(memory.root), OPTIONS, rank=0).stat("checkpoint") == ["model_1.pt"]


def test_a_file_with_a_long_name_in_small_objects(memory: Memory) -> None:
    """A save would never end if a file's name takes more than a part."""
    advanced = dataclasses.replace(OPTIONS.advanced, part_bytes=TILE_BYTES, object_bytes=1)
    job = job_at(memory.uri(), Membership(), options=dataclasses.replace(OPTIONS, advanced=advanced))
    data, name = data_of(3 * PART_BYTES), "n" * 5000
    write(job, name, data)
    job.commit_files()
    assert read(memory, f"checkpoint/{name}") == data


def test_one_of_two_jobs_wins(memory: Memory) -> None:
    """The checkpoint would have files of two jobs, or the loser think that it had won."""
    jobs = [[job_at(memory.uri(), me) for me in ranks(2)] for _ in range(2)]
    for number, of_job in enumerate(jobs):
        for rank, job in enumerate(of_job):
            write(job, f"model_{rank}.pt", b"%d of job %d" % (rank, number))
    jobs[1][0].commit_files()
    with pytest.raises(CheckpointExistsError):
        jobs[0][0].commit_files()
    assert [read(memory, f"checkpoint/model_{rank}.pt") for rank in range(2)] == [b"0 of job 1", b"1 of job 1"]
    assert cloudckpt.verify(memory.uri()).num_objects == len(memory.data_keys()) == 2
    for me in ranks(2):  # before any byte moves, on each rank
        with pytest.raises(CheckpointExistsError):
            job_at(memory.uri(), me)


def test_the_job_after_a_crash_saves_again(memory: Memory) -> None:
    """A file of ranks that died would get into the checkpoint of a smaller job; or gc would leave something."""
    dead = [job_at(memory.uri(), me) for me in ranks(3)]
    write(dead[2], "model_2.pt", b"dead")
    unfinished = dead[1].open("model_1.pt")
    unfinished.write(data_of(2 * PART_BYTES + 1))
    save(memory.uri(), [{"model_0.pt": b"zero"}, {"model_1.pt": b"one"}])
    session, unfinished._session = unfinished._session, None  # it is never completed
    assert session is not None
    session.__exit__(None, None, None)  # its threads end
    tree = FileTree(parse_location(memory.root), OPTIONS, rank=0)
    assert tree.stat("checkpoint") == ["model_0.pt", "model_1.pt"]
    report = cloudckpt.gc(memory.root, older_than=0, dry_run=False, options=OPTIONS)
    assert (report.num_objects, report.num_uploads) == (2, 1)  # a data object with its receipt, and an upload
    assert cloudckpt.verify(memory.uri()).num_objects == len(memory.data_keys()) == 2
    assert list(memory.at().inner.list_uploads()) == []


def test_a_flipped_bit_is_found(memory: Memory) -> None:
    """A load would hand damaged weights to the package, which has no checksums."""
    save(memory.uri(), [{"model_0.pt": data_of(7 * PART_BYTES), "other.pt": b"other"}])
    key = max(memory.data_keys(), key=lambda key: memory.at().inner.head(key).size_bytes)
    store = memory.at().inner
    damaged = bytearray(store.read(key, max_bytes=2**20))
    damaged[9000] ^= 1
    store.delete([key])
    store.put(key, [memoryview(damaged)], crc32c=crc32c_of([memoryview(damaged)]))
    with pytest.raises(CorruptCheckpointError, match=r"model_0\.pt"):
        read(memory, "checkpoint/model_0.pt")
    mapped = mmap.mmap(-1, 7 * PART_BYTES)
    try:
        with pytest.raises(CorruptCheckpointError), memoryview(mapped) as view:
            FileTree(parse_location(memory.root), OPTIONS, rank=0).open("checkpoint/model_0.pt").readinto(view)
    finally:
        mapped.close()  # torch_checkpointing does, and an error of its own would hide this one
    assert read(memory, "checkpoint/other.pt") == b"other"
    with pytest.raises(CorruptCheckpointError, match=r"model_0\.pt"):
        cloudckpt.verify(memory.uri())


@pytest.mark.parametrize("case", ["lost", "planned", "twice", "apart", "late", "damaged"])
def test_ranks_that_disagree_are_refused(case: str, memory: Memory) -> None:
    """A checkpoint would be committed that lacks a file, or has one of another save."""
    me = ranks(2)
    first, second = (job_at(memory.uri(), each) for each in me)
    write(first, "model_0.pt", b"zero")
    if case == "late":
        cloudckpt.gc(memory.root, older_than=0, dry_run=False, options=OPTIONS)  # puts a fence
        second = job_at(memory.uri(), me[1])
        write(first, "model_0.pt", b"zero")
    if case == "apart":
        second = job_at(memory.uri(), me[1], save=2)
    for name in ("model_1.pt", "step_1.json"):
        write(second, name, b"one")
    if case == "twice":
        write(job_at(memory.uri(), me[1]), "model_1.pt", b"another")
    receipts = [key for key in memory.data_keys() if key.endswith(".receipt")]
    of_second = next(key for key in receipts if "/1-" in key)
    store = memory.at().inner
    if case in ("lost", "damaged"):
        document = bytearray(store.read(of_second, max_bytes=2**20))
        store.delete([of_second])
    if case == "damaged":
        document[30] ^= 1
        store.put(of_second, [memoryview(document)], crc32c=crc32c_of([memoryview(document)]))
    expected = {
        "lost": "the store does not list all that was written by rank 1",
        "planned": "no rank has written them: 'model_9.pt'",
        "twice": "two saves at once, or two ranks, have written 'model_1.pt'",
        "apart": "only another try to save there has files of rank 1",
        "late": "came between this rank's begin and that of rank 1",
        "damaged": "is damaged, so nothing was committed",
    }
    with pytest.raises(IncompleteSaveError, match=expected[case]):
        first.commit_files(["model_0.pt", "model_9.pt"] if case == "planned" else ())
    assert cloudckpt.list_checkpoints(memory.root) == []


def test_a_second_try_of_a_job_commits_only_its_own(memory: Memory) -> None:
    """If this fails, a save that was tried again has files of the first try, or cannot be committed."""
    me = ranks(2)
    write(job_at(memory.uri(), me[1]), "model_1.pt", b"first try")
    jobs = [job_at(memory.uri(), each, save=2) for each in me]
    write(jobs[0], "model_0.pt", b"zero")
    write(jobs[1], "model_1.pt", b"second try")
    jobs[0].commit_files(["model_0.pt", "model_1.pt"])
    assert read(memory, "checkpoint/model_1.pt") == b"second try"


def test_a_stream_takes_bounded_memory(tmp_path: Path) -> None:
    """A rank that writes a large file would hold all of it, or one that reads it, all of it twice."""
    job = job_at(str(tmp_path / "checkpoint"), Membership())
    piece = data_of(2 * PART_BYTES)
    tracemalloc.start()
    try:
        with job.open("model_0.pt") as file:
            for _ in range(8 * OPTIONS.staging_bytes // len(piece)):
                file.write(piece)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < OPTIONS.staging_bytes
    job.commit_files()
    reader = FileTree(parse_location(tmp_path), OPTIONS, rank=0).open("checkpoint/model_0.pt")
    tracemalloc.start()
    try:
        assert len(reader.readall()) == reader.size_bytes
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < reader.size_bytes + OPTIONS.read_bytes
    report = cloudckpt.verify(tmp_path / "checkpoint")
    assert report.num_bytes > 8 * OPTIONS.staging_bytes


@pytest.mark.parametrize(
    "options", [cloudckpt.Options(resume=True), cloudckpt.Options(extensions=[cloudckpt.Zstandard()])]
)
def test_options_that_do_not_apply_are_refused(options: cloudckpt.Options, memory: Memory) -> None:
    """Somebody who asks for compression or resumption would not get it, and not be told."""
    with pytest.raises(InvalidOptionError, match=r"(does not apply to files|applies to copies)"):
        job_at(memory.uri(), Membership(), options=options)
