"""Find entries whose copies on several ranks differ, by fingerprints that the ranks send with their plans.

See ``docs/design/031-replicas.md``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import itertools
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from cloudckpt._messages import name_ranks
from cloudckpt._this_process import is_first_warning
from cloudckpt._torch_compat import ShardedTensor, local_tensor_of
from cloudckpt.errors import StateDictMismatchError, UnsupportedValueError
from cloudckpt.format.nesting import LEAVES, PLAIN_TENSORS, Nesting, has_planner_hooks
from cloudckpt.options import KIB, MIB
from cloudckpt.stores.base import crc32c_of
from cloudckpt.tensors.data_objects import PieceBody, new_piece, new_side_streams
from cloudckpt.tensors.host_memory import new_arena
from cloudckpt.tensors.snapshot import Snapshot
from cloudckpt.tensors.tensor_bytes import ALIGNMENT_BYTES, plain_tensor, view_memory, viewable_address

CompareReplicas: TypeAlias = Literal["sample", "whole", "never"]
ItemKey: TypeAlias = tuple[str, torch.Size | None]

_WHOLE_BYTES = 16 * KIB  # largest tensor that is compared whole
_WINDOW_BYTES = KIB
_LINE_BYTES = 64  # size of each window if there are few: a cache line
_WORD_BYTES = 8
_BYTES_PER_WINDOW = 4 * MIB
_MIN_WINDOWS, _MAX_WINDOWS = 3, 256  # begin, middle and end
_MAX_GATHERED = 4096  # tensors in one call: more would not fit the caches
_PART_BYTES = 16 * MIB  # copied at once if a tensor cannot be read in place
_COMPARED_BIT = 1 << 32  # a bit that makes every fingerprint differ from 0
_FACTORS = np.frombuffer(
    hashlib.shake_128(b"replicas").digest(_MIN_WINDOWS * _LINE_BYTES), dtype=np.uint64
) | np.uint64(1)
_EXTRA_STATE = "_extra_state"  # of torch's modules, such as scales that depend on a rank's data

_log = logging.getLogger("cloudckpt")


class DifferenceRule(enum.IntEnum):
    """The consequence of copies that differ."""

    BUFFER = 0
    """The lowest rank saves its copy: training makes the buffers of a model differ."""
    MAY_DIFFER = 1
    """The lowest rank saves its copy, and a warning names the entry."""
    MUST_AGREE = 2
    """An error."""
    COMMON_TO_SLICES = 3
    """An error that says how to make the common part of the slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronizedNames:
    """The names of the entries that training keeps equal on all ranks: those of live models and optimizers.

    Buffers are exceptions. A model under DDP gets the buffers of rank 0 before its forward pass, which then changes
    them on each rank by the rank's batch.
    """

    keys: frozenset[str] = frozenset()
    """The top-level keys of these entries."""
    exceptions: frozenset[str] = frozenset()
    """Names of entries and of containers."""
    users: frozenset[str] = frozenset()
    """The top-level keys of the user's own values."""

    def compares_value(self, name: str) -> bool:
        """Return True if copies of the value of this name are compared."""
        return name.partition(".")[0] in self.users or self.find_rule(name) is DifferenceRule.MUST_AGREE

    def find_rule(self, name: str) -> DifferenceRule:
        """Return the rule for copies of the entry of this name."""
        if not self.keys or name.partition(".")[0] not in self.keys:
            return DifferenceRule.MAY_DIFFER
        container = name.rpartition(".")[0]  # `name` may be a part of a tensor that consists of others
        is_exception = name in self.exceptions or container in self.exceptions or _EXTRA_STATE in name
        return DifferenceRule.BUFFER if is_exception else DifferenceRule.MUST_AGREE


