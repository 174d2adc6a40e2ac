"""What ``python -m cloudckpt.testing`` does: ask a store, say what was found, and leave nothing behind."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import pytest

from cloudckpt.errors import StoreError, TransientStoreError
from cloudckpt.options import Options
from cloudckpt.stores.base import Capabilities, Store
from cloudckpt.stores.open import open_store
from cloudckpt.testing.contract_base import DOES_NOT_APPLY
from cloudckpt.uri import Location, parse_location

HOLDS, FAILS, COULD_NOT_ASK = 0, 1, 2
"""The exit statuses."""

_NUM_TRIES = 3
_MOST_SHOWN = 10
_ENDPOINT_VARIABLES = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("STORAGE_EMULATOR_HOST",)}
_PRIVATE_SCHEMES = ("memory",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to write, how to get there, and how much to ask."""

    root: Location
    """Fresh, below what the user named."""
    options: Options
    denied_options: Mapping[str, Any] | None
    num_rounds: int
    num_keys: int
    longest_key_bytes: int

    @staticmethod
    def of(
        uri: str,
        *,
        storage_options: Mapping[str, Any],
        denied_options: Mapping[str, Any] | None,
        timeout_s: float,
        num_rounds: int,
        num_keys: int,
        longest_key_bytes: int,
    ) -> Target:
        """A fresh root under `uri`. Raises `InvalidURIError` and `InvalidOptionError`; contacts nothing."""
        options = Options(storage_options=storage_options, timeout_s=timeout_s)
        return Target(
            root=parse_location(uri).child(f"cloudckpt-contract-{uuid.uuid4().hex[:12]}"),
            options=options,
            denied_options=denied_options,
            num_rounds=num_rounds,
            num_keys=num_keys,
            longest_key_bytes=longest_key_bytes,
        )

    @property
    def is_private(self) -> bool:
        """Whether no other process sees what lies there."""
        return self.root.scheme in _PRIVATE_SCHEMES

    @property
    def endpoint_url(self) -> str | None:
        """Where a wire can be put before; ``None`` for TLS, and for what is not reached over HTTP."""
        found = self.options.storage_options.get("endpoint_url")
        names = _ENDPOINT_VARIABLES.get(self.root.scheme, ())
        url = str(found or next((os.environ[name] for name in names if os.environ.get(name)), ""))
        return url if url.startswith("http://") and self.root.scheme in _ENDPOINT_VARIABLES else None

    def opened(self, name: str = "", *, timeout_s: float | None = None, **storage_options: Any) -> Store:
        """The store at `name` below the root, with storage options over the user's."""
        options = Options(
            storage_options={**self.options.storage_options, **storage_options},
            timeout_s=timeout_s or self.options.timeout_s,
        )
        return open_store(self.root.child(name) if name else self.root, options)

    def behind(self, name: str, endpoint_url: str, *, timeout_s: float) -> Store:
        """The store at `name`, reached at `endpoint_url`."""
        more: dict[str, Any] = {"endpoint_url": endpoint_url}
        if self.root.scheme == "gs" and "endpoint_url" not in self.options.storage_options:
            more["anonymous"] = True  # what STORAGE_EMULATOR_HOST, which led here, means by itself
        return self.opened(name, timeout_s=timeout_s, **more)


def check(target: Target, *, keyword: str, verbose: bool, out: TextIO) -> int:
    """Ask everything, tell `out`, and return the exit status. Raises `StoreError` where the store cannot be asked."""
    store = target.opened()
    if target.denied_options is not None:
        target.opened(**target.denied_options)  # raises where they contradict the others
    # A bucket that does not exist or lets nobody in is found out before anything is written.
    next(store.list(), None)
    with _leaving_no_directories(target.root):
        status = COULD_NOT_ASK
        try:
            print(f"cloudckpt's contract for stores, under {target.root.uri}", file=out, flush=True)
            capabilities = store.probe()
            _tell(capabilities, out)
            report = Report(target=target, out=out, verbose=verbose)
            with tempfile.TemporaryDirectory() as directory:
                status = report.run(_pytest_arguments(keyword, directory), capabilities)
        finally:
            if _left_something(store, out):
                status = max(status, FAILS)
    return status


