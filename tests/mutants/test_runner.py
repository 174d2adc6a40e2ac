"""The runner of the deliberate defects, on a package of a few lines; and the table, on this checkout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.mutants.__main__ import CHECKOUT, run
from tests.mutants.table import MUTANTS, Mutant

CODE = """\
def larger(one, other):
    if one > other:
        return one
    return other
"""
TESTS = """\
from cloudckpt.numbers import larger

def test_larger():
    assert larger(1, 2) == 2
"""


def mutant(name: str, *, old: str, new: str) -> Mutant:
    return Mutant(
        name=name, breaks="G4: x.", file="numbers.py", old=old, new=new, tests=("tests/test_numbers.py::test_larger",)
    )


CAUGHT = mutant("wrong-way-round", old="one > other", new="one < other")
SURVIVES = mutant("equal-counts", old="one > other", new="one >= other")
DOES_NOT_APPLY = mutant("moved-away", old="one >= other", new="one < other")
AMBIGUOUS = mutant("twice", old="return", new="yield")
BREAKS_THE_IMPORT = mutant("no-python", old="if one > other:", new="if")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one module and one test."""
    root = tmp_path / "checkout"
    for name, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "src/cloudckpt/__init__.py": "",
        "src/cloudckpt/numbers.py": CODE,
        "tests/test_numbers.py": TESTS,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.faults
def test_what_is_caught_is_a_success(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If this fails, nothing satisfies the net, or it is said without the test that caught the defect."""
    assert run([CAUGHT], checkout=checkout, jobs=1) == 0
    *_, line, last = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"wrong-way-round: caught by tests/test_numbers\.py::test_larger in \d+ s", line)
    assert last == "1 of 1 mutants caught"
    assert (checkout / "src/cloudckpt/numbers.py").read_text() == CODE


@pytest.mark.faults
def test_whatever_is_not_caught_is_a_failure(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If this fails, a defect that no test sees, or that is none any more, passes for caught."""
    mutants = [CAUGHT, SURVIVES, DOES_NOT_APPLY, AMBIGUOUS, BREAKS_THE_IMPORT]
    assert run(mutants, checkout=checkout, jobs=1) == 1
    told = capfd.readouterr().out
    assert "wrong-way-round: caught by" in told
    assert "equal-counts: SURVIVED" in told
    assert "moved-away: patch does not apply: its old text occurs 0 times" in told
    assert "twice: patch does not apply: its old text occurs 2 times" in told
    assert "no-python: not caught, pytest ended with code" in told
    assert told.splitlines()[-1] == "1 of 5 mutants caught"


@pytest.mark.faults
def test_tests_that_fail_by_themselves_catch_nothing(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If this fails, a broken test catches every defect."""
    (checkout / "tests/test_numbers.py").write_text(TESTS.replace("== 2", "== 3"))
    assert run([CAUGHT], checkout=checkout, jobs=1) == 2
    assert "The named tests fail without any mutant" in capfd.readouterr().out


def test_the_table_fits_the_checkout() -> None:
    """If this fails, code or tests have moved away from under a deliberate defect: move it along."""
    problems = []
    of_contract = "".join(path.read_text() for path in (CHECKOUT / "src/cloudckpt/testing").glob("contract_*.py"))
    for one in MUTANTS:
        path = CHECKOUT / "src/cloudckpt" / one.file
        if (count := path.read_text().count(one.old) if path.is_file() else 0) != 1:
            problems.append(f"{one.name}: its old text occurs {count} times in {one.file}")
        for test in one.tests:
            file, *names = test.partition("[")[0].split("::")
            text = (CHECKOUT / file).read_text() if (CHECKOUT / file).is_file() else ""
            if not text or any(re.search(rf"\b(?:def|class) {name}\b", text + of_contract) is None for name in names):
                problems.append(f"{one.name}: there is no {test}")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", one.name) or not re.fullmatch(r"G([1-9]|10): .+\.", one.breaks):
            problems.append(f"{one.name}: its name or its promise is not of the usual form")
    assert problems == []
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 40
