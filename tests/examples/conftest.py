"""The places to which the examples write in these tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.docs.conftest import s3_bucket  # noqa: F401  # a fixture

REPOSITORY = Path(__file__).resolve().parents[2]
# The examples are no part of the installed package; `python -m examples.demo` finds them in the same way.
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))


@pytest.fixture(params=["path", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place on each kind of store in turn."""
    if request.param == "path":
        return str(tmp_path / "checkpoints")
    request.getfixturevalue("s3_bucket")
    return "s3://bucket/run"
