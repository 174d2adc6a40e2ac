"""Make Python's cyclic garbage collector run rarely while a call blocks the main thread.

Planning makes some twenty containers for each tensor, none of them garbage. At Python's own threshold of 700 new
containers, a save of 20,000 small tensors takes twice the processor time, and so does a load
(``docs/design/013-save-balance.md``).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_THRESHOLD = 100_000


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect only after 100,000 new containers, if the main thread is the caller; else change nothing.

    The thresholds belong to the whole process. The main thread that calls this waits for a save, a load or a snapshot,
    so no training loop runs beside it. The work of a background save runs in other threads, and leaves the thresholds
    alone. Garbage of other threads stays bounded.
    """
    before = gc.get_threshold()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not 0 < before[0] < _THRESHOLD:
        yield
        return
    gc.set_threshold(_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        if gc.get_threshold()[0] == _THRESHOLD:  # otherwise the user's program has set it meanwhile
            gc.set_threshold(*before)
