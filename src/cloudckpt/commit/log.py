"""The log of a checkpoint: its entries, which are manifests and fences, and the manifest that they make current.

The entry with the highest number decides: a manifest is current itself, and a fence names the manifest that stays
current, or none.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cloudckpt._messages import did_you_mean, find_near
from cloudckpt._workers import start_in_thread
from cloudckpt.commit.entries import (
    MANIFEST_PREFIX,
    Fence,
    LogEntry,
    manifest_key,
    parse_entry,
    read_entry,
    read_manifest,
    try_to_read_first,
)
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidManifestError,
    StoreError,
    UnsupportedFormatError,
)
from cloudckpt.format.model import Manifest
from cloudckpt.format.safetensors import SINGLE_NAME
from cloudckpt.io.client import StoreClient
from cloudckpt.uri import STEP_FOLDER

TORCH_METADATA_KEY = ".metadata"
_MAX_NAMED = 5
_MAX_LOOKED_AT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The entries that exist, lowest number first, and the manifest that they make the current one."""

    entries: tuple[LogEntry, ...]
    current_number: int | None
    """The number of the current manifest; None if there is no checkpoint. It may have vanished."""

    @property
    def highest_number(self) -> int:
        """The highest number of an entry; -1 if there is none."""
        return self.entries[-1].number if self.entries else -1

    @property
    def current_entry(self) -> LogEntry | None:
        """The entry of the current manifest; None if there is none, or it was not listed."""
        return next((entry for entry in self.entries if entry.number == self.current_number), None)


def list_folders(client: StoreClient) -> list[str]:
    """Return the names of the folders directly in the store. Two listings in a row agree on them."""
    return client.confirm(
        lambda: sorted(client.list_directories()),
        unconfirmed=lambda names: ("folders", *names),
        changing=lambda: _changing_error(client),
    )


def list_entries(client: StoreClient) -> tuple[LogEntry, ...]:
    """Return all entries of a log, lowest number first. An empty log is confirmed."""
    return client.confirm(
        lambda: _list_once(client, ""),
        unconfirmed=lambda entries: not entries,
        changing=lambda: _changing_error(client),
    )


def _list_once(client: StoreClient, prefix: str) -> tuple[LogEntry, ...]:
    parsed = (parse_entry(info.key.removeprefix(prefix), info) for info in client.list(prefix + MANIFEST_PREFIX))
    return tuple(sorted((entry for entry in parsed if entry is not None), key=lambda entry: entry.number))


def read_log(client: StoreClient, *, is_lenient: bool = False) -> Log:
    """Return the log, without reading a manifest: the highest entry is opened only if it has the size of a fence.

    A result without a current manifest is confirmed.

    Args:
        client: Client of the checkpoint's location.
        is_lenient: Do not raise if the highest entry cannot be read, but take the highest manifest below it for
            current. If there is none, take the entry itself: it may be a manifest that was cut, which its reader sees.

    Raises:
        InvalidManifestError: The entry is damaged.
        UnsupportedFormatError: A newer version wrote the entry.
        CheckpointChangedError: Fences vanish again and again between the listing and the read.

    """
    return _read_log(client, "", is_lenient=is_lenient, needs_confirming=lambda log: log.current_number is None)


def read_log_once(client: StoreClient, *, prefix: str = "", is_lenient: bool = False) -> Log:
    """Return the log from a single listing, which can lack entries, for callers that confirm it themselves.

    The keys of the checkpoint begin with `prefix`. Otherwise as `read_log`.
    """
    return _read_log(client, prefix, is_lenient=is_lenient, needs_confirming=lambda _: False)


def _read_log(client: StoreClient, prefix: str, *, is_lenient: bool, needs_confirming: Callable[[Log], bool]) -> Log:
    look = client.confirm(
        lambda: _list_and_read_once(client, prefix, with_manifest=False, is_lenient=is_lenient),
        unconfirmed=lambda look: look.log if look.has_vanished or needs_confirming(look.log) else None,
        changing=lambda: _changing_error(client, prefix),
    )
    if look.has_vanished and not is_lenient:
        raise _changing_error(client, prefix)
    return _without_fence(look.log) if look.has_vanished else look.log


def read_current(client: StoreClient) -> tuple[Log, Manifest | None]:
    """Return the log and its current manifest, or None if there is none.

    None is confirmed. It is also the result if a fence keeps a manifest that another program removed. If a manifest
    vanishes between the listing and the read, it was superseded or removed, and the next look lists again.

    Raises:
        InvalidManifestError: The entry is damaged.
        UnsupportedFormatError: A newer version wrote the entry.
        CheckpointChangedError: Each look lists a manifest that it does not find.

    """
    look = client.confirm(
        lambda: _list_and_read_once(client, "", with_manifest=True, is_lenient=False),
        unconfirmed=lambda look: None if look.manifest is not None else look.log,
        changing=lambda: _changing_error(client),
    )
    if look.manifest is None and look.log.current_entry is not None:
        raise _changing_error(client)
    return look.log, look.manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogReading:
    log: Log
    manifest: Manifest | None = None
    """The current manifest, if it was read."""
    has_vanished: bool = False
    """An entry was listed and not found when it was read."""


