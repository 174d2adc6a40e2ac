"""Files that an export has the service assemble from the data objects of the checkpoint.

`plan_assembly` decides which bytes of a file the service copies, and which are read and sent. `Assembler` carries the
plan out. ``docs/design/040-exports-by-the-service.md`` has the reasons.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from awscrt.checksums import combine_crc32c

from cloudckpt._workers import run_as_completed
from cloudckpt.convert.bodies import TensorFile
from cloudckpt.errors import CheckpointError, StoreError, UnsupportedOperationError
from cloudckpt.format.model import ITEMSIZE_BYTES, StoredTensor
from cloudckpt.format.safetensors import list_contents
from cloudckpt.io.body import Body, compute_md5
from cloudckpt.io.boxes import compute_strides
from cloudckpt.io.reads import RangeRead
from cloudckpt.io.upload import ObjectUpload, UploadSession, logging_store_errors
from cloudckpt.options import MIB
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.stores.base import Limits, Part, UploadedPart, crc32c_of

_log = logging.getLogger("cloudckpt")

COPIED_PART_BYTES = 64 * MIB
"""Size of a copied part. It fits into memory, because all parts are sent if the service does not join them."""
_MAX_TILE_BYTES = 4 * MIB
"""Files are not assembled from larger tiles. Each connection reads one at a time, beside the budget for buffers."""
_ALIGNMENT_BYTES = 64
"""No element of a file's tensors crosses a multiple of this: their begins are multiples of their elements' sizes."""


class SourceRange(NamedTuple):
    """Bytes ``[begin, end)`` of a file, which are those of an object from `source_begin` on."""

    begin: int
    end: int
    object_index: int
    source_begin: int

    @property
    def shift(self) -> int:
        """The offset from a position in the file to that in the object."""
        return self.source_begin - self.begin


class PlannedPart(NamedTuple):
    """A part of a file: copied from a range of an object, or read and sent if `source` is None."""

    part: Part
    source: SourceRange | None


def find_ranges(file: TensorFile, tensors: Mapping[str, StoredTensor], names: Mapping[str, str]) -> list[SourceRange]:
    """Return the ranges of a file whose bytes are in objects as they are, in order. Neighbours are joined.

    `names` maps each name in the file to that in `tensors`. The ranges hold the chunks that are neither transformed nor
    cast, and whose elements follow each other in their tensor.
    """
    found: list[SourceRange] = []
    for entry, first in zip(file.entries, file.layout.begins, strict=True):
        tensor = tensors[names[entry.fqn]]
        if tensor.transforms or tensor.dtype != entry.dtype:
            continue
        itemsize, strides = ITEMSIZE_BYTES[tensor.dtype], compute_strides(tensor.shape)
        for chunk in tensor.chunks:
            dim = next((dim for dim, length in enumerate(chunk.lengths) if length > 1), len(chunk.lengths))
            is_one_run = chunk.lengths[dim + 1 :] == tensor.shape[dim + 1 :]
            if chunk.begin < chunk.end and chunk.begin % itemsize == 0 and is_one_run:
                offset = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
                begin = first + offset * itemsize
                found.append(SourceRange(begin, begin + chunk.end - chunk.begin, chunk.object_index, chunk.begin))
    joined: list[SourceRange] = []
    for own in sorted(found):
        last = joined[-1] if joined else None
        if last and (last.end, last.object_index, last.shift) == (own.begin, own.object_index, own.shift):
            joined[-1] = last._replace(end=own.end)
        else:
            joined.append(own)
    return joined


def plan_assembly(
    size_bytes: int,
    ranges: Sequence[SourceRange],
    *,
    object_sizes_bytes: Sequence[int],
    tile_bytes: int,
    part_bytes: int,
    limits: Limits,
) -> list[PlannedPart]:
    """Plan the parts of a file of `size_bytes` whose bytes in `ranges` the service can copy.

    Every part but the last has at least the size that the store demands, so a part that is read reaches into the next
    range if the gap before that is smaller. Beside a part that is read, a copied one ends at a bound of tiles, whose
    checksums are known. Parts that are read have about `part_bytes`.

    Returns:
        The parts, the first of which is read. An empty list if nothing can be copied, or in too many parts.

    """
    least_bytes = max(limits.min_part_bytes, 2 * tile_bytes)  # two tiles are read for a part between other bounds
    spans: list[tuple[int, int, SourceRange | None]] = []
    done = 0
    for own, following in pairwise([*ranges, SourceRange(size_bytes + 1, size_bytes + 1, 0, 0)]):
        begin, end = own.begin, own.end
        if done < begin:
            begin = -(-(max(begin, done + limits.min_part_bytes) + own.shift) // tile_bytes) * tile_bytes - own.shift
        is_followed = following.begin == end and following.end - end >= least_bytes + tile_bytes
        if not is_followed and end + own.shift < object_sizes_bytes[own.object_index]:
            end = (end + own.shift) // tile_bytes * tile_bytes - own.shift
        if end - begin < least_bytes:
            continue
        if done < begin:
            spans.append((done, begin, None))
        spans.append((begin, end, own))
        done = end
    if not spans or tile_bytes > _MAX_TILE_BYTES:
        return []
    if done < size_bytes:
        spans.append((done, size_bytes, None))
    part_bytes = max(part_bytes, 2 * (limits.min_part_bytes + _ALIGNMENT_BYTES))  # halves are large enough
    parts = [*_cut(spans, tile_bytes=tile_bytes, part_bytes=part_bytes)]
    return parts if len(parts) <= limits.max_parts else []


def _cut(
    spans: Sequence[tuple[int, int, SourceRange | None]], *, tile_bytes: int, part_bytes: int
) -> Iterator[PlannedPart]:
    """Yield the parts of each span, of about one size, cut at bounds of tiles or between elements."""
    number = 0
    for begin, end, source in spans:
        shift, step_bytes = (0, _ALIGNMENT_BYTES) if source is None else (source.shift, tile_bytes)
        most_bytes = part_bytes if source is None else COPIED_PART_BYTES
        num_parts = -(-(end - begin) // most_bytes)
        inner = (begin + (end - begin) * index // num_parts for index in range(1, num_parts))
        cuts = [begin, *((cut + shift) // step_bytes * step_bytes - shift for cut in inner), end]
        for low, high in pairwise(cuts):
            number += 1
            own = None if source is None else SourceRange(low, high, source.object_index, low + shift)
            yield PlannedPart(Part(number=number, offset_bytes=low, size_bytes=high - low), own)


class Assembler:
    """Has the service copy what it can of an export's files.

    A copied part is proven to have the bytes of the save before its file exists: by the CRC32C that the service
    reports; or by the MD5, for which the bytes are read and verified here. After the first refusal or wrong answer, the
    service is not asked again: the rest is read and sent.
    """

    def __init__(self, target: Context, reader: CheckpointReader, ranges: Mapping[str, Sequence[SourceRange]]) -> None:
        """`ranges` are those of the files that may be assembled, by their keys."""
        self._target, self._reader, self._ranges = target, reader, ranges
        self._contents = list_contents(reader.manifest) if ranges else []
        self._refusals: list[Exception] = []
        self._uploads: list[tuple[ObjectUpload, list[UploadedPart]]] = []

    def count_bytes(self) -> tuple[int, int]:
        """Return how many bytes the service copied: those proven by its CRC32C, and those that were read for it."""
        copied = [part for upload, parts in self._uploads if not upload.is_abandoned for part in parts]
        by_crc32c = sum(copy.part.size_bytes for copy in copied if copy.crc32c is not None)
        return by_crc32c, sum(copy.part.size_bytes for copy in copied) - by_crc32c

    def submit(self, session: UploadSession, key: str, body: Body, part_bytes: int) -> bool:
        """Have parts of a file copied, and the others sent by `session`. Return False if all are to be sent."""
        target, manifest = self._target, self._reader.manifest
        planned = plan_assembly(
            body.size_bytes,
            self._ranges.get(key, ()),
            object_sizes_bytes=[stored.size for stored in manifest.objects],
            tile_bytes=manifest.tile_bytes,
            part_bytes=part_bytes,
            limits=target.store.limits,
        )
        if not planned or self._refusals or any(upload.is_abandoned for upload, _ in self._uploads):
            return False
        upload_id = target.client.create_multipart(key)
        copies = [(part, source) for part, source in planned if source is not None]
        copied: list[UploadedPart] = []

        def copy(item: tuple[Part, SourceRange]) -> None:
            if self._refusals:
                return
            try:
                copied.append(self._copy(key, upload_id, *item, body=body, part_bytes=part_bytes))
            except (StoreError, CheckpointError) as error:
                self._refusals.append(error)

        try:
            threads = run_as_completed(
                copies, copy, num_threads=target.max_connections, name="cloudckpt-assembly", on_failure=target.stop
            )
            with contextlib.closing(threads):
                for part, _ in threads:
                    if not self._refusals:
                        target.emit("save.part_uploaded", key=key, num_bytes=part.size_bytes)
            if not self._refusals:
                upload = session.join_parts(key, body, upload_id, [part for part, _ in planned], copied)
                self._uploads.append((upload, copied))
                return True
            _log.info("the service does not copy into %s, so it is read and sent: %s", key, self._refusals[0])
        finally:
            if not self._uploads or self._uploads[-1][1] is not copied:
                self._abort(key, upload_id)
        return False

    def _copy(
        self, key: str, upload_id: str, part: Part, source: SourceRange, *, body: Body, part_bytes: int
    ) -> UploadedPart:
        """Have the service copy one part, and prove it. Raises `StoreError` for a refusal or other bytes."""
        store, (client, source_key) = self._target.store, self._reader.locate(source.object_index)
        source_url = client.url(source_key)
        ask = functools.partial(store.copy_part, source_url=source_url, source_begin=source.source_begin)
        found = self._target.client.call(ask, key, upload_id, part)
        if found.crc32c is None:
            is_proven = found.md5 is not None and found.md5 == compute_md5(body, part, read_bytes=part_bytes)
        else:
            is_proven = found.crc32c == self._compute_crc32c(source)
        if not is_proven:
            problem = (
                f"the service has copied other bytes than those that {source_url} has from byte "
                f"{source.source_begin} on, or reports no checksum of them"
            )
            raise store.error(UnsupportedOperationError, "copy_part", key, problem)
        return UploadedPart(part=part, token=found.token, crc32c=found.crc32c)

    def _compute_crc32c(self, source: SourceRange) -> int:
        """Return the CRC32C that the bytes had when they were saved. Reads the tiles that they have a part of."""
        manifest, index, begin = self._reader.manifest, source.object_index, source.source_begin
        end, tile_bytes, crc32c = source.end + source.shift, manifest.tile_bytes, 0
        tiles = self._reader.tiles_of(RangeRead(object_index=index, begin=begin, end=end))
        for number, saved in enumerate(tiles, begin // tile_bytes):
            tile = number * tile_bytes, min((number + 1) * tile_bytes, manifest.objects[index].size)
            own = max(begin, tile[0]), min(end, tile[1])
            value = saved if own == tile else self._read_crc32c(index, tile, own)
            crc32c = combine_crc32c(crc32c, value, own[1] - own[0])
        return crc32c

    def _read_crc32c(self, index: int, tile: tuple[int, int], own: tuple[int, int]) -> int:
        """Read and verify a tile; return the CRC32C of its bytes ``[own[0], own[1])``."""
        view = memoryview(bytearray(tile[1] - tile[0]))
        self._reader.read_tiles(
            RangeRead(object_index=index, begin=tile[0], end=tile[1]),
            open_views=lambda _: contextlib.nullcontext([view]),
            names_in=lambda _, low, high: self._contents[index].names(low, high),
            is_verified=True,
        )
        return crc32c_of([view[own[0] - tile[0] : own[1] - tile[0]]])

    def _abort(self, key: str, upload_id: str) -> None:
        with logging_store_errors("abort an upload", uri=self._target.uri):
            self._target.client.unstopped_copy().abort_multipart(key, upload_id)
