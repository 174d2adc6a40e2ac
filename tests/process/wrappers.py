"""Stores to put in front of a real one, in the upload process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.wrapped import Call, WrappedStore

from cloudckpt.errors import AccessDeniedError
from cloudckpt.stores.base import Store

_T = TypeVar("_T")


class Refusing(WrappedStore):
    """Lets nobody write data."""

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        if call.operation in ("put", "create_multipart", "upload_part") and call.key.startswith("data/"):
            raise AccessDeniedError("no right to write this", key=self.url(call.key), operation=call.operation)
        return action()


class Noting(WrappedStore):
    """Leaves the id of the process that writes in the file that its environment names, and says so in the log."""

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        if call.operation in ("put", "complete_multipart") and call.key.startswith("data/"):
            Path(os.environ["NOTED_IN"]).write_text(str(os.getpid()))
            logging.getLogger("cloudckpt").warning("written by %d", os.getpid())
        return action()


class Dying(WrappedStore):
    """Kills its process once the manifest is there, before anybody is told."""

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        done = action()
        if call.operation == "put" and call.key.startswith("manifest"):
            os.kill(os.getpid(), 9)
        return done


class Waiting(WrappedStore):
    """Puts no manifest before somebody writes to the pipe that its environment names."""

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        if call.operation == "put" and call.key.startswith("manifest"):
            with Path(os.environ["AWAITED_PIPE"]).open("rb", buffering=0) as pipe:
                pipe.read(1)
        return action()


class NotImportable:
    """A wrapper of a module that the other process does not find."""

    def __call__(self, store: Store) -> Store:
        return store

    def __reduce__(self) -> object:
        return _import, ("a_module_of_the_training_program_alone",)


def _import(name: str) -> object:
    return __import__(name)
