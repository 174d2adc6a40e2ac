"""Find entries of which several ranks hold copies that differ, by fingerprints that travel with the ranks' plans.

See ``docs/design/031-replicas.md``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import logging
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from cloudckpt._torch_compat import ShardedTensor, local_tensor_of
from cloudckpt.errors import StateDictMismatchError, UnsupportedValueError
from cloudckpt.format.nesting import PLAIN_TENSORS, Nesting, answers_planners
from cloudckpt.io.checksum import compute_crc32c
from cloudckpt.options import KIB, MIB
from cloudckpt.tensors.body import PieceBody, new_piece, new_side_streams
from cloudckpt.tensors.copying import Staging
from cloudckpt.tensors.host_memory import new_arena
from cloudckpt.tensors.tensor_bytes import plain_tensor, view_memory, viewable_address

CompareReplicas: TypeAlias = Literal["sample", "whole", "never"]

_WHOLE_BYTES = 16 * KIB  # of a tensor that is compared whole
_WINDOW_BYTES = KIB
_ALIGNMENT_BYTES = 16  # the size of the largest element
_BYTES_PER_WINDOW = 4 * MIB
_MIN_WINDOWS, _MAX_WINDOWS = 3, 256  # begin, middle and end
_PART_BYTES = 16 * MIB  # copied at once, where a tensor cannot be read in place
_EXTRA_STATE = "_extra_state"  # of torch's modules, such as the scales that a rank's own data gave
_MAX_RANKS = 8

_log = logging.getLogger("cloudckpt")


class Rule(enum.IntEnum):
    """The consequence of copies that differ."""

    NOT_COMPARED = 0
    """One rank saves it. This is also the rule of an entry without a fingerprint."""
    BUFFER = 1
    """The lowest rank saves it: training makes the buffers of a model differ."""
    MAY_DIFFER = 2
    """The lowest rank saves it, with a warning."""
    MUST_AGREE = 3
    """An error."""
    COMMON_TO_SLICES = 4
    """An error that tells how such a part of a tensor comes to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronizedNames:
    """The names whose tensors training keeps equal on all ranks: those of live models and optimizers.

    Buffers are exceptions. A model under DDP gets those of rank 0 before its forward pass, which then changes them by
    the batch of each rank.
    """

    keys: frozenset[str] = frozenset()
    """The first steps of the names."""
    exceptions: frozenset[str] = frozenset()
    """Names of entries and of containers."""

    def find_rule(self, name: str) -> Rule:
        """Return the rule for copies of the tensor of this name."""
        if not self.keys or name.partition(".")[0] not in self.keys:
            return Rule.MAY_DIFFER
        container = name.rpartition(".")[0]  # of a part of a tensor that consists of others
        is_exception = name in self.exceptions or container in self.exceptions or _EXTRA_STATE in name
        return Rule.BUFFER if is_exception else Rule.MUST_AGREE


class Copy(NamedTuple):
    """An item in the plan of one of the ranks that hold it."""

    rank: int
    item: WriteItem
    fingerprint: int
    """A `Rule`, shifted by 32 bits, and the CRC32C of the bytes that are compared."""


def take_fingerprints(
    items: Sequence[WriteItem],
    state_dict: Mapping[str, Any],
    *,
    compare: CompareReplicas,
    synchronized: SynchronizedNames,
    common: Sequence[str],
    uri: str,
    pending: Staging | None,
) -> array[int]:
    """Return a `Copy.fingerprint` for each item; 0 for a value, a number, and a tensor that this rank alone holds.

    `common` are names of tensors that are always compared whole. Memory that is still `pending` is waited for, as far
    as it is compared.
    """
    fingerprints = array("Q", bytes(8 * len(items)))
    common_names = frozenset(common)
    later: list[tuple[int, torch.Tensor]] = []
    for position, item in enumerate(items):
        rule = _rule_of(item, compare, synchronized, common_names)
        tensor, address = _find_readable(item, state_dict, uri) if rule else (None, 0)
        if tensor is None:
            continue
        fingerprints[position] = rule << 32
        is_whole = compare == "whole" or rule is Rule.COMMON_TO_SLICES
        windows = windows_of(tensor.nbytes, is_whole=is_whole)
        if address:
            fingerprints[position] |= _checksum_in_place(tensor, address, windows, pending)
        elif is_whole or not tensor.is_contiguous():
            with _body_of([tensor], pending) as body:
                fingerprints[position] |= _checksum_of(body, windows)
        elif tensor.nbytes:
            later.append((position, tensor))
    for position, checksum in _sample_devices(later, pending):
        fingerprints[position] |= checksum
    return fingerprints


