"""Find the current manifest of a checkpoint, or say what is at its location instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cloudckpt.commit.entries import manifest_key
from cloudckpt.commit.log import read_current, read_log_once
from cloudckpt.errors import CheckpointNotFoundError, StoreError
from cloudckpt.format.model import Manifest
from cloudckpt.io.client import StoreClient

TORCH_METADATA_KEY = ".metadata"
_MOST_NAMED = 5
_MOST_LOOKED_AT = 20
_LOAD_AN_OLDER_ONE = "Load an older checkpoint (cloudckpt ls ROOT lists them)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A current manifest, and its number: 0 for the first save, n for the n-th overwrite."""

    number: int
    manifest: Manifest


def resolve(client: StoreClient) -> Resolved:
    """Return the current manifest.

    Raises `CheckpointNotFoundError` if there is none, and what `read_current` raises.
    """
    log, manifest = read_current(client)
    if log.current is None:
        raise _not_found(client, was_fenced=bool(log.entries))
    if manifest is None:
        raise CheckpointNotFoundError(
            f"the checkpoint at {client.uri} is gone: another program removed {manifest_key(log.current)}. "
            f"{_LOAD_AN_OLDER_ONE}",
            uri=client.uri,
        )
    return Resolved(number=log.current, manifest=manifest)


def has_torch_checkpoint(client: StoreClient) -> bool:
    """Return True if the location has a ``.metadata`` of torch's own writers. That it has none is confirmed."""
    return client.observe(lambda: lists_torch_checkpoint(client), doubt=lambda has: not has)


def lists_torch_checkpoint(client: StoreClient) -> bool:
    """Return True if one listing has a ``.metadata`` of torch's own writers."""
    return any(info.key == TORCH_METADATA_KEY for info in client.list(TORCH_METADATA_KEY))


def lists_rank_checkpoints(client: StoreClient) -> bool:
    """Return True if rank 0 has a checkpoint of its own below the location, as ``use_collectives=False`` saved it."""
    return read_log_once(client, prefix="rank-0/", is_lenient=True).current is not None


def _not_found(client: StoreClient, *, was_fenced: bool) -> CheckpointNotFoundError:
    if client.list("data/", most=1):
        left = "what a deletion or a failed save has left" if was_fenced else "of an unfinished or failed save"
        hint = f"the data there is {left}. {_LOAD_AN_OLDER_ONE}"
    elif was_fenced:
        hint = f"it was deleted, or gc removed a failed save. {_LOAD_AN_OLDER_ONE}"
    elif client.list("rank-0/manifest", most=1):
        uri = f"{client.uri.rstrip('/')}/rank-0"
        hint = f"each rank has a checkpoint of its own there. Load it by its own URI with no_dist=True, as {uri}"
    elif has_torch_checkpoint(client):
        hint = "this is a checkpoint of torch's own writer: convert it with `cloudckpt import --format dcp`"
    else:
        try:
            folders = list_kept_folders(client)
            is_empty = not client.list(most=1)
        except StoreError:  # it is a hint, so no failure matters
            hint = "check the URI"
        else:
            hint = _describe_content(client.uri, folders, is_empty=is_empty)
    return CheckpointNotFoundError(f"no checkpoint is committed at {client.uri}: {hint}", uri=client.uri)


def _describe_content(uri: str, folders: Sequence[str], *, is_empty: bool) -> str:
    if folders:
        return f"it has the {describe_folders(folders)}. Name the checkpoint itself: `cloudckpt ls {uri}` lists them"
    if is_empty:
        return "the location is empty. Check the URI, or list the checkpoints with `cloudckpt ls ROOT`"
    return (
        "the location holds other files, or the remains of deleted checkpoints. Check the URI. "
        "`cloudckpt import` makes a checkpoint of files, and `cloudckpt export` writes files to any store"
    )


def list_kept_folders(client: StoreClient) -> list[str]:
    """List folders for `describe_folders`: the last ones by name, without those that hold only the fence of a deletion.

    A run deletes its old checkpoints, so the last names lead to what it has kept.
    """
    kept: list[str] = []
    names = sorted(client.list_directories(), key=_split_numbers, reverse=True)
    for name in names[:_MOST_LOOKED_AT]:
        log = read_log_once(client, prefix=f"{name}/", is_lenient=True)
        if log.current is not None or not log.entries:
            kept.append(name)
        if len(kept) > _MOST_NAMED:
            break
    return kept


def _split_numbers(name: str) -> list[str | int]:
    """Return a key of names by which ``step-9`` comes before ``step-10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def describe_folders(folders: Sequence[str]) -> str:
    """Name the first few of at least one folder, in words."""
    more = " and more" if len(folders) > _MOST_NAMED else ""
    return f"{'folder' if len(folders) == 1 else 'folders'} {', '.join(sorted(folders[:_MOST_NAMED]))}{more}"
