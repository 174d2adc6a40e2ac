"""The versions under a root: which of them a reader needs, which publisher may add one, and which are removed.

All of it looks at the store alone, on rank 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from cloudckpt import _clock
from cloudckpt._this_process import is_first_warning
from cloudckpt.commit.log import read_current
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidOptionError,
    UnsupportedFormatError,
)
from cloudckpt.format.model import PUBLICATION_KEY, Manifest
from cloudckpt.io.client import StoreClient, open_client
from cloudckpt.options import Options
from cloudckpt.removal import delete, gc
from cloudckpt.stores import open_store
from cloudckpt.uri import STEP_FOLDER, Location

_log = logging.getLogger("cloudckpt")
FORMAT = 1
_FOLDER = re.compile(r"version-(0|[1-9][0-9]{0,17})")
_MAX_VERSION = 10**18 - 1
_ONE_DAY = timedelta(days=1)
_MAX_REMOVED = 4
"""The most versions, and the most fences, that are removed after one version. On average, one is superseded."""


class PublishedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a version: its dtype, its shape, and the CRC32C of all of its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    crc32c: int


class Base(msgspec.Struct, frozen=True):
    """A version whose difference to another one is stored: its number, its attempt, and `hash_state` of its tensors."""

    version: int
    attempt: str
    state: str


class Publication(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A version, as its manifest describes it (``docs/format.md``)."""

    format: int
    version: int
    publisher: str
    """An id that each `Publisher` draws."""
    follows: int = -1
    """The newest version that it saw under the root, before it saved this one; -1 for none."""
    anchor: int
    """The newest version up to this one that has the whole tensors."""
    base: Base | None = None
    """The version whose difference to this one is stored; None if only the whole tensors are."""
    tensors: dict[str, PublishedTensor]

    @property
    def is_anchor(self) -> bool:
        """True if the version has the whole tensors."""
        return self.anchor == self.version

    @property
    def state_hash(self) -> str:
        """`hash_state` of the tensors."""
        return hash_state(self.tensors)

    def is_based_on(self, state_hash: str) -> bool:
        """Return True if the version has the difference to a model whose tensors have that hash."""
        return self.base is not None and self.base.state == state_hash


class Version(NamedTuple):
    """A committed version, its manifest and its place."""

    publication: Publication
    manifest: Manifest
    location: Location


def hash_state(tensors: Mapping[str, PublishedTensor]) -> str:
    """Return the SHA-256 of the names, forms and checksums of all tensors, by which two states are compared."""
    lines = sorted([name, *msgspec.structs.astuple(tensor)] for name, tensor in tensors.items())
    return hashlib.sha256(msgspec.json.encode(lines)).hexdigest()


