"""Data loaders as entries of a state dict. Each rank has its own, which resumes with the batches of the saved run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from cloudckpt.dcp.live.entry import LiveEntry, LoadSource
from cloudckpt.errors import InvalidOptionError, StateDictMismatchError

_log = logging.getLogger("cloudckpt")

_MADE_WITH = "_made_with"
_SAMPLER_SETTINGS = ("epoch", "num_replicas", "rank", "seed", "shuffle")
_PLAIN_TYPES = (bool, int, str)
_LEAVE_OUT = (
    "out, pass strict=False, and begin at a position in extra (docs/quickstart.md, 'Change the number of GPUs')"
)


def length_of(data: Any) -> int | None:
    """Return the length of data or of a loader; None if it has none, or if its ``__len__`` raises anything."""
    with contextlib.suppress(Exception):
        return len(data)
    return None


def describe_loader(loader: Any) -> dict[str, Any]:
    """Return the settings of a data loader or sampler that decide which batches come after a position.

    It never raises: a save must not fail because a user's class cannot be described.
    """
    order = sampler_of(loader)
    data = next((dataset for name in ("dataset", "data_source") if (dataset := _get(loader, name)) is not None), loader)
    settings = {"sampler": type(order).__name__, **{name: _get(order, name) for name in _SAMPLER_SETTINGS}}
    is_stream = isinstance(data, IterableDataset)
    if not is_stream:  # a stream may return the length of its rest
        settings["samples"] = length_of(data)
    if isinstance(loader, DataLoader):
        settings["workers"] = _get(loader, "num_workers")
        # A sampler counts samples, so batches of another size continue at the same sample.
        if is_stream or _get(loader, "batch_size") is None:
            settings["batch_size"] = _get(_get(loader, "batch_sampler"), "batch_size")
    return {name: value for name, value in settings.items() if type(value) in _PLAIN_TYPES}


def find_differences(saved: Mapping[str, Any], live: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the settings that differ, as saved and as they are now; None if all settings in both are equal."""
    names = [name for name in saved if name in live and saved[name] != live[name]]
    before, after = (", ".join(f"{name}={settings[name]}" for name in names) for settings in (saved, live))
    return (before, after) if names else None


def make_position_error(subject: str, saved_with: str, live: str, *, advice: str, uri: str) -> StateDictMismatchError:
    """Return the error for a saved position after which this job would get other batches."""
    text = f"{subject} of {uri} was saved with {saved_with}, and this job has {live}, so it would give other batches"
    return StateDictMismatchError(f"{text}. {advice}", uri=uri)


class LoaderEntry(LiveEntry):
    """A data loader or sampler with a state, and the settings that its position depends on."""

    def __init__(
        self, entry: LiveEntry, loader: DataLoader[Any] | Sampler[Any], *, uri: str = "", advice: str | None = None
    ) -> None:
        self._entry = entry
        self._loader = loader
        self._uri = uri
        self._advice = advice

    def state_dict(self) -> Any:
        state = self._entry.state_dict()
        return {**state, _MADE_WITH: describe_loader(self._loader)} if isinstance(state, dict) else state

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> Any:
        self._uri = source.uri
        return self._entry.plan_load(saved, where=where, source=source)

    def load_state_dict(self, state: Any, *, where: str) -> None:
        made_with = state.pop(_MADE_WITH, {}) if isinstance(state, dict) else {}
        if made_with:
            _begin_epoch_whole(state)
            if "epoch" in made_with:
                set_epoch(self._loader, made_with["epoch"])  # torchdata 0.11 does not save it
        self._entry.load_state_dict(state, where=where)
        self._check_settings(made_with, where=where)

    def _check_settings(self, saved: dict[str, Any], *, where: str) -> None:
        """Raise `StateDictMismatchError` if settings differ that no class of the user restores."""
        saved.pop("epoch", None)
        loader, live = self._loader, describe_loader(self._loader)
        parts = (sampler_of(loader), _get(loader, "batch_sampler"))
        # A sampler of the user's restores its order in its own way, perhaps only when an epoch begins.
        if any(map(_has_own_state, parts)):
            of_sampler = {name: saved.pop(name) for name in _SAMPLER_SETTINGS if name in saved}
            if differing := find_differences(of_sampler, live):
                _log.warning(
                    "%r of %s was saved with %s, and its sampler now has %s: it gives the same batches only if it "
                    "restores that when an epoch begins",
                    where,
                    self._uri,
                    *differing,
                )
        if differing := find_differences(saved, live):
            leave_out = f"leave {where.partition('.')[0]} {_LEAVE_OUT}"
            advice = f"Make the loader as that run did; or {self._advice or leave_out}"
            raise make_position_error(repr(where), *differing, advice=advice, uri=self._uri)


def _get(owner: Any, name: str) -> Any:
    """Return an attribute; None if it cannot be read."""
    with contextlib.suppress(Exception):
        return getattr(owner, name)
    return None


