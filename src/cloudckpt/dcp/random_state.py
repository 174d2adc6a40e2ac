"""The state of the random generators of a process."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomState(NamedTuple):
    """State of this process's random generators: Python's, numpy's, torch's, and that of the current GPU."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    devices: list[torch.Tensor]

    @classmethod
    def capture(cls) -> RandomState:
        """Return the current state of the generators; that of a GPU only if this process uses one."""
        kind, keys, *rest = np.random.get_state()
        devices = [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        numpy = (kind, torch.tensor(np.asarray(keys).astype(np.int64)), *rest)
        return cls(python=random.getstate(), numpy=numpy, cpu=torch.get_rng_state(), devices=devices)

    def restore(self) -> None:
        """Set the generators to this state. States of several GPUs count only if this machine has as many."""
        random.setstate(self.python)
        kind, keys, *rest = self.numpy
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(self.cpu)
        if self.devices and torch.cuda.is_available():
            if len(self.devices) == 1:
                torch.cuda.set_rng_state(self.devices[0])
            elif len(self.devices) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(self.devices)
