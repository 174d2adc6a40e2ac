"""Read the files of a checkpoint that `cloudckpt.pipeline.file_saves` has saved."""

from __future__ import annotations

import gc
import io
import os
from dataclasses import dataclass

import torch
from typing_extensions import Buffer

from cloudckpt.commit.log import list_folders, read_current
from cloudckpt.errors import CloudckptError
from cloudckpt.format.model import Manifest
from cloudckpt.inspect.catalog import list_checkpoints
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.wanted_items import TensorBytes
from cloudckpt.uri import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedFiles:
    """A committed checkpoint, as a directory."""

    folder: str
    """The checkpoint's path under the root of the tree."""
    context: Context
    manifest: Manifest

    def stat(self, inside: str) -> list[str] | int | None:
        """Return the size of a file, the names in a directory, or None."""
        sizes = find_file_sizes(self.manifest)
        prefix = f"{inside}/" if inside else ""
        names = {path[len(prefix) :].partition("/")[0] for path in sizes if path.startswith(prefix)}
        return sizes.get(inside, sorted(names) or None)


class FileTree:
    """The committed checkpoints under a root, each a directory of its files, and the folders above them.

    The tree shows only committed files. An error of the store is raised, and never taken for absence.
    """

    def __init__(self, root: Location, options: Options, *, rank: int) -> None:
        self._root = root
        self._options = options
        self._rank = rank
        self._last: CommittedFiles | None = None

    def context(self, path: str) -> Context:
        """Return the context of a place. Raises `InvalidURIError` if the path leads out of the root."""
        location = self._root.child(path) if path else self._root
        return Context(location, self._options, rank=self._rank)

    def stat(self, path: str) -> list[str] | int | None:
        """Return the size of a file, the names in a directory, or None."""
        checkpoint, inside = self._find(path) or (None, "")
        return self._list_folder(path) or None if checkpoint is None else checkpoint.stat(inside)

    def open(self, path: str) -> FileReader:
        """Open a file. Raises `FileNotFoundError`."""
        checkpoint, inside = self._find(path) or (None, "")
        if checkpoint is None or not isinstance(checkpoint.stat(inside), int):
            raise FileNotFoundError(f"no committed checkpoint has the file {self.context(path).uri}")
        return FileReader(checkpoint.context, checkpoint.manifest, inside)

    def _find(self, path: str) -> tuple[CommittedFiles, str] | None:
        """Return the committed checkpoint at or above `path`, and the part of the path inside it.

        The last checkpoint is kept, since most calls ask for files of it.
        """
        last = self._last
        if last is not None and path.startswith(f"{last.folder}/"):
            return last, path[len(last.folder) + 1 :]
        parts = path.split("/")
        # Most paths are those of files in a checkpoint.
        for depth in (len(parts) - 1, len(parts), *reversed(range(len(parts) - 1))):
            if (checkpoint := self._open("/".join(parts[:depth]))) is not None:
                return checkpoint, "/".join(parts[depth:])
        return None

    def forget(self) -> None:
        """Forget the last checkpoint, so that the next call looks at the store."""
        self._last = None

    def _open(self, folder: str) -> CommittedFiles | None:
        context = self.context(folder)
        _, manifest = read_current(context.client)
        self._last = CommittedFiles(folder=folder, context=context, manifest=manifest) if manifest else None
        return self._last

    def _list_folder(self, path: str) -> list[str]:
        context = self.context(path)
        committed = {info.name for info in list_checkpoints(context.uri, options=self._options)}
        others = set(list_folders(context.client)) - committed - {"data"}
        return sorted(committed | {name for name in others if self._list_folder(f"{path}/{name}".strip("/"))})


def find_file_sizes(manifest: Manifest) -> dict[str, int]:
    """Return the size of each file by its path. Tensors of other kinds are no files."""
    return {
        name: tensor.shape[0]
        for name, tensor in manifest.tensors.items()
        if tensor.dtype == "uint8" and len(tensor.shape) == 1
    }


class FileReader(io.RawIOBase):
    """A file of a checkpoint, to be read from anywhere. Each byte is verified.

    A long read is split into parallel requests, within ``Options.read_bytes``. A short read reads ahead to the end of
    its tile, for the reads that follow. For one thread at a time.
    """

    def __init__(self, context: Context, manifest: Manifest, path: str) -> None:
        super().__init__()
        self._reader = CheckpointReader(context, manifest)
        self._path = path
        self.size_bytes = find_file_sizes(manifest)[path]
        self._ahead_bytes = manifest.tile_bytes
        self._position = 0
        self._ahead = memoryview(b"")
        self._ahead_begin = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"the position {base + offset} is before the beginning of {self._path}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        """Fill `buffer`. After a failure, no traceback refers to it, so that the caller can close a memory map."""
        try:
            return self._fill(buffer)
        except CloudckptError as error:
            failure = error
        linked: BaseException | None = failure
        while linked is not None:  # the frames of a traceback keep the buffer in use
            linked.__traceback__ = None
            linked = linked.__cause__ or linked.__context__
        gc.collect()
        raise failure

    def _fill(self, buffer: Buffer) -> int:
        with memoryview(buffer) as buffer_view, buffer_view.cast("B") as view:
            num_bytes = max(min(len(view), self.size_bytes - self._position), 0)
            offset = 0
            while offset < num_bytes:
                offset += self._read(view[offset:num_bytes])
            return num_bytes

    def readall(self) -> bytes:
        file = io.BytesIO(bytes(max(self.size_bytes - self._position, 0)))
        with file.getbuffer() as view:
            self.readinto(view)
        return file.getvalue()  # no copy

    def _read(self, view: memoryview) -> int:
        """Fill some of `view`, from the bytes that were read ahead if these include the position."""
        offset = self._position - self._ahead_begin
        if not 0 <= offset < len(self._ahead):
            if len(view) >= self._ahead_bytes:
                self._fetch(self._position, view)
                self._position += len(view)
                return len(view)
            ahead = bytearray(min(self._ahead_bytes, self.size_bytes - self._position))
            self._fetch(self._position, memoryview(ahead))
            self._ahead, self._ahead_begin, offset = memoryview(ahead), self._position, 0
        content = self._ahead[offset : offset + len(view)]
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _fetch(self, begin: int, view: memoryview) -> None:
        buffer = torch.frombuffer(view, dtype=torch.uint8)
        self._reader.read_bytes([TensorBytes(name=self._path, begin=begin, end=begin + len(view), buffer=buffer)])
