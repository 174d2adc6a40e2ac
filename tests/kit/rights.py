"""A process that may do no more, and sees no more, than others on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import pytest

NOBODY = 65534


@contextlib.contextmanager
def without_roots_rights() -> Iterator[None]:
    """Give up the rights of root, if this process has them, in the context."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def use_environment(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process have these variables alone, until the end of the test."""
    for name in os.environ.keys() - variables.keys():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