class ItemCopy(NamedTuple):
    """An item in the plan of one of the ranks that hold it."""

    rank: int
    item: WriteItem
    fingerprint: int
    """Equal for equal bytes; 0 if they are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """The fingerprints of the items in the plan of one rank, and the rules for them."""

    of_items: array[int]
    """The `ItemCopy.fingerprint` of each item of a plan."""
    synchronized: SynchronizedNames
    common: frozenset[str]
    """The names of the parts that all slices of a tensor have in common."""

    def find_rule(self, name: str) -> DifferenceRule:
        """Return the rule for copies of the entry of this name."""
        return DifferenceRule.COMMON_TO_SLICES if name in self.common else self.synchronized.find_rule(name)


def take_fingerprints(
    items: Sequence[WriteItem],
    state_dict: Mapping[str, Any],
    *,
    compare: CompareReplicas,
    synchronized: SynchronizedNames,
    common: Sequence[str],
    uri: str,
    snapshot: Snapshot | None,
) -> Fingerprints:
    """Return the fingerprints of the items of a plan. A tensor that this rank alone holds has none.

    `common` are names of tensors that are always compared whole. If the copies are in a `snapshot`, the call waits for
    the bytes to compare. `synchronized` says which values are compared.
    """
    fingerprints = Fingerprints(
        of_items=array("Q", bytes(8 * len(items))), synchronized=synchronized, common=frozenset(common)
    )
    of_items, on_host = fingerprints.of_items, list[tuple[int, int, int]]()
    on_devices: list[tuple[int, torch.Tensor]] = []
    for position, item in enumerate(items):
        fqn = item.index.fqn
        is_common = fqn in fingerprints.common
        if compare == "never" and not is_common:
            continue
        if item.tensor_data is None:
            if synchronized.compares_value(fqn):
                of_items[position] = _fingerprint_value(state_dict.get(fqn))
            continue
        tensor, address = _find_readable(item, state_dict.get(fqn), uri)
        if tensor is None:
            continue
        num_bytes = tensor.nbytes
        is_whole = compare == "whole" or is_common
        if address and not is_whole and is_gathered(num_bytes) and not address % _WORD_BYTES:
            on_host.append((position, address, num_bytes))
        elif address or is_whole or not num_bytes or not tensor.is_contiguous():
            of_items[position] = _read_alone(tensor, address, snapshot, is_whole=is_whole)
        else:
            on_devices.append((position, tensor))
    for position, fingerprint in itertools.chain(_gather(on_host, snapshot), _sample_devices(on_devices, snapshot)):
        of_items[position] = fingerprint
    return fingerprints


def _fingerprint_value(value: Any) -> int:
    return _COMPARED_BIT | crc32c_of([memoryview(_text_of(value).encode())])


def _text_of(value: Any) -> str:
    """Return a text that is equal for equal values. Objects of unknown classes are compared by their class."""
    if isinstance(value, np.generic):  # such as the learning rate of many schedulers
        value = value.item()
    kind = type(value)
    if kind in LEAVES:
        return ascii(value)
    if kind in {list, tuple}:
        return repr([_text_of(element) for element in value])
    if kind in {set, frozenset}:  # strings have another order in each process
        return repr({"set": sorted(map(_text_of, value))})
    if kind is np.ndarray and not value.dtype.hasobject:
        memory = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        sample = crc32c_of([memory[begin:end] for begin, end in windows_of(value.nbytes)])
        return f"array {value.dtype} {value.shape} {sample}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _find_readable(item: WriteItem, value: Any, uri: str) -> tuple[torch.Tensor | None, int]:
    """Return the tensor of `item`, if other ranks may hold it too, and its address; 0 if it cannot be read in place."""
    value = _find_replicated(item, value)
    if value is None:
        return None, 0
    if type(value) in PLAIN_TENSORS and (address := viewable_address(value)):
        return value, address
    try:
        return plain_tensor(value, item.index.fqn, uri=uri), 0
    except UnsupportedValueError:  # the rank that saves it raises it
        return None, 0


def _find_replicated(item: WriteItem, value: Any) -> torch.Tensor | None:
    """Return the tensor of `item`, if other ranks may hold it too; otherwise None."""
    data = item.tensor_data
    if data is None or not isinstance(value, torch.Tensor):
        return None
    if isinstance(value, ShardedTensor):
        return _find_replicated_shard(value, item.index)
    if has_planner_hooks(value) or (isinstance(value, DTensor) and has_planner_hooks(local_tensor_of(value))):
        return None
    if type(value) in PLAIN_TENSORS:
        return value
    if isinstance(value, DTensor):
        sizes = value.device_mesh.shape
        if not any(
            placement.is_replicate() and size > 1 for placement, size in zip(value.placements, sizes, strict=True)
        ):
            return None
        value = local_tensor_of(value)
    return value if value.shape == data.chunk.sizes else None


def _find_replicated_shard(whole: ShardedTensor, index: MetadataIndex) -> torch.Tensor | None:
    """Return the shard of a ``ShardedTensor`` that other ranks hold too, as with HYBRID_SHARD of torch's first FSDP."""
    group = getattr(whole, "_process_group", None)
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return None
    offsets = tuple(index.offset or ())
    return next(
        (shard.tensor for shard in whole.local_shards() if tuple(shard.metadata.shard_offsets) == offsets), None
    )


