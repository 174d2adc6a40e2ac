"""Settings that all tests share."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.kit import secrets_watch
from tests.kit.clock import skip_waits
from tests.kit.in_memory import Memory
from tests.kit.leftovers import Leftovers
from tests.kit.secrets_watch import no_secret_is_shown  # noqa: F401  # for all tests

from cloudckpt._clock import MachineClock
from cloudckpt.testing.servers import S3Server, moto_server

if TYPE_CHECKING:
    from tests.integration.servers import Servers

_numbers = itertools.count()
secrets_watch.install()

# Else torch warns of some things once in a process, and which test fails by it depends on those before.
torch.set_warn_always(True)

# Derandomised: a failure on one machine is a failure on all. No deadline: a loaded machine is not a defect.
for _name, _num_examples in (("quick", 20), ("thorough", 100)):
    settings.register_profile(
        _name,
        derandomize=True,
        deadline=None,
        max_examples=_num_examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile(os.environ.get("CLOUDCKPT_HYPOTHESIS", "quick"))


# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them are about.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Before the workers of xdist are started: they inherit the temporary directory."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Leftovers(), "leftovers")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here, because pytest asks only the outermost conftest in time."""
    parser.addoption(
        "--places",
        default="local",
        help="where the end-to-end tests save, by commas: local, s3 (moto, in process), or a server of the "
        "integration tests: rgw, ministack, fake-gcs. What is tied to another place is not run. Default: %(default)s",
    )


@pytest.fixture(autouse=True)
def _looks_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of cases are about damage, and each would wait before the damage is believed."""
    monkeypatch.setattr("cloudckpt.io.client.FIRST_LOOK_DELAY_S", 0.0)


@pytest.fixture(autouse=True)
def _clocks_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the clocks that this process has seen: they would order the next test's commits, and hide its warnings."""
    monkeypatch.setattr("cloudckpt._clock.MACHINE", MachineClock())
    monkeypatch.setattr("cloudckpt._this_process.given_warnings", {})


@pytest.fixture(autouse=True)
def _log_is_heard() -> None:
    """Let `caplog` have what the library logs: another library may have silenced its logger in an earlier test."""
    logging.disable(logging.NOTSET)
    log = logging.getLogger("cloudckpt")
    log.setLevel(logging.DEBUG)  # as `secrets_watch` has it
    log.disabled, log.propagate = False, True


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A command that a test calls sets handlers, for a process of its own: the second Ctrl-C would end this one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server (moto), in a process of its own."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Every server of the integration tests, by its name."""
    from tests.integration.servers import Servers  # noqa: PLC0415  # it takes SDKs that no other test may need

    with contextlib.ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries do not wait."""
    skip_waits(monkeypatch)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, retries_at_once: None) -> Memory:
    """Every ``memory://`` location, watched."""
    opened = Memory(f"watched-{next(_numbers)}")
    at = staticmethod(lambda location, _options: opened.open(location.authority, location.path))
    monkeypatch.setattr("cloudckpt.stores.memory.MemoryStore.at", at)
    return opened
