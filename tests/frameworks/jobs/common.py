"""Helpers that the jobs share."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import nn

import cloudckpt

FEATURES = 16
DOCUMENT = Path(__file__).parents[3] / "docs" / "frameworks.md"
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))

# A collection in one thread while another computes may clear the weak reference of a live DDP, whose next backward pass
# then fails: https://github.com/Lightning-AI/pytorch-lightning/issues/20706. The jobs are short, and need none.
gc.disable()


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


def places() -> Iterator[tuple[str, str]]:
    """The name of each place in turn and what to save under there, while the environment leads to it."""
    for place in json.loads(os.environ["PLACES"]):
        os.environ.update(place["environment"])
        yield place["name"], place["root"]
        cloudckpt.close()
        for protocol in ("s3", "gs"):
            fsspec.get_filesystem_class(protocol).clear_instance_cache()  # they hold on to an endpoint
        for name in place["environment"]:
            del os.environ[name]


def tell(place: str, result: Any) -> None:
    """To the test, in a file: what several processes print comes out as one text, in pieces of lines."""
    if int(os.environ.get("RANK", "0")) == 0:
        with Path(os.environ["RESULTS"]).open("a") as file:
            print(json.dumps({"place": place, "result": result}), file=file)


def end() -> None:
    """At once: torch may abort while the interpreter shuts down."""
    sys.stdout.flush()
    os._exit(0)


def begin_anew() -> None:
    """Let Accelerate forget what it was told before, which it keeps for all of a process."""
    from accelerate.state import AcceleratorState  # noqa: PLC0415  # of two jobs alone

    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def shard_on_cpus() -> None:
    """Have Accelerate shard here as it does on accelerators, for which it keeps that; the rest of it takes CPUs."""
    from accelerate.state import AcceleratorState, PartialState  # noqa: PLC0415  # of two jobs alone
    from accelerate.utils import DistributedType  # noqa: PLC0415  # as above

    make = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        is_new = not AcceleratorState._shared_state
        make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if is_new and fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.device = PartialState._shared_state["device"] = torch.device("cpu")  # FSDP1 takes no cpu:0

    AcceleratorState.__init__ = init
