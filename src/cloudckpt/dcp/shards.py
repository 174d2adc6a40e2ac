"""Names shards that do not make up their tensors, for the error of a save."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from cloudckpt.io.boxes import Box, intersect

_MAX_NAMES = 5
_MAX_SHARDS = 1000
_MAX_POINTS = 10_000


class _Shard(NamedTuple):
    rank: int
    box: Box

    def __str__(self) -> str:
        return f"{_shown(self.box)} of rank {self.rank}"


def describe_shards(plans: Sequence[SavePlan], entries: Mapping[str, object]) -> str:
    """Return a clause for each of the first `entries` whose shards overlap, or leave a part out; empty if none does."""
    clauses = []
    for fqn, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        shards = [
            _Shard(rank, Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)))
            for rank, plan in enumerate(plans)
            for item in plan.items
            if item.index.fqn == fqn and item.tensor_data is not None
        ][:_MAX_SHARDS]
        problem = _find_problem(tuple(entry.size), shards, has_others=len(plans) > 1)
        if problem is not None:
            held = ", ".join(map(str, shards[:_MAX_NAMES])) + (", …" if len(shards) > _MAX_NAMES else "")
            clauses.append(f"{fqn!r} of shape {list(entry.size)} {problem} (it has {held})")
    more = f"; and {len(clauses) - _MAX_NAMES} more" if len(clauses) > _MAX_NAMES else ""
    return "; ".join(clauses[:_MAX_NAMES]) + more


def _find_problem(shape: tuple[int, ...], shards: Sequence[_Shard], *, has_others: bool) -> str | None:
    for shard in shards:
        if any(
            at + length > size for at, length, size in zip(shard.box.offsets, shard.box.lengths, shape, strict=True)
        ):
            return f"ends before {shard}"
    for one, other in itertools.combinations(shards, 2):
        if (common := intersect(one.box, other.box)) is not None:
            return f"has {_shown(common)} on rank {one.rank} and on rank {other.rank}"
    if has_others:
        for point in itertools.islice(_corners(shape, shards), _MAX_POINTS):
            if not any(_holds(shard.box, point) for shard in shards):
                return f"has no shard with the element {list(point)}"
    return None


def _corners(shape: tuple[int, ...], shards: Sequence[_Shard]) -> Iterator[tuple[int, ...]]:
    """Yield the points of which one is in no shard, if the shards leave anything out."""
    boxes = [shard.box for shard in shards]
    ends = [{0, *(box.offsets[dim] + box.lengths[dim] for box in boxes)} for dim in range(len(shape))]
    return itertools.product(
        *(sorted(at for at in found if at < size) for found, size in zip(ends, shape, strict=True))
    )


def _holds(box: Box, point: tuple[int, ...]) -> bool:
    return all(at <= one < at + length for at, length, one in zip(box.offsets, box.lengths, point, strict=True))


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{at}:{at + length}' for at, length in zip(box.offsets, box.lengths, strict=True))}]"
