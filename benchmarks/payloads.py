"""Payloads to save and load: tensors by name and shape. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

KIB = 1024
MIB = 1024 * KIB
ITEM_BYTES = 4
"""All tensors are float32."""
NUM_COLUMNS = 1024
"""Tensors are matrices, as weights are: of a DTensor, torch's planner makes an index as long as the sharded side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """So many tensors of one shape: ``<name>.0``, ``<name>.1``, …; scalars are the same on every rank."""

    name: str
    count: int
    shape: tuple[int, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor, over all ranks."""
        return ITEM_BYTES * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A state dict. On several ranks each tensor is sharded by rows."""

    name: str
    tensors: tuple[Tensors, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(group.count * group.tensor_bytes for group in self.tensors)

    @property
    def num_tensors(self) -> int:
        return sum(group.count for group in self.tensors)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Payload:
        """From what `dataclasses.asdict` makes of it, after a way through JSON."""
        groups = (Tensors(**{**group, "shape": tuple(group["shape"])}) for group in fields["tensors"])
        return cls(name=fields["name"], tensors=tuple(groups))


def uniform(num_tensors: int, tensor_bytes: int) -> Payload:
    """Tensors of one size, named after it: ``64x32MiB``."""
    num_rows, rest = divmod(tensor_bytes, ITEM_BYTES * NUM_COLUMNS)
    if rest or not num_rows:
        raise ValueError(f"{tensor_bytes} bytes are not whole rows of {ITEM_BYTES * NUM_COLUMNS}")
    size = f"{tensor_bytes // MIB}MiB" if tensor_bytes % MIB == 0 else f"{tensor_bytes // KIB}KiB"
    group = Tensors(name="weight", count=num_tensors, shape=(num_rows, NUM_COLUMNS))
    return Payload(name=f"{num_tensors}x{size}", tensors=(group,))


def transformer(
    name: str = "transformer", *, num_layers: int = 12, width: int = 1024, hidden: int = 2816, vocabulary: int = 32000
) -> Payload:
    """A decoder as Llama's, its weights, norms and embeddings, with Adam's two moments and step for each of them."""
    layer = (
        *((f"attention.{projection}", (width, width)) for projection in ("q", "k", "v", "o")),
        ("mlp.gate", (hidden, width)),
        ("mlp.up", (hidden, width)),
        ("mlp.down", (width, hidden)),
        ("attention_norm", (width,)),
        ("mlp_norm", (width,)),
    )
    weights = [
        ("embedding", (vocabulary, width)),
        *((f"layers.{index}.{part}", shape) for index in range(num_layers) for part, shape in layer),
        ("norm", (width,)),
    ]
    model = [Tensors(name=f"model.{weight}", count=1, shape=shape) for weight, shape in weights]
    optimizer = [
        Tensors(name=f"optimizer.{weight}.{state}", count=1, shape=shape if state != "step" else ())
        for weight, shape in weights
        for state in ("exp_avg", "exp_avg_sq", "step")
    ]
    return Payload(name=name, tensors=(*model, *optimizer))
