"""The only patches of torch: `enable` and `disable`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from cloudckpt import _torch_compat
from cloudckpt.commit.log import list_entries
from cloudckpt.dcp.load_planner import ExplainingLoadPlanner
from cloudckpt.dcp.save_planner import BalancedSavePlanner
from cloudckpt.dcp.storage_reader import ObjectStoreReader
from cloudckpt.dcp.storage_writer import ObjectStoreWriter
from cloudckpt.errors import CloudckptError
from cloudckpt.io.client import open_client
from cloudckpt.options import Options
from cloudckpt.uri import is_remote_uri, is_valid_location, mangled_uri_scheme, parse_location

_log = logging.getLogger("cloudckpt")
_undo = contextlib.ExitStack()


def enable(
    *,
    options: Options | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    strict: bool | None = None,
) -> None:
    """Make torch's own calls understand URIs (`torch.distributed.checkpoint.save`, ``load`` and ``async_save``).

    cloudckpt saves and loads at every ``scheme://`` that it knows. Plain paths stay torch's, except for paths that hold
    a checkpoint of cloudckpt. A ``storage_writer`` or ``storage_reader`` that is passed is used unchanged.
    Only torch's ``FsspecReader(uri)``, as Lightning makes it for FSDP1, reads checkpoints of cloudckpt too. A call
    without a ``planner`` gets the planner of `save` and `load`, so that it keeps the keys of nested dicts. A second
    call of `enable` replaces the arguments. `disable` undoes all changes.

    Args:
        options: Options of all these calls.
        overwrite: See `save`.
        allow_pickle: See `load`.
        strict: See `load`.

    Raises:
        CloudckptError: This version of torch finds storages in another way.

    Example::

        cloudckpt.enable()
        dcp.save(state_dict, checkpoint_id="s3://bucket/run/step-100")
        cloudckpt.disable()

    """
    disable()
    own_options = options or Options()
    storage_utils = _torch_compat.find("torch.distributed.checkpoint", "_storage_utils")
    original = getattr(storage_utils, "_storage_setup", None)
    if original is None:
        raise CloudckptError(
            f"enable: torch {torch.__version__} has changed how it finds a storage for a checkpoint_id. Call "
            "cloudckpt.save and cloudckpt.load, or pass a storage_writer or storage_reader"
        )

    new_writer = functools.partial(ObjectStoreWriter, options=own_options, overwrite=overwrite, _via="enable")

    @functools.wraps(original)
    def set_up(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:  # torch's signature
        if storage is None and _is_cloudckpt_uri(checkpoint_id, options=own_options):
            if reader:
                return ObjectStoreReader(
                    checkpoint_id, options=own_options, allow_pickle=allow_pickle, strict=strict, _via="enable"
                )
            return new_writer(checkpoint_id)
        return original(storage, checkpoint_id, reader)

    for module in (storage_utils, state_dict_saver, state_dict_loader):
        replace_attribute(_undo, module, "_storage_setup", set_up)

    _plan_by_default(state_dict_saver, "_save_state_dict", "storage_writer", _save_planner_for)
    _plan_by_default(state_dict_loader, "_load_state_dict", "storage_reader", _load_planner_for)

    _read_with_fsspec_reader(lambda uri: set_up(None, uri, reader=True), own_options)

    threads = _torch_compat.find(
        "torch.distributed.checkpoint._async_thread_executor", "_ThreadBasedAsyncCheckpointExecutor"
    )
    if threads is not None:
        _warn_of_shared_group(threads, lambda location: _is_cloudckpt_uri(location, options=own_options))

    # An async save in another process sets up its storage there, without this patch.
    executor = _torch_compat.find(
        "torch.distributed.checkpoint._async_process_executor", "_ProcessBasedAsyncCheckpointExecutor"
    )
    if executor is None:
        return
    execute = executor.execute_save

    @functools.wraps(execute)
    def execute_save(*args: Any, **kwargs: Any) -> Any:
        location = kwargs.get("checkpoint_id")
        if (
            location is not None
            and kwargs.get("storage_writer") is None
            and _is_cloudckpt_uri(location, options=own_options)
        ):
            kwargs["storage_writer"] = new_writer(location)
            kwargs["planner"] = kwargs.get("planner") or BalancedSavePlanner(compare=own_options.compare_replicas)
        return execute(*args, **kwargs)

    replace_attribute(_undo, executor, "execute_save", execute_save)


def disable() -> None:
    """Undo `enable`. Does nothing if it is not in force.

    Example::

        cloudckpt.enable()
        cloudckpt.disable()

    """
    _undo.close()


def replace_attribute(undo: contextlib.ExitStack, owner: Any, name: str, replacement: Any) -> None:
    """Replace an attribute of a module or a class until `undo` is closed."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, replacement)


