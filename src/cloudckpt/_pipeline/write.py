"""One rank's write items, from the plan to objects on the store."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt._commit.attempt import data_key, data_prefix
from cloudckpt._manifest.receipts import ItemReceipts, ObjectReceipt
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.sizes import part_bytes_of
from cloudckpt._plan.layout import lay_out, storage_order
from cloudckpt._plan.packing import pack
from cloudckpt._stage.body import Filled, PieceBody, piece_of, side_streams
from cloudckpt._stage.items import StagedItem, estimated_bytes, known_tensors_of, staged
from cloudckpt._stage.pinned import new_arena
from cloudckpt._stage.ties import staged_ties, ties_by_planner
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt._stage.values import check_values
from cloudckpt._transfer.resume import find_leftovers
from cloudckpt._transfer.upload import UploadSession
from cloudckpt.options import MIB

# Nothing of an object can be sent before all of its tensors have their places; meanwhile the one before it goes out.
_MAX_TENSORS_PER_OBJECT = 4096
# Transformed tensors have to be held until their object's layout is known.
_MAX_TRANSFORMED_OBJECT_BYTES = 256 * MIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What `write_items` did."""

    results: list[WriteResult]
    """One for each object, with what it holds: torch looks at none of it, and there can be many items."""
    objects: list[ObjectReceipt]
    num_reused_bytes: int
    """Of the objects' bytes, those that were there already."""


def write_items(
    context: Context,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    *,
    attempt: str,
    resumed: Sequence[str],
    transforms: WriteTransforms,
    filled: Filled | None = None,
) -> Written:
    """Upload `items`, all or none, to fresh keys under `attempt`; but for what `resumed` attempts have left of them.

    Memory that is still being `filled` is read part by part, as it is there.
    """
    options = context.options
    check_values(items, known_tensors_of(planner), uri=context.uri)  # before anything is sent
    # Where objects are written through a stream, a process that was thought dead could still be writing to them.
    earlier = [data_prefix(name, context.rank) for name in resumed] if context.store.capabilities.multipart else []
    leftovers = find_leftovers(context.store, context.retrier, earlier)
    ties = {} if transforms else ties_by_planner(items, planner)
    sizes_bytes = [0 if i in ties else estimated_bytes(item) for i, item in enumerate(items)]
    num_bytes = sum(sizes_bytes)
    placed: list[Callable[..., ItemReceipts]] = []
    with (
        contextlib.closing(new_arena(budget_bytes=options.staging_bytes)) as arena,
        UploadSession(
            context.store,
            context.retrier,
            cleaner=context.new_retrier(),
            hedger=context.hedger,
            part_bytes=options.part_bytes,
            tile_bytes=options.tile_bytes,
            resumable=options.resume,
            on_part=lambda key, num_bytes: context.emit("save.part_uploaded", key=key, num_bytes=num_bytes),
            on_completing=lambda key: context.emit("save.completing", key=key),
            on_object=lambda key, num_bytes: context.emit("save.object_uploaded", key=key, num_bytes=num_bytes),
        ) as session,
    ):
        # Object by object, so that what a planner makes while resolving is not all held at once.
        for number, group in enumerate(_groups(context, items, sizes_bytes, ties, transforms)):
            in_object = list(staged(group, planner, transforms, uri=context.uri, filled=filled))
            in_object = [in_object[i] for i in storage_order([item.entry for item in in_object])]
            same_as = staged_ties(in_object)
            stored = [item for i, item in enumerate(in_object) if i not in same_as]
            layout = lay_out([item.entry for item in stored])
            streams = side_streams(item.content for item in stored)
            pieces = [piece_of(memoryview(layout.header), begin=0)]
            pieces += [
                piece_of(item.content, begin=begin, address=item.address)
                for item, begin in zip(stored, layout.begins, strict=True)
            ]
            placed.append(_receipts_of(in_object, _begins_of_all(layout.begins, same_as, len(in_object))))
            del in_object, stored  # the body holds what it still needs, and only until it is sent
            key = data_key(attempt, context.rank, number)
            found = leftovers.get(key.removeprefix(data_prefix(attempt, context.rank)), [])
            body = PieceBody(pieces, arena, filled, streams)
            part_bytes = part_bytes_of(context, num_bytes, are_copied=2 * body.copied_bytes > body.size_bytes)
            session.submit(key, body, found, part_bytes=part_bytes)
        objects = session.finish()
    results = [
        WriteResult(
            index=MetadataIndex(stored_in.key),
            size_in_bytes=stored_in.size_bytes,
            storage_data=receipts_in(stored_in=stored_in, tile_bytes=options.tile_bytes),
        )
        for receipts_in, stored_in in zip(placed, objects, strict=True)
    ]
    return Written(results=results, objects=objects, num_reused_bytes=session.num_reused_bytes)


def _groups(
    context: Context,
    items: Sequence[WriteItem],
    sizes_bytes: Sequence[int],
    ties: Mapping[int, int],
    transforms: WriteTransforms,
) -> Iterator[list[WriteItem]]:
    """The items of each object, those of one memory in one."""
    options = context.options
    object_bytes = options.object_bytes
    if transforms:
        object_bytes = min(object_bytes, _MAX_TRANSFORMED_OBJECT_BYTES)
    if not context.store.capabilities.multipart:
        # An object is then one part: it is staged whole, and only several of them go out side by side.
        share_bytes = options.staging_bytes // context.connections
        object_bytes = min(object_bytes, max(options.part_bytes, share_bytes))
    firsts = [i for i in range(len(items)) if i not in ties]
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for follower, first in ties.items():
        followers[first].append(follower)
    sizes_of_firsts = [sizes_bytes[i] for i in firsts]
    for group in pack(sizes_of_firsts, object_bytes=object_bytes, max_tensors=_MAX_TENSORS_PER_OBJECT):
        yield [items[j] for i in group for j in (firsts[i], *followers.get(firsts[i], ()))]


def _begins_of_all(begins: Sequence[int], same_as: Mapping[int, int], num_items: int) -> Sequence[int]:
    """Where each item's bytes begin, from the `begins` of those that are the same as no other before them."""
    if not same_as:
        return begins
    of_stored = iter(begins)
    found: list[int] = []
    for position in range(num_items):
        found.append(found[same_as[position]] if position in same_as else next(of_stored))
    return found


def _receipts_of(in_object: Sequence[StagedItem], begins: Sequence[int]) -> Callable[..., ItemReceipts]:
    """What remains of an object's items once they are laid out; it asks for the object's own receipt (`stored_in`)."""
    return functools.partial(
        ItemReceipts,
        fqns=[item.entry.fqn for item in in_object],
        offsets=[item.index_offsets for item in in_object],
        begins=array("q", begins),
        ends=array("q", [begin + item.entry.num_bytes for item, begin in zip(in_object, begins, strict=True)]),
        dtypes=[item.dtype for item in in_object],
        lengths=[item.lengths for item in in_object],
        transforms=[item.transforms for item in in_object],
    )
