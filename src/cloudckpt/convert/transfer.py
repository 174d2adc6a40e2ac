"""The parts that copies, exports, imports, merges and pulls share: two locations, an upload of bodies, reports."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cloudckpt._display import with_short_repr
from cloudckpt.convert.state_dicts import Selection, parse_patterns
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidURIError,
    ObjectNotFoundError,
)
from cloudckpt.format.model import ObjectRef
from cloudckpt.io.body import Body
from cloudckpt.io.leftovers import Leftover
from cloudckpt.io.upload import UploadSession, fit_part_bytes
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.uri import Location, parse_location

Format: TypeAlias = Literal["safetensors", "torch", "dcp"]
BodyIn: TypeAlias = Callable[[Arena], Body]
"""Makes a body whose parts are read into the memory of an arena."""
Assemble: TypeAlias = Callable[[UploadSession, str, Body, int], bool]
"""Takes a session, a key, its body and a part size. Returns False if it has not begun to upload the body."""

WIDE_FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Floats whose values count by themselves. Those of 8 bits mean nothing without their scales."""
_RANK = 0  # each process works alone, without a group


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """Result of `cloudckpt.copy`."""

    source: str
    """URI of the source."""
    target: str
    """URI of the copy."""
    attempt: str
    """Identifier of the copy."""
    num_objects: int
    """Number of data objects."""
    num_bytes: int
    """Size of all data objects."""
    num_service_bytes: int
    """Bytes that the service copied and confirmed by the CRC32C of the save."""
    num_read_back_bytes: int
    """Bytes that the service copied without a CRC32C. The copy read them back and compared them."""
    num_reused_bytes: int
    """Bytes that an earlier copy had left at the target (`Options.resume`). The copy read them and compared them."""
    was_there: bool
    """True if an earlier copy had committed the whole checkpoint (`Options.resume`), so that nothing was written."""
    num_requests: int
    """Number of requests to both stores."""
    num_retries: int
    """Number of requests that were made again."""
    copy_s: float
    """Seconds of the whole call."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the whole call."""
        return self.num_bytes / self.copy_s if self.copy_s > 0 else 0.0


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """Result of `cloudckpt.export_checkpoint` or `cloudckpt.import_checkpoint`."""

    source: str
    """URI of the source."""
    target: str
    """URI of the target."""
    format: Format
    """Format of the files."""
    num_tensors: int
    """Number of tensors."""
    num_values: int
    """Number of Python objects."""
    left_out: tuple[str, ...]
    """Names of Python objects that an export left out (`skip_non_tensors`)."""
    files: tuple[str, ...]
    """Names of the files that an export wrote, in their folder; of an import, the keys of the data objects."""
    num_bytes: int
    """Size of the files."""
    num_service_bytes: int
    """Bytes of an export that the service copied and confirmed by their CRC32C."""
    num_read_back_bytes: int
    """Bytes of an export that the service copied without a CRC32C. The export read them and compared their MD5."""
    is_whole: bool
    """False if an export lacks files that other processes have yet to write (`part`), and so the index."""
    num_requests: int
    """Number of requests to both stores."""
    convert_s: float
    """Seconds of the whole call."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the whole call."""
        return self.num_bytes / self.convert_s if self.convert_s > 0 else 0.0


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """Result of `cloudckpt.merge`."""

    sources: tuple[str, ...]
    """URIs of the sources."""
    target: str
    """URI of the merged checkpoint."""
    weights: tuple[float, ...]
    """Weight of each source. Their sum is 1."""
    num_averaged: int
    """Number of tensors that are means."""
    num_copied: int
    """Number of other entries, which are the same in all sources."""
    num_bytes: int
    """Size of the data objects."""
    merge_s: float
    """Seconds of the whole call."""


OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes done and their total. Any thread calls it, one at a time; the first number never falls."""


class Progress:
    """Counts bytes for several threads."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = 0

    def expect(self, num_bytes: int) -> None:
        """Add `num_bytes` to the total."""
        with self._lock:
            self._total_bytes += num_bytes
            self._report_bytes()

    def add(self, num_bytes: int) -> None:
        """Add `num_bytes` to those that are done."""
        with self._lock:
            self._done_bytes += num_bytes
            self._report_bytes()

    def _report_bytes(self) -> None:
        if self._on_progress is not None:
            self._on_progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


