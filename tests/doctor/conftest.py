"""Places to examine, some of them ill."""

from __future__ import annotations

from tests.e2e.conftest import (  # noqa: F401  # fixtures
    local,
    on_server,
    place,
    s3,
    s3_application,
    s3_server,
    servers,
)
