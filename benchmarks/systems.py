"""The systems that are compared. Each imports its library late, for each may live in its own environment.

What is timed is what a user runs for one checkpoint: making the writer or reader, with its client, and the
save or load itself. Rivals run with their own defaults, but for `s3fs-tuned` and where a comment says so.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import io
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks import training
from benchmarks.outcomes import Outcome, Running, Settings

try:
    from torch.distributed.checkpoint import FsspecReader, FsspecWriter
except ImportError:  # before torch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

TUNED_THREADS = 8
TUNED_BLOCK_BYTES = 32 << 20


class System(abc.ABC):
    """One way to save and load with torch's distributed checkpoint."""

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]]
    """Schemes of the URIs that it takes; empty text for paths."""
    module: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    """Distributions that make up its version, as pip names them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.library: Any = importlib.import_module(self.module)

    @classmethod
    def require(cls) -> None:
        """Raises ImportError where the system is not installed in this interpreter."""
        importlib.import_module(cls.module)

    @abc.abstractmethod
    def save(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        """Save, and return when the checkpoint is complete."""

    @abc.abstractmethod
    def load(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        """Load in place."""

    @abc.abstractmethod
    def begin(self, state_dict: dict[str, Any], uri: str) -> Running:
        """Save in the background, and return when `state_dict` may change."""

    def async_save(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        """Save in the background, and return when the checkpoint is complete."""
        running = self.begin(state_dict, uri)
        running.result()
        return Outcome(blocking_s=running.blocking_s)

    def save_beside_training(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        """The same while a training loop goes on, of which it tells how fast it goes with and without."""
        begun: list[Running] = []

        def begin() -> Callable[[], bool]:
            begun.append(self.begin(state_dict, uri))
            return begun[0].is_done

        speeds = training.compared(begin)
        begun[0].result()
        return beside(begun[0].blocking_s, speeds)


def beside(blocking_s: float, speeds: training.Compared) -> Outcome:
    """Return the outcome of a save beside training."""
    return Outcome(
        blocking_s=blocking_s,
        steps_per_s=speeds.steps_per_s,
        steps_per_s_alone=speeds.steps_per_s_alone,
        waiting_share=speeds.waiting_share,
    )


class _Rival(System):
    """A pair of torch's storage writer and reader."""

    def save(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        dcp.save(state_dict, storage_writer=self.writer(uri), no_dist=self.settings.no_dist)
        return Outcome()

    def load(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        dcp.load(state_dict, storage_reader=self.reader(uri), no_dist=self.settings.no_dist)
        return Outcome()

    def begin(self, state_dict: dict[str, Any], uri: str) -> Running:
        started_s = time.perf_counter()
        response = dcp.async_save(
            state_dict,
            storage_writer=self.writer(uri),
            no_dist=self.settings.no_dist,
            async_stager=self.stager(),
        )
        upload = response
        if not isinstance(response, Future):
            response.staging_completion.result()
            upload = response.upload_completion
        return Running(blocking_s=time.perf_counter() - started_s, is_done=upload.done, result=upload.result)

    def stager(self) -> AsyncStager | None:
        """Return the stager for background saves; None: torch makes one for each."""
        return None

    @abc.abstractmethod
    def writer(self, uri: str) -> Any:
        """A new writer for `uri`."""

    @abc.abstractmethod
    def reader(self, uri: str) -> Any:
        """A new reader for `uri`."""


class FileSystemRival(_Rival):
    """The writer and reader of torch itself, for paths."""

    name = "filesystem"
    schemes = ("",)
    module = "torch"
    distributions = ("torch",)

    def writer(self, uri: str) -> Any:
        return FileSystemWriter(uri)

    def reader(self, uri: str) -> Any:
        return FileSystemReader(uri)


class S3fsRival(_Rival):
    """The fsspec writer and reader of torch, on s3fs."""

    name = "s3fs"
    schemes = ("s3",)
    module = "s3fs"
    distributions = ("torch", "s3fs", "aiobotocore", "botocore")

    def writer(self, uri: str) -> Any:
        # The default, sync_files=True, calls os.sync() here, which flushes the disks and does nothing for S3.
        return FsspecWriter(uri, sync_files=False, **self._writer_options(), **self._storage_options())

    def reader(self, uri: str) -> Any:
        return FsspecReader(uri, **self._storage_options())

    def _writer_options(self) -> dict[str, Any]:
        return {}

    def _storage_options(self) -> dict[str, Any]:
        client = {"region_name": self.settings.region, "verify": self.settings.ca_bundle}
        return {
            "endpoint_url": self.settings.endpoint_url,
            "client_kwargs": {name: value for name, value in client.items() if value is not None},
        }


class TunedS3fsRival(S3fsRival):
    """The same with what its documentation offers for speed: threads, larger blocks, more requests at once."""

    name = "s3fs-tuned"

    def _writer_options(self) -> dict[str, Any]:
        return {"thread_count": TUNED_THREADS}

    def _storage_options(self) -> dict[str, Any]:
        return {
            **super()._storage_options(),
            "default_block_size": TUNED_BLOCK_BYTES,
            "default_cache_type": "readahead",
            "max_concurrency": 2 * TUNED_THREADS,
            "config_kwargs": {"max_pool_connections": 4 * TUNED_THREADS},
        }


class S3TorchConnectorRival(_Rival):
    """The connector of AWS, s3torchconnector."""

    name = "s3torchconnector"
    schemes = ("s3",)
    module = "s3torchconnector.dcp"
    distributions = ("torch", "s3torchconnector", "s3torchconnectorclient")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.client_config: Any = importlib.import_module("s3torchconnector").S3ClientConfig

    def writer(self, uri: str) -> Any:
        return self._pointed(self.library.S3StorageWriter(self.settings.region, uri, **self._client_config()))

    def reader(self, uri: str) -> Any:
        return self._pointed(self.library.S3StorageReader(self.settings.region, uri, **self._client_config()))

    def _client_config(self) -> dict[str, Any]:
        path_style = self.settings.endpoint_url is not None
        return {"s3client_config": self.client_config(force_path_style=path_style)}

    def _pointed(self, storage: Any) -> Any:
        # Its DCP classes take no endpoint. The native client is made on first use, so this comes in time. Certificates
        # it takes from SSL_CERT_FILE alone.
        storage.fs._client._endpoint = self.settings.endpoint_url  # noqa: SLF001
        return storage


class KeptStagerRival(S3TorchConnectorRival):
    """The same, with one stager of torch's for all saves in the background, which then copies into memory it has."""

    name = "s3torchconnector-kept"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # All that it refuses on a CPU is off. Shared memory is for other processes, and takes a file for each tensor.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def stager(self) -> AsyncStager:
        return self._stager


class TorchSave(System):
    """``torch.save`` into memory, and one put of boto3, with one client for the process: what many scripts do."""

    name = "torch-save"
    schemes = ("s3",)
    module = "boto3"
    distributions = ("torch", "boto3", "botocore")

    @functools.cached_property
    def client(self) -> Any:
        settings = self.settings
        return self.library.client(
            "s3", endpoint_url=settings.endpoint_url, region_name=settings.region, verify=settings.ca_bundle
        )

    def save(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        buffer.seek(0)
        self.client.put_object(**_address(uri), Body=buffer)
        return Outcome()

    def load(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        content = self.client.get_object(**_address(uri))["Body"].read()
        loaded = torch.load(io.BytesIO(content))
        for name, tensor in state_dict.items():
            tensor.copy_(loaded[name])
        return Outcome()

    def begin(self, state_dict: dict[str, Any], uri: str) -> Running:
        raise NotImplementedError("torch.save does not save in the background")


def _address(uri: str) -> dict[str, str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": f"{prefix}/state.pt"}


class Cloudckpt(System):
    """cloudckpt on an object store."""

    name = "cloudckpt"
    schemes = ("s3", "gs")
    module = "cloudckpt"
    distributions = ("torch", "cloudckpt", "boto3", "botocore", "awscrt")
    own_arguments: ClassVar[Mapping[str, Any]] = {}

    def save(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        self.library.save(state_dict, uri, no_dist=self.settings.no_dist, options=self._options())
        return Outcome()

    def load(self, state_dict: dict[str, Any], uri: str) -> Outcome:
        report = self.library.load(state_dict, uri, no_dist=self.settings.no_dist, options=self._options())
        return Outcome(num_bytes_read=report.num_bytes_read)

    def begin(self, state_dict: dict[str, Any], uri: str) -> Running:
        started_s = time.perf_counter()
        handle = self.library.async_save(
            state_dict, uri, no_dist=self.settings.no_dist, options=self._options(), **self.own_arguments
        )
        handle.staged.result()
        return Running(blocking_s=time.perf_counter() - started_s, is_done=handle.done, result=handle.result)

    def _options(self) -> Any:
        options = {**self.settings.options}
        if self.settings.connections is not None:
            options["connections"] = self.settings.connections
        names = {field.name for field in dataclasses.fields(self.library.AdvancedOptions)}
        advanced = self.library.AdvancedOptions(**{name: options.pop(name) for name in names & options.keys()})
        return self.library.Options(storage_options=self._storage_options(), advanced=advanced, **options)

    def _storage_options(self) -> dict[str, Any]:
        settings = self.settings
        wanted = {"endpoint_url": settings.endpoint_url, "region": settings.region, "verify": settings.ca_bundle}
        return {name: value for name, value in wanted.items() if value is not None}


class CloudckptProcess(Cloudckpt):
    """The same, whose saves in the background are made by torch's process."""

    name = "cloudckpt-process"
    own_arguments: ClassVar[Mapping[str, Any]] = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}

    def begin(self, state_dict: dict[str, Any], uri: str) -> Running:
        if not dist.is_initialized():  # torch's process needs it, also for one rank
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return super().begin(state_dict, uri)


class CloudckptPath(Cloudckpt):
    """cloudckpt on a directory."""

    name = "cloudckpt-path"
    schemes = ("",)
    distributions = ("torch", "cloudckpt", "awscrt")

    def _storage_options(self) -> dict[str, Any]:
        return {}


_SYSTEMS = (
    Cloudckpt,
    CloudckptProcess,
    S3TorchConnectorRival,
    KeptStagerRival,
    S3fsRival,
    TunedS3fsRival,
    TorchSave,
    CloudckptPath,
    FileSystemRival,
)
SYSTEM_NAMES = (*(system.name for system in _SYSTEMS), "limit")
"""In the order of tables."""


def system_named(name: str) -> type[System]:
    """The class of that system; what the limits need is imported for them alone."""
    if name == "limit":
        limits = importlib.import_module("benchmarks.limits")
        limit: type[System] = limits.Limit
        return limit
    return next(system for system in _SYSTEMS if system.name == name)
