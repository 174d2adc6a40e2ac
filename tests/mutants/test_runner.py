"""The table of the deliberate defects, on this checkout."""

from __future__ import annotations

import re

import pytest
from tests.mutants.__main__ import CHECKOUT
from tests.mutants.table import MUTANTS, read_mutants


def test_the_table_fits_the_checkout() -> None:
    """If this fails, code or tests have moved away from under a deliberate defect: move it along."""
    problems = []
    of_contract = "".join(path.read_text() for path in (CHECKOUT / "src/cloudckpt/testing").glob("contract_*.py"))
    for defect, mutant in MUTANTS.items():
        path = CHECKOUT / "src/cloudckpt" / mutant.file
        if (count := path.read_text().count(mutant.old) if path.is_file() else 0) != 1:
            problems.append(f"{defect}: its old text occurs {count} times in {mutant.file}")
        for test in mutant.tests:
            file, *names = test.partition("[")[0].split("::")
            text = (CHECKOUT / file).read_text() if (CHECKOUT / file).is_file() else ""
            if not text or any(re.search(rf"\b(?:def|class) {name}\b", text + of_contract) is None for name in names):
                problems.append(f"{defect}: there is no {test}")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", defect) or not re.fullmatch(
            r"G([1-9]|1[01]): .+\.", mutant.breaks
        ):
            problems.append(f"{defect}: its name or its promise is not of the usual form")
    assert problems == []
    assert len(MUTANTS) >= 40


def test_row_of_the_table_without_its_parts_is_refused() -> None:
    """If this fails, a defect that is written wrongly is lost, and nobody learns that no test is held to it."""
    row = "one-name\nG1: it breaks.\nfile.py\ntests/test_it.py\n-   old\n-\n- more\n+   new\n"
    (mutant,) = read_mutants(row).values()
    assert (mutant.old, mutant.new, mutant.tests) == ("  old\n\nmore", "  new", ("tests/test_it.py",))
    for wrong in (f"{row}\n{row}", row.replace("tests/test_it.py\n", ""), row.replace("-", "+")):
        with pytest.raises(ValueError, match="it occurs twice, or lacks"):
            read_mutants(wrong)
