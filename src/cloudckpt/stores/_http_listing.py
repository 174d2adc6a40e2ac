"""Whether a page of a listing is what was asked for, for the stores that speak HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cloudckpt.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from cloudckpt.stores._http_reading import Session

_MOST_CHARACTERS = 200


def check_names(session: Session, operation: str, *, prefix: str, names: Iterable[object]) -> None:
    """Raise `UnsupportedOperationError` for a name that does not begin with `prefix`.

    Whoever lists in order to remove would remove what is somebody else's.
    """
    for name in names:
        if not isinstance(name, str) or not name.startswith(prefix):
            raise session.error(
                UnsupportedOperationError,
                operation,
                prefix,
                f"a listing of what begins so holds {ascii(name)[:_MOST_CHARACTERS]} too. The store, or a proxy before "
                f"it, does not look at prefixes. Use another one.",
            )


def check_goes_on(session: Session, operation: str, *, prefix: str, token: object, last_token: object) -> None:
    """Raise `UnsupportedOperationError` where the next page is the one that was just read: there would be no end."""
    if token == last_token:
        what = "the listing goes round in circles: the store, or a proxy before it, does not look at page tokens."
        raise session.error(UnsupportedOperationError, operation, prefix, what)