def _left_something(store: Store, out: TextIO) -> bool:
    try:
        left = remove_all(store)
    except BaseException:
        print(f"✗ Not everything was removed; remove by hand what lies under {store.uri}", file=out, flush=True)
        raise
    if left:
        print(f"✗ Could not be removed; remove it by hand, under {store.uri}:", file=out)
        for line in left[:_MOST_SHOWN]:
            print(f"    {line}", file=out)
        if len(left) > _MOST_SHOWN:
            print(f"    and {len(left) - _MOST_SHOWN} more", file=out)
    return bool(left)


def remove_all(store: Store) -> list[str]:
    """Remove every object and every unfinished upload; what is left, or why it could not be told."""
    left: list[str] = []
    for _ in range(_NUM_TRIES):
        try:
            for upload in list(store.list_uploads()):
                store.abort_multipart(upload.key, upload.upload_id)
            store.delete([info.key for info in store.list()])
            left = [store.url(info.key) for info in store.list()]
            left += [f"an unfinished upload to {store.url(upload.key)}" for upload in store.list_uploads()]
        except TransientStoreError as error:
            left = [str(error)]
        except StoreError as error:
            return [str(error)]
        if not left:
            break
    return left


@contextlib.contextmanager
def _leaving_no_directories(root: Location) -> Iterator[None]:
    """Where keys are files: remove the directories that were not there before, if they are empty then."""
    if root.scheme != "file":
        yield
        return
    path = Path(root.path)
    made = [path, *(parent for parent in path.parents if not parent.exists())]
    try:
        yield
    finally:
        inside = [Path(directory) for directory, _, _ in os.walk(path, topdown=False)]
        for directory in [*inside, *made]:
            with contextlib.suppress(OSError):  # it is gone, or somebody else has put something there
                directory.rmdir()


def _tell(capabilities: Capabilities, out: TextIO) -> None:
    if capabilities.conditional_create:
        print("✓ create-if-absent: the store has it", file=out)
    else:
        observed = f" ({capabilities.observed})" if capabilities.observed else ""
        print(f"✗ create-if-absent: the store does not keep it{observed}", file=out)
        print(
            "    Of two saves to one place each would overwrite the other's. cloudckpt refuses to save here; use",
            file=out,
        )
        print("    another store or a newer server, or accept it with Options(commit='unconditional').", file=out)
    multipart = "✓ multipart uploads: the store has them" if capabilities.multipart else "○ multipart uploads: none"
    print(multipart, file=out)
    if capabilities.verifies_crc32c:
        print("✓ checksums: wrong ones are refused", file=out, flush=True)
    else:
        print(
            "○ checksums: the store looks at none; damage on the way there is found when it is read",
            file=out,
            flush=True,
        )


def _pytest_arguments(keyword: str, directory: str) -> list[str]:
    """Those that keep pytest from finding any configuration but this."""
    suite = str(Path(__file__).with_name("command_suite.py"))
    alone = ["-c", os.devnull, "--rootdir", directory, "--noconftest", "-p", "no:cacheprovider"]
    return [suite, *alone, *(["-k", keyword] if keyword else [])]


TARGET = pytest.StashKey[Target]()
"""Where the suite finds what it is to ask."""

_MOST_CHARACTERS = 400


