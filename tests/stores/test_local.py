"""Files as objects: what a file system adds to the contract."""
# ruff: noqa: PTH101, PTH102, PTH103, PTH115, PTH116, PTH118, PTH119, PTH120
# (the calls under test are those of os)

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import pytest
import torch
from tests.kit.rights import without_roots_rights
from tests.stores.wire_contract import DeniedContract

import cloudckpt
from cloudckpt import Options
from cloudckpt.errors import (
    AccessDeniedError,
    ChecksumRefusedError,
    CommitUnknownError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreTimeoutError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores.local import LocalStore, files
from cloudckpt.testing.contract_base import WAIT_S, content, crc, keys, make_parts, put, read_range, upload_part


@contextlib.contextmanager
def _with_mode(root, mode):
    """Meanwhile this process may do no more than `mode` says. Root may do anything, so it becomes somebody else."""
    before = stat.S_IMODE(os.stat(root).st_mode)
    os.chmod(root, mode)
    try:
        with without_roots_rights():
            yield
    finally:
        os.chmod(root, before)


class _DeniedStore(LocalStore):
    """Each call is made without rights, and by nobody else meanwhile."""

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or name not in vars(LocalStore) or name in ("uri", "url", "capabilities", "limits"):
            return found

        def called(*args, **kwargs):
            with _with_mode(self._root, 0):
                result = found(*args, **kwargs)
                return list(result) if isinstance(result, Iterator) else result

        return called


class TestContract(DeniedContract):
    """Every clause, in a directory that does not exist yet."""

    shared_between_processes = True
    num_paging_keys = 40  # a directory has no pages, and each put waits for the disk

    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(f"{tmp_path}/run/step-1")

    def denied(self, store):
        os.makedirs(store.uri, exist_ok=True)
        return _DeniedStore(store.uri)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "root")


@pytest.fixture
def trace(monkeypatch):
    """The calls that make things durable and visible, in order, with paths for descriptors."""
    calls: list[tuple[str, str]] = []

    def record(function: str, path_of) -> None:
        real = getattr(os, function)

        def recording(*args, **kwargs):
            calls.append((function, path_of(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, function, recording)

    record("fsync", lambda file: os.readlink(f"/proc/self/fd/{file}"))
    record("link", lambda source, target: target)
    record("replace", lambda source, target: target)
    record("mkdir", lambda path, mode=0: path)
    return calls


def everything(path) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(folder, name), path) for folder, ds, fs in os.walk(path) for name in ds + fs
    )


def test_a_put_is_durable_before_it_returns(tmp_path, trace):
    """After a power cut a manifest must not name data that is gone: file first, then its name, then all directories."""
    root = f"{tmp_path}/new/root"
    put(LocalStore(root), "data/a", b"body", if_absent=True)
    visible = trace.index(("link", f"{root}/data/a"))
    (temporary,) = [path for call, path in trace[:visible] if call == "fsync" and path.endswith("/a")]
    assert "/.cloudckpt-tmp." in temporary
    synced_after = [path for call, path in trace[visible:] if call == "fsync"]
    assert synced_after == [f"{root}/data", root]
    for new in (f"{tmp_path}/new", root):
        made = trace.index(("mkdir", new))
        assert ("fsync", os.path.dirname(new)) in trace[made:visible], f"the entry of {new} is not durable"


def test_a_multipart_upload_is_durable_before_it_returns(tmp_path, trace):
    """If this fails, an object that was uploaded in parts can appear before all of it is on disk."""
    store = LocalStore(tmp_path / "root")
    upload_id = store.create_multipart("a")
    uploaded = upload_part(store, "a", upload_id, make_parts([b"body"])[0], b"body")
    store.complete_multipart("a", upload_id, [uploaded])
    visible = trace.index(("replace", f"{tmp_path}/root/a"))
    assert any(call == "fsync" and path.endswith("/a") for call, path in trace[:visible])
    assert ("fsync", f"{tmp_path}/root") in trace[visible:]


def test_nothing_is_left_beside_the_objects(store, tmp_path):
    """Temporary files that stay fill the disk; empty directories look like checkpoints to a user."""
    put(store, "a/b", b"body", if_absent=True)
    put(store, "a/b", b"body")
    with pytest.raises(ObjectExistsError):
        put(store, "a/b", b"body", if_absent=True)
    with pytest.raises(ChecksumRefusedError):
        store.put("x/y", [memoryview(b"body")], crc32c=1)
    store.abort_multipart("c/d", store.create_multipart("c/d"))
    assert everything(tmp_path) == ["root", "root/a", "root/a/b"]
    store.delete(["a/b"])
    assert everything(tmp_path) == ["root"]


