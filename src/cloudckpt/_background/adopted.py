"""What a stager of the user's has staged, in the form of our own stagings."""

from __future__ import annotations

import concurrent.futures
import warnings
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from cloudckpt._threads import Future


class Adopted:
    """Of any stager of torch's protocol. How many bytes there are, it does not tell."""

    num_bytes = copied_bytes = 0

    def __init__(self) -> None:
        self.completed: Future[None] = Future()
        """When all of it is there; its exception if that failed."""
        self.is_overlapped = False
        """Whether it is the stager's wish that nobody waits for it."""
        self.state_dict: dict[str, Any] = {}
        """Once it is completed."""

    @classmethod
    def failed(cls, error: BaseException) -> Adopted:
        """Nothing, because of `error`."""
        adopted = cls()
        adopted.completed.set_exception(error)
        return adopted

    @classmethod
    def of(cls, stager: AsyncStager, entries: dict[str, Any]) -> Adopted:
        """What `stager` makes of `entries`. Raises what it raises."""
        adopted = cls()
        result = stager.stage(entries)
        if isinstance(result, concurrent.futures.Future):
            adopted.is_overlapped = True
            adopted.follow(result)
            return adopted
        if stager.should_synchronize_after_execute:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch calls it, too
                stager.synchronize_staging()
        adopted.state_dict = result
        adopted.completed.set_result(None)
        return adopted

    def follow(self, future: concurrent.futures.Future[Any]) -> None:
        """Be complete when `future` is, with the state dict that it holds."""

        def take(future: concurrent.futures.Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self.completed.set_exception(error)
                return
            self.state_dict = future.result()
            self.completed.set_result(None)

        future.add_done_callback(take)
