"""Every byte of one manifest's objects, read and compared with what the manifest says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cloudckpt._workers import each_done
from cloudckpt.errors import ObjectNotFoundError, ShortObjectError
from cloudckpt.format.codec import unpack_tiles
from cloudckpt.format.model import Manifest
from cloudckpt.format.safetensors import (
    LENGTH_BYTES,
    ObjectContents,
    find_header_end,
    find_header_problems,
    list_contents,
)
from cloudckpt.io.download import fetch, find_wrong_tiles, measure
from cloudckpt.pipeline.context import Context
from cloudckpt.stores.base import crc32c_of
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.tensor_bytes import bytes_view

_T = TypeVar("_T")

_MIN_READ_BYTES = 4096


class _DamagedUnitError(Exception):
    """The bytes read differ from the bytes saved. The arguments say how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Whole tiles of one object, bytes ``[begin, end)``: one read, or one tile that is too large for one."""

    object_index: int
    begin: int
    end: int


class VerifyJob:
    """Reads of all that one manifest names. Needs no torch-distributed, and no memory but `Options.read_bytes`."""

    def __init__(
        self, context: Context, manifest: Manifest, *, on_read: Callable[[int], None] = lambda _num_bytes: None
    ) -> None:
        self._context = context
        self._manifest = manifest
        self._on_read = on_read
        self._contents: list[ObjectContents] = []
        self._arena = Arena(budget_bytes=context.options.read_bytes)
        self._read_bytes = max(
            min(context.options.advanced.request_bytes, context.options.read_bytes // context.connections),
            _MIN_READ_BYTES,
        )
        # Many threads write these. Each key, and each list within `_damage`, belongs to one of them at a time.
        self._sizes_bytes: dict[int, int] = {}
        self._damage: list[list[tuple[int, int]]] = [[] for _ in manifest.objects]
        self._header_problems: dict[int, list[str]] = {}
        self._missing: set[int] = set()

    def run(self) -> list[str]:
        """Every problem, each with the object's key and the names of what it holds; empty where all is well.

        Raises `StoreError` where the store does not answer, or may not be read: that says nothing about the data.
        """
        self._contents = list_contents(self._manifest)
        self._context.emit("verify.planned", num_bytes=sum(stored.size for stored in self._manifest.objects))
        self._in_threads(range(len(self._manifest.objects)), self._look)
        self._in_threads(list(self._units()), self._check)
        return [text for index in range(len(self._manifest.objects)) for text in self._problems_of(index)]

    def _in_threads(self, items: Sequence[_T], work: Callable[[_T], None]) -> None:
        context = self._context
        done = each_done(
            items,
            work,
            num_threads=context.connections,
            name="cloudckpt-verify",
            on_failure=context.stop,
        )
        for _ in done:
            pass

    def _look(self, index: int) -> None:
        context, stored = self._context, self._manifest.objects[index]
        size_bytes = measure(context.client, key=stored.key, size_bytes=stored.size)
        if size_bytes is None:
            self._missing.add(index)
        else:
            self._sizes_bytes[index] = size_bytes
        if not self._manifest.objects[index].size:
            self._judge_header(index, memoryview(b""))

    def _units(self) -> Iterator[_Unit]:
        tile_bytes = self._manifest.tile_bytes
        step_bytes = max(self._read_bytes // tile_bytes, 1) * tile_bytes
        for index, size_bytes in self._sizes_bytes.items():
            saved_bytes = self._manifest.objects[index].size
            # Of an object that was cut, the tiles that are whole.
            there_bytes = saved_bytes if size_bytes >= saved_bytes else size_bytes // tile_bytes * tile_bytes
            for begin in range(0, there_bytes, step_bytes):
                yield _Unit(object_index=index, begin=begin, end=min(begin + step_bytes, there_bytes))

    def _check(self, unit: _Unit) -> None:
        manifest, index = self._manifest, unit.object_index
        first, last = unit.begin // manifest.tile_bytes, -(-unit.end // manifest.tile_bytes)
        expected = unpack_tiles(manifest.objects[index].crc32c)[first:last]
        try:
            if unit.end - unit.begin <= self._read_bytes:
                bad = self._bad_tiles(unit, expected)
            else:
                bad = self._bad_large_tile(unit, expected[0])
        except ObjectNotFoundError:
            self._missing.add(index)
        except ShortObjectError:  # replaced since its size was asked for
            self._damage[index].append((unit.begin, unit.end))
        else:
            for tile in bad:
                begin = unit.begin + tile * manifest.tile_bytes
                self._damage[index].append((begin, min(begin + manifest.tile_bytes, unit.end)))
        self._context.emit("verify.range_read", key=manifest.objects[index].key, num_bytes=unit.end - unit.begin)
        self._on_read(unit.end - unit.begin)

    def _bad_tiles(self, unit: _Unit, expected: Sequence[int]) -> Sequence[int]:
        context = self._context
        with self._arena.lend(unit.end - unit.begin) as buffer:
            view = bytes_view(buffer)
            key = self._manifest.objects[unit.object_index].key
            fetch(context.client, key=key, begin=unit.begin, views=[view])
            bad = find_wrong_tiles(
                context.client,
                key=key,
                begin=unit.begin,
                views=[view],
                tile_bytes=self._manifest.tile_bytes,
                expected_crc32cs=expected,
            )
            if unit.begin == 0 and not bad:
                self._judge_header(unit.object_index, view)
        return list(bad)

    def _bad_large_tile(self, unit: _Unit, expected: int) -> Sequence[int]:
        """Check a tile that is read in pieces."""

        def look() -> None:
            if self._crc32c_of(unit) != expected:
                raise _DamagedUnitError("the tile has another checksum than was saved")

        try:
            self._context.client.observe(look, doubted=_DamagedUnitError)
        except _DamagedUnitError:
            return [0]
        if unit.begin == 0:
            self._judge_header(unit.object_index, memoryview(b""))
        return []

    def _crc32c_of(self, unit: _Unit) -> int:
        value = 0
        for begin in range(unit.begin, unit.end, self._read_bytes):
            with self._arena.lend(min(self._read_bytes, unit.end - begin)) as buffer:
                view = bytes_view(buffer)
                self._fetch(unit.object_index, begin, view)
                value = crc32c_of([view], value)
        return value

    def _judge_header(self, index: int, known: memoryview) -> None:
        """`known` are the object's first bytes that have been checked; a longer header is read for itself."""
        size_bytes = self._manifest.objects[index].size

        def look() -> None:
            beginning = self._prefix(index, known, min(LENGTH_BYTES, size_bytes))
            try:
                end = find_header_end(beginning, size_bytes=size_bytes)
            except ValueError as error:
                raise _DamagedUnitError(str(error)) from error
            header = self._prefix(index, known, end)
            problems = list(find_header_problems(header, self._contents[index], size_bytes=size_bytes))
            if problems:
                raise _DamagedUnitError(*problems)

        try:  # what is read here is not covered by a checksum, and may have been damaged on its way
            self._context.client.observe(look, doubted=_DamagedUnitError)
        except _DamagedUnitError as error:
            self._header_problems[index] = list(error.args)

    def _prefix(self, index: int, known: memoryview, num_bytes: int) -> bytes:
        if len(known) >= num_bytes:
            return bytes(known[:num_bytes])
        content = bytearray(num_bytes)
        self._fetch(index, 0, memoryview(content))
        return bytes(content)

    def _fetch(self, index: int, begin: int, view: memoryview) -> None:
        context = self._context
        fetch(context.client, key=self._manifest.objects[index].key, begin=begin, views=[view])

    def _problems_of(self, index: int) -> Iterator[str]:
        stored, contents = self._manifest.objects[index], self._contents[index]
        where = self._context.client.url(stored.key)
        if index in self._missing:
            yield f"{where} is missing, and with it {contents.names(0, stored.size)}"
            return
        size_bytes = self._sizes_bytes[index]
        if size_bytes > stored.size:
            yield f"{where} has {size_bytes} bytes, but {stored.size} were saved: bytes were added to it"
        elif size_bytes < stored.size:
            lost_from = size_bytes // self._manifest.tile_bytes * self._manifest.tile_bytes
            yield (
                f"{where} has {size_bytes} bytes, but {stored.size} were saved: it was cut, and bytes from "
                f"{lost_from} on cannot be checked. They hold {contents.names(lost_from, stored.size)}"
            )
        for begin, end in _joined(sorted(self._damage[index])):
            yield (
                f"{where} is damaged: bytes [{begin}, {end}) do not have the CRC32C that was saved. They hold "
                f"{contents.names(begin, end)}"
            )
        yield from (f"{where}: {text}" for text in self._header_problems.get(index, ()))


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
