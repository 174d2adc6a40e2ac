"""What modules for frameworks say where there are none; with the real packages: tests/frameworks."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

import cloudckpt
from cloudckpt.integrations._needs import TRIED
from cloudckpt.integrations._opaque import packed, unpacked

_REQUIREMENTS = Path(__file__).parent / "frameworks" / "requirements.txt"
_MODULES = {name.partition("[")[0]: name for name in TRIED}


@pytest.mark.parametrize("module", _MODULES)
def test_a_framework_that_is_not_installed(module: str) -> None:
    """A user would see that a module is missing, and not which package in which version to install."""
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    wanted = _MODULES[module]
    # transformers' module builds on accelerate's, and says so first.
    named = "accelerate" if module == "transformers" else wanted
    with pytest.raises(cloudckpt.MissingDependencyError) as caught:
        importlib.import_module(f"cloudckpt.integrations.{module}")
    assert isinstance(caught.value, ImportError)
    assert f"pip install '{named}=={TRIED[named]}'" in str(caught.value)


def test_the_versions_are_those_that_were_tried() -> None:
    """A user would be told to install a version that no test has run with."""
    pinned = dict(line.split("==") for line in _REQUIREMENTS.read_text().splitlines() if "==" in line)
    assert {name: pinned[name] for name in TRIED} == TRIED


def test_what_could_run_code_is_not_unpickled() -> None:
    """State that a framework keeps would be refused without a word of which checkpoint, why, and what to do."""
    data = packed({"path": Path("x"), "step": 3})
    with pytest.raises(cloudckpt.UnsafePickleError, match=r"add_safe_globals, or give weights_only=False") as caught:
        unpacked(data, uri="s3://bucket/run/last.ckpt")
    assert caught.value.uri == "s3://bucket/run/last.ckpt"
    assert "pathlib." in str(caught.value)
    assert unpacked(data, allow_pickle=True) == {"path": Path("x"), "step": 3}
    assert unpacked(packed({"step": 3})) == {"step": 3}