def test_files_obey_the_umask(store, tmp_path):
    """Others in the user's group must be able to read the checkpoint if the user's settings say so."""
    put(store, "a", b"body", if_absent=True)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(os.stat(tmp_path / "root" / "a").st_mode) == 0o666 & ~mask


def test_uploads_are_found_from_above(tmp_path):
    """Garbage is collected from the run's folder, while each save is rooted at its own step."""
    upload_id = LocalStore(tmp_path / "run" / "step-1").create_multipart("data/a")
    above = LocalStore(tmp_path / "run")
    (found,) = above.list_uploads()
    assert (found.key, found.upload_id) == ("step-1/data/a", upload_id)
    assert keys(above) == []
    assert list(above.list_directories()) == []
    above.abort_multipart(found.key, found.upload_id)
    assert everything(tmp_path) == ["run"]


@pytest.mark.parametrize("upload_id", ["../../x", "a/b", "", "."])
def test_an_upload_id_is_no_path(store, upload_id):
    """Ids come from listings of a directory that others can write to. An object must not look like an upload."""
    with pytest.raises(ObjectNotFoundError):
        store.abort_multipart("a", upload_id)
    with pytest.raises(StoreError, match="unfinished uploads"):
        put(store, ".cloudckpt-tmp.1/a", b"body")


@pytest.mark.timeout(120)
def test_a_process_killed_in_a_put_leaves_nothing_visible(tmp_path):
    """SIGKILL at any point: the object is there whole, or not at all, and what is left can be listed."""
    code = """
import os, signal, sys
from cloudckpt.stores.local import LocalStore
from awscrt.checksums import crc32c
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
LocalStore(sys.argv[1]).put("a", [memoryview(b"body")], crc32c=crc32c(b"body"), if_absent=True)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=100)
    assert done.returncode == -9
    store = LocalStore(tmp_path)
    assert keys(store) == []
    (left,) = store.list_uploads()
    assert left.key == "a"
    put(store, "a", b"new", if_absent=True)
    assert content(store, "a") == b"new"
    store.abort_multipart(left.key, left.upload_id)
    assert everything(tmp_path) == ["a"]


def test_pruning_and_writing_do_not_disturb_each_other(store):
    """One rank deletes the last object of a directory while another creates its first: neither may fail."""
    failures: list[BaseException] = []
    done = threading.Event()

    def sweep() -> None:
        try:
            while not done.is_set():
                store.delete(["a/b/c/old"])
                for info in store.list("a/"):
                    assert info.key.startswith("a/")
        except BaseException as error:  # noqa: BLE001  # shown by the test
            failures.append(error)

    sweeper = threading.Thread(target=sweep, daemon=True)
    sweeper.start()
    try:
        for number in range(40):
            put(store, "a/b/c/old", b"body")
            put(store, f"a/b/c/{number}", b"body", if_absent=True)
            assert content(store, f"a/b/c/{number}") == b"body"
            store.delete([f"a/b/c/{number}"])
    finally:
        done.set()
        sweeper.join(WAIT_S)
    assert not failures


class TestWithoutLinks:
    """File systems such as FAT or some FUSE mounts have no hard links."""

    @pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
    def test_create_if_absent_is_refused(self, store, number, monkeypatch, tmp_path):
        """Falling back to look-and-write would lose somebody's checkpoint one day."""
        monkeypatch.setattr(os, "link", _raiser(number))
        assert not store.probe().conditional_create
        with pytest.raises(UnsupportedOperationError, match=r"no hard links.*commit='unconditional'"):
            put(store, "a", b"body", if_absent=True)
        assert everything(tmp_path / "root") == []
        put(store, "a", b"body")


def test_a_lost_answer_to_a_link_is_success(store, monkeypatch):
    """Over NFS a link that worked can be reported as “exists”; the commit must not be reported as lost to somebody."""
    real = os.link

    def link(source, target, **kwargs):
        real(source, target, **kwargs)
        raise FileExistsError(errno.EEXIST, "exists", source, None, target)

    monkeypatch.setattr(os, "link", link)
    put(store, "a", b"ours", if_absent=True)
    assert content(store, "a") == b"ours"


