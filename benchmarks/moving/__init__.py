"""The ways of moving bytes that `benchmarks.transport` compares."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.moving.candidate import Candidate
from benchmarks.moving.ours import Bare, Cloudckpt, Gathering, MemoryBIO
from benchmarks.moving.theirs import Awscrt, Obstore, Pycurl, Pyreqwest

CANDIDATES: Mapping[str, type[Candidate]] = {
    "bare": Bare,
    "gathering": Gathering,
    "memory-bio": MemoryBIO,
    "cloudckpt": Cloudckpt,
    "obstore": Obstore,
    "pyreqwest": Pyreqwest,
    "pycurl": Pycurl,
    "awscrt": Awscrt,
}
"""By name; those that are no part of this package or its dependencies, by that of their module."""
