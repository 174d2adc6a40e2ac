"""One line for each clause, and a verdict: a pytest plugin in place of pytest's own report."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO
from unittest import mock

import pytest

from cloudckpt.stores.base import Capabilities
from cloudckpt.testing._command import COULD_NOT_ASK, FAILS, HOLDS, Target
from cloudckpt.testing._contract_tools import DOES_NOT_APPLY

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
    from cloudckpt.testing.contract import StoreContract  # noqa: PLC0415  # once pytest runs, which rewrites it

    words = " ".join((inspect.getdoc(getattr(StoreContract, name, None)) or "").split())
    sentence, dot, _ = words.partition(". ")
    return f"{sentence}." if dot else sentence