def test_short_writes_and_reads_are_continued(store, monkeypatch):
    """The kernel may take or give less than asked; the rest must follow at the right place."""
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, views, at: real_write(file, [views[0][:3]], at))
    monkeypatch.setattr(os, "preadv", lambda file, views, at: real_read(file, [views[0][:2]], at))
    body = bytes(range(100))
    store.put("a", [memoryview(body)[:50], memoryview(body)[50:]], crc32c=crc(body))
    assert read_range(store, "a", 1, 99) == body[1:99]
    assert content(store, "a") == body


def test_an_upload_with_bytes_missing_is_not_completed(store):
    """A part whose write was lost leaves a hole; the size shows it."""
    upload_id = store.create_multipart("a")
    parts = make_parts([b"1234", b"56"])
    uploaded = [upload_part(store, "a", upload_id, parts[0], b"1234")]
    second = upload_part(store, "a", upload_id, parts[1], b"56")
    os.truncate(files.temp_path(f"{store.uri}/a", upload_id), 4)
    with pytest.raises(StoreError, match="6 bytes, but 4 were written"):
        store.complete_multipart("a", upload_id, [*uploaded, second])
    assert keys(store) == []


class TestLinks:
    """Symbolic links below the root."""

    @pytest.fixture
    def outside(self, tmp_path):
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "secret").write_bytes(b"secret")
        return tmp_path / "outside"

    def test_a_link_out_of_the_root_is_not_followed(self, store, tmp_path, outside):
        """A checkpoint from a stranger must not read the user's files into tensors, nor write over them."""
        put(store, "a", b"body")
        (tmp_path / "root" / "file").symlink_to(outside / "secret")
        (tmp_path / "root" / "folder").symlink_to(outside)
        for key in ("file", "folder/secret"):
            with pytest.raises(StoreError, match="leads out of"):
                content(store, key)
        for call in (
            lambda: put(store, "folder/new", b"x"),
            lambda: store.create_multipart("folder/new"),
            lambda: store.delete(["folder/secret"]),
        ):
            with pytest.raises(StoreError, match="leads out of"):
                call()
        assert keys(store) == ["a"]
        assert list(store.list_directories()) == []
        assert (outside / "secret").read_bytes() == b"secret"

    def test_writing_to_a_link_replaces_the_link(self, store, tmp_path, outside):
        """An atomic put replaces the name; what the link points to belongs to somebody else."""
        put(store, "a", b"body")
        (tmp_path / "root" / "b").symlink_to(outside / "secret")
        with pytest.raises(ObjectExistsError):
            put(store, "b", b"ours", if_absent=True)
        put(store, "b", b"ours")
        assert content(store, "b") == b"ours"
        (tmp_path / "root" / "c").symlink_to(outside / "secret")
        store.delete(["c"])
        assert keys(store) == ["a", "b"]
        assert (outside / "secret").read_bytes() == b"secret"

    def test_the_root_may_be_a_link(self, tmp_path):
        """A run's folder is often a link to a disk."""
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        store = LocalStore(tmp_path / "link")
        put(store, "a/b", b"body", if_absent=True)
        assert content(store, "a/b") == b"body"
        assert (keys(store), list(store.list_directories())) == (["a/b"], ["a"])
        store.delete(["a/b"])
        assert everything(tmp_path) == ["link", "real"]


class TestBadPlaces:
    """Errors of the file system name the obstacle and the remedy."""

    @pytest.mark.parametrize("if_absent", [True, False])
    def test_a_file_and_a_directory_are_not_taken_for_each_other(self, store, tmp_path, if_absent):
        """A message that “exists already”, or one that names the object alone, would send the user the wrong way."""
        put(store, "a", b"body")
        put(store, "d/e", b"body")
        with pytest.raises(StoreError, match=rf"at {tmp_path}/root/a\).*A file is where a directory is needed"):
            put(store, "a/b/c", b"body", if_absent=if_absent)
        with pytest.raises(StoreError, match="A directory is where a file is needed") as caught:
            put(store, "d", b"body", if_absent=if_absent)
        assert not isinstance(caught.value, ObjectExistsError)
        store.delete(["a/b", "d"])
        assert keys(store) == ["a", "d/e"]

    @pytest.mark.parametrize(
        ("function", "number", "kind", "advice"),
        [
            ("pwritev", errno.ENOSPC, StoreError, "free some space"),
            ("fsync", errno.EXFULL, StoreError, "Exchange full"),
            ("mkdir", errno.EACCES, AccessDeniedError, "Grant this user access"),
            ("open", errno.EMFILE, TransientStoreError, "ulimit -n"),
            ("replace", errno.ESTALE, TransientStoreError, "server failed"),
            ("replace", errno.EIO, StoreError, "The device failed"),
            ("replace", errno.EDQUOT, StoreError, "quota is used up"),
            ("pwritev", errno.ETIMEDOUT, StoreTimeoutError, "in time"),
        ],
    )
    def test_a_failing_put_says_what_to_do_and_leaves_nothing(  # noqa: PLR0917  # the table's columns
        self, store, tmp_path, monkeypatch, function, number, kind, advice
    ):
        """Disk full, no rights, broken disk: typed, with the path and the next step, and no half file."""
        put(store, "old", b"old")
        with monkeypatch.context() as patch:
            patch.setattr(os, function, _raiser(number))
            with pytest.raises(kind, match=advice) as caught:
                put(store, "new/a", b"body")
        assert caught.value.key == f"{tmp_path}/root/new/a"
        assert caught.value.operation == "put"
        assert os.strerror(number) in str(caught.value)
        # A rename is done or lost with its answer; or it is refused.
        assert caught.value.had_no_effect is (function != "replace" or number == errno.EDQUOT)
        assert keys(store) == ["old"]
        assert list(store.list_uploads()) == []


