"""Verify that a stored checkpoint has the bytes of its save."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cloudckpt._display import transferred
from cloudckpt._messages import join_first, quote_names
from cloudckpt._workers import run_all
from cloudckpt.commit.log import resolve
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    ShortObjectError,
    changed_error,
)
from cloudckpt.format.model import FilesManifest, StoredObject
from cloudckpt.format.safetensors import (
    LENGTH_BYTES,
    ObjectContents,
    find_header_end,
    find_header_problems,
    list_contents,
)
from cloudckpt.inspect.description import find_empty_dicts
from cloudckpt.io.boxes import join_ranges
from cloudckpt.io.download import download_range
from cloudckpt.io.reads import RangeRead
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.safetensors_files import find_published_sha256, find_source
from cloudckpt.report import VerifyReport
from cloudckpt.stores.base import crc32c_of
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.tensor_bytes import bytes_view
from cloudckpt.uri import Location, parse_location

_T = TypeVar("_T")
_log = logging.getLogger("cloudckpt")

_MIN_READ_BYTES = 4096


def verify(uri: str | os.PathLike[str], *, options: Options | None = None) -> VerifyReport:
    """Read every byte of the checkpoint or the safetensors files at `uri`, and compare it with the checksums.

    Needs no model and no process group, and runs no code from the store. Checks the manifest, the existence and exact
    size of each object, the CRC32C of every tile with header and padding, and each safetensors header against the
    manifest. Takes `Options.connections` requests at once and at most `Options.read_bytes` of memory besides the
    manifest and the headers.

    Safetensors files of other programs have no checksums, but Hugging Face's hub publishes their SHA-256. It is known
    from ``hf://``, in a snapshot of the hub's cache, and in a folder that ``hf download --local-dir`` has made. A file
    in such a folder that was written after its download, and is another one, proves nothing.

    Args:
        uri: The checkpoint.
        options: How to reach the store.

    Returns:
        Counts and seconds of a verification that found no damage.

    Raises:
        CorruptCheckpointError: Something differs. ``problems`` has all differences, each with its object and tensors.
        CheckpointNotFoundError: No checkpoint exists at `uri`, or only one of torch's own writer, without checksums,
            or safetensors files whose SHA-256 is unknown, or that were changed after their download.
        CheckpointChangedError: The checkpoint was overwritten twice during the call.
        UnsupportedFormatError: A newer cloudckpt wrote it.
        StoreError: A request failed, which proves no damage.

    Example::

        report = cloudckpt.verify("s3://bucket/run/step-100")
        print(report.num_bytes, report.verify_s)

    """
    options = options or Options()
    location = parse_location(uri)
    try:
        return _verify_once(location, options)
    except CheckpointChangedError:
        return _verify_once(location, options)


def _verify_once(location: Location, options: Options) -> VerifyReport:
    begun_s = time.monotonic()
    context, resolved = find_source(Context(location, options, rank=0))
    manifest = resolved.manifest
    reader = CheckpointReader(context, manifest)
    is_of_files = isinstance(manifest, FilesManifest)
    problems = _find_file_problems(reader, uri=location.uri) if is_of_files else Verification(reader).run()
    if problems and reader.has_changed():
        raise changed_error(location.uri, doing="verified", advice="Verify again")
    if problems:
        shown = join_first(problems)
        raise CorruptCheckpointError(
            f"{location.uri} is not what was {'published' if is_of_files else 'saved'}: {shown}. "
            f"{'Download it again' if is_of_files else 'Load an older checkpoint'}",
            uri=location.uri,
            problems=problems,
        )
    report = VerifyReport(
        uri=location.uri,
        attempt=manifest.attempt,
        num_objects=len(manifest.objects),
        num_tensors=len(manifest.tensors),
        num_values=len(manifest.values) + len(find_empty_dicts(manifest)),
        num_bytes=sum(stored.size for stored in manifest.objects),
        num_requests=context.client.num_requests,
        num_retries=context.client.num_retries,
        verify_s=time.monotonic() - begun_s,
    )
    _log.info("verified %s%s", report.uri, transferred(report.num_bytes, report.verify_s))
    return report


def _find_file_problems(reader: CheckpointReader, *, uri: str) -> list[str]:
    """Compare whole safetensors files with the SHA-256 that Hugging Face's hub has published of each."""
    context, files = reader.context, reader.manifest.objects
    found = {file.key: find_published_sha256(context, file.key) for file in files}
    published = {key: sha256 for key, sha256 in found.items() if sha256 is not None}
    if unknown := [key for key in found if key not in published]:
        raise CheckpointNotFoundError(
            f"{uri} has no checksums: nothing tells the SHA-256 that the hub published of {quote_names(unknown)}. "
            "The headers fit the sizes. `cloudckpt import` makes a checkpoint of the files, with checksums",
            uri=uri,
        )
    context.emit("verify.planned", num_bytes=sum(file.size for file in files))
    arena, read_bytes = Arena(budget_bytes=context.options.read_bytes), _choose_read_bytes(context)
    problems: dict[str, str] = {}

    def check(file: StoredObject) -> None:
        def look() -> None:
            digest = hashlib.sha256()
            try:
                for begin in range(0, file.size, read_bytes):
                    with arena.lend(min(read_bytes, file.size - begin)) as buffer:
                        view = bytes_view(buffer)
                        download_range(context.client, key=file.key, begin=begin, views=[view])
                        digest.update(view)
            except (ObjectNotFoundError, ShortObjectError) as error:
                raise _DamagedUnitError(str(error)) from error
            if digest.hexdigest() != published[file.key].digest:
                raise _DamagedUnitError(
                    f"{context.client.url(file.key)} has another SHA-256 than the hub has published"
                )

        try:
            context.client.confirm(look, errors=_DamagedUnitError)
        except _DamagedUnitError as error:
            problems[file.key] = str(error)
        context.emit("verify.range_read", key=file.key, num_bytes=file.size)

    run_all(files, check, num_threads=context.max_connections, name="cloudckpt-verify", on_failure=context.stop)
    damaged: list[str] = []
    changed: list[str] = []
    for key in (file.key for file in files if file.key in problems):
        (changed if published[key].is_outdated else damaged).append(problems[key])
    if changed and not damaged:
        raise CheckpointNotFoundError(
            f"{uri} is not proven: {join_first(changed)}. That was written after the download, so it was "
            "changed on purpose, or is damaged, and nothing here tells which. If it was not changed, download it again",
            uri=uri,
        )
    return damaged


