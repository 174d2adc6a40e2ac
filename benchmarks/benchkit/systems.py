"""The systems that are compared. Each imports its library late, for each may live in its own environment.

What is timed is what a user runs for one checkpoint: making the writer or reader, with its client, and the
save or load itself. Rivals run with their own defaults, but for `--rival-threads` and where a comment says
so.
"""

from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

StoreKind = Literal["s3", "path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a worker needs to know of the run."""

    endpoint_url: str | None
    region: str
    rival_threads: int
    """`thread_count` of the rivals' writers; 1 is their default."""
    no_dist: bool
    """True where there is one process and no process group."""
    options: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    """Keywords of `cloudckpt.Options` that differ from the defaults."""


class System(abc.ABC):
    """One way to save and load with torch's distributed checkpoint."""

    name: ClassVar[str]
    label: ClassVar[str]
    store: ClassVar[StoreKind]
    module: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    """What its version is made of, as pip names it."""

    def __init__(self, settings: Settings) -> None:
        """Raises ImportError where the system is not installed in this interpreter."""
        self.settings = settings
        self.library: Any = importlib.import_module(self.module)

    @abc.abstractmethod
    def save(self, state_dict: dict[str, Any], uri: str) -> None:
        """Save, and return when the checkpoint is complete."""

    @abc.abstractmethod
    def load(self, state_dict: dict[str, Any], uri: str) -> None:
        """Load in place."""


class _RivalSystem(System):
    """A pair of torch's storage writer and reader."""

    def save(self, state_dict: dict[str, Any], uri: str) -> None:
        dcp.save(state_dict, storage_writer=self.writer(uri), no_dist=self.settings.no_dist)

    def load(self, state_dict: dict[str, Any], uri: str) -> None:
        dcp.load(state_dict, storage_reader=self.reader(uri), no_dist=self.settings.no_dist)

    @abc.abstractmethod
    def writer(self, uri: str) -> Any:
        """A new writer for `uri`."""

    @abc.abstractmethod
    def reader(self, uri: str) -> Any:
        """A new reader for `uri`."""


class FileSystemRival(_RivalSystem):
    """The writer and reader of torch itself, for paths."""

    name = "filesystem"
    label = "torch FileSystemWriter/Reader"
    store = "path"
    module = "torch"
    distributions = ("torch",)

    def writer(self, uri: str) -> Any:
        return FileSystemWriter(uri, thread_count=self.settings.rival_threads)

    def reader(self, uri: str) -> Any:
        return FileSystemReader(uri)


class S3fsRival(_RivalSystem):
    """The fsspec writer and reader of torch, on s3fs."""

    name = "s3fs"
    label = "torch FsspecWriter/Reader + s3fs"
    store = "s3"
    module = "s3fs"
    distributions = ("torch", "s3fs", "aiobotocore", "botocore")

    def writer(self, uri: str) -> Any:
        # The default, sync_files=True, calls os.sync() here, which flushes the disks and does nothing for S3.
        return FsspecWriter(uri, sync_files=False, thread_count=self.settings.rival_threads, **self._storage_options())

    def reader(self, uri: str) -> Any:
        return FsspecReader(uri, **self._storage_options())

    def _storage_options(self) -> dict[str, Any]:
        return {
            "endpoint_url": self.settings.endpoint_url,
            "client_kwargs": {"region_name": self.settings.region},
        }


class S3TorchConnectorRival(_RivalSystem):
    """The connector of AWS, s3torchconnector."""

    name = "s3torchconnector"
    label = "s3torchconnector"
    store = "s3"
    module = "s3torchconnector.dcp"
    distributions = ("torch", "s3torchconnector", "s3torchconnectorclient")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.client_config: Any = importlib.import_module("s3torchconnector").S3ClientConfig

    def writer(self, uri: str) -> Any:
        writer = self.library.S3StorageWriter(
            self.settings.region, uri, thread_count=self.settings.rival_threads, **self._client_config()
        )
        self._point_at_endpoint(writer)
        return writer

    def reader(self, uri: str) -> Any:
        reader = self.library.S3StorageReader(self.settings.region, uri, **self._client_config())
        self._point_at_endpoint(reader)
        return reader

    def _client_config(self) -> dict[str, Any]:
        path_style = self.settings.endpoint_url is not None
        return {"s3client_config": self.client_config(force_path_style=path_style)}

    def _point_at_endpoint(self, storage: Any) -> None:
        # Its DCP classes take no endpoint. The native client is made on first use, so this comes in time.
        storage.fs._client._endpoint = self.settings.endpoint_url  # noqa: SLF001


class CloudckptS3(System):
    """cloudckpt on S3."""

    name = "cloudckpt"
    label = "cloudckpt (S3)"
    store = "s3"
    module = "cloudckpt"
    distributions = ("torch", "cloudckpt", "boto3", "botocore", "awscrt")

    def save(self, state_dict: dict[str, Any], uri: str) -> None:
        self.library.save(state_dict, uri, no_dist=self.settings.no_dist, options=self._options())

    def load(self, state_dict: dict[str, Any], uri: str) -> None:
        self.library.load(state_dict, uri, no_dist=self.settings.no_dist, options=self._options())

    def _options(self) -> Any:
        return self.library.Options(storage_options=self._storage_options(), **self.settings.options)

    def _storage_options(self) -> dict[str, Any]:
        if self.settings.endpoint_url is None:
            return {"region": self.settings.region}
        return {"endpoint_url": self.settings.endpoint_url, "region": self.settings.region}


class CloudckptPath(CloudckptS3):
    """cloudckpt on a directory."""

    name = "cloudckpt-path"
    label = "cloudckpt (path)"
    store = "path"
    distributions = ("torch", "cloudckpt", "awscrt")

    def _storage_options(self) -> dict[str, Any]:
        return {}


SYSTEMS: dict[str, type[System]] = {
    system.name: system for system in (CloudckptS3, S3TorchConnectorRival, S3fsRival, CloudckptPath, FileSystemRival)
}
"""In the order of the table."""
