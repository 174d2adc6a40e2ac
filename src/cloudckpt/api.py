"""Saving and loading by URI. Each function takes the keywords of its torch counterpart, and behaves as that does."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal, TypeAlias

import torch.distributed as dist

from cloudckpt._display import noting_interrupt
from cloudckpt._keywords import suggest_keywords
from cloudckpt._this_process import rare_collections
from cloudckpt.background.handle import AsyncSave
from cloudckpt.background.in_flight import (
    earlier_failure,
    exclusive_begin,
    find_busy_rank,
    stager_of_process,
    wait_for_previous,
)
from cloudckpt.background.process import require_process_support
from cloudckpt.background.runner import BackgroundSave, ExternalSnapshot, background_ranks, begin_snapshot
from cloudckpt.dcp import AsyncCheckpointerType, AsyncStager, LoadPlanner, SavePlanner
from cloudckpt.dcp.live.entry import LiveEntry, find_synchronized
from cloudckpt.dcp.live.objects import LiveObjects, Model, Optimizers, find_parameters
from cloudckpt.dcp.ranks.collectives import CollectiveCall, guarded_collectives
from cloudckpt.dcp.ranks.failures import raising_own_interrupt
from cloudckpt.dcp.ranks.rank_calls import num_ranks_of, rank_in
from cloudckpt.dcp.renaming import Rename
from cloudckpt.dcp.save_and_load import (
    RanksContext,
    SavedMetadata,
    run_load,
    run_save,
    states_of,
)
from cloudckpt.dcp.save_planner import BalancedSavePlanner
from cloudckpt.dcp.storage_reader import ObjectStoreReader
from cloudckpt.dcp.storage_writer import ObjectStoreWriter, require_collectives
from cloudckpt.errors import InvalidOptionError, InvalidURIError
from cloudckpt.options import Options, require_options
from cloudckpt.report import LoadReport
from cloudckpt.telemetry.progress import show_progress
from cloudckpt.uri import parse_location, redact

__all__ = ["async_save", "load", "prepare_async_save", "resolve_state_dict", "save"]

StateDict = dict[str, Any]
PathOrURI: TypeAlias = str | os.PathLike[str]


@suggest_keywords
def save(
    state_dict: StateDict | PathOrURI | None = None,
    uri: PathOrURI | None = None,
    *,
    model: Model | None = None,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    dataloader: Any = None,
    extra: dict[str, Any] | None = None,
    random_state: bool = True,
    checkpoint_id: PathOrURI | None = None,
    storage_writer: ObjectStoreWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool = False,
    base: PathOrURI | None = None,
    options: Options | None = None,
) -> SavedMetadata:
    """Save a checkpoint from all ranks, and return once it is committed (`torch.distributed.checkpoint.save`).

    Nothing at `uri` changes for readers until the commit. A checkpoint that exists there is left alone, and the save
    fails, unless `overwrite` is true.

    Args:
        state_dict: A dict of tensors, values, dicts and ``Stateful`` objects; or `uri`, if live objects are passed.
        uri: Place of the checkpoint.
        model: A ``torch.nn.Module``, or a dict of them. FSDP1, FSDP2, TP, DDP and compiled ones are saved by the names
            of the plain model.
        optimizer: A ``torch.optim.Optimizer``, or a list or a dict of them. Its state is saved by parameter names.
        scheduler: An object with ``state_dict()`` and ``load_state_dict()``, or a list or a dict of them.
        dataloader: The same, such as torchdata's ``StatefulDataLoader`` or a sampler. Each rank saves its own.
        extra: Numbers, tensors, dicts, random generators (torch, numpy, Python) and ``Stateful`` objects by name, and
            lists of such objects. All ranks have the same.
        random_state: Save this rank's generators (Python, numpy, torch, its GPU), if live objects are passed.
        checkpoint_id: torch's name for `uri`.
        storage_writer: Writer to use. `overwrite`, `base` and `options` then belong to it.
        planner: Planner to use instead of one that balances the ranks by bytes.
        process_group: Group of the ranks; None for all.
        no_dist: Save from this process alone.
        use_collectives: torch's keyword. False is refused: save each rank to a URI of its own with `no_dist`.
        overwrite: Replace a checkpoint at `uri` at the instant of the commit.
        base: A checkpoint in the same folder as `uri`, which was saved with ``Options(unchanged="reference")``. Tensors
            that equal its own are not sent again: the checkpoint names them there. This save has the same option then.
        options: Options of this save.

    Returns:
        torch's metadata of the checkpoint, with this rank's report in ``report``.

    Raises:
        CheckpointException: The save failed. Raised on every rank, with the causes by rank. It is also an instance of
            the causes' class if they have one in common, such as `CheckpointExistsError`.
        RankLostError: A rank died, was stopped, or did not come within `Options.timeout_s`. A slow one is waited for.
        InvalidOptionError: An argument cannot be used, or not beside another one.
        InvalidURIError: `uri` cannot name a checkpoint.
        TypeError: `state_dict` is no dict.

    Example::

        cloudckpt.save("s3://bucket/run/step-100", model=model, optimizer=optimizer)
        cloudckpt.load("s3://bucket/run/step-100", model=model, optimizer=optimizer)

    """
    require_collectives(use_collectives=use_collectives)
    objects = LiveObjects(model, optimizer, scheduler, dataloader, extra, has_random_state=random_state)
    state_dict, uri = resolve_state_dict(objects, state_dict, uri, process_group, no_dist=no_dist, doing="saving")
    if storage_writer is not None:
        wait_for_previous()  # the save in flight may use the same writer
    writer = _writer(uri, checkpoint_id, storage_writer, overwrite=overwrite, base=base, options=options)
    rank = rank_in(process_group, no_dist=no_dist)
    note = noting_interrupt(f"the save to {writer.checkpoint_id} was interrupted. You can repeat it")
    with note, raising_own_interrupt(rank), earlier_failure() as earlier_error, _show_progress("save", writer):
        return run_save(
            state_dict,
            writer,
            planner=planner,
            ranks_context=_ranks_context(writer, process_group, doing="saving", no_dist=no_dist),
            refusal=earlier_error,
        )


@suggest_keywords
@rare_collections()
def load(
    state_dict: StateDict | PathOrURI | None = None,
    uri: PathOrURI | None = None,
    *,
    model: Model | None = None,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    dataloader: Any = None,
    extra: dict[str, Any] | None = None,
    random_state: bool = False,
    strict: bool | None = None,
    rename: Rename | None = None,
    checkpoint_id: PathOrURI | None = None,
    storage_reader: ObjectStoreReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
) -> LoadReport:
    """Load a checkpoint into live objects or a state dict, in place (`torch.distributed.checkpoint.load`).

    The load plans by what the checkpoint holds, so a fresh optimizer gets all of its state. Shards are cut anew as the
    ranks need them. Every byte is checked against the checksums of the save. All ranks load the same save; if it is
    overwritten meanwhile, the load begins once more. After an error, the tensors may hold anything.

    Args:
        state_dict: The state dict to fill; or `uri`, if live objects are passed. A ``Stateful`` in it also gets
            the saved entries that its ``state_dict()`` does not ask for, unless `strict` is False.
        uri: Place of the checkpoint; or of safetensors files, which hold a model and no checksums: one file, or a
            folder in Hugging Face's layout.
        model: Models to fill, as `save` takes them. So are `optimizer`, `scheduler`, `dataloader` and `extra`.
        optimizer: See `model`.
        scheduler: See `model`.
        dataloader: See `model`. The number of ranks must be that of the save.
        extra: See `model`. It is filled with everything that was saved in it. A value that was not saved is an error.
        random_state: Set this rank's random generators to the saved state.
        strict: None: a live object is loaded whole, and a state dict that asks for the ``param_groups`` of an optimizer
            asks for all of its ``state``. True: all that was saved is asked for. False: live objects take what fits. A
            warning names the rest.
        rename: From names in the checkpoint to those of what is loaded: a dict of prefixes, as in ``{"ema": "model"}``,
            ``{"model.encoder": "model"}`` or ``{"optim": "optimizer"}``, in which ``""`` is the prefix of all names; or
            a function that takes a name in the checkpoint and returns the other. None in the place of the other name
            leaves entries out. Entries that a dict does not rename hide where others are renamed to. With an
            optimizer, the names of parameters stay: only the prefixes of the whole model and of the whole optimizer may
            change.
        checkpoint_id: torch's name for `uri`.
        storage_reader: Reader to use. `allow_pickle`, `strict`, `rename` and `options` then belong to it.
        planner: Planner to use for a state dict.
        process_group: Group of the ranks; None for all.
        no_dist: Load in this process alone.
        allow_pickle: Load values of any class, which may run any code, and checkpoints of torch's own writers. Without
            it, plain Python and numpy values load, and classes that ``torch.serialization.add_safe_globals`` allows.
        options: Options of this load.

    Returns:
        This rank's report.

    Raises:
        CheckpointException: The load failed. Raised on every rank. It is also an instance of the cause's class, such as
            `CheckpointNotFoundError`, `CorruptCheckpointError`, `UnsafePickleError` or `RankLostError`.
        StateDictMismatchError: The checkpoint lacks what is asked for, `strict` is not kept, or a part of `rename`
            fits no entry, or none that is asked for.

    Example::

        extra = {}
        cloudckpt.load("s3://bucket/run/step-100", model=model, optimizer=optimizer, extra=extra)
        print(extra["epoch"])

    """
    objects = LiveObjects(model, optimizer, scheduler, dataloader, extra, has_random_state=random_state)
    state_dict, uri = resolve_state_dict(
        objects, state_dict, uri, process_group, no_dist=no_dist, doing="loading", strict=strict
    )
    reader = storage_reader
    if reader is None:
        location = _location(uri, checkpoint_id)
        reader = ObjectStoreReader(
            location, options=options, allow_pickle=allow_pickle, strict=strict, rename=rename, _via=""
        )
    else:
        check_reader(reader, allow_pickle=allow_pickle, strict=strict, rename=rename, options=options)
        if uri is not None or checkpoint_id is not None:
            reader.reset(_location(uri, checkpoint_id))
    names = [key for key, entry in state_dict.items() if isinstance(entry, LiveEntry)]
    doing = f"loading {', '.join(names)} of" if names else "loading"  # ranks that do something else are refused
    note = noting_interrupt(
        f"the load from {reader.checkpoint_id} was interrupted, and has filled only a part. Repeat it"
    )
    with note, _show_progress("load", reader):
        return run_load(
            state_dict,
            reader,
            planner=planner,
            new_ranks_context=functools.partial(_ranks_context, reader, process_group, doing=doing, no_dist=no_dist),
            rank=rank_in(process_group, no_dist=no_dist),
        )


@suggest_keywords
def async_save(
    state_dict: StateDict | PathOrURI | None = None,
    uri: PathOrURI | None = None,
    *,
    model: Model | None = None,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    dataloader: Any = None,
    extra: dict[str, Any] | None = None,
    random_state: bool = True,
    checkpoint_id: PathOrURI | None = None,
    storage_writer: ObjectStoreWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool = False,
    base: PathOrURI | None = None,
    options: Options | None = None,
) -> AsyncSave:
    """Save a checkpoint in the background, and return once the state is copied, so that training may go on.

    The copy stays in memory that is kept for the next save, until `cloudckpt.close`. A save that is still running is
    waited for first, or refused (`Options.async_in_flight`). A script that ends waits for its last save.

    Args:
        state_dict: See `save`, also for `uri` and all arguments that are not named here.
        uri: See `save`.
        model: See `save`.
        optimizer: See `save`.
        scheduler: See `save`.
        dataloader: See `save`.
        extra: See `save`.
        random_state: See `save`.
        checkpoint_id: See `save`.
        storage_writer: See `save`.
        planner: See `save`.
        process_group: See `save`. The save's collectives run on a gloo group of their own.
        async_checkpointer_type: ``AsyncCheckpointerType.PROCESS`` saves in a process that torch starts.
        async_stager: Stager to use instead of this process's own.
        no_dist: See `save`.
        use_collectives: See `save`.
        overwrite: See `save`.
        base: See `save`.
        options: See `save`. `Options.async_overlap` returns before parameters and optimizers' state are copied.

    Returns:
        A handle. `AsyncSave.result` waits for the commit, and raises the failure. If it is not called, the next save
        raises the failure, on all ranks.

    Raises:
        SaveInFlightError: A save is still running, and `Options.async_in_flight` is ``"raise"``.
        RankLostError: Not all ranks came.
        CheckpointException: The state could not be copied on this rank.
        AssertionError: The process group has no CPU backend.

    Example::

        handle = cloudckpt.async_save("s3://bucket/run/step-100", model=model, optimizer=optimizer)
        train_on()
        handle.result()

    """
    require_collectives(use_collectives=use_collectives)
    objects = LiveObjects(model, optimizer, scheduler, dataloader, extra, has_random_state=random_state)
    state_dict, uri = resolve_state_dict(objects, state_dict, uri, process_group, no_dist=no_dist, doing="saving")
    # Make no writer yet: the save in flight may use the same one.
    save_options = require_options(
        options or (storage_writer.options if isinstance(storage_writer, ObjectStoreWriter) else None)
    )
    ask_ranks = functools.partial(
        _find_own_save if no_dist else find_busy_rank,
        process_group=process_group,
        uri=_shown_location(uri, checkpoint_id, storage_writer),
        timeout_s=save_options.timeout_s,
    )
    with exclusive_begin(save_options.async_in_flight, find_busy_rank=ask_ranks):
        call: CollectiveCall | None = None
        save: BackgroundSave | None = None
        try:
            wait_for_previous()
            writer = _writer(uri, checkpoint_id, storage_writer, overwrite=overwrite, base=base, options=options)
            if async_stager is None and isinstance(writer, AsyncStager):
                async_stager = writer
            by_process = async_checkpointer_type is AsyncCheckpointerType.PROCESS
            if by_process:
                require_process_support(writer, no_dist=no_dist)
            ranks = background_ranks(writer, process_group, no_dist=no_dist)
            call = ranks if isinstance(ranks, CollectiveCall) else None
            with earlier_failure() as earlier_error:
                new_save = functools.partial(
                    BackgroundSave,
                    writer=writer,
                    by_process=by_process,
                    ranks=ranks,
                    process_group=process_group,
                    no_dist=no_dist,
                )
                if earlier_error is not None:
                    save = new_save(snapshot=ExternalSnapshot.from_error(earlier_error), planner=None)
                    save.begin(is_overlapped=False)
            if planner is None:
                planner = BalancedSavePlanner(
                    compare=save_options.compare_replicas, synchronized=find_synchronized(state_dict)
                )
            snapshot = begin_snapshot(
                async_stager,
                states_of(state_dict),
                by_process=by_process,
                parameters=find_parameters(state_dict) if save_options.async_overlap else None,
            )
            is_overlapped = (
                snapshot.is_overlapped if isinstance(snapshot, ExternalSnapshot) else save_options.async_overlap
            )
            save = new_save(snapshot=snapshot, planner=planner)
            with _show_progress("save", writer, in_background=True) as bar:
                handle = save.begin(is_overlapped=is_overlapped)
                end_bar = bar.pop_all().close
                handle.committed.add_done_callback(lambda _: end_bar())
                return handle
        except BaseException as error:  # no caller gets the handle, and the other ranks must not wait for this one
            if save is not None:
                save.abandon(error)
            elif call is not None:
                call.end(error)
            raise


def prepare_async_save(
    state_dict: StateDict, uri: str, *, process_group: dist.ProcessGroup | None, no_dist: bool, options: Options
) -> None:
    """Do the work of a first `async_save` in advance: connect the ranks, and allocate, pin and plan the memory.

    Collective. Raises as `async_save` does. If the state of a rank cannot be copied, this rank alone raises.
    """
    with exclusive_begin("wait", find_busy_rank=_find_own_save):
        wait_for_previous()
        writer = ObjectStoreWriter(uri, options=options)
        ranks = background_ranks(writer, process_group, no_dist=no_dist)
        with ranks.ending() if isinstance(ranks, CollectiveCall) else contextlib.nullcontext():
            pass
        stager_of_process(is_shared=False).begin(states_of(state_dict)).completed.result()


def _shown_location(uri: PathOrURI | None, checkpoint_id: PathOrURI | None, writer: ObjectStoreWriter | None) -> str:
    """Return the URI of the save, or invalid arguments as text: they are refused once all ranks have answered."""
    if uri is None and checkpoint_id is None:
        return "" if writer is None else writer.agreed_id
    try:
        return parse_location(_location(uri, checkpoint_id)).uri
    except (InvalidURIError, TypeError):
        return f"{uri}, {checkpoint_id}"


def _find_own_save(own_uri: str | None, **_: object) -> tuple[int, str] | None:
    return None if own_uri is None else (0, own_uri)


def resolve_state_dict(
    objects: LiveObjects,
    state_dict: StateDict | PathOrURI | None,
    uri: PathOrURI | None,
    process_group: dist.ProcessGroup | None,
    *,
    no_dist: bool,
    doing: str,
    strict: bool | None = None,
) -> tuple[StateDict, PathOrURI | None]:
    """Return the state dict that is passed, or that of the live objects, and the location."""
    if not objects.are_given:
        _require_state_dict(state_dict, uri, doing=doing)
        return state_dict, uri  # type: ignore[return-value]  # it is a dict
    if isinstance(state_dict, (str, os.PathLike)) and uri is None:
        state_dict, uri = None, state_dict
    if state_dict is not None:
        raise TypeError("pass a state dict or live objects (model=…), not both. Put further values into extra={…}")
    rank, num_ranks = rank_in(process_group, no_dist=no_dist), num_ranks_of(process_group, no_dist=no_dist)
    return objects.entries(rank=rank, num_ranks=num_ranks, is_strict=strict is not False), uri


def _require_state_dict(state_dict: object, uri: object, *, doing: str) -> None:
    """Raise ``TypeError`` for an object that is no state dict, such as a module."""
    kind = MutableMapping if doing == "loading" else Mapping
    if not isinstance(state_dict, kind):
        hint = " Pass model=…, or a dict of its state" if hasattr(state_dict, "state_dict") else ""
        if state_dict is None or isinstance(state_dict, (str, os.PathLike)):
            hint = " Pass one before the URI, or live objects: model=…, optimizer=…"
            if isinstance(uri, Mapping):
                hint = " The two arguments are swapped: the URI is the second"
            elif state_dict is not None and doing == "loading":
                hint += f". cloudckpt.read({redact(state_dict)!r}) returns what was saved"
        given = "None" if state_dict is None else f"a {type(state_dict).__name__}"
        raise TypeError(f"{doing} takes a state dict, which is a dict, and not {given}.{hint}")


def _ranks_context(
    storage: ObjectStoreWriter | ObjectStoreReader,
    process_group: dist.ProcessGroup | None,
    *,
    doing: str,
    no_dist: bool,
) -> RanksContext:
    """Return the context that gives the collectives of one call, which do not wait for a lost rank."""
    uri = storage.agreed_id if isinstance(storage, ObjectStoreWriter) else storage.checkpoint_id
    return guarded_collectives(
        process_group, doing=doing, uri=uri, timeout_s=storage.options.timeout_s, no_dist=no_dist
    )


def _show_progress(
    verb: Literal["save", "load"], storage: ObjectStoreWriter | ObjectStoreReader, *, in_background: bool = False
) -> contextlib.ExitStack:
    """Return the context in which the job's rank 0 shows a bar. It does so also if each rank saves alone."""
    is_first = rank_in(None, no_dist=False) == 0 and os.environ.get("RANK", "0") == "0"
    is_wanted = storage.options.progress and is_first
    return show_progress(verb, storage.checkpoint_id, is_wanted=is_wanted, in_background=in_background)


