"""Snapshots of state dicts, in host memory that one snapshot takes over from the one before."""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from cloudckpt._this_process import OfThisProcess, rare_collections
from cloudckpt._torch_compat import AsyncCollectiveTensor, Shard, ShardedTensor, StateDictStager, local_tensor_of
from cloudckpt.background.hook_answers import HookAnswers, has_hooks
from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.nesting import PART_ATTRIBUTES, PLAIN_TENSORS
from cloudckpt.format.wrappers import is_wrapper, put_together
from cloudckpt.tensors.host_memory import SnapshotPool, empty_tensor
from cloudckpt.tensors.snapshot import Snapshot, num_copy_threads
from cloudckpt.tensors.snapshot_plan import (
    AnsweringParameter,
    AnsweringTensor,
    SnapshotPlan,
    plan_snapshot,
    with_attributes,
)
from cloudckpt.tensors.tensor_bytes import (
    describe_shortage,
    extent_bytes,
    find_obstacle,
    is_short,
    layout_of,
    memory_address,
)
from cloudckpt.tensors.values import describe_unsaved_part

_get_dtype = operator.attrgetter("dtype")
_get_requires_grad = operator.attrgetter("requires_grad")
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range})
_DICTS = frozenset({dict, OrderedDict})


class CopyPlanCache:
    """The plan of the last snapshot, and the layout of its tensors: a state dict with this layout needs no new plan.

    It holds no tensor of the state dict.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], plan: SnapshotPlan) -> None:
        self.plan = plan
        self._copied_as_memory = [number for number in range(len(tensors)) if number not in plan.batched]
        self._addresses = list(addresses)
        self._sizes = list(map(torch.Tensor.size, tensors))
        self._dtypes = list(map(_get_dtype, tensors))
        self._require_grad = list(map(_get_requires_grad, tensors))
        self._forms = self._find_forms(tensors)
        self._addresses_of_copies = list(map(torch.Tensor.data_ptr, plan.copies))
        self._forms_of_copies = self._find_forms(plan.copies)

    def can_begin(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> bool:
        """Return True if each tensor is at its old address, and tensors that are copied as memory have their old form.

        All other tensors are copied as tensors, which is correct even if their form has changed.
        """
        with contextlib.suppress(RuntimeError):  # a tensor has no shape or no strides
            return self._addresses == addresses and self._forms == self._find_forms(tensors)
        return False

    def is_valid(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if the copies will equal the tensors. It may be called while the copies are made.

        The user had the copies of the last snapshot, and may have changed their forms.
        """
        copies = self.plan.copies
        with contextlib.suppress(RuntimeError):
            return (
                self._sizes == list(map(torch.Tensor.size, tensors)) == list(map(torch.Tensor.size, copies))
                and self._dtypes == list(map(_get_dtype, tensors))
                and self._require_grad == list(map(_get_requires_grad, tensors))
                and self._addresses_of_copies == list(map(torch.Tensor.data_ptr, copies))
                and self._forms_of_copies == self._find_forms(copies)
            )
        return False

    def _find_forms(self, tensors: Sequence[torch.Tensor]) -> list[Hashable]:
        """Return the form of each tensor that is copied as memory: everything but its address."""
        return [layout_of(tensors[number]) for number in self._copied_as_memory]


