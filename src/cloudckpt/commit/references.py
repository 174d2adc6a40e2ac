"""References to objects of other checkpoints of a root, and the claims that keep these objects.

A checkpoint, the *user*, can name objects in the folder of another one beside it, the *holder*. Before its commit it
puts a *claim* into the holder's folder, which names the objects. A claimed object stays when its checkpoint is deleted
or overwritten. gc removes a claim once its save has no commit and can have none any more
(``docs/design/037-references.md``).
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias

import msgspec
from awscrt.checksums import crc32c

from cloudckpt.commit.attempts import ATTEMPT
from cloudckpt.commit.entries import put_fence, read_entry
from cloudckpt.commit.log import list_entries, read_current, read_log
from cloudckpt.errors import CheckpointError
from cloudckpt.format.model import Manifest
from cloudckpt.io.client import StoreClient
from cloudckpt.io.upload import logging_store_errors

_log = logging.getLogger("cloudckpt")

Siblings: TypeAlias = Callable[[str], StoreClient]
"""Returns the client of a folder beside the checkpoint's own folder, or of its own folder for an empty name."""
_SUFFIX = ".claim"
_MAX_CLAIM_BYTES = 256 * 1024 * 1024


class _Claim(msgspec.Struct, frozen=True, kw_only=True):
    keys: list[str]
    crc32c: int
    """The checksum of the keys, each with a line feed at its end."""


_DECODER = msgspec.json.Decoder(_Claim)  # made on import, by one thread


def claim_key(attempt: str, folder: str) -> str:
    """Return the key, in the holder's folder, of the claim of a save to `folder`."""
    return f"data/{attempt}/{folder}{_SUFFIX}"


def parse_claim(key: str) -> tuple[str, str] | None:
    """Return the attempt and the folder of a claim; None for the key of another object."""
    match key.split("/"):
        case ["data", attempt, name] if ATTEMPT.fullmatch(attempt) and name.endswith(_SUFFIX):
            return attempt, name.removesuffix(_SUFFIX)
    return None


def put_claims(siblings: Siblings, references: Mapping[str, Collection[str]], *, attempt: str, folder: str) -> None:
    """Claim the objects in `references`, keys by holder, for the save `attempt` to `folder`.

    Replaces a claim that exists. Removes it if `references` names no key of the holder: until the commit, only the save
    itself needs its claim.
    """
    for holder, keys in references.items():
        client, key = siblings(holder), claim_key(attempt, folder)
        if not keys:
            client.delete([key])
            continue
        document = msgspec.json.encode(_Claim(keys=sorted(keys), crc32c=_checksum(sorted(keys))))
        client.call(client.store.put, key, [memoryview(document)], crc32c=crc32c(document))


def is_current(client: StoreClient, attempt: str) -> bool:
    """Return True if the checkpoint of `attempt` is current at its location, and others may refer to its objects.

    If it is still current after a save has claimed its objects, every later removal of one of them sees the claim.
    """
    _, manifest = read_current(client)
    return manifest is not None and manifest.attempt == attempt and manifest.is_referable


def find_claimed(client: StoreClient, *, spent: Collection[str] = ()) -> frozenset[str] | None:
    """Return the keys of all claims and of the objects that they name; None if a claim cannot be read.

    Call it after the fence or the commit that hides the checkpoint. A save that puts its claim later then finds that
    its source is gone; before it, that save would refer to objects that the caller removes. Claims in `spent` do not
    count. Absence of claims is confirmed.
    """
    claims = client.confirm(lambda: _list_claims(client), unconfirmed=lambda claims: not claims)
    claimed: set[str] = set()
    for key in claims:
        if key in spent:
            continue
        document = client.read(key, max_bytes=_MAX_CLAIM_BYTES)
        if document is None:  # its save has taken it back, or another gc has removed it
            continue
        try:
            claim = _DECODER.decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if claim.crc32c != _checksum(claim.keys):
            return None
        claimed |= {key, *claim.keys}
    return frozenset(claimed)


def _list_claims(client: StoreClient) -> list[str]:
    return [info.key for info in client.list("data/") if parse_claim(info.key)]


def find_spent(siblings: Siblings, claims: Iterable[str], *, conditional: bool, is_dry: bool = False) -> frozenset[str]:
    """Return the `claims`, keys in one holder's folder, whose save has no commit, and can have none any more.

    As in `remove_garbage`, a fence in the user's folder takes the number that the save would have: the save fixed its
    number before it put the claim. The claims of a user whose log cannot be read stay. Raises `StoreError`.
    """
    by_folder: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for key in claims:
        if (parsed := parse_claim(key)) is not None:
            by_folder[parsed[1]][parsed[0]] = key
    spent: set[str] = set()
    for folder, keys in by_folder.items():
        client = siblings(folder)
        try:
            lost = keys.keys() - _attempts_in(client)
            if lost and conditional and not is_dry:
                log = read_log(client)
                # If the number is taken, the log has grown as well.
                put_fence(client, log.highest_number + 1, keeps=log.current_number, conditional=True)
                lost -= _attempts_in(client, above=log.highest_number)
        except CheckpointError as error:
            _log.warning("kept what the checkpoint at %s may use, because it cannot be judged: %s", client.uri, error)
            continue
        spent |= {keys[attempt] for attempt in lost}
    return frozenset(spent)


def _attempts_in(client: StoreClient, *, above: int | None = None) -> set[str]:
    """Return the attempts of all manifests in a log, including superseded ones.

    Raises `CheckpointError` if a manifest cannot be read, or if no entry is above the number `above`.
    """
    entries = list_entries(client)
    if above is not None and (not entries or entries[-1].number <= above):
        raise CheckpointError(f"{client.uri} does not list the fence that was just put", uri=client.uri)
    contents = [read_entry(client, entry.number) for entry in entries]
    if any(entry is None for entry in contents):
        raise CheckpointError(f"{client.uri} is being overwritten", uri=client.uri)
    return {entry.attempt for entry in contents if isinstance(entry, Manifest)}


def drop_claims(siblings: Siblings, holders: Iterable[str], *, attempt: str, folder: str) -> None:
    """Remove the claims of a save that has no commit and can have none any more. A failure is logged."""
    for holder in holders:
        client = siblings(holder)
        with logging_store_errors(f"remove a claim at {client.uri}", uri=client.uri):
            client.delete([claim_key(attempt, folder)])


def _checksum(keys: Iterable[str]) -> int:
    checksum: int = functools.reduce(lambda so_far, key: crc32c(f"{key}\n".encode(), so_far), keys, 0)
    return checksum
