"""The servers of the integration tests, for longer."""

from __future__ import annotations

from tests.integration.conftest import rgw, use

__all__ = ["rgw", "use"]