def _location(uri: PathOrURI | None, checkpoint_id: PathOrURI | None) -> PathOrURI:
    if uri is not None and checkpoint_id is not None and uri != checkpoint_id:
        raise InvalidURIError(
            f"uri and checkpoint_id are two names for one thing, but differ: {redact(uri)!r}, {redact(checkpoint_id)!r}"
        )
    location = uri if uri is not None else checkpoint_id
    if location is None:
        raise InvalidURIError("no location was given: pass a URI such as 's3://bucket/run/step-100', or a path")
    return location


def check_reader(
    reader: ObjectStoreReader,
    *,
    allow_pickle: bool,
    strict: bool | None,
    rename: Rename | None,
    options: Options | None = None,
) -> ObjectStoreReader:
    """Return the reader that a user passes. Raises `InvalidOptionError` for settings beside it."""
    if allow_pickle or strict is not None or rename is not None or options is not None:
        raise InvalidOptionError(
            "allow_pickle, strict, rename and options belong to the reader: pass them to it, not beside it"
        )
    if not isinstance(reader, ObjectStoreReader):
        raise _foreign_storage("storage_reader", "load", reader)
    return reader


def _foreign_storage(keyword: str, call: str, storage: object) -> TypeError:
    kind = "ObjectStoreWriter" if call == "save" else "ObjectStoreReader"
    return TypeError(
        f"{keyword} is a {type(storage).__name__}, but cloudckpt takes an {kind}. Pass other storages to "
        f"torch.distributed.checkpoint.{call}"
    )


def _writer(
    uri: PathOrURI | None,
    checkpoint_id: PathOrURI | None,
    storage_writer: ObjectStoreWriter | None,
    *,
    overwrite: bool,
    base: PathOrURI | None,
    options: Options | None,
) -> ObjectStoreWriter:
    if storage_writer is None:
        location = _location(uri, checkpoint_id)
        return ObjectStoreWriter(location, options=options, overwrite=overwrite, base=base, _via="")
    if overwrite or base is not None or options is not None:
        raise InvalidOptionError("overwrite, base and options belong to the writer: pass them to it, not beside it")
    if not isinstance(storage_writer, ObjectStoreWriter):
        raise _foreign_storage("storage_writer", "save", storage_writer)
    if uri is not None or checkpoint_id is not None:
        storage_writer.reset(_location(uri, checkpoint_id))
    return storage_writer
