"""Places to examine, some of them ill."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.placing import leave_out_others, parametrize
from tests.e2e.conftest import (  # noqa: F401  # fixtures
    local,
    on_server,
    place,
    s3,
    s3_application,
    s3_server,
    servers,
)

HERE = Path(__file__).parent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A path, moto's S3, and the GCS emulator; others where ``--places`` says so."""
    parametrize(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``--places rgw`` runs what can run on a Ceph RADOS Gateway, there alone."""
    leave_out_others(config, items, HERE)
