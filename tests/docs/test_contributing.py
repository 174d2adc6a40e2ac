"""What contributors and their machines run is what make runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from tests.docs.oldest import oldest
from tests.docs.tables import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


def jobs(workflow: str = "ci") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / f".github/workflows/{workflow}.yml").read_text())["jobs"]
    return found


@pytest.mark.parametrize(
    ("workflow", "targets"),
    [
        ("ci", {"lint", "test", "faults", "integration", "frameworks", "package", "docs", "terraform", "demo"}),
        ("versions", {"newest", "oldest"}),
    ],
)
def test_the_workflows_only_call_make(workflow: str, targets: set[str]) -> None:
    """If this fails, a workflow does what a contributor cannot repeat by one command."""
    called = set()
    for job in jobs(workflow).values():
        for step in job["steps"]:
            assert set(step) <= {"uses", "with", "run"}
            if "run" in step:
                command = re.fullmatch(
                    r'(?:sudo env "PATH=\$PATH" )?make (\S+|\$\{\{ matrix\.target \}\})', step["run"]
                )
                assert command is not None, step["run"]
                called |= {command[1]} if "$" not in command[1] else set(job["strategy"]["matrix"]["target"])
    assert called <= TARGETS
    assert called >= targets


def test_ci_and_the_workflow_run_the_same_targets() -> None:
    """If this fails, a change that one of them lets through is refused by the other."""
    lines = re.findall(r"^run (.+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    own = {word for line in lines for word in line.split() if not word.startswith("-")}
    assert own <= TARGETS
    of_workflow = {target for job in jobs().values() for target in job["strategy"]["matrix"]["target"]}
    # What lanes install by themselves, and the tests of `make test` once more, for which one machine has no time.
    assert own - {"servers", "frameworks-installed"} == of_workflow - {"coverage"}


def test_the_oldest_versions_are_those_of_the_project() -> None:
    """If this fails, `make oldest` tries other versions than those that users are promised."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_users = [line for name, lines in extras.items() if name not in ("bench", "dev") for line in lines]
    wanted = [line for line in [*project["dependencies"], *of_users] if not line.startswith("cloudckpt")]
    assert oldest() == {re.split(r"[\[>]", line)[0]: line.partition(">=")[2] for line in wanted}
    assert len(oldest()) == len(wanted)


def test_every_target_is_told_of() -> None:
    """If this fails, a contributor does not learn of a lane, or reads of one that is not there."""
    helped = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    shown = re.search(r"```sh\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert shown is not None
    assert {line.removeprefix("make ") for line in shown[1].splitlines()} == helped
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == TARGETS


def test_clean_removes_every_environment() -> None:
    """If this fails, `make clean` leaves gigabytes, and the next run goes on with what is old."""
    recipe = MAKEFILE.partition("\nclean:")[2]
    made = re.findall(r"^([A-Z_]*VENV) \?=", MAKEFILE, re.MULTILINE)
    assert len(made) > 3
    assert {name for name in made if f"$({name})" not in recipe} == set()


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