def _rule_of(
    item: WriteItem, compare: CompareReplicas, synchronized: SynchronizedNames, common: Collection[str]
) -> Rule:
    fqn, data = item.index.fqn, item.tensor_data
    if fqn in common:
        return Rule.COMMON_TO_SLICES
    if compare == "never" or data is None or not data.size:
        # An optimizer has a number for each parameter. To wait for them all would be to wait for the whole snapshot.
        return Rule.NOT_COMPARED
    return synchronized.find_rule(fqn)


def _find_readable(item: WriteItem, state_dict: Mapping[str, Any], uri: str) -> tuple[torch.Tensor | None, int]:
    """Return the tensor that `item` stores, if other ranks may hold it too, and its address if it can be read there."""
    held = _find_copied(item, state_dict.get(item.index.fqn))
    if held is None:
        return None, 0
    if type(held) in PLAIN_TENSORS and (address := viewable_address(held)):
        return held, address
    try:
        return plain_tensor(held, item.index.fqn, uri=uri), 0
    except UnsupportedValueError:  # the rank that saves it raises it
        return None, 0


def _find_copied(item: WriteItem, held: Any) -> torch.Tensor | None:
    """Return the tensor that `item` stores, if other ranks may hold it too."""
    data = item.tensor_data
    if data is None or not isinstance(held, torch.Tensor):
        return None
    if isinstance(held, ShardedTensor):
        return _find_copied_shard(held, item.index)
    if answers_planners(held) or (isinstance(held, DTensor) and answers_planners(local_tensor_of(held))):
        return None
    if type(held) in PLAIN_TENSORS:
        return held
    if isinstance(held, DTensor):
        sizes = held.device_mesh.shape
        if not any(one.is_replicate() and size > 1 for one, size in zip(held.placements, sizes, strict=True)):
            return None
        held = local_tensor_of(held)
    return held if held.shape == data.chunk.sizes else None


def _find_copied_shard(held: ShardedTensor, index: MetadataIndex) -> torch.Tensor | None:
    """Return the shard of a ``ShardedTensor`` that other ranks hold too, as with HYBRID_SHARD of torch's first FSDP."""
    group = getattr(held, "_process_group", None)
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return None
    offsets = tuple(index.offset or ())
    return next((one.tensor for one in held.local_shards() if tuple(one.metadata.shard_offsets) == offsets), None)


