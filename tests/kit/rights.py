"""A process that may do no more than others on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

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
