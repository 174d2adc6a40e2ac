"""What users test their stores and jobs with: the stores' contract, and servers that need no network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudckpt.testing.contract import StoreContract

__all__ = ["StoreContract"]


def __getattr__(name: str) -> Any:
    # The contract needs pytest, which the servers do not.
    if name == "StoreContract":
        from cloudckpt.testing.contract import StoreContract  # noqa: PLC0415

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
