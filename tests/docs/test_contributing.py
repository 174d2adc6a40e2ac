"""What contributors and their machines run is what make runs."""

from __future__ import annotations

import re
from typing import Any

import yaml
from tests.docs.tables import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def jobs(workflow: str = "ci") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / f".github/workflows/{workflow}.yml").read_text())["jobs"]
    return found


def test_ci_and_the_workflow_run_the_same_targets() -> None:
    """If this fails, a change that one of them lets through is refused by the other."""
    lines = re.findall(r"^run (.+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    own = {word for line in lines for word in line.split() if not word.startswith("-")}
    assert own <= TARGETS
    of_workflow = {target for job in jobs().values() for target in job["strategy"]["matrix"]["target"]}
    # What lanes install by themselves, and the tests of `make test` once more, for which one machine has no time.
    assert own - {"servers", "frameworks-installed"} == of_workflow - {"coverage"}


def test_every_target_is_told_of() -> None:
    """If this fails, a contributor does not learn of a lane, or reads of one that is not there."""
    helped = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    shown = re.search(r"```sh\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert shown is not None
    assert {line.removeprefix("make ") for line in shown[1].splitlines()} == helped
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == TARGETS