def _warn_of_shared_group(executor: Any, is_cloudckpt_uri: Callable[[object], bool]) -> None:
    """Make torch's background saves in threads warn once if they share a process group with training."""
    execute, warned = executor.execute_save, threading.Event()

    @functools.wraps(execute)
    def execute_save(*args: Any, **kwargs: Any) -> Any:
        if not warned.is_set() and _is_shared(kwargs.get("process_group"), no_dist=kwargs.get("no_dist", False)):
            writer = kwargs.get("storage_writer")
            location = writer.checkpoint_id if isinstance(writer, ObjectStoreWriter) else kwargs.get("checkpoint_id")
            if isinstance(writer, ObjectStoreWriter) or (writer is None and is_cloudckpt_uri(location)):
                warned.set()
                if dist.get_rank() == 0:
                    _log.warning(
                        "torch's async_save of %s uses the default process group, whose backend is gloo alone: if "
                        "training uses that group before the save has ended, both hang. Pass async_save "
                        "process_group=dist.new_group(), made once on all ranks, or call cloudckpt.async_save",
                        location,
                    )
        return execute(*args, **kwargs)

    replace_attribute(_undo, executor, "execute_save", execute_save)


def _is_shared(process_group: dist.ProcessGroup | None, *, no_dist: bool) -> bool:
    """Return True for the default group of several ranks, if training uses it for tensors of the CPU and the GPU."""
    if no_dist or not (dist.is_available() and dist.is_initialized()) or process_group not in (None, dist.group.WORLD):
        return False
    backends = {pair.rpartition(":")[2] for pair in str(dist.get_backend_config()).lower().split(",")}
    return backends == {"gloo"} and dist.get_world_size() > 1


def _save_planner_for(storage: object) -> BalancedSavePlanner | None:
    if not isinstance(storage, ObjectStoreWriter):
        return None
    return BalancedSavePlanner(compare=storage.options.compare_replicas)


def _load_planner_for(storage: object) -> ExplainingLoadPlanner | None:
    if not isinstance(storage, ObjectStoreReader):
        return None
    return ExplainingLoadPlanner(storage.checkpoint_id, is_renamed=storage.is_renamed, via=storage.lifecycle.via)


def _plan_by_default(module: Any, name: str, storage_name: str, planner_for: Callable[[object], Any]) -> None:
    """Make torch's function plan with this package's planner if it gets this package's storage and no planner."""
    original = getattr(module, name, None)
    if original is None:
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("planner") is None:
            bound.arguments["planner"] = planner_for(bound.arguments.get(storage_name))
        return original(*bound.args, **bound.kwargs)

    replace_attribute(_undo, module, name, call)


def _read_with_fsspec_reader(make: Callable[[Any], ObjectStoreReader], options: Options) -> None:
    """Turn torch's ``FsspecReader(uri)`` into the reader of `make` if the URI has a checkpoint of cloudckpt."""
    kind = _torch_compat.find("torch.distributed.checkpoint._fsspec_filesystem", "FsspecReader")
    if kind is None:
        return
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, path: Any, **kwargs: Any) -> None:
        # With settings for fsspec, the path may name a place that `options` do not reach.
        if type(self) is kind and not kwargs and is_remote_uri(path) and _holds_manifest(path, options):
            reader = make(path)
            self.__class__, self.__dict__ = type(reader), reader.__dict__
        else:
            original(self, path, **kwargs)

    replace_attribute(_undo, kind, "__init__", init)


def _is_cloudckpt_uri(checkpoint_id: Any, *, options: Options) -> bool:
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        return False
    if is_remote_uri(checkpoint_id) or "://" in str(checkpoint_id) or mangled_uri_scheme(checkpoint_id):
        return True  # an invalid URI too: the error of cloudckpt says why
    # A save to a path with a checkpoint of cloudckpt uses cloudckpt: loads would not find torch's beside it.
    return is_valid_location(checkpoint_id) and _holds_manifest(checkpoint_id, options)


def _holds_manifest(path: str | os.PathLike[str], options: Options) -> bool:
    return bool(list_entries(open_client(parse_location(path), options)))