class PinnedStager(OfThisProcess, AsyncStager):
    """Copies state dicts to host memory that is allocated once and used again.

    It is a `torch.distributed.checkpoint.staging.AsyncStager`, for `cloudckpt.async_save` and torch's own. The memory
    grows with the state dict, and is freed by `close`. It is pinned if tensors of a GPU are in it. Tensors that share
    memory share it in the copy. A staged state dict is valid until the next `begin` or `close`. Not safe for use from
    several threads at once, nor in a forked child.

    Args:
        shared: Share the memory with torch's background process, which then copies nothing. Otherwise it gets a copy.
        overlapped: `stage` returns a future at once, and the state dict must not change until that is done.
        num_threads: Number of threads that copy CPU tensors. None: the cores of this rank, three quarters of them if
            there are four or more.

    Example::

        stager = cloudckpt.PinnedStager()
        cloudckpt.async_save("s3://bucket/run/step-100", model=model, async_stager=stager).result()
        stager.close()

    """

    def __init__(self, *, shared: bool = False, overlapped: bool = False, num_threads: int | None = None) -> None:
        self._pool = SnapshotPool(shared=shared)
        self._overlapped = overlapped
        self._num_threads = num_threads
        self._last: Snapshot | None = None
        self._cache: CopyPlanCache | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the stager holds."""
        return self._pool.num_bytes

    def begin(self, state_dict: dict[str, Any], *, parameters: Iterable[torch.Tensor] | None = None) -> Snapshot:
        """Start to copy `state_dict`, which must not change until the result is complete.

        With `parameters`, a tensor may change after `Snapshot.wait_for_urgent`, unless it is in their memory, is a
        ``torch.nn.Parameter``, or is a leaf that requires a gradient. This uses the memory of the previous snapshot
        again, even if it is still referred to. Raises `MemoryError`, and `UnsupportedValueError`, which names the key
        of a value that cannot be copied.
        """
        return self._begin(state_dict, for_torch=False, parameters=parameters)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Return a copy of `state_dict` on the CPU (torch's protocol); with `overlapped`, a future of it.

        Memory with tensors of an earlier copy is not used again while these exist, because that copy is being saved.
        """
        snapshot = self._begin(state_dict, for_torch=True)
        if self._overlapped:
            return future_state_dict(snapshot)
        snapshot.completed.result()
        return snapshot.state_dict

    def synchronize_staging(self) -> None:
        """Wait until the last copy is complete (torch's protocol)."""
        if self._last is not None:
            self._last.completed.result()

    def close(self) -> None:
        """Free the memory, once the copying has ended. The stager can be used again, and begins anew."""
        self._await_last()
        self._cache = None
        self._pool.close()

    def _await_last(self) -> None:
        if self._last is not None:
            if self._last.completed.exception() is not None:
                self._cache = None  # the cause may be a copy that the user has changed
            self._last = None

    @torch.no_grad()
    @torch.inference_mode(mode=False)  # other threads write to the copies, and later snapshots do
    @rare_collections()
    def _begin(
        self, state_dict: dict[str, Any], *, for_torch: bool, parameters: Iterable[torch.Tensor] | None = None
    ) -> Snapshot:
        self._await_last()
        cache, self._cache = self._cache, None
        tree = StateDictTree(state_dict)
        urgent: list[int] = []
        if parameters is not None:
            later = ParameterMemory([*parameters, *tree.parameters, *filter(_is_parameter, tree.tensors)])
            urgent = [number for number, tensor in enumerate(tree.tensors) if not later.holds(tensor)]
        if not for_torch and cache is not None and cache.can_begin(tree.tensors, tree.addresses):
            snapshot = self._start(cache.plan, tree, urgent)
            if cache.is_valid(tree.tensors):
                self._cache = cache
                return snapshot
            snapshot.completed.exception()  # this copy is not used
        del cache  # the memory that it holds may be needed
        # torch serialises tuples with all of their storages, so those must not be the whole of the shared memory.
        is_shared = for_torch and self._pool.is_shared
        plan = plan_snapshot(
            tree.tensors,
            self._pool,
            num_threads=self._get_num_threads(),
            reuse_lent=not for_torch,
            urgent=urgent,
            whole=[is_shared and not is_within for is_within in tree.is_in_tuple],
        )
        has_gpus = any(tensor.is_cuda for tensor in tree.tensors)
        if has_gpus:
            self._pool.pin()
        snapshot = self._start(plan, tree, urgent)
        if not for_torch and not has_gpus:
            self._cache = CopyPlanCache(tree.tensors, tree.addresses, plan)
        return snapshot

    def _start(self, plan: SnapshotPlan, tree: StateDictTree, urgent: Sequence[int]) -> Snapshot:
        self._last = snapshot = Snapshot(
            plan,
            tree.tensors,
            tree.rebuild(plan.copies),
            num_threads=self._get_num_threads(),
            urgent=[plan.copies[number] for number in urgent],
        )
        snapshot.start()
        return snapshot

    def _get_num_threads(self) -> int:
        return self._num_threads or num_copy_threads()


class StagedState(Protocol):
    """A copy of a state dict that a stager makes."""

    completed: Future[None]
    state_dict: dict[str, Any]


def future_state_dict(snapshot: StagedState) -> Future[dict[str, Any]]:
    """Return a future of the copied state dict, or of the error of the copy."""
    result: Future[dict[str, Any]] = Future()
    result.set_running_or_notify_cancel()  # it cannot be cancelled

    def pass_on(completed: Future[None]) -> None:
        error = completed.exception()
        if error is None:
            result.set_result(snapshot.state_dict)
        else:
            result.set_exception(error)

    snapshot.completed.add_done_callback(pass_on)
    return result


