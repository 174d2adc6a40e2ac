"""Lightning: `CloudCheckpointIO` for strategies that save on one rank, and two strategies that save shards."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from cloudckpt._this_process import is_first_warning
from cloudckpt.api import load, save
from cloudckpt.convert.copying import is_taken
from cloudckpt.convert.state_dicts import Selection, load_whole
from cloudckpt.dcp.live.entry import LiveEntry
from cloudckpt.dcp.live.loaders import (
    LoaderEntry,
    begin_next_epoch,
    length_of,
    make_position_error,
    sampler_of,
    set_epoch,
)
from cloudckpt.dcp.live.objects import ModelEntry, StatefulEntry
from cloudckpt.dcp.live.optimizers import wrap_optimizers
from cloudckpt.errors import CheckpointNotFoundError, InvalidOptionError
from cloudckpt.integrations._nested_state import SKELETON, deserialize, from_state_dict, serialize, to_state_dict
from cloudckpt.integrations._requirements import require
from cloudckpt.options import Options
from cloudckpt.removal import delete
from cloudckpt.uri import parse_location

with require("lightning", note="; pytorch_lightning is another package, and its Trainer does not accept these classes"):
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import CombinedLoader

_log = logging.getLogger("cloudckpt")

_OTHER_DATA = "resume, with max_epochs, from a checkpoint of the end of an epoch"
_Path = str | os.PathLike[str]
_is_training_state = re.compile(r"optimizer_states|optimizer_[0-9]+|lr_schedulers|loops|callbacks").fullmatch


class _Removals:
    """Carries out the removals of Lightning, except for the checkpoint that the run was loaded from, and other runs'.

    For files, ``ModelCheckpoint`` itself keeps the checkpoint that the run resumed from, and every one outside its
    ``dirpath``. For URIs it does not.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._saved: set[str] = set()
        self._loaded: set[str] = set()
        self._folders: set[str] = set()
        """The folders under which this run saves."""
        self._early: list[tuple[str, threading.Thread]] = []
        """Removals before the first save, each with its thread: `AsyncCheckpointIO` saves in another thread."""
        self._lock = threading.Lock()
        self._running: tuple[str, threading.Thread] | None = None
        """The URI of the running save, and its thread."""
        self._unwanted: dict[str, threading.Thread] = {}
        """Checkpoints to remove once they are committed, each with the thread that has to save it before others."""

    def note_load(self, path: _Path) -> None:
        self._loaded.add(parse_location(path).uri)

    @contextlib.contextmanager
    def saving(self, path: _Path) -> Iterator[None]:
        """Run a save, and remove its checkpoint afterwards if it was removed meanwhile, or while the save waited."""
        uri, me = parse_location(path).uri, threading.current_thread()
        with self._lock:
            self._running = uri, me
            # The thread before has carried out all of its saves.
            self._unwanted = {uri: thread for uri, thread in self._unwanted.items() if thread is me}
        try:
            yield
        finally:
            with self._lock:
                self._running = None
                is_unwanted = self._unwanted.pop(uri, None) is not None
            if is_unwanted:
                self._remove(uri, None)

    def note_save(self, path: _Path, callbacks: Any) -> None:
        """Note a save that is committed, and the states of its callbacks, which name their folders."""
        uri = parse_location(path).uri
        states = callbacks.values() if isinstance(callbacks, Mapping) else ()
        named = [state.get("dirpath") for state in states if isinstance(state, Mapping)]
        self._saved.add(uri)
        self._folders.add(uri.rpartition("/")[0])
        for folder in filter(None, named):
            with contextlib.suppress(Exception):  # Fabric saves values of any form under this name
                self._folders.add(parse_location(folder).uri)
        early, self._early = self._early, []
        own_thread = threading.current_thread()
        for early_uri, thread in early:
            self._remove(early_uri, None if thread is own_thread else own_thread)

    def remove(self, path: _Path) -> None:
        uri, own_thread = parse_location(path).uri, threading.current_thread()
        with self._lock:
            running_uri, saver = self._running or ("", own_thread)
            if running_uri == uri and saver is not own_thread:
                self._unwanted[uri] = saver
                return
        self._remove(uri, None if saver is own_thread else saver)

    def _remove(self, uri: str, saver: threading.Thread | None) -> None:
        """Remove a checkpoint; or if it does not exist, let `saver` remove it, in whose queue its save may be."""
        # A name that begins with a dot is that of a temporary file of Lightning's, which another process may have made.
        if uri not in self._saved and not uri.rpartition("/")[2].startswith("."):
            if not self._folders:
                self._early.append((uri, threading.current_thread()))
                return
            is_own = any(uri.startswith(f"{folder}/") for folder in self._folders)
            if uri in self._loaded or not is_own:
                why = "this run was loaded from it" if uri in self._loaded else "this run saves to other folders"
                _log.warning("%s stays, because %s. If nobody needs it, remove it with cloudckpt.delete", uri, why)
                return
        if saver is not None and uri not in self._saved:
            with self._lock:
                self._unwanted[uri] = saver
            if not is_taken(uri, options=self._options):
                return
        self._saved.discard(uri)
        with contextlib.suppress(CheckpointNotFoundError):
            delete(uri, options=self._options)
        with self._lock:
            self._unwanted.pop(uri, None)


class CloudCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of Lightning and Fabric by URI.

    Use it with strategies in which rank 0 saves everything (one device, DDP). The result is an ordinary checkpoint:
    atomic, verified, and listed by ``cloudckpt ls``; its tensors have names such as ``state_dict.layer.weight``.
    ``AsyncCheckpointIO(CloudCheckpointIO())`` saves in the background.

    Args:
        options: Options of all saves and loads.
        overwrite: Replace an existing checkpoint at the instant of the commit, as Lightning expects (``last.ckpt``).

    Example::

        fabric = Fabric(plugins=[CloudCheckpointIO()])
        fabric.save("s3://bucket/fabric/step-0", state)
        fabric.load("s3://bucket/fabric/step-0", state)

    """

    def __init__(self, *, options: Options | None = None, overwrite: bool = True) -> None:
        self._options = options or Options()
        self._overwrite = overwrite
        self._removals = _Removals(self._options)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _Path, storage_options: Any = None) -> None:
        """Save `checkpoint` from rank 0, and return once it is committed."""
        _refuse_storage_options(storage_options)
        _warn_of_positions(checkpoint)
        state = to_state_dict(checkpoint, uri=parse_location(path).uri)
        with self._removals.saving(path):
            save(state, path, no_dist=True, overwrite=self._overwrite, options=self._options)
            self._removals.note_save(path, checkpoint.get("callbacks"))

    def load_checkpoint(
        self,
        path: _Path,
        map_location: Callable[..., Any] | torch.device | str | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the whole checkpoint on each rank that calls.

        Plain values always load; other values that are not tensors load only if `weights_only` is False. Tensors are on
        the CPU, or on `map_location` if it is a device.
        """
        allow_pickle = weights_only is False
        location = parse_location(path)
        flat, _ = load_whole(location, self._options, Selection(uri=location.uri), allow_pickle=False)
        if isinstance(map_location, (str, torch.device)):
            flat = {name: value.to(map_location) if torch.is_tensor(value) else value for name, value in flat.items()}
        checkpoint: dict[str, Any] = from_state_dict(flat, allow_pickle=allow_pickle, uri=location.uri)
        self._removals.note_load(path)
        return checkpoint

    def remove_checkpoint(self, path: _Path) -> None:
        """Delete the checkpoint as `cloudckpt.delete` does. A missing checkpoint is no error.

        The checkpoint that this run resumed from stays, with a warning, and so do those outside the folders under which
        it saves.
        """
        self._removals.remove(path)


