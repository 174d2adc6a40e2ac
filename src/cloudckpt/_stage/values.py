"""Python objects from a store, without running code from it (G6)."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from cloudckpt.errors import UnsafePickleError, UnsupportedValueError

# Beyond torch's own list of harmless types; more come from torch.serialization.add_safe_globals.
_HARMLESS = (io.BytesIO,)


def loaded_safely(stored: bytes | bytearray, fqn: str, *, uri: str, is_verified: bool) -> Any:
    """The object that ``torch.save`` wrote, under ``weights_only=True``.

    Raises `UnsafePickleError` where that is refused, `UnsupportedValueError` where no such object can be made.
    """
    try:
        # For good: taking it off the list again would also take it off for others who had put it there.
        torch.serialization.add_safe_globals(list(_HARMLESS))
        return torch.load(io.BytesIO(stored), weights_only=True)
    except pickle.UnpicklingError:
        raise UnsafePickleError(
            f"{fqn!r} of {uri} was not loaded: unpickling it could run any code (it uses {unsafe_names(stored)}). If "
            "you trust who wrote it, pass allow_pickle=True; or allow these names with "
            "torch.serialization.add_safe_globals",
            uri=uri,
        ) from None
    except Exception as error:  # the code of a class can raise anything
        # Its bytes are those that were saved: they were compared before, unless the caller gave that up.
        doubt = "" if is_verified else ", or it is damaged, which Options(verify=False) does not tell"
        raise UnsupportedValueError(
            f"{fqn!r} of {uri} cannot be made here of what was saved ({type(error).__name__}: {error}): its class has "
            f"changed since, or it holds tensors of a device that this machine lacks{doubt}. Leave it out, or load it "
            "where it was saved",
            uri=uri,
        ) from error


def unsafe_names(stored: bytes | bytearray | str) -> str:
    """What a pickle, or the one in a file, would call; found without calling it."""
    file = stored if isinstance(stored, str) else io.BytesIO(stored)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # noqa: BLE001  # made for messages; what it cannot read, it cannot name
        names = []
    return ", ".join(names) or "what torch's weights_only unpickler does not admit"


def harmless_copy(stored: bytes | bytearray, fqn: str, *, uri: str, is_verified: bool) -> io.BytesIO:
    """The same object in bytes that were made here, for a planner that unpickles whatever it is given."""
    value = loaded_safely(stored, fqn, uri=uri, is_verified=is_verified)
    copy = io.BytesIO()
    torch.save(value, copy)
    copy.seek(0)
    return copy
