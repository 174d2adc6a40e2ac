"""torch_checkpointing: a storage whose directories are checkpoints, which its ``rename`` commits."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NoReturn

from typing_extensions import Buffer

from cloudckpt.errors import CheckpointExistsError, CheckpointNotFoundError, InvalidURIError
from cloudckpt.inspect.file_tree import FileTree
from cloudckpt.integrations._requirements import require
from cloudckpt.options import Options
from cloudckpt.pipeline.file_saves import FilesJob, FileWriter, Membership, has_receipts, join_job
from cloudckpt.removal import delete
from cloudckpt.uri import mangled_uri_scheme, parse_location

with require("torch_checkpointing"):
    from torch_checkpointing.distributed_metadata import DistributedMetadata
    from torch_checkpointing.metadata_serialization import METADATA_FILE_NAME
    from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig


@dataclass
class CloudStorageConfig(StorageConfig):
    """Saves and loads the checkpoints of ``torch_checkpointing`` under a URI. Experimental, as the package is.

    A path of the package names a place under `root`: ``manager.save("step-100", …)`` saves ``<root>/step-100``. That is
    an ordinary checkpoint with one tensor of bytes for each file. Nothing is visible before the commit. If two jobs
    save to one place, one wins. Each byte that is read is verified. Create the manager after ``init_process_group``.

    Raises:
        InvalidURIError: `root` cannot name a folder.

    Example::

        config = CheckpointManager.Config(
            storage_config=CloudStorageConfig("s3://bucket/run"),
            save=SyncCheckpointSaverConfig(),  # leave it out to save in the background
        )
        manager = CheckpointManager(config)
        manager.save("step-100", {"model": model.state_dict(), "step": 100})

    """

    root: str
    """URI of the folder of the checkpoints."""
    options: Options = field(default_factory=Options)
    """Options of all saves and loads, except ``resume`` and ``extensions``."""
    temp_dir_prefix: str = "tmp_"
    """The prefix in the package's ``CheckpointWriterConfig``."""

    def __post_init__(self) -> None:
        self.root = parse_location(self.root).uri
        self._membership = Membership()

    def create_storage(self) -> Storage:
        """Create the storage."""
        return _CloudStorage(self)

    def join(self) -> Membership:
        """Return the place of this rank. The process that the package spawns has that of its parent."""
        self._membership = join_job(self.root) or self._membership
        return self._membership

    def __getstate__(self) -> dict[str, Any]:
        self.join()
        return self.__dict__


