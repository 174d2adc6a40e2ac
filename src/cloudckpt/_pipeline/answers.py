"""Several questions to a store at once: none of them waits for the answer to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudckpt._workers import each_done


def answers(*calls: Callable[[], Any], num_at_once: int) -> list[Any]:
    """What `calls` return, in their order; `num_at_once` run side by side, and 1 needs no thread.

    Raises the first failure, once nothing is running any more.
    """
    if num_at_once == 1:
        return [call() for call in calls]
    found: dict[int, Any] = {}

    def make(number: int) -> None:
        found[number] = calls[number]()

    numbers = range(len(calls))
    for _ in each_done(numbers, make, num_threads=num_at_once, name="cloudckpt-look", on_failure=lambda: None):
        pass
    return [found[number] for number in numbers]
