"""A state dict taken apart into tensors that can be copied as memory, and put together again of their copies."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from cloudckpt._flat import PART_ATTRIBUTES, PLAIN_TENSORS, holds_parts
from cloudckpt._stage.tensors import address_of, is_freed, is_short, shortage_of
from cloudckpt._stage.values import unsaved_part
from cloudckpt.errors import UnsupportedValueError

_UNCHANGING = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range}
)
_DICTS = frozenset({dict, OrderedDict})
_PLACEHOLDERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Leaves:
    """The tensors of a state dict, in its order, and a copy of all else.

    `tensors` have addresses; `of_memory` sees to it that they are nothing but strided memory. Their copies must be put
    into `put_together` in their order.
    """

    def __init__(
        self, state_dict: Mapping[str, Any], *, address_of: Callable[[torch.Tensor], int] | None = None
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.are_within: list[bool] = []
        """Of each tensor, whether it is in a tuple, which DCP has serialised as a whole."""
        self._address_of = address_of or _address_of
        self._num_tuples = 0
        self._places: list[tuple[Any, Sequence[Any]]] = []
        """Containers, and of each the keys that the next of the copies get."""
        self._finishers: list[Callable[[], None]] = []
        self._default: DefaultStager | None = None
        self._path: list[str] = []
        """Of what cannot be copied, from the inside."""
        self._failed: Any = None
        self._root: list[Any] = [None]
        try:
            with torch.no_grad():
                self._take(state_dict, self._root, 0)
        except (UnsupportedValueError, MemoryError):
            raise
        except Exception as error:
            name = ".".join(reversed(self._path[:-1]))
            raise UnsupportedValueError(
                f"cannot copy {unsaved_part(self._failed, name)} for a save in the background: {type(error).__name__}: "
                f"{error}. Leave it out of the state dict, or convert it to something that can be copied",
                uri="",
            ) from error
        finally:
            self._close_default()

    @classmethod
    def of_memory(cls, state_dict: Mapping[str, Any], found: Leaves) -> Leaves:
        """`found`, what was found in `state_dict`, if its tensors are strided memory; else with the others copied."""
        if all(map(_is_memory, found.tensors)):
            return found
        return cls(state_dict, address_of=lambda tensor: address_of(tensor) if _is_memory(tensor) else 0)

    def put_together(self, copies: list[torch.Tensor]) -> dict[str, Any]:
        """The state dict with `copies` in place of `tensors`."""
        ordered = iter(copies)
        for container, keys in self._places:
            for key, tensor in zip(keys, ordered, strict=False):
                container[key] = tensor
        for finish in self._finishers:
            finish()
        result: dict[str, Any] = self._root[0]
        return result

    def _take(self, value: Any, container: Any, key: Any) -> None:
        """Put a copy of `value` at `key` of `container`, now or when its tensors are there."""
        kind = type(value)
        if kind in PLAIN_TENSORS and not holds_parts(value) and (address := self._address_of(value)):
            container[key] = None
            self._note([value], [address], container, [key])
        elif kind in _UNCHANGING:
            container[key] = value
        else:
            try:
                self._take_other(value, kind, container, key)
            except BaseException:
                if not self._path:
                    self._failed = value
                self._path.append(str(key))
                raise

    def _take_other(self, value: Any, kind: type[Any], container: Any, key: Any) -> None:
        if kind in PLAIN_TENSORS and holds_parts(value):
            held: list[Any] = [None]
            self._take(value.detach(), held, 0)
            self._finish(container, key, lambda: _with_parts_of(value, held[0]))
        elif kind in PLAIN_TENSORS:
            container[key] = _odd_copy(value)
        elif self._num_tuples and isinstance(value, dict) and kind not in {dict, OrderedDict}:
            container[key] = self._copied(value)  # a Counter, say: what is in a tuple is serialised with its types
        elif isinstance(value, Mapping):
            items: dict[Any, Any] = OrderedDict() if kind is OrderedDict else {}
            container[key] = items
            self._take_mapping(value, items)
        elif kind is list:
            container[key] = entries = [None] * len(value)
            self._take_all(value, entries)
        elif kind is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
            entries = [None] * len(value)
            self._num_tuples += 1
            self._take_all(value, entries)
            self._num_tuples -= 1
            make = tuple if kind is tuple else kind._make  # of namedtuples
            self._finish(container, key, lambda: make(entries))
        elif isinstance(value, ShardedTensor):
            self._take_sharded(value, container, key)
        elif isinstance(value, DTensor):
            local: list[Any] = [None]
            self._take(value._local_tensor, local, 0)  # noqa: SLF001  # to_local() would record a gradient
            make_again = functools.partial(DTensor, requires_grad=False)
            self._finish(container, key, lambda: make_again(local[0], value._spec))  # noqa: SLF001  # as torch makes it
        elif isinstance(value, AsyncCollectiveTensor):
            self._take(value.wait(), container, key)
        else:
            container[key] = self._copied(value)

    def _take_mapping(self, value: Mapping[Any, Any], items: dict[Any, Any]) -> None:
        if type(value) in _DICTS and self._take_together(value, items):
            return
        for name, item in value.items():
            items[name] = None  # in its place, also where it is put in later
            self._take(item, items, name)

    def _take_together(self, value: Mapping[Any, Any], items: dict[Any, Any]) -> bool:
        """As `_take` for each item where all are tensors with addresses; else False, with nothing done."""
        tensors = list(value.values())
        if not PLAIN_TENSORS.issuperset(map(type, tensors)) or any(map(holds_parts, tensors)):
            return False
        addresses = list(map(self._address_of, tensors))
        if not all(addresses):
            return False
        items.update(dict.fromkeys(value))
        self._note(tensors, addresses, items, list(items))
        return True

    def _note(self, tensors: list[torch.Tensor], addresses: list[int], container: Any, keys: Sequence[Any]) -> None:
        self.tensors += tensors
        self.addresses += addresses
        self.are_within += [self._num_tuples > 0] * len(tensors)
        self._places.append((container, keys))

    def _take_all(self, values: Any, entries: list[Any]) -> None:
        for number, item in enumerate(values):
            self._take(item, entries, number)

    def _finish(self, container: Any, key: Any, make: Callable[[], Any]) -> None:
        def finish() -> None:
            container[key] = make()

        self._finishers.append(finish)

    def _take_sharded(self, tensor: ShardedTensor, container: Any, key: Any) -> None:
        """On the CPU, sharing nothing."""
        metadata = copy.deepcopy(tensor.metadata())
        shards = tensor.local_shards()
        placed = [copy.deepcopy(shard.metadata) for shard in shards]
        for shard_metadata in [*metadata.shards_metadata, *placed]:
            if shard_metadata.placement is not None:
                shard_metadata.placement._device = torch.device("cpu")  # noqa: SLF001  # as ShardedTensor.cpu() does
        entries: list[Any] = [None] * len(shards)
        self._take_all([shard.tensor.detach() for shard in shards], entries)

        def make() -> ShardedTensor:
            return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001  # likewise
                [Shard(entry, shard_metadata) for entry, shard_metadata in zip(entries, placed, strict=True)],
                sharded_tensor_metadata=metadata,
                process_group=tensor._process_group,  # noqa: SLF001
                init_rrefs=tensor._init_rrefs,  # noqa: SLF001
            )

        self._finish(container, key, make)

    def _close_default(self) -> None:
        if self._default is not None:
            self._default.close()

    def _copied(self, value: Any) -> Any:
        """By torch's stager, which also brings tensors within objects to the CPU."""
        if self._default is None:
            # As dcp.async_save makes its own. Without an accelerator torch refuses anything faster.
            self._default = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )
            self._default._state_dict_stager = _OfValues()  # noqa: SLF001  # it has no way to be given one
        staged: Any = self._default.stage({"": value})
        return staged[""]