class ParameterMemory:
    """The memory of parameters and of optimizers' state, which training changes in the step of the optimizer alone."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = sorted({memory_range for tensor in tensors for memory_range in _ranges_of(tensor)})
        self._begins = [begin for begin, _ in ranges]
        self._ends = list(itertools.accumulate((end for _, end in ranges), max))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if all of `tensor` is in this memory."""
        begin = tensor.data_ptr()
        index = bisect.bisect_right(self._begins, begin) - 1
        return index >= 0 and begin + extent_bytes(tensor) <= self._ends[index]


def _ranges_of(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the addresses ``[begin, end)`` of the elements of a parameter on this rank.

    Other parts of a wrapper are left out, such as scales, which a forward pass may change.
    """
    if isinstance(tensor, DTensor):
        tensor = local_tensor_of(tensor)
    if is_wrapper(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
        for part in parts:
            if part.shape == tensor.shape:
                yield from _ranges_of(part)
    elif type(tensor) in PLAIN_TENSORS and (begin := memory_address(tensor)):
        yield begin, begin + extent_bytes(tensor)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


class StateDictTree:
    """The tensors of a state dict that have memory addresses, in its order, and a copy of everything else."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.parameters: list[torch.Tensor] = []
        """The DTensors that are parameters."""
        self.is_in_tuple: list[bool] = []
        """For each tensor, True if it is in a tuple, which DCP serialises as a whole."""
        self._num_tuples = 0
        self._containers: list[tuple[Any, Sequence[Any]]] = []
        """Containers in the order of `tensors`, each with the keys of its tensors."""
        self._finishers: list[Callable[[], None]] = []
        self._value_stager = _ValueStager()
        self._path: list[Any] = []
        """The path of keys to the value that is being copied, or could not be copied."""
        self._failed: Any = None
        """The innermost value that could not be copied."""
        self._root: list[Any] = [None]
        try:
            with torch.no_grad():
                self._add(state_dict, self._root, 0)
        except (UnsupportedValueError, MemoryError):
            raise
        except RecursionError:
            raise UnsupportedValueError(
                f"{'.'.join(map(str, self._path[1:3]))!r} or a part of it holds itself, or is nested too deeply to be "
                "saved. Leave it out of the state dict",
                uri="",
            ) from None
        except Exception as error:
            failed: Any = self._failed
            obstacle = find_obstacle(failed) if isinstance(failed, torch.Tensor) else None
            if obstacle is not None:
                raise UnsupportedValueError(f"cannot save {self._get_name()!r}: it is {obstacle}", uri="") from error
            raise UnsupportedValueError(
                f"cannot copy {describe_unsaved_part(self._failed, self._get_name())} for a save in the background: "
                f"{type(error).__name__}: {error}. Leave it out of the state dict, or convert it to something that can "
                "be copied",
                uri="",
            ) from error
        finally:
            self._value_stager.close()  # type: ignore[no-untyped-call]  # torch's method has no types

    def rebuild(self, copies: list[torch.Tensor]) -> dict[str, Any]:
        """Return the state dict with `copies` in place of `tensors`. A second call replaces the copies of the first."""
        ordered = iter(copies)
        for container, keys in self._containers:
            for key, tensor in zip(keys, ordered, strict=False):
                container[key] = tensor
        for finish in self._finishers:
            finish()
        result: dict[str, Any] = self._root[0]
        return result

    def _add(self, value: Any, container: Any, key: Any) -> None:
        """Put a copy of `value` at `key` of `container`, now or in `rebuild`."""
        kind = type(value)
        if kind in PLAIN_TENSORS and self._is_bare(value) and (address := memory_address(value)):
            container[key] = None
            self._add_tensors([value], [address], container, [key])
        elif kind in _ATOMS:
            container[key] = value
        else:
            self._path.append(key)
            try:
                if isinstance(value, torch.Tensor):
                    self._add_tensor(value, container, key)
                else:
                    self._add_other(value, kind, container, key)
            except BaseException:
                if self._failed is None:
                    self._failed = value
                raise
            self._path.pop()

    def _get_name(self) -> str:
        """Return the name that planners give to the value that is being copied."""
        return ".".join(map(str, self._path[1:]))

    def _is_bare(self, tensor: torch.Tensor) -> bool:
        """Return True if a plain tensor has no attributes that its copy needs."""
        return not tensor.__dict__ and not (self._num_tuples and type(tensor) is torch.nn.Parameter)

    def _add_tensor(self, value: torch.Tensor, container: Any, key: Any) -> None:
        """Add a tensor with the attributes that its copy needs."""
        attributes = self._copy_attributes(value)
        if not attributes and not (self._num_tuples and type(value) is torch.nn.Parameter):
            self._add_values(value, container, key)
            return
        without_attributes: list[Any] = [None]
        self._add_values(value, without_attributes, 0)
        kind = AnsweringParameter if self._num_tuples and type(value) is torch.nn.Parameter else AnsweringTensor

        def make() -> torch.Tensor:
            copied: torch.Tensor = without_attributes[0]
            if type(copied) in PLAIN_TENSORS or isinstance(copied, AnsweringTensor):
                return with_attributes(copied, kind, attributes)
            copied.__dict__.update(attributes)
            return copied

        self._finish_later(container, key, make)

    def _copy_attributes(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return the attributes of the copy: those that planners may ask for, or all if the tensor is serialised."""
        is_dtensor = isinstance(tensor, DTensor)
        attributes: dict[str, Any] = {}
        if type(tensor) in PLAIN_TENSORS or is_dtensor:  # other classes have their state there, and copy it
            for name, value in tensor.__dict__.items():
                if self._num_tuples:
                    attributes[name] = self._copy_value(value)
                elif name in PART_ATTRIBUTES or type(value) in _ATOMS:
                    attributes[name] = copy.deepcopy(value)
        if has_hooks([tensor, local_tensor_of(tensor)] if is_dtensor else [tensor]):
            answers = HookAnswers(self._get_name(), tensor)
            for item in answers.items:
                shard = find_tensor_shard(tensor, item.index)
                self._add(shard.detach(), answers.shards, item.index.offset)  # without attributes
            attributes.update(answers.as_hooks())
        return attributes

    def _add_values(self, value: Any, container: Any, key: Any) -> None:
        """Add a tensor without its attributes."""
        kind = type(value)
        if kind in PLAIN_TENSORS and (address := memory_address(value)):
            container[key] = None
            self._add_tensors([value], [address], container, [key])
        elif kind in PLAIN_TENSORS:
            container[key] = _copy_without_memory(value)
        else:
            self._add_other(value, kind, container, key)

    def _add_other(self, value: Any, kind: type[Any], container: Any, key: Any) -> None:
        if self._num_tuples and isinstance(value, dict) and kind not in _DICTS:
            container[key] = self._copy_value(value)  # a Counter, say: a tuple is serialised with the types in it
        elif isinstance(value, Mapping):
            items: dict[Any, Any] = OrderedDict() if kind is OrderedDict else {}
            container[key] = items
            self._add_mapping(value, items)
        elif kind is list:
            container[key] = entries = [None] * len(value)
            self._add_all(value, entries)
        elif kind is tuple or (
            isinstance(value, tuple) and hasattr(value, "_make") and not getattr(value, "__dict__", None)
        ):
            entries = [None] * len(value)
            self._num_tuples += 1
            self._add_all(value, entries)
            self._num_tuples -= 1
            make = tuple if kind is tuple else kind._make  # namedtuples need their own
            self._finish_later(container, key, lambda: make(entries))
        elif isinstance(value, ShardedTensor):
            self._add_sharded(value, container, key)
        elif not self._add_subclass(value, container, key):
            container[key] = self._copy_value(value)

    def _add_subclass(self, value: Any, container: Any, key: Any) -> bool:
        """Add a tensor that holds others, part by part. Returns False for anything else."""
        if isinstance(value, DTensor):
            if _is_parameter(value):
                self.parameters.append(value)
            local: list[Any] = [None]
            self._add_values(local_tensor_of(value), local, 0)
            make_dtensor = functools.partial(_rebuild_dtensor, spec=value._spec, requires_grad=value.requires_grad)
            self._finish_later(container, key, lambda: make_dtensor(local[0]))
        elif isinstance(value, AsyncCollectiveTensor):
            self._add(value.wait(), container, key)
        elif is_wrapper(value):
            names, context = value.__tensor_flatten__()
            parts: dict[str, Any] = dict.fromkeys(names)
            for name in names:
                self._add(getattr(value, name), parts, name)
            make = functools.partial(put_together, type(value), parts, context, value.size(), value.stride(), name=key)
            self._finish_later(container, key, make)
        else:
            return False
        return True

    def _add_mapping(self, value: Mapping[Any, Any], items: dict[Any, Any]) -> None:
        if type(value) in _DICTS and self._add_tensor_dict(value, items):
            return
        for name, item in value.items():
            items[name] = None  # keeps the order, also if the copy is put later
            self._add(item, items, name)

    def _add_tensor_dict(self, value: Mapping[Any, Any], items: dict[Any, Any]) -> bool:
        """Add all items at once if all are tensors with addresses. Otherwise do nothing, and return False."""
        tensors = list(value.values())
        if not PLAIN_TENSORS.issuperset(map(type, tensors)) or not all(map(self._is_bare, tensors)):
            return False
        addresses = list(map(memory_address, tensors))
        if not all(addresses):
            return False
        items.update(dict.fromkeys(value))
        self._add_tensors(tensors, addresses, items, list(items))
        return True

    def _add_tensors(
        self, tensors: list[torch.Tensor], addresses: list[int], container: Any, keys: Sequence[Any]
    ) -> None:
        self.tensors += tensors
        self.addresses += addresses
        self.is_in_tuple += [self._num_tuples > 0] * len(tensors)
        self._containers.append((container, keys))

    def _add_all(self, values: Any, entries: list[Any]) -> None:
        for number, item in enumerate(values):
            self._add(item, entries, number)

    def _finish_later(self, container: Any, key: Any, make: Callable[[], Any]) -> None:
        def finish() -> None:
            container[key] = make()

        self._finishers.append(finish)

    def _add_sharded(self, tensor: ShardedTensor, container: Any, key: Any) -> None:
        """Add a `ShardedTensor` that is on the CPU and shares nothing."""
        metadata = copy.deepcopy(tensor.metadata())
        shards = tensor.local_shards()
        metadata_copies = [copy.deepcopy(shard.metadata) for shard in shards]
        for shard_metadata in [*metadata.shards_metadata, *metadata_copies]:
            if shard_metadata.placement is not None:
                shard_metadata.placement._device = torch.device("cpu")  # ShardedTensor.cpu() does it
        entries: list[Any] = [None] * len(shards)
        self._add_all([shard.tensor.detach() for shard in shards], entries)

        def make() -> ShardedTensor:
            return ShardedTensor._init_from_local_shards_and_global_metadata(  # ShardedTensor.cpu() does it
                [Shard(entry, shard_metadata) for entry, shard_metadata in zip(entries, metadata_copies, strict=True)],
                sharded_tensor_metadata=metadata,
                process_group=tensor._process_group,
                init_rrefs=tensor._init_rrefs,
            )

        self._finish_later(container, key, make)

    def _copy_value(self, value: Any) -> Any:
        """Copy an object by torch's stager, which also brings the tensors in it to the CPU."""
        return self._value_stager.stage(value)


class _ValueStager(StateDictStager):
    """torch's stager, which here keeps the class of a tensor, and copies conjugates and negatives correctly."""

    def _offload_tensor(self, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        torchs_stager: Any = super()
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
            torchs_stager._keep_alive(x, memo)  # torch remembers storages by identity
        copied: torch.Tensor = torchs_stager._offload_tensor(x, memo, non_blocking=non_blocking)
        if type(copied) is torch.Tensor and (type(x) is not torch.Tensor or x.requires_grad):  # a parameter
            return with_attributes(copied.requires_grad_(x.requires_grad), type(x), copied.__dict__)
        return copied


def _rebuild_dtensor(local: torch.Tensor, spec: Any, *, requires_grad: bool) -> DTensor:
    """Make the DTensor with this local tensor, so that torch can send it to another process.

    A DTensor takes over the storage offset of the tensor that it is made of. torch 2.13 pickles a DTensor with an
    offset like a tensor with memory of its own, and crashes.
    """
    make: Any = DTensor
    if not local.storage_offset():
        dtensor: DTensor = make(local, spec, requires_grad=requires_grad)
        return dtensor
    at_begin = local.as_strided(local.size(), local.stride(), 0)
    dtensor = make(at_begin, spec, requires_grad=requires_grad)
    dtensor._local_tensor = local  # torch's own unpickling does it
    return dtensor


def _copy_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor without an address to the CPU. The copy has the same kind, so that the save names the problem."""
    requires_grad = tensor.requires_grad
    tensor = tensor.detach()
    if tensor.is_meta:
        return tensor  # it has nothing that could change
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    if not (is_dense and (tensor.is_cpu or tensor.is_cuda)):
        return tensor.to("cpu", copy=True)
    if is_short(tensor) and tensor.untyped_storage().nbytes():
        raise ValueError(f"it is {describe_shortage(tensor)}")
    empty = torch.UntypedStorage(0, device="cpu")
    copied = empty_tensor(tensor.dtype).set_(empty, 0, tensor.size(), tensor.stride())
    if tensor.numel():  # the tensor's memory was freed: free the copy's, too
        copied.untyped_storage().resize_(0)
    return copied.requires_grad_(requires_grad)
