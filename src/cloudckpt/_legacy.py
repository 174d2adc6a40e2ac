"""Checkpoints of torch's own `FileSystemWriter` and `FsspecWriter` (``.metadata`` + ``.distcp``), from any store.

Their ``.metadata`` is a pickle, so this is used only with the caller's consent.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt._transfer.download import fetch
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import CloudckptError, CorruptCheckpointError, UnsafePickleError, UnsupportedFormatError
from cloudckpt.options import MIB
from cloudckpt.stores.base import Store

_BUFFER_BYTES = 4 * MIB
_METADATA_KEY = ".metadata"
_END = pickle.STOP
"""The last byte of a pickle of any version, so that one without it was cut."""


class TorchCheckpointReader(FileSystemReader):
    """torch's reader, over one of our stores."""

    def __init__(self, store: Store, retrier: Retrier, registry: ExtensionRegistry | None) -> None:
        super().__init__("", registry)
        self.fs = _StoreFiles(store, retrier)  # type: ignore[assignment]  # torch's own subclasses do the same
        self.path = ""


def read_torch_metadata(
    store: Store, retrier: Retrier, registry: ExtensionRegistry | None, *, allow_pickle: bool
) -> tuple[TorchCheckpointReader, Metadata]:
    """The reader of the checkpoint there, and its metadata; raises `UnsafePickleError` without `allow_pickle`."""
    uri = store.uri
    if not allow_pickle:
        raise UnsafePickleError(
            f"{uri} holds a checkpoint of torch's own writer, whose .metadata is a pickle: reading it could run "
            "any code. If you trust who wrote it, pass allow_pickle=True (and save it with cloudckpt afterwards)",
            uri=uri,
        )
    reader = TorchCheckpointReader(store, retrier, registry)

    def look() -> Metadata:
        try:
            return reader.read_metadata()
        except CloudckptError:
            raise
        except Exception as error:  # a pickle can raise anything, also where it is whole
            if _is_cut(store, retrier):
                raise CorruptCheckpointError(f"the .metadata of {uri} is damaged: {error}", uri=uri) from error
            # Not told as damage, for which a checkpoint is passed over, or replaced: it may be all right.
            raise UnsupportedFormatError(
                f"the .metadata of {uri} cannot be read ({type(error).__name__}: {error}): it is damaged, or of a "
                f"newer torch than this one ({torch.__version__}), or of a newer Python",
                uri=uri,
            ) from error

    return reader, retrier.confirmed(look, (CorruptCheckpointError, UnsupportedFormatError))


def _is_cut(store: Store, retrier: Retrier) -> bool:
    with _ObjectFile(store, retrier, _METADATA_KEY) as file:
        size_bytes = file.seek(0, io.SEEK_END)
        file.seek(max(size_bytes - len(_END), 0))
        return file.read(len(_END)) != _END


class _StoreFiles(FileSystemBase):
    """What `FileSystemReader` needs of a file system; nothing here can write."""

    def __init__(self, store: Store, retrier: Retrier) -> None:
        self._store = store
        self._retrier = retrier

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "rb":
            raise io.UnsupportedOperation(mode)
        with io.BufferedReader(_ObjectFile(self._store, self._retrier, str(path)), _BUFFER_BYTES) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}" if str(path) else suffix

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return any(info.key == str(path) for info in self._store.list(str(path)))

    def rename(self, path: Any, new_path: Any) -> None:  # noqa: ARG002  # torch's interface
        raise io.UnsupportedOperation("rename")

    def mkdir(self, path: Any) -> None:  # noqa: ARG002
        raise io.UnsupportedOperation("mkdir")

    def rm_file(self, path: Any) -> None:  # noqa: ARG002
        raise io.UnsupportedOperation("rm_file")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003  # never asked of an adapter
        return True


class _ObjectFile(io.RawIOBase):
    """An object as a seekable file."""

    def __init__(self, store: Store, retrier: Retrier, key: str) -> None:
        super().__init__()
        self._store = store
        self._retrier = retrier
        self._key = key
        self._size_bytes = retrier.call(lambda: store.head(key)).size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(origin + offset, 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        num_bytes = max(min(len(view), self._size_bytes - self._position), 0)
        if num_bytes:
            fetch(self._store, self._retrier, key=self._key, begin=self._position, views=[view[:num_bytes]])
            self._position += num_bytes
        return num_bytes
