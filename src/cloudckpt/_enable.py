"""The only patches of torch: `enable` and `disable`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint._storage_utils as storage_utils
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._async_process_executor import _ProcessBasedAsyncCheckpointExecutor

from cloudckpt._commit.resolve import list_entries
from cloudckpt._dcp.load_planner import ExplainingLoadPlanner
from cloudckpt._dcp.save_planner import BalancedSavePlanner
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import is_remote_uri, is_valid_location, mangled_uri_scheme, parse_location
from cloudckpt.options import Options
from cloudckpt.reader import ObjectStoreReader
from cloudckpt.stores.open import open_store
from cloudckpt.writer import ObjectStoreWriter

_restore: list[Callable[[], None]] = []


def enable(*, options: Options | None = None, overwrite: bool = False, allow_pickle: bool = False) -> None:
    """From here on torch's own calls understand the URIs: ``dcp.save(state_dict, checkpoint_id="s3://…")``.

    Every ``scheme://`` that cloudckpt knows is saved and loaded with it. Plain paths stay torch's, but for those at
    which a checkpoint of cloudckpt lies. A ``storage_writer`` or ``storage_reader`` that is passed is used as ever.
    A call without a ``planner`` gets the one that `save` and `load` use, so that it keeps the keys of nested dicts.
    `options`, `overwrite` and `allow_pickle`, as for `cloudckpt.load`, hold for all of these calls; calling again
    replaces them. `disable` undoes it all.
    """
    disable()
    chosen = options or Options()
    original = storage_utils._storage_setup  # noqa: SLF001  # torch has no registry to extend

    @functools.wraps(original)
    def set_up(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:  # noqa: FBT001, FBT002  # torch's signature
        if storage is None and _is_ours(checkpoint_id, options=chosen):
            if reader:
                return ObjectStoreReader(checkpoint_id, options=chosen, allow_pickle=allow_pickle)
            return ObjectStoreWriter(checkpoint_id, options=chosen, overwrite=overwrite)
        return original(storage, checkpoint_id, reader)

    for module in (storage_utils, state_dict_saver, state_dict_loader):
        _replace(module, "_storage_setup", set_up)

    _plan_by_default(state_dict_saver, "_save_state_dict")
    _plan_by_default(state_dict_loader, "_load_state_dict")

    # An async save in another process sets up its storage there, where this patch is not.
    execute = _ProcessBasedAsyncCheckpointExecutor.execute_save

    @functools.wraps(execute)
    def execute_save(*args: Any, **kwargs: Any) -> Any:
        location = kwargs.get("checkpoint_id")
        if kwargs.get("storage_writer") is None and _is_ours(location, options=chosen):
            kwargs["storage_writer"] = ObjectStoreWriter(location, options=chosen, overwrite=overwrite)  # type: ignore[arg-type]  # _is_ours saw to it
            kwargs["planner"] = kwargs.get("planner") or BalancedSavePlanner()
        return execute(*args, **kwargs)

    _replace(_ProcessBasedAsyncCheckpointExecutor, "execute_save", execute_save)


def disable() -> None:
    """Undo `enable`. Does nothing where it is not in force."""
    while _restore:
        _restore.pop()()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = getattr(owner, name)
    _restore.append(lambda: setattr(owner, name, original))
    setattr(owner, name, replacement)


def _plan_by_default(module: Any, name: str) -> None:
    """Let torch's function plan with the planners of this package where the storage is, too, and it is given none."""
    original = getattr(module, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        storage = given.arguments.get("storage_writer", given.arguments.get("storage_reader"))
        if given.arguments.get("planner") is None:
            if isinstance(storage, ObjectStoreWriter):
                given.arguments["planner"] = BalancedSavePlanner()
            elif isinstance(storage, ObjectStoreReader):
                given.arguments["planner"] = ExplainingLoadPlanner(storage.checkpoint_id)
        return original(*given.args, **given.kwargs)

    _replace(module, name, call)


def _is_ours(checkpoint_id: Any, *, options: Options) -> bool:
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        return False
    if is_remote_uri(checkpoint_id) or "://" in str(checkpoint_id) or mangled_uri_scheme(checkpoint_id):
        return True  # also what cannot work: our error says why
    # A path at which cloudckpt saved is its, for saving too: torch's checkpoint beside it would not be found.
    return is_valid_location(checkpoint_id) and _holds_manifest(checkpoint_id, options)


def _holds_manifest(path: str | os.PathLike[str], options: Options) -> bool:
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    return bool(list_entries(open_store(parse_location(path).uri, options), retrier))
