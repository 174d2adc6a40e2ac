"""Apply each deliberate defect of the table to a copy of the package, and expect its named tests to fail.

``make mutants`` runs all of them. The checkout is never patched: the copies lie in a temporary directory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

CHECKOUT = Path(__file__).parents[2]
LIMIT_S = 180.0
"""Time limit of one mutant's tests, all together."""
_TEST_TIMEOUT_S = 60
"""Time limit of one test, by pytest-timeout: a mutant that hangs is caught by the test that fails at this limit."""
# The tests run only where the copy is what they import.
_RUN_PYTEST = """
import importlib.util, pytest, sys
found = importlib.util.find_spec("cloudckpt").origin
sys.exit(pytest.main(sys.argv[2:]) if found.startswith(sys.argv[1]) else f"the tests would import {found}")
"""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one run of pytest."""

    exit_code: int | None
    """None if the run was killed at its time limit."""
    output: str
    seconds: float


def copy_checkout(source: Path, target: Path) -> Path:
    """Copy ``src`` of the checkout at `source`, and link all the rest."""
    target.mkdir()
    shutil.copytree(source / "src", target / "src")
    for entry in source.iterdir():
        if entry.name != "src":
            (target / entry.name).symlink_to(entry)
    return target


def apply_patch(mutant: Mutant, root: Path) -> str:
    """Patch the copy at `root`. Returns why the patch does not apply, or an empty string."""
    path = root / "src/cloudckpt" / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    text = path.read_text()
    if (count := text.count(mutant.old)) != 1:
        return f"its old text occurs {count} times in {mutant.file}"
    path.write_text(text.replace(mutant.old, mutant.new))
    # Python compares size and seconds only, and would run the old code if both are the same.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    return ""


def run_tests(root: Path, tests: Iterable[str], *arguments: str, limit_s: float | None = None) -> Outcome:
    """Run pytest on the copy at `root`, and kill it with all its processes after `limit_s`."""
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "CLOUDCKPT_HYPOTHESIS": "thorough"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-c", _RUN_PYTEST, str(root / "src"), "-q", "-p", "no:cacheprovider"]
    begun_s = time.monotonic()
    process = subprocess.Popen(
        [*command, *arguments, *tests],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    exit_code: int | None
    try:
        output, _ = process.communicate(timeout=limit_s)
        exit_code = process.returncode
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        exit_code = None
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    return Outcome(exit_code=exit_code, output=output, seconds=time.monotonic() - begun_s)


def try_mutant(name: str, mutant: Mutant, *, sound: Path) -> tuple[bool, str]:
    """Run the tests of `mutant` on a patched copy of `sound`. Returns if they caught it, and the line to print."""
    root = copy_checkout(sound, sound.parent / name)
    try:
        problem = apply_patch(mutant, root)
        if problem:
            return False, f"{name}: patch does not apply: {problem}"
        found = run_tests(root, mutant.tests, "-x", f"--timeout={_TEST_TIMEOUT_S}", limit_s=LIMIT_S)
    finally:
        shutil.rmtree(root)
    failed = _FAILED.search(found.output)
    if found.exit_code == 1 and failed is not None:
        return True, f"{name}: caught by {failed[1]} in {found.seconds:.0f} s"
    if found.exit_code == 0:
        return False, f"{name}: SURVIVED {' '.join(mutant.tests)}"
    ended = "was killed at the time limit" if found.exit_code is None else f"ended with code {found.exit_code}"
    return False, f"{name}: not caught, pytest {ended} after {found.seconds:.0f} s:\n{found.output[-2000:]}"


def distinct_tests(mutants: Iterable[Mutant]) -> list[str]:
    """List each named test once, and none that another name includes."""
    names = sorted({test for mutant in mutants for test in mutant.tests})
    return [
        name for name in names if not any(name.startswith((f"{other}/", f"{other}::", f"{other}[")) for other in names)
    ]


def run(mutants: Mapping[str, Mutant], *, jobs: int) -> int:
    """Try all `mutants`, `jobs` at a time. Returns 0 if each was caught, 1 if not, 2 if the tests fail without any."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        sound = copy_checkout(CHECKOUT, Path(directory) / "sound")
        tests = distinct_tests(mutants.values())
        in_parallel = ("-n", str(jobs), "--dist", "worksteal") if jobs > 1 else ()
        found = run_tests(sound, tests, *in_parallel)
        if found.exit_code != 0:
            print(f"{found.output}\nThe named tests fail without any mutant: mend them first.")
            return 2
        print(f"without a mutant: {len(tests)} named tests and files pass in {found.seconds:.0f} s", flush=True)
        num_caught = 0
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for is_caught, line in pool.map(functools.partial(try_mutant, sound=sound), mutants, mutants.values()):
                print(line, flush=True)
                num_caught += is_caught
    print(f"{num_caught} of {len(mutants)} mutants caught")
    return 0 if num_caught == len(mutants) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", help="try this mutant; may be given several times")
    parser.add_argument("--jobs", type=int, default=2, help="mutants to try at the same time; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    settings = parser.parse_args(arguments)
    mutants = {name: mutant for name, mutant in MUTANTS.items() if settings.only is None or name in settings.only}
    unknown = set(settings.only or ()) - mutants.keys()
    if unknown:
        parser.error(f"no mutant is named {', '.join(sorted(unknown))}; --list prints all names")
    if settings.list:
        for name, mutant in mutants.items():
            print(f"{name}: {mutant.breaks}")
        return 0
    return run(mutants, jobs=settings.jobs)


if __name__ == "__main__":
    sys.exit(main())
