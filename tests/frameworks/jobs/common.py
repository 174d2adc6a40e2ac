"""What the jobs share."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn

FEATURES = 16


class Noisy(nn.Module):
    """A small model that draws random numbers in training, so that a resume has to restore the generators."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(32, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))


def data(num_samples: int = 64) -> torch.Tensor:
    """Always the same."""
    return torch.randn(num_samples, FEATURES, generator=torch.Generator().manual_seed(7))


def tell(result: Any) -> None:
    """To the test, and end: torch may abort while the interpreter shuts down."""
    if int(os.environ.get("RANK", "0")) == 0:
        print("RESULT " + json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0)
