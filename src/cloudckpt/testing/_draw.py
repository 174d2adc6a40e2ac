"""Chance that can be repeated: what is drawn depends on what it is drawn for, and on nothing that threads do."""

from __future__ import annotations

import hashlib

from cloudckpt._commit.attempt import ATTEMPT


def without_attempts(text: str) -> str:
    """`text` without ids of attempts, which no two saves share."""
    return ATTEMPT.sub("*", text)


class Draw:
    """Numbers drawn for one event, which `names` name: the same names, the same numbers, in any process."""

    def __init__(self, *names: object) -> None:
        self._names = names

    def fraction(self, what: str) -> float:
        """At least 0 and less than 1."""
        return self._bits(what) / 2.0**53

    def below(self, bound: int, what: str) -> int:
        """At least 0 and less than `bound`."""
        return self._bits(what) % bound

    def _bits(self, what: str) -> int:
        # Python's own hash differs from process to process.
        digest = hashlib.blake2b(repr((*self._names, what)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 11
