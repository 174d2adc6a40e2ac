"""State dicts whose every byte follows from one line of text, so that whoever loads one can tell which save it is.

The text lies in the checkpoint, too. A load that mixes two saves, or that changes one bit of one, holds some tensor
that is not what its text says.
"""

from __future__ import annotations

import hashlib

import torch

_TEXT_BYTES = 128
_BIAS_BYTES = 1000
SMALL_BYTES = 192 * 1024
LARGE_BYTES = 5 * 1024 * 1024 + 64 * 1024
"""More than one part of a multipart upload."""


class MixedError(AssertionError):
    """What was loaded is no state that was ever saved."""


def state_of(identity: str, *, weights_bytes: int) -> dict[str, torch.Tensor]:
    """The state that `identity` stands for."""
    text = identity.encode()
    assert len(text) <= _TEXT_BYTES, identity
    return {
        "identity": torch.frombuffer(bytearray(text.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8),
        "weights": _derived(identity, "weights", weights_bytes),
        "bias": _derived(identity, "bias", _BIAS_BYTES),
    }


def empty_state(*, weights_bytes: int) -> dict[str, torch.Tensor]:
    """What to load one into."""
    sizes = {"identity": _TEXT_BYTES, "weights": weights_bytes, "bias": _BIAS_BYTES}
    return {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}


def identity_of(state: dict[str, torch.Tensor]) -> str:
    """Which save it is. Raises `MixedError` unless every byte is that save's."""
    identity = state["identity"].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    expected = state_of(identity, weights_bytes=state["weights"].numel())
    wrong = [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])]
    if wrong:
        raise MixedError(f"what was loaded calls itself {identity!r}, but {', '.join(wrong)} is not of it")
    return identity


def _derived(identity: str, name: str, size_bytes: int) -> torch.Tensor:
    digest = hashlib.shake_128(f"{identity} {name}".encode()).digest(size_bytes)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
