"""What contributors and their machines run is what make runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from tests.docs.tables import ROOT

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


def jobs() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    return found


def test_the_workflow_only_calls_make() -> None:
    """If this fails, the workflow does what a contributor cannot repeat by one command."""
    called = set()
    for job in jobs().values():
        for step in job["steps"]:
            assert set(step) <= {"uses", "with", "run"}
            if "run" in step:
                command = re.fullmatch(
                    r'(?:sudo env "PATH=\$PATH" )?make (\S+|\$\{\{ matrix\.target \}\})', step["run"]
                )
                assert command is not None, step["run"]
                called |= {command[1]} if "$" not in command[1] else set(job["strategy"]["matrix"]["target"])
    assert called <= TARGETS
    assert called >= {"lint", "test", "faults", "integration", "package", "demo"}


def test_ci_and_the_workflow_run_the_same_targets() -> None:
    """If this fails, a change that one of them lets through is refused by the other."""
    lines = re.findall(r"^make (.+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    own = {word for line in lines for word in line.split() if not word.startswith("-")}
    assert own <= TARGETS
    of_workflow = {
        target
        for job in jobs().values()
        for target in [*job.get("strategy", {}).get("matrix", {}).get("target", []), "integration"]
    }
    # What integration installs by itself, and the tests of `make test` once more, for which one machine has no time.
    assert own - {"servers"} == of_workflow - {"coverage"}


def test_the_hooks_run_the_pinned_ruff() -> None:
    """If this fails, a commit is formatted one way, and CI wants another."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    wanted = [requirement for hook in hooks for requirement in hook.get("additional_dependencies", [])]
    assert wanted
    assert set(wanted) == {f"ruff=={pins()['ruff']}"}


@pytest.mark.parametrize("path", ["tests/package/requirements.txt", "docs/_site/requirements.txt"])
def test_the_tools_of_other_environments_are_the_pinned_ones(path: str) -> None:
    """If this fails, the wheel is checked with another mypy than the checkout, or the site made with another ruff."""
    for line in (ROOT / path).read_text().splitlines():
        name, _, version = line.partition("==")
        if name.lower() in pins():
            assert version == pins()[name.lower()], line