class LoaderStates(Callback):
    """Saves the state of each rank's stateful data loaders, and resumes with the batches of uninterrupted training.

    Lightning saves the position of rank 0's loader alone. From it, a resume may repeat or skip an epoch, shuffle as in
    another one, or continue in other data. With this callback, a resume within an epoch raises `StateDictMismatchError`
    before its first batch if the number of ranks or of samples, the seed, or another setting has changed. Between two
    epochs, data and ranks may change; but not with ``max_steps``.

    The loaders are torchdata's ``StatefulDataLoader``. Those that shuffle need torchdata's ``RandomSampler``, or on
    several ranks its ``StatefulDistributedSampler``.

    Raises:
        InvalidOptionError: The order of a stateful data loader is not saved. Or it has no length: Lightning fetches its
            batches ahead, so that a resume would skip one.

    Example::

        callbacks = [ModelCheckpoint("s3://bucket/steps", every_n_train_steps=100), LoaderStates()]
        trainer = Trainer(max_steps=200, plugins=[CloudCheckpointIO()], callbacks=callbacks)

    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._saved: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the trainer."""
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks. A collective call, as ``trainer.save_checkpoint`` is."""
        trainer = self._trainer
        if trainer is None or trainer.train_dataloader is None:
            return {}
        entries = self._entries(trainer)
        states: list[Any] = [{"loaders": [entry.state_dict() for entry in entries], "is_ended": trainer.is_last_batch}]
        if trainer.world_size > 1:
            states *= trainer.world_size
            dist.all_gather_object(states, states[0])
        return {"ranks": states}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remove Lightning's own state of the loaders, with which torchdata fails if the loaders are others."""
        if self.state_key in checkpoint["callbacks"]:
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until the loaders exist."""
        self._saved = state_dict.get("ranks", [])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the loaders to the saved positions, which replace the positions that Lightning has set."""
        for position, loader in enumerate(self._loaders(trainer)):
            _refuse_lost_position(loader, position)
        if trainer.is_global_zero and len(self._loaders(trainer)) < len(_all_loaders(trainer)):
            _log.warning(
                "a data loader has no state, which LoaderStates could save: a resume begins its epoch anew. Use "
                "torchdata.stateful_dataloader.StatefulDataLoader"
            )
        saved, self._saved = self._saved, []
        if not saved:
            return
        loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_progress
        # With max_steps, Lightning 2.6 repeats the end of an epoch at which it saved, and counts it twice.
        is_repeated = loop.restarted_on_epoch_end
        is_between = saved[0]["is_ended"] and not is_repeated
        if not is_between and len(saved) != trainer.world_size:
            ranks, advice = (f"{len(saved)} ranks", str(trainer.world_size)), f"Keep the number, or {_OTHER_DATA}"
            raise make_position_error("the part of an epoch", *ranks, advice=advice, uri=str(trainer.ckpt_path))
        if is_repeated:
            progress.current.processed -= 1
            progress.total.processed -= 1
        states = saved[min(trainer.global_rank, len(saved) - 1)]["loaders"]
        loaders = zip(self._loaders(trainer), self._entries(trainer), states, strict=False)
        for position, (loader, entry, state) in enumerate(loaders):
            if is_between:
                begin_next_epoch(state)
            entry.load_state_dict(state, where=f"data loader {position}")
            if is_between:
                iter(loader)  # applies the state to its sampler, so that the next iterator begins the next epoch
            set_epoch(loader, progress.current.processed)
        if trainer.current_epoch == 0 or loop.is_resuming or loop.epoch_loop.restarting:  # otherwise Lightning does
            iter(loop._data_fetcher)

    def _entries(self, trainer: Trainer) -> list[LoaderEntry]:
        uri = str(trainer.ckpt_path)
        return [
            LoaderEntry(StatefulEntry(loader), loader, uri=uri, advice=_OTHER_DATA) for loader in self._loaders(trainer)
        ]

    @staticmethod
    def _loaders(trainer: Trainer) -> list[Any]:
        return [loader for loader in _all_loaders(trainer) if hasattr(loader, "load_state_dict")]


