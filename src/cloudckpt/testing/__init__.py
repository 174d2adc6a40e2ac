"""Tools for tests of stores and jobs: the contract of stores, fault injection, and local servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudckpt.testing.contract import StoreContract

__all__ = ["StoreContract"]


def __getattr__(name: str) -> Any:
    # The contract imports pytest; the servers do not need it.
    if name == "StoreContract":
        from cloudckpt.testing.contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
