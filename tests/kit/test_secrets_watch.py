"""The watch over secrets itself: each channel is planted with one, and it is caught."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from tests.kit import secrets_watch
from tests.kit.in_memory import Memory
from tests.kit.ranks import RankError, run_ranks

import cloudckpt
from cloudckpt.stores.s3 import S3Store

SECRET = "planted-HUSH"  # noqa: S105  # nobody's


LOGGER = logging.getLogger("cloudckpt.somewhere")


def look_up() -> None:
    raise LookupError(f"Authorization: {SECRET}")


def fail() -> None:
    """Raise an error of the package that is chained to one with the secret."""
    try:
        look_up()
    except LookupError as error:
        raise cloudckpt.CloudckptError("it failed") from error


def chain_an_error() -> None:
    with pytest.raises(cloudckpt.CloudckptError):
        fail()


def log_an_error() -> None:
    try:
        fail()
    except cloudckpt.CloudckptError:
        LOGGER.info("it failed", exc_info=True)


def warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn(f"careful with {SECRET}", UserWarning, stacklevel=1)


class Writer(cloudckpt.ObjectStoreWriter):
    """Shows the secret where it is printed."""

    def __repr__(self) -> str:
        return f"Writer({SECRET})"


def log_a_message() -> None:
    LOGGER.debug("signed with %s", SECRET)


PLANTS: dict[str, Callable[[], object]] = {
    "log message": log_a_message,
    "logged error": log_an_error,
    "warning": warn,
    "error": lambda: cloudckpt.CheckpointNotFoundError(f"nothing at {SECRET}", uri="s3://bucket/run"),
    "attribute of an error": lambda: cloudckpt.CheckpointNotFoundError("nothing", uri=f"s3://{SECRET}@bucket/run"),
    "chained error": chain_an_error,
    "options": lambda: cloudckpt.Options(metadata={"token": SECRET}),
    "writer": lambda: Writer("memory://somewhere/run"),
    "store": lambda: S3Store(SECRET, "run", storage_options={}, timeout_s=1, connections=1),
    "event": lambda: cloudckpt.Event(name="retry", uri=SECRET, rank=0),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_secret_is_caught_wherever_it_is_shown(plant: str) -> None:
    """If this fails, the watch looks away, and every other test that passes says nothing about leaks."""
    PLANTS[plant]()
    with pytest.raises(secrets_watch.LeakedSecretError, match="shows the secret"):
        secrets_watch.check()
    assert secrets_watch.hits() == []


def test_a_secret_in_a_manifest_is_caught(memory: Memory) -> None:
    """If this fails, credentials that reach a manifest, and with it everybody who may read the bucket, go unnoticed."""
    cloudckpt.save({SECRET: torch.ones(1)}, "memory://bucket/run")
    with pytest.raises(secrets_watch.LeakedSecretError, match="a manifest shows"):
        secrets_watch.check()


@pytest.mark.multirank
def test_a_secret_on_a_rank_is_caught() -> None:
    """If this fails, what the ranks' processes log and raise is not watched at all."""
    with pytest.raises(RankError, match="shows the secret"):
        run_ranks(log_a_message, world_size=1)