def _list_and_read_once(client: StoreClient, prefix: str, *, with_manifest: bool, is_lenient: bool) -> _LogReading:
    """Read a log once. With `with_manifest`, also read its current manifest.

    An entry of a fence's size is read, since the listed size may be wrong and only the content tells a fence.
    """
    entries, first = _list_and_read_first(client, prefix) if with_manifest else (_list_once(client, prefix), None)
    if not entries:
        return _LogReading(log=Log(entries=(), current_number=None))
    highest = entries[-1]
    log = Log(entries=entries, current_number=highest.number)
    if not with_manifest and not highest.has_fence_size:
        return _LogReading(log=log)
    try:
        content = first if first and not highest.number else read_entry(client, highest.number, prefix=prefix)
    except (InvalidManifestError, UnsupportedFormatError):
        if not is_lenient:
            raise
        return _LogReading(log=_without_fence(log))
    if not isinstance(content, Fence):
        return _LogReading(log=log, manifest=content, has_vanished=content is None)
    log = Log(entries=entries, current_number=content.keeps)
    if content.keeps is None or not with_manifest:
        return _LogReading(log=log)
    manifest = read_manifest(client, content.keeps, prefix=prefix)
    return _LogReading(log=log, manifest=manifest, has_vanished=manifest is None)


def _list_and_read_first(client: StoreClient, prefix: str) -> tuple[tuple[LogEntry, ...], Manifest | Fence | None]:
    """Return the entries, and entry 0 from a far store: most checkpoints have it alone, and it saves a round trip."""
    if client.store.capabilities.is_near:
        return _list_once(client, prefix), None
    first = start_in_thread(functools.partial(try_to_read_first, client, prefix=prefix), name="cloudckpt-look")
    entries = _list_once(client, prefix)
    return entries, first.result() if entries and not entries[-1].number else None


def _without_fence(log: Log) -> Log:
    """Return the log as it is without its highest entry, which has the size of a fence and cannot be read."""
    below = [entry.number for entry in log.entries if not entry.has_fence_size]
    return Log(entries=log.entries, current_number=max(below, default=log.highest_number))