@dataclass(slots=True, kw_only=True)
class _Clause:
    name: str
    purpose: str
    failures: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why it asked nothing."""

    @property
    def title(self) -> str:
        return self.name.removeprefix("test_").replace("_", " ")


class Report:
    """Runs pytest and tells what comes of it."""

    def __init__(self, *, target: Target, out: TextIO, verbose: bool) -> None:
        self._target = target
        self._out = out
        self._verbose = verbose
        self._clauses: dict[str, _Clause] = {}
        self._running: str | None = None

    def run(self, arguments: Sequence[str], capabilities: Capabilities) -> int:
        """Ask the clauses that `arguments` choose, and return the command's exit status."""
        # Neither the user's plugins nor their settings have a say in what a store does.
        with mock.patch.dict(os.environ, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}):
            for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
                os.environ.pop(name, None)
            status = pytest.main(list(arguments), plugins=[self])
        self._finish(None)
        if status == pytest.ExitCode.INTERRUPTED:
            self._say("Interrupted: the clauses that are not listed were not asked.")
            return COULD_NOT_ASK
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            self._say("No clause is called so: -k takes words of their names, as in -k 'create or upload'.")
            return COULD_NOT_ASK
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._say(f"pytest could not run the clauses (exit status {int(status)}).")
            return COULD_NOT_ASK
        return self._verdict(capabilities)

    @pytest.hookimpl(trylast=True)  # once pytest's own report is there
    def pytest_configure(self, config: pytest.Config) -> None:
        """Take the place of pytest's own report."""
        config.stash[TARGET] = self._target
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what came of one phase of one clause."""
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if name != self._running:
            self._finish(name)
        clause = self._clauses[name]
        if report.failed:
            parameters = report.nodeid.rpartition("::")[2].removeprefix(name)
            clause.failures.append(f"{parameters} {self._failure(report)}".strip())
        if report.when == "teardown":
            clause.reasons += [str(reason) for what, reason in report.user_properties if what == DOES_NOT_APPLY]

    def _finish(self, next_name: str | None) -> None:
        if self._running is not None:
            self._tell(self._clauses[self._running])
        self._running = next_name
        if next_name is not None and next_name not in self._clauses:
            self._clauses[next_name] = _Clause(name=next_name, purpose=_purpose(next_name))

    def _failure(self, report: pytest.TestReport) -> str:
        if self._verbose:
            return report.longreprtext
        crash = getattr(report.longrepr, "reprcrash", None)
        words = " ".join((crash.message if crash else report.longreprtext).split())
        # The reason often stands at the end, behind a long key.
        half = _MOST_CHARACTERS // 2
        return f"{words[:half]} … {words[-half:]}" if len(words) > _MOST_CHARACTERS else words

    def _tell(self, clause: _Clause) -> None:
        if clause.failures:
            self._say(f"✗ {clause.title}")
            self._say(f"    {clause.purpose}")
            for failure in clause.failures:
                self._say("    " + failure.replace("\n", "\n    "))
            self._say(f"    (-k {clause.name})")
        elif clause.reasons:
            self._say(f"○ {clause.title}: {clause.reasons[0]}")
        else:
            self._say(f"✓ {clause.title}")

    def _verdict(self, capabilities: Capabilities) -> int:
        failed = [clause for clause in self._clauses.values() if clause.failures]
        num_idle = sum(bool(clause.reasons) for clause in self._clauses.values() if not clause.failures)
        idle = f", {num_idle} of them without having anything to ask" if num_idle else ""
        if failed:
            self._say(
                f"✗ {len(failed)} of {len(self._clauses)} clauses fail. cloudckpt relies on each: see above for what."
            )
            return FAILS
        if not capabilities.conditional_create:
            self._say(f"✗ All {len(self._clauses)} clauses hold{idle}, but the store has no create-if-absent.")
            return FAILS
        self._say(f"✓ All {len(self._clauses)} clauses hold{idle}.")
        return HOLDS

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def _purpose(name: str) -> str:
    """The first sentence of the clause's docstring."""
    from cloudckpt.testing.contract import StoreContract

    words = " ".join((inspect.getdoc(getattr(StoreContract, name, None)) or "").split())
    sentence, dot, _ = words.partition(". ")
    return f"{sentence}." if dot else sentence
