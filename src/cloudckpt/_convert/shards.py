"""Tensors dealt out to files in Hugging Face's layout, with its index. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cloudckpt._plan.layout import Entry, Layout, lay_out, storage_order
from cloudckpt._plan.packing import pack

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file."""

    name: str
    entries: tuple[Entry, ...]
    """As they are stored."""
    layout: Layout


def shards_of(entries: Sequence[Entry], *, max_shard_bytes: int) -> list[Shard]:
    """Files of at most `max_shard_bytes` of tensors each, but for a larger tensor, which gets one of its own.

    The entries keep their order from file to file, as in ``huggingface_hub.split_torch_state_dict_into_shards``. In
    each file, the largest elements come first, so that all are aligned.
    """
    groups = pack([entry.num_bytes for entry in entries], object_bytes=max_shard_bytes) or [range(0)]
    shards = []
    for number, group in enumerate(groups, start=1):
        members = [entries[i] for i in group]
        members = [members[i] for i in storage_order(members)]
        name = SINGLE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shards.append(Shard(name=name, entries=tuple(members), layout=lay_out(members)))
    return shards


def index_of(shards: Sequence[Shard]) -> bytes:
    """The index that ``transformers`` and torch's reader expect beside several files."""
    weight_map = {entry.fqn: shard.name for shard in shards for entry in shard.entries}
    total_bytes = sum(entry.num_bytes for shard in shards for entry in shard.entries)
    document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"