def _all_loaders(trainer: Trainer) -> list[Any]:
    loaders: list[Any] = CombinedLoader(trainer.train_dataloader).flattened
    return loaders


def _refuse_lost_position(loader: Any, position: int) -> None:
    """Raise `InvalidOptionError` for a stateful data loader from whose state a resume would give other batches."""
    order = sampler_of(loader)
    if length_of(loader) is None:
        raise InvalidOptionError(
            f"stateful data loader {position} has no length. Lightning fetches its batches ahead, so a resume would "
            "skip one: give the data set a __len__, or remove LoaderStates"
        )
    if type(order) is torch.utils.data.RandomSampler or isinstance(order, DistributedSamplerWrapper):
        raise InvalidOptionError(
            f"the order of stateful data loader {position} is not saved by its sampler ({type(order).__name__}), so a "
            "resume would continue with other batches. On one rank, pass sampler=torchdata.stateful_dataloader.sampler."
            "RandomSampler(data, generator=torch.Generator()). On several, pass StatefulDistributedSampler(data) from "
            "there, and the Trainer use_distributed_sampler=False"
        )


_Module = TypeVar("_Module", bound="LightningModule")


def load_from_checkpoint(
    module_class: type[_Module],
    uri: _Path,
    *,
    map_location: torch.device | str | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    options: Options | None = None,
    **hyperparameters: Any,
) -> _Module:
    """Load a module as ``module_class.load_from_checkpoint(…)`` does, which opens only files.

    It is for inference: the state of optimizers, schedulers, loops and callbacks is not read. One rank or all may have
    saved the checkpoint. Meanwhile, the weights are in memory twice.

    Args:
        module_class: Class of the module.
        uri: Place of the checkpoint.
        map_location: See Lightning's ``load_from_checkpoint``.
        strict: See Lightning's ``load_from_checkpoint``.
        weights_only: If False, values of any class load, which may run any code.
        options: Options of the load.
        **hyperparameters: See Lightning's ``load_from_checkpoint``.

    Returns:
        The module.

    Raises:
        CheckpointNotFoundError: No checkpoint is committed there.
        CorruptCheckpointError: Stored bytes are not those of the save.
        UnsafePickleError: A value could run code, and `weights_only` is not False.

    """
    location, options = parse_location(uri), options or Options()
    selection = Selection(uri=location.uri, leaves_out=_is_training_state)
    state_dict, _ = load_whole(location, options, selection, allow_pickle=False)
    checkpoint = from_state_dict(
        state_dict, without=_is_training_state, allow_pickle=weights_only is False, uri=location.uri
    )
    checkpoint.setdefault("state_dict", state_dict.get("state_dict", {}))  # shards are not in the skeleton
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    # `from_state_dict` has already refused values that could run code.
    module: _Module = module_class.load_from_checkpoint(
        file, map_location=map_location, strict=strict, weights_only=False, **hyperparameters
    )
    return module


