"""Megatron-core: ``megatron.core.dist_checkpointing`` saves to a URI and loads from one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from cloudckpt.api import async_save, save
from cloudckpt.background.stager import PinnedStager
from cloudckpt.dcp.enable import replace_attribute
from cloudckpt.dcp.storage_reader import ObjectStoreReader
from cloudckpt.errors import CheckpointNotFoundError, InvalidURIError
from cloudckpt.inspect.catalog import list_checkpoints
from cloudckpt.inspect.description import describe
from cloudckpt.integrations._requirements import require
from cloudckpt.options import Options
from cloudckpt.uri import is_remote_uri, mangled_uri_scheme

with require("megatron-core"):
    from megatron.core import msc_utils
    from megatron.core.dist_checkpointing.core import CONFIG_FNAME
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

_METADATA_KEY = "megatron-core"
_TRACKER = "latest_checkpointed_iteration.txt"
_undo = contextlib.ExitStack()


def enable(*, options: Options | None = None, allow_pickle: bool = False) -> None:
    """Make ``dist_checkpointing.save`` and ``load`` understand URIs, and all that Megatron builds on them.

    A save is one commit: it holds the shards, the objects, the common state and what Megatron writes to
    ``metadata.json``. A checkpoint that exists is never replaced. An asynchronous save copies the shards, and its
    ``AsyncRequest`` ends with the commit. Loads reshard as Megatron's do. Paths without a scheme stay Megatron's.

    Two methods of ``TorchDistSaveShardedStrategy`` are replaced, and the storage client of ``--enable-msc``: pass that
    flag to Megatron's scripts, and do not use ``msc://``. `disable` undoes it.

    Args:
        options: Options of all saves and loads.
        allow_pickle: See `cloudckpt.load`. Megatron itself makes its classes loadable without.

    Example::

        megatron.enable()
        dist_checkpointing.save(sharded_state_dict, "s3://bucket/run/iter_0000100")

    """
    disable()
    client, feature = _Client(options or Options(), allow_pickle=allow_pickle), msc_utils.MultiStorageClientFeature
    replace_attribute(_undo, feature, "_enabled", replacement=True)
    replace_attribute(_undo, msc_utils, "msc", client)
    strategy = torch_dist.TorchDistSaveShardedStrategy
    save_files, save_files_async = strategy.save, strategy.async_save
    stager = _ShardStager()
    _undo.callback(stager.close)

    @functools.wraps(save_files)
    def save_shards(self: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        if not _is_uri(checkpoint_dir):
            save_files(self, sharded_state_dict, checkpoint_dir)
            return
        state_dict = torch_dist.mcore_to_pyt_state_dict(_shards_of(self, sharded_state_dict))
        save(state_dict, checkpoint_dir, planner=_planner(), options=client.options_of(self))

    @functools.wraps(save_files_async)
    def save_shards_async(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_uri(checkpoint_dir):
            feature.disable()  # its writer would import the real client
            try:
                return save_files_async(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
            finally:
                feature.enable()
        handle = async_save(
            _shards_of(self, sharded_state_dict),
            checkpoint_dir,
            planner=_planner(),
            async_stager=stager,
            options=client.options_of(self),
        )
        # Megatron asks its queue if all ranks are done. Each call in the queue is a process.
        descriptor, flag = tempfile.mkstemp(prefix="cloudckpt-")
        os.close(descriptor)
        handle.committed.add_done_callback(lambda _: Path(flag).unlink(missing_ok=True))
        return AsyncRequest(_wait_while_exists, (flag, os.getpid()), [handle.result])

    replace_attribute(_undo, strategy, "save", save_shards)
    replace_attribute(_undo, strategy, "async_save", save_shards_async)


def disable() -> None:
    """Undo `enable`. Does nothing if it is not in force.

    Example::

        megatron.disable()

    """
    _undo.close()


def _is_uri(path: object) -> bool:
    if mangled_uri_scheme(path):
        raise InvalidURIError(f"{path} went through pathlib.Path, which breaks a URI. Pass the URI as a str")
    return is_remote_uri(path)


def _planner() -> Any:
    return torch_dist.MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )


def _shards_of(strategy: Any, sharded_state_dict: Any) -> dict[str, Any]:
    """Return the entries that this rank saves, by key: a list of shards of one tensor, or of objects."""
    replace_keys = torch_dist._replace_state_dict_keys_with_sharded_keys
    return dict(replace_keys(sharded_state_dict, strategy.keep_only_main_replica)[0])


def _wait_while_exists(flag: str, pid: int) -> None:
    """Return once the process `pid` has removed the file `flag`, or has ended."""
    while Path(flag).exists() and Path(f"/proc/{pid}").exists():
        time.sleep(0.1)


class _ShardStager(PinnedStager):
    """Copies the shards of `_shards_of`, and returns torch's form of them."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        shards = [shard for entry in state_dict.values() for shard in entry if isinstance(shard, ShardedTensor)]
        copies: Any = super().stage({str(number): shard.data for number, shard in enumerate(shards)})
        copied = {
            id(shard): dataclasses.replace(shard, data=copies[str(number)]) for number, shard in enumerate(shards)
        }
        copy = {key: [copied.get(id(shard), shard) for shard in entry] for key, entry in state_dict.items()}
        return dict(torch_dist.mcore_to_pyt_state_dict(copy))