def _changing_error(client: StoreClient, prefix: str = "") -> CheckpointChangedError:
    uri = client.url(prefix.rstrip("/"))
    return CheckpointChangedError(
        f"{uri} is being overwritten again and again, or its store lists an entry that it does not find: the "
        "current checkpoint is unknown. Try again",
        uri=uri,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A current manifest, and its number in the log: 0 for the first entry, one more for each overwrite or fence."""

    number: int
    manifest: Manifest


def resolve(client: StoreClient) -> Resolved:
    """Return the current manifest.

    Raises `CheckpointNotFoundError` if there is none, and what `read_current` raises.
    """
    return require_current(client, *read_current(client))


def require_current(client: StoreClient, log: Log, manifest: Manifest | None) -> Resolved:
    """Return the manifest that `read_current` has found, or raise the error of `resolve`."""
    if log.current_number is None:
        raise _not_found_error(client, was_fenced=bool(log.entries))
    if manifest is None:
        raise CheckpointNotFoundError(
            f"the checkpoint at {client.uri} is gone: another program removed {manifest_key(log.current_number)}. "
            f"{describe_siblings(client)}",
            uri=client.uri,
        )
    return Resolved(number=log.current_number, manifest=manifest)


def has_torch_checkpoint(client: StoreClient) -> bool:
    """Return True if the location has a ``.metadata`` of torch's own writers. False is confirmed."""
    return client.confirm(lambda: lists_torch_checkpoint(client), unconfirmed=lambda has: not has)


def lists_torch_checkpoint(client: StoreClient) -> bool:
    """Return True if one listing has a ``.metadata`` of torch's own writers."""
    return any(info.key == TORCH_METADATA_KEY for info in client.list(TORCH_METADATA_KEY))


def lists_rank_checkpoints(client: StoreClient) -> bool:
    """Return True if rank 0 has a checkpoint of its own below the location, since each rank saved to its own URI."""
    return read_log_once(client, prefix="rank-0/", is_lenient=True).current_number is not None


def _not_found_error(client: StoreClient, *, was_fenced: bool) -> CheckpointNotFoundError:
    if client.list("data/", max_results=1):
        left = "what a deletion or a failed save has left" if was_fenced else "of an unfinished or failed save"
        hint = f"the data there is {left}. {describe_siblings(client)}"
    elif was_fenced:
        hint = f"it was deleted, or gc removed a failed save. {describe_siblings(client)}"
    elif client.list("rank-0/manifest", max_results=1):
        uri = f"{client.uri.rstrip('/')}/rank-0"
        hint = f"each rank has a checkpoint of its own there. Load it by its own URI with no_dist=True, as {uri}"
    elif has_torch_checkpoint(client):
        hint = (
            "this is a checkpoint of torch's own writer. To make one of cloudckpt's of it: "
            f"`cloudckpt import --format dcp {client.uri} TARGET`"
        )
    else:
        try:
            folders = list_kept_folders(client)
            is_empty, has_files = not client.list(max_results=1), bool(client.list(SINGLE_NAME, max_results=1))
        except StoreError:  # the hint does without the answer
            hint = "check the URI"
        else:
            hint = _describe_content(client, folders, is_empty=is_empty, has_files=has_files)
    return CheckpointNotFoundError(f"no checkpoint is committed at {client.uri}: {hint}", uri=client.uri)


def _describe_content(client: StoreClient, folders: Sequence[str], *, is_empty: bool, has_files: bool) -> str:
    if folders:
        advice = f"Name the checkpoint itself (`cloudckpt ls {client.uri}` lists them), or call load_latest"
        return f"it has the {describe_folders(folders)}. {advice}"
    if is_empty:
        return f"the location is empty. {describe_siblings(client)}"
    if has_files:
        return (
            "these are safetensors files, which load, read, show and diff take as they are. "
            f"`cloudckpt export {client.uri} TARGET --config-from {client.uri}` copies them and what is beside them; "
            f"`cloudckpt import {client.uri} TARGET` makes a checkpoint of them, with checksums"
        )
    return (
        "the location holds other files, or the remains of deleted checkpoints. Check the URI. A folder of safetensors "
        f"has {SINGLE_NAME} or its index; name any other such file itself. `cloudckpt import` makes a checkpoint of "
        "files, and `cloudckpt export` writes files to any store"
    )


def describe_siblings(client: StoreClient) -> str:
    """Return a sentence that names the last checkpoints by name beside a location. For hints: nothing is confirmed."""
    if client.open_parent is None:
        return "Check the URI"
    try:
        parent = client.at(client.open_parent())
        names = list(itertools.islice(_list_checkpoints(parent), _MAX_NAMED + 1))
        own = client.uri.rpartition("/")[2]
        folders = [] if names else [name for name in parent.list_directories() if name != own]
    except StoreError:  # the hint does without the answer
        return "Check the URI"
    if not names:
        named = f", which has the {describe_folders(folders)}" if folders else ""
        near = did_you_mean(find_near(own, folders)) or named
        return f"No checkpoint was found in {parent.uri} either{near}: check the URI"
    return f"{parent.uri} has the {_name_some(names, 'checkpoint')}"


def list_kept_folders(client: StoreClient) -> list[str]:
    """List the last folders by name for `describe_folders`, except for folders with only the fence of a deletion.

    A run deletes its old checkpoints, so its last names are those of kept ones.
    """
    folders: list[str] = []
    for name in _list_last_folders(client):
        log = read_log_once(client, prefix=f"{name}/", is_lenient=True)
        if log.current_number is not None or not log.entries:
            folders.append(name)
        if len(folders) > _MAX_NAMED:
            break
    return folders


def find_newest_step(client: StoreClient) -> str:
    """Return the name of the highest step directly in the store, or "". For hints: nothing is confirmed."""
    names = sorted(filter(STEP_FOLDER.fullmatch, client.list_directories()), key=_split_numbers, reverse=True)
    logs = ((name, read_log_once(client, prefix=f"{name}/", is_lenient=True)) for name in names[:_MAX_LOOKED_AT])
    return next((name for name, log in logs if log.current_number is not None), "")


def has_checkpoints(client: StoreClient) -> bool:
    """Return True if one of the last folders by name is a checkpoint. For hints: nothing is confirmed."""
    return any(_list_checkpoints(client))


def _list_checkpoints(client: StoreClient) -> Iterator[str]:
    for name in _list_last_folders(client):
        if read_log_once(client, prefix=f"{name}/", is_lenient=True).current_number is not None:
            yield name


def _list_last_folders(client: StoreClient) -> list[str]:
    return sorted(client.list_directories(), key=_split_numbers, reverse=True)[:_MAX_LOOKED_AT]


def _split_numbers(name: str) -> list[str | int]:
    """Return a sort key that puts ``step-9`` before ``step-10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def describe_folders(folders: Sequence[str]) -> str:
    """Return a phrase that names the first few folders. `folders` must not be empty."""
    return _name_some(folders, "folder")


def _name_some(names: Sequence[str], noun: str) -> str:
    more = " and more" if len(names) > _MAX_NAMED else ""
    named = ", ".join(sorted(names[:_MAX_NAMED], key=_split_numbers))
    return f"{noun if len(names) == 1 else f'{noun}s'} {named}{more}"