@functools.lru_cache(maxsize=1024)
def windows_of(num_bytes: int, *, is_whole: bool = False) -> tuple[tuple[int, int], ...]:
    """Return the ranges ``[begin, end)`` that are compared of a tensor of `num_bytes`, in row-major order."""
    if is_whole or num_bytes <= _WHOLE_BYTES:
        return tuple((begin, min(begin + _PART_BYTES, num_bytes)) for begin in range(0, num_bytes, _PART_BYTES))
    number = min(max(num_bytes // _BYTES_PER_WINDOW, _MIN_WINDOWS), _MAX_WINDOWS)
    last = (num_bytes - _WINDOW_BYTES) // _ALIGNMENT_BYTES
    begins = [index * last // (number - 1) * _ALIGNMENT_BYTES for index in range(number)]
    return (*((begin, begin + _WINDOW_BYTES) for begin in begins[:-1]), (begins[-1], num_bytes))


def _checksum_in_place(
    tensor: torch.Tensor, address: int, windows: Sequence[tuple[int, int]], pending: Staging | None
) -> int:
    memory, checksum = view_memory(address, tensor.nbytes, tensor), 0
    for begin, end in windows:
        if pending is not None:
            pending.wait(address + begin, end - begin)
        checksum = compute_crc32c(memory[begin:end], checksum)
    return checksum


@contextlib.contextmanager
def _body_of(contents: Sequence[torch.Tensor], pending: Staging | None) -> Iterator[PieceBody]:
    """Give the bytes of tensors that cannot be read in place, back to back. No memory of a GPU is used for it."""
    ends = list(itertools.accumulate(content.nbytes for content in contents))
    pieces = [new_piece(content, begin=end - content.nbytes) for content, end in zip(contents, ends, strict=True)]
    with contextlib.closing(new_arena(budget_bytes=_PART_BYTES)) as arena:
        yield PieceBody(pieces, arena, pending, new_side_streams(contents))


def _checksum_of(body: PieceBody, windows: Sequence[tuple[int, int]]) -> int:
    checksum = 0
    for begin, end in windows:
        with body.open(begin, end) as views:
            for view in views:
                checksum = compute_crc32c(view, checksum)
    return checksum


def _sample_devices(tensors: Sequence[tuple[int, torch.Tensor]], pending: Staging | None) -> Iterator[tuple[int, int]]:
    """Give each position with the checksum of its tensor's windows.

    The copies from a device are queued together and waited for once, which takes a tenth of the time.
    """
    group: list[tuple[int, list[torch.Tensor]]] = []
    num_bytes = 0
    for number, (position, tensor) in enumerate(tensors, 1):
        memory = tensor.view(-1).view(torch.uint8)
        samples = [memory[begin:end] for begin, end in windows_of(tensor.nbytes)]
        group.append((position, samples))
        num_bytes += sum(map(len, samples))
        if num_bytes < _PART_BYTES and number < len(tensors):
            continue
        with (
            _body_of([sample for _, of_one in group for sample in of_one], pending) as body,
            body.open(0, body.size_bytes) as views,
        ):
            left = iter(views)
            for at, of_one in group:
                checksum = 0
                for view in itertools.islice(left, len(of_one)):
                    checksum = compute_crc32c(view, checksum)
                yield at, checksum
        group, num_bytes = [], 0


def copies_of_items(plans: Sequence[SavePlan]) -> dict[MetadataIndex, list[Copy]]:
    """Return the copies of each item, in the order of their ranks."""
    copies_of: dict[MetadataIndex, list[Copy]] = {}
    for rank, plan in enumerate(plans):
        nesting = plan.planner_data
        fingerprints: Sequence[int] = nesting.fingerprints if isinstance(nesting, Nesting) else ()
        if len(fingerprints) != len(plan.items):
            fingerprints = [0] * len(plan.items)
        for item, fingerprint in zip(plan.items, fingerprints, strict=True):
            copies_of.setdefault(item.index, []).append(Copy(rank, item, fingerprint))
    return copies_of


def are_equal(copies: Sequence[Copy]) -> bool:
    """Return True if all copies were compared, and found to be equal."""
    first = copies[0].fingerprint
    return first != 0 and all(copy.fingerprint == first for copy in copies)


def check_replicas(copies_of: Mapping[MetadataIndex, Sequence[Copy]], *, uri: str) -> None:
    """Raise `StateDictMismatchError` if copies differ that must agree. Warn once of others that do."""
    unexpected: list[Sequence[Copy]] = []
    for copies in copies_of.values():
        if len(copies) == 1 or not _differ(copies):
            continue
        rule = max(copy.fingerprint >> 32 for copy in copies)
        fqn = copies[0].item.index.fqn
        if rule == Rule.COMMON_TO_SLICES:
            raise StateDictMismatchError(
                f"{fqn!r} differs between the ranks that save {uri}, and all slices of a tensor have it in "
                "common. Nothing was written. Quantize the tensor before it is sharded, or with a scale for each "
                "row, or save it dequantized",
                uri=uri,
            )
        if rule == Rule.MUST_AGREE:
            raise StateDictMismatchError(
                f"ranks hold different values under one name in {uri}: {_describe(copies)}. Nothing was written. Wrap "
                "the model in DistributedDataParallel, or broadcast its state, or give each rank a name or a URI of "
                "its own; if the ranks differ on purpose, Options(compare_replicas='never') saves the lowest rank's",
                uri=uri,
            )
        if rule == Rule.MAY_DIFFER:
            unexpected.append(copies)
    if unexpected:
        _warn_once(_describe(unexpected[0]), len(unexpected), uri)


def _differ(copies: Sequence[Copy]) -> bool:
    """Return True if two copies that were compared differ."""
    return len({copy.fingerprint & 0xFFFFFFFF for copy in copies if copy.fingerprint}) > 1


def _describe(copies: Sequence[Copy]) -> str:
    first = next(copy for copy in copies if copy.fingerprint)
    checksum = first.fingerprint & 0xFFFFFFFF
    others = [copy.rank for copy in copies if copy.fingerprint and copy.fingerprint & 0xFFFFFFFF != checksum]
    return f"{first.item.index.fqn!r} of {ranks_text(others)} differs from that of rank {first.rank}"


_warned: set[str] = set()


def _warn_once(description: str, number: int, uri: str) -> None:
    if description in _warned:
        return
    _warned.add(description)
    more = f", and so for {number - 1} more" if number > 1 else ""
    _log.warning(
        "%s in %s%s. Of each such entry the checkpoint has the lowest rank's. If each rank's counts, save it under a "
        "name for each rank",
        description,
        uri,
        more,
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return a text that names the ranks, or the first of them."""
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_RANKS]))}{more}"