def check_version(version: Any, *, name: str = "version") -> int:
    """Return `version`, an argument of that `name`, if it is a version's number. Raises `InvalidOptionError`."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_VERSION:
        raise InvalidOptionError(f"{name} must be an integer from 0 to {_MAX_VERSION}, not {version!r}")
    return number


def parse_version(manifest: Manifest, location: Location) -> Version:
    """Return the version of a manifest. Raises `UnsupportedFormatError` if it is none that is known here."""
    try:
        publication = msgspec.convert(manifest.metadata[PUBLICATION_KEY], Publication)
        base, number = publication.base, publication.version
        is_known = publication.format == FORMAT and location.name == folder_of(number)
        if is_known and (publication.is_anchor if base is None else base.version < number):
            return Version(publication, manifest, location)
    except (msgspec.ValidationError, KeyError):
        pass
    raise UnsupportedFormatError(
        f"{location.uri} is no published version, or one of a newer cloudckpt. Publish under a root of its own, and "
        "upgrade cloudckpt where you pull",
        uri=location.uri,
    )


def folder_of(number: int) -> str:
    """Return the name of the folder of a version."""
    return f"version-{number}"


class Versions:
    """The versions in the folder at `location`."""

    def __init__(self, location: Location, options: Options) -> None:
        self.location, self.options = location, options

    def place_of(self, number: int) -> Location:
        """Return the place of a version."""
        return self.location.child(folder_of(number))

    def advise_root(self) -> str:
        """Return a sentence if the location has the name of a version or a step, which no root should have."""
        if (version := _FOLDER.fullmatch(self.location.name)) is not None:
            root = self.location.parent.uri
            return f". It has the name of a version: pass the folder of versions, {root!r}, and version={version[1]}"
        if STEP_FOLDER.fullmatch(self.location.name):
            return ". It has the name of a step, which cloudckpt.load takes"
        return ""

    def list_numbers(self) -> list[int]:
        """Return the numbers of all folders of versions, also of deleted and unfinished ones, the highest first."""
        names = self._open_client().list_directories()
        steps = sorted(filter(STEP_FOLDER.fullmatch, names))
        if steps and is_first_warning("steps beside versions", self.location.uri):
            _log.warning(
                "%s has steps of a run, such as %s. Publish under a root of its own: load_latest takes the newer",
                self.location.uri,
                steps[-1],
            )
        return sorted((int(match[1]) for name in names if (match := _FOLDER.fullmatch(name))), reverse=True)

    def read(self, number: int) -> Version | None:
        """Return a version; None if nothing is committed there. Raises the errors of `read_current`."""
        location = self.place_of(number)
        _, manifest = read_current(self._open_client().at(open_store(location, self.options)))
        return None if manifest is None else parse_version(manifest, location)

    def find_newest(self, *, above: int) -> Version | None:
        """Return the committed version with the highest number above `above`; None if there is none."""
        numbers = self.list_numbers()
        while True:
            found = (self.read(number) for number in numbers if number > above)
            newest = next((version for version in found if version is not None), None)
            if not numbers or (newest is not None and newest.publication.version == numbers[0]):
                return newest
            # The highest folder may have been removed after the listing, and then a newer version has been published.
            highest, numbers = numbers[0], self.list_numbers()
            if numbers[:1] == [highest]:
                return newest

    def find_chain(self, target: Version, *, held: str) -> list[Version]:
        """Return the versions to read for `target`, oldest first, if the model holds the state `held`.

        The first is an anchor, or has the difference to that state. Nothing, if the model holds the target.

        Raises `CheckpointChangedError` if retention has removed one of them.
        """
        chain = [] if target.publication.state_hash == held else [target]
        while chain and not (first := chain[0].publication).is_based_on(held) and not first.is_anchor:
            assert first.base is not None  # noqa: S101  # `parse_version` has checked it
            version = self.read(first.base.version)
            if version is None or version.manifest.attempt != first.base.attempt:
                raise overtaken_error(target, why=f"version {first.base.version}, which it needs, is gone")
            chain.insert(0, version)
        return chain

    def _open_client(self) -> StoreClient:
        return open_client(self.location, self.options)


def overtaken_error(target: Version, *, why: object) -> CheckpointChangedError:
    """Return the error for a reader whose versions were removed while it read them."""
    return CheckpointChangedError(
        f"retention has overtaken the pull of {target.location.uri}: {why}. Pull again, and start at the anchor of the "
        "newest version. If that fails, too, something else has removed versions: publish with a new Publisher",
        uri=target.location.uri,
    )


def find_superseded_versions(anchors: Mapping[int, int], *, keep_chains: int, pinned: Iterable[int]) -> list[int]:
    """Return the versions to remove, in the order of their removal.

    A chain is an anchor with all versions up to the next one. It stays as a whole, or is removed from its end, so that
    at each moment each version has what it needs.

    Args:
        anchors: The anchor of each committed version.
        keep_chains: The number of the newest chains that stay.
        pinned: Versions whose chains stay.

    """
    kept = {*sorted(set(anchors.values()))[-keep_chains:], *(anchors[number] for number in pinned)}
    superseded = [number for number, anchor in anchors.items() if anchor not in kept]
    return sorted(superseded, key=lambda number: (anchors[number], -number))


class Succession:
    """Finds out if another publisher has taken over from the one with the id `publisher`."""

    def __init__(self, versions: Versions, publisher: str) -> None:
        self._versions, self._id = versions, publisher
        self.own: set[int] = set()
        """The versions that this publisher has certainly committed."""
        self.is_overtaken = False

    def find_newest(self, sent: Publication | None, version: int | None = None) -> int:
        """Return the newest committed version, or -1.

        Raises `CheckpointExistsError` if another publisher has published since `sent`, the version that this one has
        published last, or if `version` is not higher.
        """
        newest = -1
        for number in [] if self.is_overtaken else self._versions.list_numbers():
            if number not in self.own:
                found = self._versions.read(number)
                if found is None:
                    continue
                if found.publication.publisher == self._id:
                    self.own.add(number)
                elif sent is not None and number > sent.follows:
                    # Of two versions that follow the same one, the one with the lower number wins.
                    own = sent.version
                    self.is_overtaken |= number < own or found.publication.follows >= own
            newest = max(newest, number)
            if sent is None or number <= sent.follows:
                break
        root = self._versions.location.uri
        if self.is_overtaken:
            raise CheckpointExistsError(
                f"another publisher has taken {root} over, and this one can publish nothing more there. Stop one of "
                "the two, or give each a root of its own",
                uri=root,
            )
        if version is not None and version <= newest:
            raise CheckpointExistsError(
                f"version {version} cannot be published, since {root} has version {newest}. Pass a higher number, or "
                "publish under another root",
                uri=root,
            )
        return newest


class VersionRetention:
    """Removes superseded versions."""

    def __init__(self, versions: Versions, keep_chains: int | None, pinned: Callable[[int], bool]) -> None:
        self._versions, self._keep_chains, self._pinned = versions, keep_chains, pinned
        self._anchors: dict[int, int] = {}
        """The anchor of each version that exists, once they were listed."""
        self._fences: deque[tuple[datetime, int]] = deque()
        """Times at which versions were removed, each of which has left a fence, or were found without a manifest."""

    def run_after(self, publication: Publication) -> None:
        """Remove what a committed version has superseded."""
        if self._keep_chains is None:
            return
        if not self._anchors:
            self._look()
        self._anchors[publication.version] = publication.anchor
        answers = {number: self._pinned(number) for number in self._anchors}
        for number, answer in answers.items():
            if answer not in (True, False):  # a None, of a function without return, would unpin everything
                raise InvalidOptionError(f"pinned must return True or False, not {answer!r}, as for version {number}")
        pinned = [number for number, answer in answers.items() if answer]
        superseded = find_superseded_versions(self._anchors, keep_chains=self._keep_chains, pinned=pinned)
        for number in superseded[:_MAX_REMOVED]:
            with contextlib.suppress(CheckpointNotFoundError):  # another publisher was faster
                delete(self._versions.place_of(number).uri, options=self._versions.options)
            del self._anchors[number]
            self._fences.append((_clock.now(), number))
        for _ in range(_MAX_REMOVED):  # no save can be running any more that a fence must stop
            if self._fences and self._fences[0][0] < _clock.now() - _ONE_DAY:
                place = self._versions.place_of(self._fences.popleft()[1])
                gc(place.uri, older_than=_ONE_DAY, dry_run=False, options=self._versions.options)

    def _look(self) -> None:
        for number in self._versions.list_numbers():
            version = self._versions.read(number)
            if version is None:
                self._fences.append((_clock.now(), number))
            else:
                self._anchors[number] = version.publication.anchor