class _CloudShards(ParallelStrategy):
    """Mixin for a strategy of Lightning's that saves and loads its shards."""

    _own_setting: tuple[str, object]
    """The setting of Lightning's strategy that makes it save on all ranks, and its value for that."""

    def __init__(self, *args: Any, options: Options | None = None, overwrite: bool = True, **kwargs: Any) -> None:
        name, value = self._own_setting
        if kwargs.setdefault(name, value) != value:
            raise InvalidOptionError(
                f"{type(self).__name__} saves on all ranks. Remove {name}; cloudckpt.export_checkpoint makes one file"
            )
        super().__init__(*args, **kwargs)
        self._cloud_options = options or Options()
        self._overwrite = overwrite
        self._removals = _Removals(self._cloud_options)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _Path, storage_options: Any = None) -> None:
        """Save from all ranks, and return once the checkpoint is committed."""
        _refuse_storage_options(storage_options)
        _warn_of_positions(checkpoint)
        state = {"state_dict": checkpoint.pop("state_dict")}
        for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{index}"] = optimizer_state
        state[SKELETON] = serialize(checkpoint)
        uri = self.broadcast(os.fspath(filepath))
        save(state, uri, overwrite=self._overwrite, options=self._cloud_options)
        self._removals.note_save(uri, checkpoint.get("callbacks"))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the shards of an optimizer's state by the names of the parameters. A fresh one stays fresh."""
        state: dict[str, Any] = self._wrap_optimizer(optimizer).state_dict()
        return state

    def load_checkpoint(self, checkpoint_path: _Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the model in place, and the optimizers too if training continues; return the rest."""
        module = self.lightning_module
        is_strict, is_fitting = module.strict_loading, module.trainer.state.fn == TrainerFn.FITTING
        optimizers = list(enumerate(self.optimizers)) if is_fitting else []
        model = ModelEntry(self.model, is_strict=is_strict, rank=self.global_rank)
        state: dict[str, Any] = {"state_dict": model, SKELETON: b""}
        state |= {f"optimizer_{index}": self._wrap_optimizer(optimizer) for index, optimizer in optimizers}
        uri = self.broadcast(os.fspath(checkpoint_path))
        load(state, uri, strict=None if is_strict else False, options=self._cloud_options)
        self._removals.note_load(uri)
        allow_pickle = weights_only is False
        other: dict[str, Any] = deserialize(state[SKELETON], allow_pickle=allow_pickle, uri=parse_location(uri).uri)
        return other

    def remove_checkpoint(self, filepath: _Path) -> None:
        """Delete the checkpoint from rank 0, or leave it as `CloudCheckpointIO.remove_checkpoint` does."""
        if self.is_global_zero:
            self._removals.remove(filepath)

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> LiveEntry:
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return wrap_optimizers(inner, {"": self.model}, rank=self.global_rank)


class CloudModelParallelStrategy(_CloudShards, ModelParallelStrategy):
    """Strategy for FSDP2 and tensor parallelism; all ranks save and load their shards by URI.

    One atomic checkpoint holds parameters and optimizer state by name, so it loads on any number of ranks, and the rest
    of Lightning's state.

    Args:
        *args: See ``ModelParallelStrategy``.
        **kwargs: See ``ModelParallelStrategy``; and ``options`` and ``overwrite`` as for `CloudCheckpointIO`.

    Raises:
        InvalidOptionError: ``save_distributed_checkpoint`` is False.

    """

    _own_setting = ("save_distributed_checkpoint", True)


class CloudFSDPStrategy(_CloudShards, FSDPStrategy):
    """Strategy for FSDP1; all ranks save and load their shards by URI.

    It uses the same names as `CloudModelParallelStrategy`, so each loads the checkpoints of the other.

    Args:
        *args: See ``FSDPStrategy``.
        **kwargs: See ``FSDPStrategy``; and ``options`` and ``overwrite`` as for `CloudCheckpointIO`.

    Raises:
        InvalidOptionError: ``state_dict_type`` is not ``"sharded"``.

    """

    _own_setting = ("state_dict_type", "sharded")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the shards under the names that the model has without FSDP."""
        return get_model_state_dict(self.model)


def _refuse_storage_options(storage_options: Any) -> None:
    if storage_options is not None:
        raise InvalidOptionError(
            "storage_options are not accepted here. Give cloudckpt.Options(storage_options=…) to the constructor"
        )


def _warn_of_positions(checkpoint: Mapping[str, Any]) -> None:
    """Warn of stateful data loaders whose position is in Lightning's own state alone."""
    with contextlib.suppress(Exception):  # Fabric saves values of any form under these names
        loaders = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        is_lacking = LoaderStates.__qualname__ not in checkpoint["callbacks"]
        if loaders and is_lacking and is_first_warning("lightning", "positions"):
            _log.warning(
                "Lightning saves rank 0's position in the data without its epoch, its length and its seed, so a resume "
                "may continue with other batches. Give the Trainer the callback "
                "cloudckpt.integrations.lightning.LoaderStates()"
            )
