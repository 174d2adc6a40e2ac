"""A run of the tests leaves nothing behind, and says so where it does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.leftovers import survivors

ROOT = Path(__file__).parents[1]
_RUN_S = 120.0
_CONFTEST = """
import os
import tests.leftovers

tests.leftovers._END_S = float(os.environ["END_S"])

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(tests.leftovers.Leftovers())
"""
_TIDY = """
import multiprocessing.util, tempfile

def test_a_file():
    tempfile.mkdtemp()
    multiprocessing.util.get_temp_dir()
"""
_UNTIDY = """
import subprocess, sys

def test_a_process():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    process.returncode = 0  # so that nothing warns of it
"""


def run(test: str, tmp_path: Path, *arguments: str, end_s: float) -> subprocess.CompletedProcess[str]:
    """pytest on one file, in a process of its own, which gives others `end_s` to end."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return subprocess.run(
        [*command, "-c", os.devnull, *arguments],
        cwd=tmp_path,
        env={**environment, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT), "END_S": str(end_s)},
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
    )


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.slow
def test_a_run_leaves_no_file(tmp_path: Path, workers: str) -> None:
    """If this fails, each run of the suite leaves hundreds of folders in the machine's temporary directory."""
    done = run(_TIDY, tmp_path, "-n", workers, end_s=60.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    # pytest's own goes with the next runs, so that what failed can be looked at.
    assert {path.name.rpartition("-")[0] for path in (tmp_path / "tmp").iterdir()} <= {"pytest-of"}


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.slow
def test_a_process_that_stays_fails_the_run(tmp_path: Path, workers: str) -> None:
    """If this fails, a test may leave processes that slow whatever runs next, and nobody hears of it."""
    done = run(_UNTIDY, tmp_path, "-n", workers, end_s=0.2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a process outlived the tests" in done.stdout
    assert "time.sleep(600)" in done.stdout


def test_the_tests_have_a_temporary_directory_of_their_own() -> None:
    """If this fails, what tests and servers put into the temporary directory is removed by nobody."""
    assert Path(tempfile.gettempdir()).name.startswith("ckpt-")
    assert os.environ["TMPDIR"] == tempfile.gettempdir()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nobody_elses_process_is_named(tmp_path: Path) -> None:
    """If this fails, processes of other programs are killed at the end of a run."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleep, env={"TMPDIR": f"{tmp_path}/mine/deeper"}) as process:
        try:
            found = {survivor.pid for survivor in survivors(tmp_path / "mine", end_s=0.0)}
        finally:
            process.kill()
    assert process.pid in found
    assert not found & {1, os.getpid(), os.getppid()}
