"""What an examination finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["passed", "failed", "skipped"]

_MARKS = {"passed": "✓", "failed": "✗", "skipped": "–"}  # noqa: RUF001  # as long as the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    """Short, and the same in every release."""
    outcome: Outcome
    found: str
    """What was seen, or why nothing was."""
    advice: str = ""
    """What a failure means, and what to do about it."""
    matters: bool = True
    """Whether a save or load cannot be relied on if it fails; what does not matter costs money, time or comfort."""

    @property
    def mark(self) -> str:
        """A sign for tables."""
        return _MARKS[self.outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All that was looked at, in order. ``str()`` of it is a table."""

    uri: str
    read_only: bool
    checks: tuple[Check, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing failed that matters."""
        return not any(check.outcome == "failed" and check.matters for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """Those that failed, whether they matter or not."""
        return tuple(check for check in self.checks if check.outcome == "failed")

    def __getitem__(self, name: str) -> Check:
        """The check of that name; `KeyError` where the store has none such."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        width = max((len(check.name) for check in self.checks), default=0)
        for check in self.checks:
            yield f"{check.mark} {check.name:<{width}}  {check.found}"
        for check in self.failures:
            yield f"✗ {check.name}: {check.advice or check.found}"
