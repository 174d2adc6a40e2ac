"""The versions of a publisher among those of others, and the removal of those that newer ones supersede.

Both look at the store alone, on rank 0.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta

from cloudckpt import _clock
from cloudckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from cloudckpt.publication.versions import Publication, Versions, find_superseded_versions
from cloudckpt.removal import delete, gc

_ONE_DAY = timedelta(days=1)
_MAX_REMOVED = 4
"""The most versions, and the most fences, that are removed after one version. On average, one is superseded."""


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
        pinned = [number for number in self._anchors if self._pinned(number)]
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
