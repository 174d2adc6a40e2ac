"""How two checkpoints differ, by value: whatever ranks and shards they were saved with."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cloudckpt._collecting import rare_collections
from cloudckpt._compare.blocks import batches, boxes_for
from cloudckpt._compare.sides import Side, Wanted, read_both
from cloudckpt._compare.tally import Tally
from cloudckpt._compare.values import is_same_value
from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES
from cloudckpt._manifest.model import Manifest, StoredTensor
from cloudckpt.errors import InvalidOptionError
from cloudckpt.options import Options

Kind = Literal["added", "removed", "type", "dtype", "shape", "values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One entry that is not the same in both."""

    name: str
    kind: Kind
    """``"added"``: only the second has it. ``"type"``: a tensor in one, and none in the other."""
    before: str
    """What it is in the first, in words; empty where it is not there."""
    after: str
    num_elements: int = 0
    num_different: int = 0
    """Elements whose values differ by more than the tolerances."""
    max_absolute: float = 0.0
    """The largest ``|after - before|``; infinite where a NaN or an infinity is in one place and not in the other."""
    max_relative: float = 0.0
    """The largest difference as a share of the larger of the two magnitudes: from 0 to 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How the second of two checkpoints differs from the first."""

    before: str
    after: str
    """Their URIs."""
    differences: tuple[Difference, ...]
    """By name."""
    num_same: int
    """Entries that are the same in both."""
    num_bytes_compared: int

    @property
    def is_same(self) -> bool:
        """Whether there is no difference."""
        return not self.differences


def compare(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    only: Callable[[str], bool] | None = None,
    options: Options | None = None,
    options_after: Options | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints entry by entry, element by element.

    Elements are the same where both are NaN, or where ``|after - before| <= atol + rtol * |before|``. How the tensors
    are cut into shards makes no difference. Every byte is checked as in a load. Takes memory for a block of 64 MiB of
    either checkpoint (and for one whole chunk, where chunks were transformed; a value whole), besides what two loads
    take (`Options.read_bytes`). `only` picks names. Values that are no tensors are the same if their bytes are, or if
    they load without running code and are equal. `on_progress` is told of bytes that are done, and of all.

    `options_after` are for `after`, where it lies on another store. Raises what a load raises, and
    `InvalidOptionError` for a tolerance that is none.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not 0 <= value < math.inf:
            raise InvalidOptionError(f"{name} must be a number from 0 on, not {value!r}")
    with rare_collections():
        sides = [Side(before, options or Options()), Side(after, options_after or options or Options())]
        found = _Found(sides, only or (lambda _: True))
        done = 0
        for batch in batches(found.blocks()):
            for wanted in batch:
                wanted.make()
            read_both([(side, [(wanted, wanted.of(at)) for wanted in batch]) for at, side in enumerate(sides)])
            for wanted in batch:
                found.judge(wanted, rtol=rtol, atol=atol)
                done += wanted.num_bytes
            if on_progress is not None:
                on_progress(done, found.num_bytes)
        return found.result()


class _Found:
    """What is compared, and what came of it."""

    def __init__(self, sides: Sequence[Side], only: Callable[[str], bool]) -> None:
        first, second = (side.manifest for side in sides)
        self._uris = [side.context.uri for side in sides]
        self._first, self._second = first, second
        self._differences: dict[str, Difference] = {}
        self._tallies: dict[str, Tally] = {}
        names = [
            name
            for name in dict.fromkeys((*first.tensors, *first.values, *second.tensors, *second.values))
            if only(name)
        ]
        self._names = len(names)
        self._common = [name for name in names if self._is_comparable(name)]
        self._num_compared = 0
        self.num_bytes = sum(self._bytes_of(name) for name in self._common)

    def blocks(self) -> Iterator[Wanted]:
        """All that has to be read, piece by piece."""
        for name in self._common:
            first, second = self._first.tensors.get(name), self._second.tensors.get(name)
            if first is None or second is None:
                yield Wanted(name, None, "", self._bytes_of(name))
                continue
            self._tallies[name] = Tally()
            itemsize_bytes = ITEMSIZE_BYTES[first.dtype]
            for box in boxes_for(first, second, itemsize_bytes):
                yield Wanted(name, box, first.dtype, math.prod(box.lengths) * itemsize_bytes)

    def judge(self, wanted: Wanted, *, rtol: float, atol: float) -> None:
        """The bytes are there."""
        before, after = wanted.of(0), wanted.of(1)
        if wanted.box is not None:
            self._tallies[wanted.name].add(before, after, rtol=rtol, atol=atol)
        else:
            same, told = is_same_value(before.getvalue(), after.getvalue())
            if not same:
                self._differ(wanted.name, "values", *told)
        self._num_compared += wanted.num_bytes
        wanted.release()

    def result(self) -> Comparison:
        """When all was judged."""
        for name, tally in self._tallies.items():
            if tally.num_different:
                text = _tensor_text(self._first.tensors[name])
                self._differences[name] = Difference(
                    name=name,
                    kind="values",
                    before=text,
                    after=text,
                    num_elements=tally.num_elements,
                    num_different=tally.num_different,
                    max_absolute=tally.max_absolute,
                    max_relative=tally.max_relative,
                )
        return Comparison(
            before=self._uris[0],
            after=self._uris[1],
            differences=tuple(self._differences[name] for name in sorted(self._differences)),
            num_same=self._names - len(self._differences),
            num_bytes_compared=self._num_compared,
        )

    def _is_comparable(self, name: str) -> bool:
        """Whether the bytes have to be looked at; what differs without that is noted."""
        texts = [_text_of(manifest, name) for manifest in (self._first, self._second)]
        first, second = self._first.tensors.get(name), self._second.tensors.get(name)
        if not texts[0] or not texts[1]:
            self._differ(name, "removed" if texts[0] else "added", *texts)
        elif (first is None) != (second is None):
            self._differ(name, "type", *texts)
        elif first is not None and second is not None and first.shape != second.shape:
            self._differ(name, "shape", *texts)
        elif first is not None and second is not None and first.dtype != second.dtype:
            self._differ(name, "dtype", *texts)
        else:
            return True
        return False

    def _differ(self, name: str, kind: Kind, before: str, after: str) -> None:
        self._differences[name] = Difference(name=name, kind=kind, before=before, after=after)

    def _bytes_of(self, name: str) -> int:
        tensor = self._first.tensors.get(name)
        if tensor is not None:
            return math.prod(tensor.shape) * ITEMSIZE_BYTES[tensor.dtype]
        value = self._first.values[name]
        return value.end - value.begin


def _text_of(manifest: Manifest, name: str) -> str:
    tensor = manifest.tensors.get(name)
    if tensor is not None:
        return _tensor_text(tensor)
    return "a value" if name in manifest.values else ""


def _tensor_text(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
