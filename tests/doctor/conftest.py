"""Places to examine, some of them ill."""

from __future__ import annotations

import pytest
from tests.e2e.conftest import (  # noqa: F401  # fixtures
    local,
    on_server,
    place,
    s3,
    s3_application,
    s3_server,
    servers,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A path, moto's S3, and the GCS emulator; others where ``--places`` says so."""
    if "place" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--places")
        names = ("local", "s3", "fake-gcs") if chosen == "local,s3" else tuple(chosen.split(","))
        metafunc.parametrize("place", names, indirect=True)
