"""Real text: the licence at the root of this repository, which is the same on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"


def read_text() -> torch.Tensor:
    """The text, one byte per element."""
    return torch.frombuffer(bytearray(LICENCE.read_bytes()), dtype=torch.uint8)


def fixed_batch(text_bytes: torch.Tensor, *, num_rows: int, context: int) -> torch.Tensor:
    """The first rows of the text, to compare models on."""
    return text_bytes[: num_rows * context].view(num_rows, context).long()


class Sampler:
    """Draws training batches, and remembers in its state how far it has come.

    All ranks draw the same global batch and each takes its rows of it. So one copy of the state serves
    every rank, and a checkpoint can be continued on another number of ranks.
    """

    def __init__(self, text_bytes: torch.Tensor, *, seed: int, context: int, rows_per_batch: int) -> None:
        self._text_bytes = text_bytes
        self._context = context
        self._rows_per_batch = rows_per_batch
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, *, rank: int, world_size: int) -> torch.Tensor:
        """Draw this rank's rows of the next batch, of context + 1 bytes each."""
        last_start = len(self._text_bytes) - self._context - 1
        starts = torch.randint(last_start, (self._rows_per_batch,), generator=self._generator)
        mine = starts[rank::world_size].tolist()
        return torch.stack([self._text_bytes[start : start + self._context + 1].long() for start in mine])

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the sequence of random numbers."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._generator.set_state(state_dict["generator"])