NOTHING_DONE = "ENOSPC EDQUOT EROFS EACCES EPERM EMLINK ENAMETOOLONG EOPNOTSUPP ENOSYS"
MAYBE_DONE = "EIO ESTALE ETIMEDOUT EREMOTEIO ECONNRESET EHOSTDOWN EINTR EBUSY ENOLCK EAGAIN"


@pytest.mark.usefixtures("retries_at_once")
@pytest.mark.parametrize("arrives", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("name", f"{NOTHING_DONE} {MAYBE_DONE}".split())
def test_a_commit_whose_link_fails_is_refused_unknown_or_done(tmp_path, monkeypatch, name, *, arrives):
    """A full disk at the commit would leave its outcome unknown, and the data; or data would be removed under a commit
    whose answer was lost.
    """
    real, is_refusal = os.link, name in NOTHING_DONE.split()
    if is_refusal and arrives:
        return  # link(2) does not do that

    def link(source, target, **keywords):
        if not os.path.basename(target).startswith("manifest"):
            return real(source, target, **keywords)
        if arrives:
            real(source, target, **keywords)
        raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), target)

    monkeypatch.setattr(os, "link", link)
    uri, options = tmp_path / "step-1", Options(retries=1)
    state = {"w": torch.ones(100)}
    if arrives:
        cloudckpt.save(state, uri, no_dist=True, options=options)
        cloudckpt.load(state, uri, no_dist=True)
        return
    with pytest.raises(StoreError if is_refusal else CommitUnknownError):
        cloudckpt.save(state, uri, no_dist=True, options=options)
    monkeypatch.undo()
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(left) == (0 if is_refusal else 1)


def test_a_directory_that_cannot_be_synced_is_accepted(store, monkeypatch):
    """Some network file systems refuse to sync a directory; what they refuse to all cannot be asked of them."""
    real = os.fsync

    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not here")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    put(store, "a", b"body")
    assert content(store, "a") == b"body"


def _raiser(number: int):
    def failing(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return failing


def test_directory_without_search_permission_raises():
    """A directory without the right to search it shows names and no more: taken for empty, it would have no
    checkpoint, and a save would begin over one.
    """
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o755)  # noqa: S103  # so that somebody else gets there
        store = LocalStore(f"{above}/run")
        put(store, "manifest.json", b"body")
        with _with_mode(store.uri, 0o444), pytest.raises(AccessDeniedError):
            keys(store, "manifest")
        assert keys(store, "manifest") == ["manifest.json"]


def test_a_file_systems_own_folder_hides_no_checkpoint():
    """If this fails, no checkpoint is found where a file system is mounted: its lost+found is root's alone."""
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o755)  # noqa: S103  # so that somebody else gets there
        cloudckpt.save({"step": 1}, f"{above}/step-1", no_dist=True)
        os.mkdir(f"{above}/lost+found")
        cloudckpt.gc(above, quiet=True)  # what Python imports for it may be root's alone, too
        with _with_mode(f"{above}/lost+found", 0o000):
            assert [info.name for info in cloudckpt.list_checkpoints(above)] == ["step-1"]
            assert cloudckpt.latest(above).name == "step-1"
            assert not cloudckpt.gc(above, quiet=True).failed
