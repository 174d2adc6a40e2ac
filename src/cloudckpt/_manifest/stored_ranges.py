"""The ``storage_data`` of a saved checkpoint's metadata. torch sends it to all ranks, so it is kept small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from cloudckpt._manifest.receipts import ItemReceipts, StoredRange

_Place = tuple[str, int, int]


class StoredRanges(Mapping[MetadataIndex, StoredRange]):
    """Where each item of a save lies. Its values are made when they are asked for; can be pickled."""

    def __init__(self, receipts: Iterable[ItemReceipts]) -> None:
        self._columns = [
            (of_object.stored_in.key, of_object.fqns, of_object.offsets, of_object.begins, of_object.ends)
            for of_object in receipts
        ]
        self._places: dict[tuple[str, tuple[int, ...] | None], _Place] | None = None

    def __getitem__(self, index: MetadataIndex) -> StoredRange:
        try:
            key, begin, end = self._found()[index.fqn, index.offset]
        except KeyError:
            raise KeyError(index) from None
        return StoredRange(key=key, begin=begin, end=end)

    def __iter__(self) -> Iterator[MetadataIndex]:
        return (MetadataIndex(fqn, offsets) for fqn, offsets in self._found())

    def __len__(self) -> int:
        return len(self._found())

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}

    def _found(self) -> dict[tuple[str, tuple[int, ...] | None], _Place]:
        """A later item hides an earlier one of the same index, as in the manifest."""
        if self._places is None:
            self._places = {
                (fqn, offsets): (key, begin, end)
                for key, *columns in self._columns
                for fqn, offsets, begin, end in zip(*columns, strict=True)
            }
        return self._places