def find_unlisted(uri: str, *, options: Options) -> str:
    """Return why the checkpoint at `uri` cannot be loaded, by its manifest and a listing; "" if they show no reason.

    Looks at the objects in its own folder, and reads no data.
    """
    client = Context(parse_location(uri), options, rank=0).client
    try:
        manifest = resolve(client).manifest
    except CheckpointError as error:
        return str(error)
    listed = {info.key: info.size_bytes for info in client.list("data/")}
    own = [stored for stored in manifest.objects if not stored.folder]
    lacking = [stored.key for stored in own if listed.get(stored.key) != stored.size]
    if not lacking:
        return ""
    shown = join_first(lacking, separator=", ")
    return f"the listing lacks {len(lacking)} of its {len(own)} data objects, or has them with another size: {shown}"


class _DamagedUnitError(Exception):
    """The bytes that were read differ from those of the save. Each argument is a sentence about a difference."""


def _choose_read_bytes(context: Context) -> int:
    options = context.options
    return max(min(options.advanced.request_bytes, options.read_bytes // context.max_connections), _MIN_READ_BYTES)


class Verification:
    """Reads and checks everything that one manifest names, without torch.distributed.

    Takes at most `Options.read_bytes` of memory beside the manifest and the headers.
    """

    def __init__(self, reader: CheckpointReader, *, on_read: Callable[[int], None] = lambda _num_bytes: None) -> None:
        self._reader, self._on_read = reader, on_read
        self._client = reader.context.client
        self._manifest = reader.manifest
        self._contents: list[ObjectContents] = []
        self._arena = Arena(budget_bytes=reader.context.options.read_bytes)
        self._read_bytes = _choose_read_bytes(reader.context)
        # Many threads write these attributes. Only one at a time uses a key, or a list within `_damage`.
        self._sizes_bytes: dict[int, int] = {}
        self._damage: list[list[tuple[int, int]]] = [[] for _ in self._manifest.objects]
        self._header_problems: dict[int, list[str]] = {}
        self._missing: set[int] = set()

    def run(self) -> list[str]:
        """Return all problems, each with the object's key and the names of its entries.

        Raises `StoreError` if the store does not answer, or denies a read: that says nothing about the data.
        """
        return [text for texts in self.run_each().values() for text in texts]

    def run_each(self) -> dict[int, list[str]]:
        """Return the problems of each object that has some, by its index. Raises as `run` does."""
        self._contents = list_contents(self._manifest)
        num_bytes = sum(stored.size for stored in self._manifest.objects)
        self._reader.context.emit("verify.planned", num_bytes=num_bytes)
        self._in_threads(range(len(self._manifest.objects)), self._measure)
        self._in_threads(list(self._plan()), self._check)
        indices = range(len(self._manifest.objects))
        return {index: problems for index in indices if (problems := list(self._problems_of(index)))}

    def _in_threads(self, items: Sequence[_T], work: Callable[[_T], None]) -> None:
        context = self._reader.context
        run_all(items, work, num_threads=context.max_connections, name="cloudckpt-verify", on_failure=context.stop)

    def _measure(self, index: int) -> None:
        size_bytes = self._reader.measure_object(index)
        if size_bytes is None:
            self._missing.add(index)
        else:
            self._sizes_bytes[index] = size_bytes
        if not self._manifest.objects[index].size:
            self._check_header(index, memoryview(b""))

    def _plan(self) -> Iterator[RangeRead]:
        """Yield ranges of whole tiles, one for each read, or for one tile that is too large for a read."""
        tile_bytes = self._manifest.tile_bytes
        range_bytes = max(self._read_bytes // tile_bytes, 1) * tile_bytes
        for index, size_bytes in self._sizes_bytes.items():
            saved_bytes = self._manifest.objects[index].size
            # An object that was cut is read up to its last whole tile.
            whole_bytes = saved_bytes if size_bytes >= saved_bytes else size_bytes // tile_bytes * tile_bytes
            for begin in range(0, whole_bytes, range_bytes):
                yield RangeRead(object_index=index, begin=begin, end=min(begin + range_bytes, whole_bytes))

    def _check(self, request: RangeRead) -> None:
        index, tile_bytes = request.object_index, self._manifest.tile_bytes
        try:
            bad = self._bad_tiles(request) if request.num_bytes <= self._read_bytes else self._bad_large_tile(request)
        except ObjectNotFoundError:
            self._missing.add(index)
        except ShortObjectError:  # it was replaced after `_measure`
            self._damage[index].append((request.begin, request.end))
        else:
            for tile in bad:
                begin = request.begin + tile * tile_bytes
                self._damage[index].append((begin, min(begin + tile_bytes, request.end)))
        key = self._manifest.objects[index].key
        self._reader.context.emit("verify.range_read", key=key, num_bytes=request.num_bytes)
        self._on_read(request.num_bytes)

    def _bad_tiles(self, request: RangeRead) -> Sequence[int]:
        with self._arena.lend(request.num_bytes) as buffer:
            view = bytes_view(buffer)
            self._fetch(request.object_index, request.begin, view)
            bad = list(self._reader.compare_tiles(request, [view]))
            if request.begin == 0 and not bad:
                self._check_header(request.object_index, view)
        return bad

    def _bad_large_tile(self, request: RangeRead) -> Sequence[int]:
        """Check a tile that takes several reads."""
        (expected,) = self._reader.tiles_of(request)

        def look() -> None:
            if self._crc32c_of(request) != expected:
                raise _DamagedUnitError("its bytes have another checksum than was saved")

        try:
            self._client.confirm(look, errors=_DamagedUnitError)
        except _DamagedUnitError:
            return [0]
        if request.begin == 0:
            self._check_header(request.object_index, memoryview(b""))
        return []

    def _crc32c_of(self, request: RangeRead) -> int:
        value = 0
        for begin in range(request.begin, request.end, self._read_bytes):
            with self._arena.lend(min(self._read_bytes, request.end - begin)) as buffer:
                view = bytes_view(buffer)
                self._fetch(request.object_index, begin, view)
                value = crc32c_of([view], value)
        return value

    def _check_header(self, index: int, checked: memoryview) -> None:
        """Compare an object's header with the manifest. `checked` are its first bytes, if their tiles are right."""
        size_bytes = self._manifest.objects[index].size

        def look() -> None:
            beginning = self._read_beginning(index, checked, min(LENGTH_BYTES, size_bytes))
            try:
                end = find_header_end(beginning, size_bytes=size_bytes)
            except ValueError as error:
                raise _DamagedUnitError(str(error)) from error
            header = self._read_beginning(index, checked, end)
            problems = list(find_header_problems(header, self._contents[index], size_bytes=size_bytes))
            if problems:
                raise _DamagedUnitError(*problems)

        try:  # no checksum covers these bytes, which may have been damaged on their way
            self._client.confirm(look, errors=_DamagedUnitError)
        except _DamagedUnitError as error:
            self._header_problems[index] = list(error.args)

    def _read_beginning(self, index: int, checked: memoryview, num_bytes: int) -> bytes:
        if len(checked) >= num_bytes:
            return bytes(checked[:num_bytes])
        content = bytearray(num_bytes)
        self._fetch(index, 0, memoryview(content))
        return bytes(content)

    def _fetch(self, index: int, begin: int, view: memoryview) -> None:
        client, key = self._reader.locate(index)
        download_range(client, key=key, begin=begin, views=[view])

    def _problems_of(self, index: int) -> Iterator[str]:
        stored, contents = self._manifest.objects[index], self._contents[index]
        client, key = self._reader.locate(index)
        where = client.url(key)
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
        for begin, end in join_ranges(sorted(self._damage[index])):
            yield (
                f"{where} is damaged: bytes [{begin}, {end}) do not have the CRC32C that was saved. They hold "
                f"{contents.names(begin, end)}"
            )
        yield from (f"{where}: {text}" for text in self._header_problems.get(index, ()))