class Transfer:
    """The source, the target and the arguments of one copy, export, import, merge or pull.

    A copy, as a drain makes it too, has no selection and no prefixes.

    Raises `InvalidURIError` if source and target are the same folder, or one is inside the other.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        *,
        options: Options | None,
        target_options: Options | None,
        overwrite: bool,
        on_progress: OnProgress | None,
        include: str | Sequence[str] = (),
        strip_prefix: str = "",
        add_prefix: str = "",
        allow_pickle: bool = False,
    ) -> None:
        self._begun_s = time.monotonic()
        self.source = Context(parse_location(source), options or Options(), rank=_RANK)
        self.target = Context(parse_location(target), target_options or Options(), rank=_RANK)
        self.selection = Selection(
            uri=self.source.uri,
            include=parse_patterns(include),
            strip_prefix=strip_prefix,
            add_prefix=add_prefix,
        )
        self.overwrite = overwrite
        self.allow_pickle = allow_pickle
        self.progress = Progress(on_progress)
        check_apart(self.source, self.target)

    @property
    def seconds(self) -> float:
        """The time since this object was made."""
        return time.monotonic() - self._begun_s

    def report(
        self,
        kind: Format,
        files: Mapping[str, int],
        *,
        num_tensors: int,
        num_values: int = 0,
        left_out: tuple[str, ...] = (),
        copied_bytes: tuple[int, int] = (0, 0),
        is_whole: bool = True,
        contexts: Iterable[Context] = (),
        num_other_requests: int = 0,
    ) -> ConversionReport:
        """Build the report of an export or import that wrote `files`: their sizes, by name.

        `contexts` made requests besides those of the source and the target, and loads and saves made
        `num_other_requests`.
        """
        clients = {context.client for context in (self.source, self.target, *contexts)}
        return ConversionReport(
            source=self.source.uri,
            target=self.target.uri,
            format=kind,
            num_tensors=num_tensors,
            num_values=num_values,
            left_out=left_out,
            files=tuple(sorted(files)),
            num_bytes=sum(files.values()),
            num_service_bytes=copied_bytes[0],
            num_read_back_bytes=copied_bytes[1],
            is_whole=is_whole,
            num_requests=sum(client.num_requests for client in clients) + num_other_requests,
            convert_s=self.seconds,
        )


def upload_bodies(
    target: Context,
    bodies: Mapping[str, BodyIn],
    *,
    last: Mapping[str, BodyIn] | None = None,
    leftovers: Mapping[str, Sequence[Leftover]] | None = None,
    progress: Progress,
    budget_bytes: int,
    tile_bytes: int,
    stop_reading: Callable[[], None] = lambda: None,
    check_source: Callable[[], None] = lambda: None,
    assemble: Assemble = lambda *_: False,
) -> tuple[list[ObjectRef], int]:
    """Upload an object for each key of `bodies`, and then one for each key of `last`.

    Buffers take at most `budget_bytes`. Each object exists whole or not at all; after a failure, none exists.
    `check_source` is called before `last` and at the end, and may raise. `leftovers`, by key, are parts that earlier
    attempts sent; parts with the same bytes are used. With `leftovers`, a failed upload leaves what it sent: objects
    and parts. A failure also calls `stop_reading`. `assemble` may begin the upload of a body in another way.

    Returns:
        The receipts in the order of the keys, and the number of bytes that came from `leftovers`.

    """
    target.on_sent = progress.add
    choose_part_bytes = functools.partial(
        choose_buffered_part_bytes, target, budget_bytes=budget_bytes, tile_bytes=tile_bytes
    )
    with (
        contextlib.closing(Arena(budget_bytes=budget_bytes)) as arena,
        target.new_uploads(
            part_bytes=choose_part_bytes(), tile_bytes=tile_bytes, resumable=leftovers is not None
        ) as session,
    ):
        try:
            for group in (bodies, last or {}):
                for key, body_in in group.items():
                    body, part_bytes = body_in(arena), choose_part_bytes()
                    if not assemble(session, key, body, part_bytes):
                        session.submit(key, body, (leftovers or {}).get(key, ()), part_bytes=part_bytes)
                session.tasks.join()
                receipts = session.receipts()
                check_source()
        except BaseException:
            stop_reading()
            raise
    progress.add(session.num_reused_bytes)
    return receipts, session.num_reused_bytes


def is_one_service(source: Context, target: Context) -> bool:
    """Return True if one service holds both places with the same storage options, so that the service can copy."""
    source_options, target_options = source.options.storage_options, target.options.storage_options
    service = target.store.capabilities.copies_within
    return (
        service != ""
        and source.store.capabilities.copies_within == service
        and dict(source_options) == dict(target_options)
    )


def choose_buffered_part_bytes(target: Context, *, budget_bytes: int, tile_bytes: int) -> int:
    """Return the size of parts, at least one tile, so that a buffer for each connection fits into `budget_bytes`."""
    return fit_part_bytes(
        budget_bytes,
        connections=target.max_connections,
        max_bytes=target.options.advanced.part_bytes,
        tile_bytes=tile_bytes,
    )


def head_file(context: Context, key: str) -> ObjectInfo:
    """Return the size and version of a file of the source. Raises `CheckpointNotFoundError` if it does not exist."""
    try:
        return context.client.require(key)
    except ObjectNotFoundError as error:
        raise CheckpointNotFoundError(f"{str(error).rstrip('.')}. Check the URI", uri=error.key) from error


def check_unchanged(context: Context, files: Iterable[ObjectInfo]) -> None:
    """Raise `CheckpointChangedError` if a file of the source was replaced since `head_file` looked at it."""
    for file in files:
        if context.client.confirm(functools.partial(_was_replaced, context, file), unconfirmed=bool):
            raise replaced_error(context.client.url(file.key))


def _was_replaced(context: Context, file: ObjectInfo) -> bool:
    return not head_file(context, file.key).is_same_write(file)


def replaced_error(uri: str) -> CheckpointChangedError:
    """Return the error about a source that was replaced."""
    return CheckpointChangedError(
        f"{uri} was replaced while it was read, so nothing was committed. Import again", uri=uri
    )


def check_apart(source: Context, target: Context) -> None:
    """Raise `InvalidURIError` if source and target are the same folder, or one is inside the other."""
    source_path, target_path = _path_of(source.location), _path_of(target.location)
    if _server_of(source) != _server_of(target):
        return
    if source_path == target_path:
        raise InvalidURIError(f"{source.uri} is both the source and the target: there is nothing to do. Give another")
    for inner, outer in ((source_path, target_path), (target_path, source_path)):
        if inner.startswith(outer + "/") or not outer:
            raise InvalidURIError(
                f"{source.uri} and {target.uri} are one inside the other, so their files would mix. Choose a target "
                "beside the source"
            )


def _server_of(context: Context) -> tuple[str, str, str]:
    endpoint_url = str(context.options.storage_options.get("endpoint_url") or "").rstrip("/")
    return context.location.scheme, context.location.authority, endpoint_url


def _path_of(location: Location) -> str:
    path = location.path if location.local_path is None else os.path.realpath(location.local_path)
    return path.rstrip("/")
