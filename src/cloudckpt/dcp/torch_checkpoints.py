"""Checkpoints of torch's own `FileSystemWriter` and `FsspecWriter` (``.metadata`` + ``.distcp``), from any store.

Their ``.metadata`` is a pickle, so this is used only with the caller's consent.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from cloudckpt._torch_compat import ExtensionRegistry
from cloudckpt.commit.log import TORCH_METADATA_KEY
from cloudckpt.errors import (
    ALLOW_PICKLE_HINT,
    CloudckptError,
    CorruptCheckpointError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from cloudckpt.io.client import StoreClient
from cloudckpt.io.download import download_range
from cloudckpt.options import MIB
from cloudckpt.report import LoadReport
from cloudckpt.tensors.casts import group_casts, log_casts, new_cast_check
from cloudckpt.tensors.tensor_bytes import writable

_BUFFER_BYTES = 4 * MIB
_END = pickle.STOP
"""The last byte of a pickle of any version, so that one without it was cut."""


class TorchCheckpointReader(FileSystemReader):
    """torch's reader, over a store of cloudckpt."""

    def __init__(self, client: StoreClient, registry: ExtensionRegistry | None) -> None:
        super().__init__("", registry)
        self._uri, self._client = client.uri, client
        self._files = _StoreFiles(client)
        self.fs = self._files  # type: ignore[assignment]  # torch's own subclasses do the same
        self.path = ""

    def load(
        self, plan: LoadPlan, planner: LoadPlanner, metadata: Metadata, *, rank: int, allows_lossy_casts: bool
    ) -> LoadReport:
        """Fill what the plan asks for."""
        begun_s = time.monotonic()
        checking = _CheckingPlanner(planner, metadata, allows_lossy_casts=allows_lossy_casts, uri=self._uri)
        self.read_data(plan, checking).wait()
        if rank == 0:  # one rank says it for all
            log_casts(group_casts(checking.casts), uri=self._uri)
        return LoadReport(
            uri=self._uri,
            attempt="",
            rank=rank,
            num_bytes_wanted=self._files.num_bytes_read,
            num_bytes_read=self._files.num_bytes_read,
            num_requests=self._client.num_requests,
            num_retries=self._client.num_retries,
            plan_s=0.0,
            read_s=time.monotonic() - begun_s,
        )


def read_torch_metadata(
    client: StoreClient, registry: ExtensionRegistry | None, *, allow_pickle: bool
) -> tuple[TorchCheckpointReader, Metadata]:
    """Return the reader of the checkpoint in `store`, and its metadata.

    Raises `UnsafePickleError` without `allow_pickle`.
    """
    uri = client.uri
    if not allow_pickle:
        raise UnsafePickleError(
            f"{uri} holds a checkpoint of torch's own writer, whose .metadata is a pickle: reading it could run "
            "any code",
            uri=uri,
            hint=ALLOW_PICKLE_HINT,
        )
    reader = TorchCheckpointReader(client, registry)

    def look() -> Metadata:
        try:
            return reader.read_metadata()
        except CloudckptError:
            raise
        except Exception as error:  # a pickle can raise anything, also where it is whole
            if _is_cut(client):
                raise CorruptCheckpointError(f"the .metadata of {uri} is damaged: {error}", uri=uri) from error
            # Not reported as damage, for which a checkpoint is skipped or replaced: it may be intact.
            raise UnsupportedFormatError(
                f"the .metadata of {uri} cannot be read ({type(error).__name__}: {error}): it is damaged, or of a "
                f"newer torch than this one ({torch.__version__}), or of a newer Python",
                uri=uri,
            ) from error

    return reader, client.confirm(look, errors=(CorruptCheckpointError, UnsupportedFormatError))


def _is_cut(client: StoreClient) -> bool:
    with _ObjectFile(client, TORCH_METADATA_KEY) as file:
        size_bytes = file.seek(0, io.SEEK_END)
        file.seek(max(size_bytes - len(_END), 0))
        return file.read(len(_END)) != _END


class _CheckingPlanner(DefaultLoadPlanner):
    """The planner of a load, with a check of the tensors that torch's reader would cast in silence."""

    def __init__(self, planner: LoadPlanner, metadata: Metadata, *, allows_lossy_casts: bool, uri: str) -> None:
        super().__init__()
        self.casts: list[tuple[str, torch.dtype, torch.dtype]] = []
        self._planner, self._saved = planner, metadata.state_dict_metadata
        self._allows_lossy_casts, self._uri = allows_lossy_casts, uri

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._planner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor, entry = self._planner.resolve_tensor(read_item).detach(), self._saved.get(read_item.storage_index.fqn)
        stored = entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else tensor.dtype
        if stored is tensor.dtype and not tensor.is_inference():
            return tensor
        if stored is not tensor.dtype:
            self.casts.append((read_item.storage_index.fqn, stored, tensor.dtype))
        return torch.empty(tensor.size(), dtype=stored, device="cpu")  # torch's reader fills it

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        target = self._planner.resolve_tensor(read_item).detach()
        if target.dtype is not tensor.dtype or target.is_inference():
            cast = None
            if target.dtype is not tensor.dtype and not self._allows_lossy_casts:
                cast = new_cast_check(read_item.storage_index.fqn, tensor.dtype, target, uri=self._uri)
            with writable([target]):
                target.copy_(tensor if cast is None else cast.check(tensor))
        self._planner.commit_tensor(read_item, target)


class _StoreFiles:
    """The part of a `FileSystemBase` that a `FileSystemReader` reads by, over the objects of a store."""

    def __init__(self, client: StoreClient) -> None:
        self.num_bytes_read = 0
        self._client = client

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = _ObjectFile(self._client, str(path))
        with io.BufferedReader(file, _BUFFER_BYTES) as stream:
            yield stream
        self.num_bytes_read += file.num_bytes_read

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}" if str(path) else suffix


class _ObjectFile(io.RawIOBase):
    """An object as a seekable file."""

    def __init__(self, client: StoreClient, key: str) -> None:
        super().__init__()
        self._client = client
        self._key = key
        self.num_bytes_read = 0
        self._size_bytes = client.require(key).size_bytes
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
            download_range(self._client, key=self._key, begin=self._position, views=[view[:num_bytes]])
            self._position += num_bytes
            self.num_bytes_read += num_bytes
        return num_bytes
