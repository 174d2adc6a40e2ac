"""How much was tried, counted over all tests of a run and printed at its end: ``docs/guarantees.md`` states it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import pytest

_PREFIX = "tried "


class Tried(Protocol):
    """Of a passed test: it has tried so many `what`, such as kills."""

    def __call__(self, what: str, number: int = 1) -> None: ...


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Tried:
    """Counts for the summary, in whichever process the test runs."""

    def count(what: str, number: int = 1) -> None:
        record_property(f"{_PREFIX}{what}", number)

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line, of what passed tests have tried."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if report.when == "call" and name.startswith(_PREFIX):
                counts[name.removeprefix(_PREFIX)] += int(str(value))
    if counts:
        terminalreporter.write_line(
            "tried: " + ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
        )