@functools.lru_cache(maxsize=1024)
def windows_of(num_bytes: int, *, is_whole: bool = False) -> tuple[tuple[int, int], ...]:
    """Return the byte ranges ``[begin, end)`` of a tensor of `num_bytes` that are compared, in row-major order."""
    if is_whole or num_bytes <= _WHOLE_BYTES:
        return tuple((begin, min(begin + _PART_BYTES, num_bytes)) for begin in range(0, num_bytes, _PART_BYTES))
    number = min(max(num_bytes // _BYTES_PER_WINDOW, _MIN_WINDOWS), _MAX_WINDOWS)
    window_bytes = _WINDOW_BYTES if number > _MIN_WINDOWS else _LINE_BYTES
    last = (num_bytes - window_bytes) // ALIGNMENT_BYTES
    begins = [index * last // (number - 1) * ALIGNMENT_BYTES for index in range(number)]
    return (*((begin, begin + window_bytes) for begin in begins[:-1]), (begins[-1], num_bytes))


def is_gathered(num_bytes: int) -> bool:
    """Return True if tensors of this size have windows of the same size, so that many are read in one call."""
    return _WHOLE_BYTES < num_bytes < (_MIN_WINDOWS + 1) * _BYTES_PER_WINDOW and not num_bytes % ALIGNMENT_BYTES


def _gather(tensors: Sequence[tuple[int, int, int]], snapshot: Snapshot | None) -> Iterator[tuple[int, int]]:
    """Yield the position and the fingerprint of each tensor, given as position, address and size (`is_gathered`).

    One call for each tensor would take three times as long.
    """
    for first in range(0, len(tensors), _MAX_GATHERED):
        group = tensors[first : first + _MAX_GATHERED]
        if snapshot is not None:
            for _, address, num_bytes in group:
                _wait(snapshot, address, windows_of(num_bytes))
        positions, addresses, sizes = np.array(group, dtype=np.int64).T
        base = int(addresses.min())
        memory = view_memory(base, int((addresses + sizes).max()) - base, tensors)
        last = (sizes - _LINE_BYTES) // ALIGNMENT_BYTES
        begins = np.stack([0 * last, last // 2, last], axis=1) * ALIGNMENT_BYTES + (addresses - base)[:, None]
        words = begins[:, :, None] // _WORD_BYTES + np.arange(_LINE_BYTES // _WORD_BYTES)
        rows = np.frombuffer(memory, dtype=np.uint64)[words.reshape(len(group), -1)]
        yield from zip(positions.tolist(), _hash_rows(rows).tolist(), strict=True)


def _wait(snapshot: Snapshot, address: int, windows: Sequence[tuple[int, int]]) -> None:
    for begin, end in windows:
        snapshot.wait(address + begin, end - begin)


def _hash_rows(rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each row, which is not 0."""
    mixed = rows * _FACTORS[0]
    mixed ^= mixed >> np.uint64(32)  # or differences in the highest bits, which are signs, would cancel out
    mixed *= _FACTORS
    hashes: npt.NDArray[np.uint64] = mixed.sum(axis=1, dtype=np.uint64) | np.uint64(_COMPARED_BIT)
    return hashes


def _fingerprint_of(views: Iterable[memoryview], num_bytes: int, *, is_whole: bool) -> int:
    """Return the fingerprint of a tensor of `num_bytes` from its compared bytes."""
    if is_gathered(num_bytes) and not is_whole:
        joined = b"".join(map(bytes, views))  # each view is valid until the next one
        return int(_hash_rows(np.frombuffer(joined, dtype=np.uint64)[None])[0])
    checksum = 0
    for view in views:
        checksum = crc32c_of([view], checksum)
    return _COMPARED_BIT | checksum


@contextlib.contextmanager
def _body_of(contents: Sequence[torch.Tensor], snapshot: Snapshot | None) -> Iterator[PieceBody]:
    """Yield a body of tensors that cannot be read in place, back to back. Allocates no GPU memory."""
    ends = list(itertools.accumulate(content.nbytes for content in contents))
    pieces = [new_piece(content, begin=end - content.nbytes) for content, end in zip(contents, ends, strict=True)]
    with contextlib.closing(new_arena(budget_bytes=_PART_BYTES)) as arena:
        yield PieceBody(pieces, arena, snapshot, new_side_streams(contents))


def _read_alone(tensor: torch.Tensor, address: int, snapshot: Snapshot | None, *, is_whole: bool) -> int:
    """Return the fingerprint of a tensor; `address` is 0 if it must be copied to be read."""
    windows = windows_of(tensor.nbytes, is_whole=is_whole)
    if not address:
        with _body_of([tensor], snapshot) as body:
            return _fingerprint_of(_copy_each(body, windows), tensor.nbytes, is_whole=is_whole)
    if snapshot is not None:
        _wait(snapshot, address, windows)
    memory = view_memory(address, tensor.nbytes, tensor)
    return _fingerprint_of([memory[begin:end] for begin, end in windows], tensor.nbytes, is_whole=is_whole)


def _copy_each(body: PieceBody, windows: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
    for begin, end in windows:
        with body.open(begin, end) as views:
            yield from views


def _sample_devices(
    tensors: Sequence[tuple[int, torch.Tensor]], snapshot: Snapshot | None
) -> Iterator[tuple[int, int]]:
    """Yield each position with the fingerprint of its tensor.

    Queues the copies from a device together, and waits once, which takes a tenth of the time.
    """
    group: list[tuple[int, int, list[torch.Tensor]]] = []
    num_bytes = 0
    for number, (position, tensor) in enumerate(tensors, 1):
        memory = tensor.view(-1).view(torch.uint8)
        samples = [memory[begin:end] for begin, end in windows_of(tensor.nbytes)]
        group.append((position, tensor.nbytes, samples))
        num_bytes += sum(map(len, samples))
        if num_bytes < _PART_BYTES and number < len(tensors):
            continue
        with (
            _body_of([sample for *_, samples in group for sample in samples], snapshot) as body,
            body.open(0, body.size_bytes) as views,
        ):
            unread = iter(views)
            for sampled, tensor_bytes, samples in group:
                yield sampled, _fingerprint_of(itertools.islice(unread, len(samples)), tensor_bytes, is_whole=False)
        group, num_bytes = [], 0


def fingerprints_of(plan: SavePlan) -> Fingerprints | None:
    """Return the fingerprints that a rank sent with its plan; None if another planner made the plan."""
    nesting = plan.planner_data
    fingerprints = nesting.fingerprints if isinstance(nesting, Nesting) else None
    if isinstance(fingerprints, Fingerprints) and len(fingerprints.of_items) == len(plan.items):
        return fingerprints
    return None


def key_of(index: MetadataIndex) -> ItemKey:
    """Return a key that all items of one tensor or shard share. Python hashes it much faster than `index`."""
    return index.fqn, index.offset


def copies_of_items(plans: Sequence[SavePlan]) -> dict[ItemKey, list[ItemCopy]]:
    """Return the copies of each item, in the order of their ranks."""
    copies_of: dict[ItemKey, list[ItemCopy]] = {}
    for rank, plan in enumerate(plans):
        fingerprints = fingerprints_of(plan)
        for item, fingerprint in zip(plan.items, fingerprints.of_items if fingerprints else itertools.repeat(0)):  # noqa: B905
            index, copy = item.index, ItemCopy(rank, item, fingerprint)
            if copies := copies_of.get(key := (index.fqn, index.offset)):  # `key_of`, without a call
                copies.append(copy)
            else:
                copies_of[key] = [copy]
    return copies_of


def are_equal(copies: Sequence[ItemCopy]) -> bool:
    """Return True if all copies were compared, and found to be equal."""
    first = copies[0].fingerprint
    return first != 0 and all(copy.fingerprint == first for copy in copies)


def check_replicas(copies_of: Mapping[ItemKey, Sequence[ItemCopy]], plans: Sequence[SavePlan], *, uri: str) -> None:
    """Raise `StateDictMismatchError` if copies that must agree differ. Warn once of other differences."""
    fingerprints_by_rank = [fingerprints_of(plan) for plan in plans]
    unexpected: list[Sequence[ItemCopy]] = []
    for copies in copies_of.values():
        if len(copies) == 1 or not _differ(copies):
            continue
        fqn = copies[0].item.index.fqn
        rule = max(
            fingerprints.find_rule(fqn)
            for copy in copies
            if (fingerprints := fingerprints_by_rank[copy.rank]) is not None
        )
        if rule is DifferenceRule.COMMON_TO_SLICES:
            raise StateDictMismatchError(
                f"{fqn!r} differs between the ranks that save {uri}, and all slices of a tensor have it in "
                "common. Nothing was written. Quantize the tensor before it is sharded, or with a scale for each "
                "row, or save it dequantized",
                uri=uri,
            )
        if rule is DifferenceRule.MUST_AGREE:
            raise StateDictMismatchError(
                f"ranks hold different values under one name in {uri}: {_describe(copies)}. Nothing was written. Wrap "
                "the model in DistributedDataParallel, or broadcast its state, or give each rank a name or a URI of "
                "its own; if the ranks differ on purpose, Options(compare_replicas='never') saves the lowest rank's",
                uri=uri,
            )
        if rule is DifferenceRule.MAY_DIFFER:
            unexpected.append(copies)
    if unexpected:
        _warn_once(_describe(unexpected[0]), len(unexpected), uri)


def _differ(copies: Sequence[ItemCopy]) -> bool:
    """Return True if two compared copies differ."""
    return not are_equal(copies) and len({copy.fingerprint for copy in copies if copy.fingerprint}) > 1


def _describe(copies: Sequence[ItemCopy]) -> str:
    first = next(copy for copy in copies if copy.fingerprint)
    others = [copy.rank for copy in copies if copy.fingerprint not in {0, first.fingerprint}]
    return f"{first.item.index.fqn!r} of {name_ranks(others)} differs from that of rank {first.rank}"


def _warn_once(description: str, number: int, uri: str) -> None:
    if not is_first_warning("replicas", description):
        return
    more = f", and so for {number - 1} more" if number > 1 else ""
    _log.warning(
        "%s in %s%s. Of each such entry the checkpoint has the lowest rank's. If each rank's counts, save it under a "
        "name for each rank",
        description,
        uri,
        more,
    )
