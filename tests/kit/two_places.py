"""A fast place and a root on local disks: their stores with faults, their steps, and damage to their files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.wrapped import Call, FaultyStore

import cloudckpt
from cloudckpt.errors import StoreError
from cloudckpt.stores.base import Store


class Places:
    """Every store that is opened, each a `FaultyStore`, and faults for all under one directory."""

    def __init__(self) -> None:
        self.stores: list[FaultyStore] = []
        self.broken: dict[str, Callable[[Call], Exception | None]] = {}

    def __call__(self, inner: Store) -> Store:
        def find_error(call: Call) -> Exception | None:
            errors = (error(call) for directory, error in [*self.broken.items()] if inner.uri.startswith(directory))
            return next(filter(None, errors), None)

        self.stores.append(FaultyStore(inner, find_error=find_error))
        return self.stores[-1]

    def fail(self, directory: Path, error: Callable[[Call], Exception | None]) -> None:
        self.broken[str(directory)] = error

    def num_calls(self, directory: Path, operation: str) -> int:
        """Number of these calls there."""
        return sum(store.count(operation) for store in self.stores if store.uri.startswith(str(directory)))

    def num_bytes(self, directory: Path, *operations: str) -> int:
        """Bytes of data objects that these operations moved there."""
        return sum(
            call.num_bytes
            for store in self.stores
            if store.uri.startswith(str(directory))
            for call in store.calls
            if call.operation in operations and "data/" in call.key
        )


def full(call: Call) -> Exception | None:
    """A device without space."""
    return _refusal(call, "No space left on device", ("put", "create_multipart", "upload_part"))


def full_for_data(call: Call) -> Exception | None:
    """A device that fills up during the save."""
    return full(call) if "data/" in call.key else None


def full_for_manifest(call: Call) -> Exception | None:
    """A device that takes the data of a save, and not the commit."""
    return full(call) if "manifest" in call.key else None


def unreadable(call: Call) -> Exception | None:
    """A device that is gone."""
    return _refusal(call, "Input/output error", (call.operation,))


def unwritable(call: Call) -> Exception | None:
    """A bucket that answers, and takes nothing."""
    return _refusal(call, "the bucket takes nothing now", ("put", "create_multipart", "upload_part", "copy_from"))


def _refusal(call: Call, text: str, operations: tuple[str, ...]) -> Exception | None:
    return StoreError(text, key=call.key, operation=call.operation) if call.operation in operations else None


def names(directory: Path) -> list[str]:
    """The steps that are committed there."""
    return [info.name for info in cloudckpt.list_checkpoints(directory)] if directory.exists() else []


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
