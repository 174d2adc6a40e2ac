"""The watch over secrets itself: each channel is planted with one, and it is caught."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from tests import secrets_watch
from tests.e2e.harness import RankError, run_ranks
from tests.in_memory import Memory

import cloudckpt
from cloudckpt.stores.s3 import S3Store

SECRET = "planted-HUSH"  # noqa: S105  # nobody's


def fail() -> None:
    raise LookupError(f"Authorization: {SECRET}")


def fail_and_say_so() -> None:
    try:
        fail()
    except LookupError as error:
        raise cloudckpt.CloudckptError("it failed") from error


def fail_and_hide_it() -> None:
    try:
        fail()
    except LookupError:
        raise cloudckpt.CloudckptError("it failed") from None


def fail_twice() -> None:
    try:
        fail()
    except LookupError:
        raise cloudckpt.CloudckptError("it failed")  # noqa: B904  # which is the point


def log_a_message() -> None:
    logging.getLogger("cloudckpt.somewhere").debug("signed with %s", SECRET)


def log_an_error() -> None:
    try:
        fail()
    except LookupError:
        logging.getLogger("cloudckpt").info("it failed", exc_info=True)


def warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn(f"careful with {SECRET}", UserWarning, stacklevel=1)


def make_an_error() -> None:
    cloudckpt.CheckpointNotFoundError(f"nothing at {SECRET}", uri="s3://bucket/run")


def make_an_error_that_carries_it() -> None:
    cloudckpt.CheckpointNotFoundError("nothing there", uri=f"s3://{SECRET}@bucket/run")


def chain_an_error() -> None:
    with pytest.raises(cloudckpt.CloudckptError):
        fail_and_say_so()


def chain_an_error_unasked() -> None:
    with pytest.raises(cloudckpt.CloudckptError):
        fail_twice()


def make_options() -> None:
    cloudckpt.Options(metadata={"token": SECRET})


def make_a_writer() -> None:
    class Writer(cloudckpt.ObjectStoreWriter):
        def __repr__(self) -> str:
            return f"Writer({SECRET})"

    Writer("memory://somewhere/run")


def make_a_store() -> None:
    S3Store(SECRET, "run", storage_options={}, timeout_s=1, connections=1)


def make_an_event() -> None:
    cloudckpt.Event(name="retry", uri=SECRET, rank=0)


@pytest.mark.parametrize(
    "plant",
    [
        *(log_a_message, log_an_error, warn, make_an_error, make_an_error_that_carries_it, chain_an_error),
        *(chain_an_error_unasked, make_options, make_a_writer, make_a_store, make_an_event),
    ],
)
def test_a_secret_is_caught_wherever_it_is_shown(plant: Callable[[], None]) -> None:
    """If this fails, the watch looks away, and every other test that passes says nothing about leaks."""
    plant()
    with pytest.raises(secrets_watch.LeakedSecretError, match="shows the secret"):
        secrets_watch.check()
    assert secrets_watch.hits() == []


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
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


def test_an_error_that_hides_its_cause_is_no_leak() -> None:
    """If this fails, the watch cries at what no traceback shows, and gets switched off."""
    with pytest.raises(cloudckpt.CloudckptError):
        fail_and_hide_it()
    secrets_watch.check()
