"""The wheel, installed in an environment of its own: `make package` builds it and runs this there."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import cloudckpt

pytest_plugins = ["cloudckpt.testing.fixtures"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DIST = ROOT / "dist"


def run(*command: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """From a folder in which no module of the checkout can be found."""
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=timeout_s, check=False)


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = DIST.glob("*.whl")
    return found


def test_the_tests_import_the_wheel() -> None:
    """If this fails, all of these tests look at the checkout."""
    path = Path(cloudckpt.__file__)
    assert "site-packages" in path.parts
    assert not path.is_relative_to(ROOT / "src")


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    """If this fails, the version stands in two places, and a release changes one of them."""
    (sdist,) = DIST.glob("*.tar.gz")
    assert importlib.metadata.version("cloudckpt") == cloudckpt.__version__
    assert wheel.name.split("-")[1] == cloudckpt.__version__
    assert sdist.name == f"cloudckpt-{cloudckpt.__version__}.tar.gz"


def test_the_wheel_holds_the_package_and_no_more(wheel: Path) -> None:
    """If this fails, users get our tests and benchmarks, or miss types, licence or modules."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"cloudckpt", f"cloudckpt-{cloudckpt.__version__}.dist-info"}
    assert "cloudckpt/py.typed" in names
    assert f"cloudckpt-{cloudckpt.__version__}.dist-info/licenses/LICENSE" in names
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "cloudckpt").rglob("*.py")}
    assert modules <= names


def test_the_wheel_imports_with_its_dependencies_alone() -> None:
    """If this fails, an optional package is needed for the import."""
    extras = ("boto3", "google.cloud.storage", "typer", "rich", "opentelemetry", "pytest", "safetensors")
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == extra or name.startswith(extra + ".") for extra in {extras!r}):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import cloudckpt
cloudckpt.save({{"step": 1}}, "memory://run/step-1", no_dist=True)
state_dict = {{"step": 0}}
cloudckpt.load(state_dict, "memory://run/step-1", no_dist=True)
assert state_dict == {{"step": 1}}
"""
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", ["path", "cloudckpt_s3_uri", "cloudckpt_gcs_uri"])
def test_the_wheel_saves_and_loads(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """If this fails, the wheel lacks something that the checkout has."""
    uri = str(tmp_path / "step-1") if place == "path" else f"{request.getfixturevalue(place)}/step-1"
    weight = torch.arange(1000.0)
    cloudckpt.save({"weight": weight}, uri, no_dist=True)
    loaded = {"weight": torch.zeros(1000)}
    cloudckpt.load(loaded, uri, no_dist=True)
    assert torch.equal(loaded["weight"], weight)


def test_the_contract_ships(tmp_path: Path) -> None:
    """If this fails, users cannot hold their own store to the contract."""
    done = run(sys.executable, "-m", "cloudckpt.testing", str(tmp_path / "root"), timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr


PROGRAMS = ("user_program.py", "wrong_program.py")


def wanted_errors() -> set[tuple[str, int]]:
    return {
        (name, number)
        for name in PROGRAMS
        for number, line in enumerate((HERE / name).read_text().splitlines(), 1)
        if "# wrong:" in line
    }


def test_mypy_accepts_a_right_program_and_refuses_a_wrong_one() -> None:
    """If this fails, the types that ship are incomplete or wrong for mypy, or are `Any` to it."""
    done = run(script("mypy"), "--strict", "--no-incremental", *PROGRAMS, timeout_s=280)
    found = re.findall(r"^([^:\n]+):(\d+): error", done.stdout, re.MULTILINE)
    assert {(name, int(number)) for name, number in found} == wanted_errors(), done.stdout


def test_pyright_sees_the_same() -> None:
    """If this fails, editors that use pyright show errors in right programs, or none in wrong ones."""
    done = run(script("pyright"), "--pythonpath", sys.executable, "--outputjson", *PROGRAMS, timeout_s=280)
    errors = [entry for entry in json.loads(done.stdout)["generalDiagnostics"] if entry["severity"] == "error"]
    found = {(Path(entry["file"]).name, entry["range"]["start"]["line"] + 1) for entry in errors}
    assert found == wanted_errors(), done.stdout