class _Client:
    """Takes the place of the module ``multistorageclient`` in Megatron: files, paths and a reader.

    Under a URI, a checkpoint seems to hold one file, ``metadata.json``, which is read from the manifest. The tracker of
    the newest iteration is the newest committed ``iter_<n>``. Writes to the two are dropped, because the
    commit has their content already.
    """

    def __init__(self, options: Options, *, allow_pickle: bool) -> None:
        self._options = options
        self._found: dict[str, str] = {}
        self.Path = lambda path: _Folder(self, path) if _is_uri(path) else Path(path)
        join = {name: getattr(os.path, name) for name in ("join", "dirname", "basename", "islink")}
        self.os = SimpleNamespace(
            path=SimpleNamespace(**join, exists=self.exists, isfile=self.isfile, isdir=self.isdir),
            makedirs=lambda path, **_: None if _is_uri(path) else Path(path).mkdir(parents=True, exist_ok=True),
        )

        def make_reader(path: Any, **_: object) -> Any:
            if not _is_uri(path):
                return FileSystemReader(path)
            return ObjectStoreReader(path, options=options, allow_pickle=allow_pickle, _is_part=True)

        self.torch = SimpleNamespace(load=torch.load, save=torch.save, MultiStorageFileSystemReader=make_reader)

    def options_of(self, strategy: Any) -> Options:
        config = {"sharded_backend": strategy.backend, "sharded_backend_version": strategy.version}
        return dataclasses.replace(self._options, metadata={**self._options.metadata, _METADATA_KEY: config})

    def exists(self, path: Any, **_: object) -> bool:
        return self.isfile(path) or self.isdir(path)

    def isfile(self, path: Any, **_: object) -> bool:
        return self._content_of(path) is not None if _is_uri(path) else Path(path).is_file()

    def isdir(self, path: Any, **_: object) -> bool:
        if not _is_uri(path):
            return Path(path).is_dir()
        return self._config_of(str(path)) is not None or self._newest_under(str(path)) is not None

    def open(self, path: Any, mode: str = "r", **kwargs: Any) -> Any:
        if not _is_uri(path):
            return Path(path).open(mode, **kwargs)
        folder, _, name = str(path).rpartition("/")
        if name not in (CONFIG_FNAME, _TRACKER):
            raise InvalidURIError(f"{path} cannot be opened: {folder} is a place of checkpoints, which hold no files")
        if "w" in mode:
            return io.StringIO()
        content = self._content_of(path)
        if content is None:
            raise FileNotFoundError(f"{path} does not exist, because {folder} holds no committed checkpoint")
        return io.BytesIO(content.encode()) if "b" in mode else io.StringIO(content)

    def _content_of(self, path: str) -> str | None:
        folder, _, name = str(path).rpartition("/")
        if name == CONFIG_FNAME:
            return self._config_of(folder)
        return self._newest_under(folder) if name == _TRACKER else None

    def _config_of(self, uri: str) -> str | None:
        """Return ``metadata.json`` of the checkpoint at `uri`; None if it is not Megatron's, or none is committed."""
        if uri not in self._found:  # a checkpoint does not change
            try:
                metadata = describe(uri, options=self._options).metadata
            except CheckpointNotFoundError:
                return None
            if _METADATA_KEY not in metadata:
                return None
            self._found = {uri: json.dumps(metadata[_METADATA_KEY])}
        return self._found[uri]

    def _newest_under(self, root: str) -> str | None:
        names = [info.name for info in list_checkpoints(root, options=self._options)]
        iterations = [int(match[1]) for name in names if (match := re.fullmatch(r"iter_(\d+)", name))]
        return str(max(iterations)) if iterations else None


class _Folder:
    """The part of ``pathlib.Path`` that Megatron uses of a checkpoint's folder."""

    def __init__(self, client: _Client, uri: str) -> None:
        self._client, self._uri, self.name = client, uri, uri.rpartition("/")[2]

    def __str__(self) -> str:
        return self._uri

    def exists(self) -> bool:
        return self._client.exists(self._uri)

    def joinpath(self, name: str) -> _Folder:
        return _Folder(self._client, f"{self._uri}/{name}")

    def iterdir(self) -> Iterator[_Folder]:
        return iter([config] if (config := self.joinpath(CONFIG_FNAME)).exists() else [])
