"""The names of temporary objects: the parts of an upload, and what they are composed to on the way.

GCS has no multipart uploads of its own. An upload is a random id, and each of its parts an object beside the key,
whose name alone says what it belongs to, whatever root the store has that finds it.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass

from cloudckpt import _forks

_UPLOAD_ID = re.compile(r"[0-9a-f]{16}")
_SUFFIX = ".~part"
"""The same for all of them: by it a lifecycle rule of the bucket finds what killed processes left."""
_TEMPORARY = re.compile(r"(.+)\.~([0-9a-f]{16})-[0-9]-[0-9]{5}-[0-9a-f]{8}" + re.escape(_SUFFIX), re.DOTALL)
_PART = re.compile(r"0-([0-9]{5})-([0-9a-f]{8})" + re.escape(_SUFFIX))
_TOKEN = re.compile(r"([0-9a-f]{8})-([0-9]+)(?:@([0-9a-f]{16})@(.+))?", re.DOTALL)
_MOST_REMEMBERED = 10_000
_LONGEST_NAME_BYTES = 1024  # https://cloud.google.com/storage/docs/objects#naming


@dataclass(frozen=True, slots=True, kw_only=True)
class Temporary:
    """What the name of a temporary object says."""

    name: str
    """Of the object that is being uploaded."""
    upload_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """What finds a part again, beside its number."""

    of_try: str
    generation: int
    upload: Temporary | None = None
    """The upload that it is part of, if it is not the one that is to be completed."""


def new_upload_id() -> str:
    """An id that no other upload has."""
    return secrets.token_hex(8)


def is_upload_id(text: str) -> bool:
    """Whether `new_upload_id` could have made it."""
    return _UPLOAD_ID.fullmatch(text) is not None


def prefix_of(name: str, upload_id: str) -> str:
    """What the names of all temporary objects of the upload begin with, and no others."""
    return f"{name}.~{upload_id}-"


def new_try() -> str:
    """Tells one try from the next: a request that was given up may still be carried out, and must replace nothing."""
    return secrets.token_hex(4)


def part_name(name: str, upload_id: str, number: int, *, of_try: str, level: int = 0) -> str:
    """Of the part `number`; or, from `level` 1 on, of the `number`-th group of what lies a level below."""
    return f"{prefix_of(name, upload_id)}{level}-{number:05d}-{of_try}{_SUFFIX}"


def parse_part(name: str, *, prefix: str) -> tuple[int, str] | None:
    """Number and try of the part that is called `name`, of the upload with that `prefix_of`."""
    match = _PART.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return None if match is None else (int(match[1]), match[2])


def token_of(token: Token) -> str:
    """As text."""
    plain = f"{token.of_try}-{token.generation}"
    return plain if token.upload is None else f"{plain}@{token.upload.upload_id}@{token.upload.name}"


def parse_token(text: str) -> Token | None:
    """The reverse of `token_of`; ``None`` for a text that it has not made."""
    match = _TOKEN.fullmatch(text)
    if match is None:
        return None
    upload = Temporary(upload_id=match[3], name=match[4]) if match[4] else None
    return Token(of_try=match[1], generation=int(match[2]), upload=upload)


def leaves_room(name: str) -> bool:
    """Whether the names of the parts of `name` are still short enough."""
    return len(part_name(name, new_upload_id(), 1, of_try=new_try()).encode()) <= _LONGEST_NAME_BYTES


def parse(name: str) -> Temporary | None:
    """What `name` says, if it is that of a temporary object."""
    match = _TEMPORARY.fullmatch(name)
    return None if match is None else Temporary(name=match[1], upload_id=match[2])


class Ended:
    """The latest uploads that this process aborted or completed, so that a straggler's part is not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._was_aborted: OrderedDict[str, bool] = OrderedDict()
        _forks.watch(self)

    def after_fork(self) -> None:
        """Its lock may be held by a thread that no longer exists."""
        self._lock = threading.Lock()

    def add(self, upload_id: str, *, aborted: bool) -> None:
        """Remember it."""
        with self._lock:
            self._was_aborted[upload_id] = aborted
            if len(self._was_aborted) > _MOST_REMEMBERED:
                self._was_aborted.popitem(last=False)

    def __contains__(self, upload_id: str) -> bool:
        with self._lock:
            return upload_id in self._was_aborted

    def aborted(self, upload_id: str) -> bool:
        """Whether it was aborted, not completed."""
        with self._lock:
            return self._was_aborted.get(upload_id, False)