class _CloudStorage(Storage):
    """The storage that `CloudStorageConfig` creates. It has committed checkpoints alone, and folders that have some."""

    def __init__(self, config: CloudStorageConfig) -> None:
        self._root = parse_location(config.root)
        self._options = config.options
        self._prefix = config.temp_dir_prefix
        self._me = config.join()
        self._lock = threading.Lock()
        self._job: FilesJob | None = None  # the state that this rank saves at present, and its place
        self._folder = ""
        self._planned: frozenset[str] = frozenset()
        self._num_saves: dict[str, int] = {}
        self._tree = FileTree(self._root, config.options, rank=self._me.rank)

    @property
    def mmap_fill_workers(self) -> int:
        """One, because a read makes parallel requests itself."""
        return 1

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        reader, args = self._tree.open(self._relative(path)), read_args or ReadArgs()
        if args.known_size_bytes not in (None, reader.size_bytes):
            raise OSError(f"{self.remap_path(path)} has {reader.size_bytes} bytes, not {args.known_size_bytes}")
        return io.BytesIO(reader.readall()) if args.pre_read_full_file else reader  # type: ignore[return-value]

    def stream_write(self, path: Path) -> FileWriter:
        folder, inside = self._split_staged(path)
        if folder is None or not inside:
            _refuse(f"{path} is not in a temporary directory ({self._prefix}…), so nothing would commit it")
        with self._lock:
            job = self._job_at(folder) or self._begin(folder)
            return job.open(inside)

    def write(self, path: Path, data: Buffer) -> None:
        with self.stream_write(path) as stream:
            stream.write(data)
        if self._split_staged(path)[1] == METADATA_FILE_NAME:
            self._planned = _find_planned(bytes(data))

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Begin a save if `path` is its temporary directory. Raises `FileExistsError` if a checkpoint exists."""
        folder = self._split_staged(path / "file")[0]
        with self._lock:
            job = self._job_at(folder)
            if folder is not None and (job is None or job.has_files):
                self._begin(folder)

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Commit the save of all ranks. Raises `FileExistsError` if another one was committed first."""
        folder = self._relative(dst_path)
        job = self._job_at(folder)
        if job is None or not is_directory or self._split_staged(src_path / "file") != (folder, "file"):
            _refuse(f"{src_path} is not the temporary directory of a save to {dst_path}, and nothing else is renamed")
        self._job = None
        with _as_os_errors():
            job.commit_files(self._planned)

    def ls(self, path: Path) -> list[str]:
        content = self._look(path)
        if not isinstance(content, list):
            kind = FileNotFoundError if content is None else NotADirectoryError
            raise kind(f"no committed checkpoint is at or under {self.remap_path(path)}")
        return content

    def exists(self, path: Path) -> bool:
        folder = self._split_staged(path / "file")[0]
        if folder is not None and path.name.startswith(self._prefix):
            with self._lock:
                job = self._job_at(folder)
                if job is None and self._me.rank == 0 and has_receipts(self._tree.context(folder), self._me):
                    job = self._begin(folder)  # only other ranks have files
            if job is not None:
                return True
        return self._look(path) is not None

    def isdir(self, path: Path) -> bool:
        return isinstance(self._look(path), list)

    def getsize(self, path: Path) -> int:
        return self._tree.open(self._relative(path)).size_bytes

    def glob(self, pattern: str) -> list[str]:
        directory, name = os.path.split(pattern)
        content = self._look(Path(directory))
        return [
            str(PurePath(directory, file))
            for file in fnmatch.filter(content if isinstance(content, list) else [], name)
        ]

    def delete(self, path: Path) -> None:
        _refuse(f"{path} cannot be deleted, because a checkpoint does not change. Delete the checkpoint")

    def rmdir(self, path: Path) -> None:
        """Delete the checkpoint at `path`, its manifest first. A folder of checkpoints is not deleted."""
        folder = self._split_staged(path / "file")[0]
        if self._job_at(folder) is not None:
            self._job = None  # gc removes the objects of this save
            return
        try:
            delete(self.remap_path(path), options=self._options)
        except CheckpointNotFoundError as error:
            if self._look(path) is not None:
                raise OSError(errno.ENOTEMPTY, f"{self.remap_path(path)} is no checkpoint, but has some") from error
            raise FileNotFoundError(str(error)) from error
        self._tree.forget()

    def remap_path(self, path: Path) -> str:
        return self._tree.context(self._relative(path)).uri

    def _look(self, path: Path) -> list[str] | int | None:
        return self._tree.stat(self._relative(path))

    def _relative(self, path: PurePath) -> str:
        if mangled_uri_scheme(path):
            raise InvalidURIError(f"{path} was a URI. Pass a path under the storage's root, {self._root.uri}")
        return "/".join(part for part in path.parts if part != "/")

    def _split_staged(self, path: PurePath) -> tuple[str | None, str]:
        """Return the checkpoint for which a file in a temporary directory is written, and the file's path in it."""
        parts = self._relative(path).split("/")
        for index in reversed(range(len(parts) - 1)):
            if parts[index].startswith(self._prefix):
                name = parts[index].removeprefix(self._prefix)
                return "/".join([*parts[:index], name]), "/".join(parts[index + 1 :])
        return None, ""

    def _job_at(self, folder: str | None) -> FilesJob | None:
        return self._job if folder == self._folder else None

    def _begin(self, folder: str) -> FilesJob:
        self._num_saves[folder] = number = self._num_saves.get(folder, 0) + 1
        self._job, self._folder, self._planned = None, folder, frozenset()
        job = FilesJob(self._tree.context(folder), self._me, save=number)
        with _as_os_errors():
            job.begin()
        self._job = job
        return job


def _find_planned(metadata: bytes) -> frozenset[str]:
    """Return the files that the package's metadata, which this process has written, names."""
    distributed = DistributedMetadata.from_dict(pickle.loads(metadata))  # noqa: S301  # not from the store
    return frozenset(
        item.get_layout_info(rank, key).file_path
        for key, item in distributed.metadata.items()
        for rank in item.get_all_ranks()
    )


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise ``FileExistsError`` for a place that is taken, as the package's interface demands."""
    try:
        yield
    except CheckpointExistsError as error:
        raise FileExistsError(error.message) from error


def _refuse(why: str) -> NoReturn:
    raise io.UnsupportedOperation(why)