class _OfValues(StateDictStager):
    """torch's copies a tensor's memory, and forgets where that holds the values' conjugates or negatives."""

    def _offload_tensor(self, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002  # as torch's
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
            self._keep_alive(x, memo)  # type: ignore[no-untyped-call]  # torch's, which remembers storages by identity
        return super()._offload_tensor(x, memo, non_blocking=non_blocking)  # type: ignore[no-untyped-call]  # likewise


def _address_of(tensor: torch.Tensor) -> int:
    """0 where there is none."""
    try:
        return address_of(tensor)
    except RuntimeError:  # of a layout without one
        return 0


def _is_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor is some memory, seen with strides, of a device that there are copies from."""
    return bool(
        (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.numel()
        and address_of(tensor)
    )


def _with_parts_of(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    copied = copied.detach()  # another, as the next snapshot may have the same copies
    for name in PART_ATTRIBUTES:
        if hasattr(tensor, name):
            setattr(copied, name, getattr(tensor, name))
    return copied


def _odd_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is no such memory, on the CPU."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return tensor  # it has nothing that could change
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    if not (is_dense and (tensor.is_cpu or tensor.is_cuda)):
        return tensor.to("cpu", copy=True)
    if is_short(tensor) and not is_freed(tensor):
        raise ValueError(f"it is {shortage_of(tensor)}")
    dtype = _PLACEHOLDERS[tensor.itemsize]
    copied = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
    if tensor.numel():  # its memory was freed: so is that of the copy, and the save says so
        copied.untyped_storage().resize_(0)
    return copied.view(tensor.dtype)