def _has_own_state(owner: Any) -> bool:
    """Return True if neither torch nor torchdata defines how the object is restored."""
    module = getattr(_get(owner, "load_state_dict"), "__module__", None) or "torch"
    return module.partition(".")[0] not in {"torch", "torchdata"}


def sampler_of(loader: Any) -> Any:
    """Return the sampler that orders the samples. A batch sampler of the user may order them itself."""
    batches = _get(loader, "batch_sampler")
    source = loader if batches is None else batches
    order = _get(source, "sampler")
    return source if order is None else order


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a data loader's sampler, if its order depends on one."""
    order = sampler_of(loader)
    if _get(order, "set_epoch") is not None:
        order.set_epoch(epoch)


def begin_next_epoch(state: dict[str, Any]) -> None:
    """Move the state of a data loader from the last batch of an epoch to the beginning of the next epoch.

    The next epoch may have other data, and another number of ranks.
    """
    _begin_epoch_whole(state, is_between=True)
    for name in ("samples", "num_replicas", "rank"):
        state[_MADE_WITH].pop(name, None)


def _begin_epoch_whole(state: dict[str, Any], *, is_between: bool = False) -> None:
    """Set the position of a sampler to 0 in a state of torchdata that was saved at the start or the end of an epoch.

    torchdata leaves the last position of the previous epoch in such a state, so the loader would silently skip the next
    epoch (https://github.com/meta-pytorch/data/issues/1513, in torchdata 0.11).
    """
    has_workers = isinstance(state.get("_snapshot"), dict)
    main = state["_snapshot"].get("_main_snapshot", {}) if has_workers else state
    is_ended = not has_workers and state.get("_iterator_finished")
    of_sampler = (main.get("_sampler_iter_state") or {}).get("sampler_state")
    is_whole = is_between or is_ended or main.get("_sampler_iter_yielded") == 0
    if is_whole and isinstance(of_sampler, dict) and "yielded" in of_sampler:
        of_sampler["yielded"] = 0


class RankEntry(LiveEntry):
    """An entry that differs between ranks: each saves and loads its own, under ``rank-<r>``."""

    def __init__(self, entry: LiveEntry, *, rank: int, num_ranks: int) -> None:
        self._entry = entry
        self._key = f"rank-{rank}"
        self._num_ranks = num_ranks

    def state_at(self, where: str) -> dict[str, Any]:
        return {self._key: self._entry.state_at(where)}

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> dict[str, Any]:
        by_rank = saved if isinstance(saved, Mapping) else {}
        if self._key not in by_rank or len(by_rank) not in {1, self._num_ranks}:  # 1: this rank saved by itself
            advice = f"Leave {where} {_LEAVE_OUT}"
            ranks = f"{len(by_rank)} ranks", str(self._num_ranks)
            raise make_position_error(repr(where), *ranks, advice=advice, uri=source.uri)
        return {self._key: self._entry.plan_load(by_rank[self._key], where=f"{where}.{self._key}", source=source)}

    def load_state_dict(self, state: Any, *, where: str) -> None:
        self._entry.load_state_dict(state[self._key], where=f"{where}.{self._key}")


def refuse_shared_loaders(extra: Mapping[Any, Any], *, num_ranks: int) -> None:
    """Raise `InvalidOptionError` for a data loader in `extra` on several ranks: all would get rank 0's position."""
    names = [key for key, value in extra.items() if isinstance(value, DataLoader)] if num_ranks > 1 else []
    if names:
        raise InvalidOptionError(
            f"extra[{names[0]!r}] is a data loader, and each of the {num_ranks} ranks has its own position: pass it as "
            "dataloader=…, several in a dict"
        )


def warn_of_shared_generator(dataloader: Any) -> None:
    """Warn of data loaders that continue with other random numbers after a resume.

    ``iter(loader)`` draws a seed from the loader's generator, by default the process's, so a resume within an epoch
    draws once more than the run that saved. torch's own samplers have no state.
    """
    loaders = list(dataloader.values()) if isinstance(dataloader, Mapping) else dataloader
    for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
        if not isinstance(loader, DataLoader) or "generator" not in vars(
            loader
        ):  # a wrapper has the attribute of the loader in it
            continue
        of_sampler = _get(_get(loader, "sampler"), "generator")
        is_drawn_from = of_sampler is loader.generator and loader.num_workers == 0
        if loader.generator is None:
            _log.warning(
                "the %s has no generator of its own, so a resume within an epoch continues with other random numbers. "
                "Pass it generator=torch.Generator()",
                type(loader).__name__,
            )
            return
        is_torchs = type(loader.sampler) is torch.utils.data.RandomSampler  # torchdata's is a subclass
        if of_sampler is not None and (is_drawn_from or is_torchs):
            _log.warning(
                "the %s does not save the generator of its sampler, so a resume continues in another order. Pass it "
                "sampler=torchdata.stateful_dataloader.sampler.RandomSampler(data, generator=torch.Generator()), and "
                "another generator=torch.Generator()",
                type(loader).__name__,
            )
            return
