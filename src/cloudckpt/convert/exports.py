"""Export a checkpoint as files that other programs read."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import glob
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from cloudckpt.commit.manifest_log import look_until_stable, resolve
from cloudckpt.convert.bodies import FileBody, TensorsBody
from cloudckpt.convert.endpoints import check_apart, folder_and_name, upload_session
from cloudckpt.convert.reports import (
    Conversion,
    ConversionReport,
    OnProgress,
    Progress,
    build_report,
)
from cloudckpt.convert.safetensors_source import INDEX_NAME
from cloudckpt.convert.state_dicts import choose_names, flatten_entries, load_whole, parse_patterns, quote_names
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    Hint,
    InvalidOptionError,
    ObjectNotFoundError,
    StoreError,
    UnsupportedValueError,
)
from cloudckpt.format.model import ITEMSIZE_BYTES, SAFETENSORS_TAG, Manifest
from cloudckpt.format.safetensors import HeaderEntry, Layout, lay_out, pack, sort_for_storage
from cloudckpt.inspect.blocks import CheckpointReader
from cloudckpt.io.resume import Body
from cloudckpt.io.upload import choose_held_part_bytes
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.stores.base import crc32c_of
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")

ExportFormat: TypeAlias = Literal["safetensors", "torch"]

_SINGLE_NAME = "model.safetensors"
_SAFETENSORS_PATTERNS = (_SINGLE_NAME, "model-?????-of-?????.safetensors", INDEX_NAME)
_RESERVED_NAME = "__metadata__"
_MAX_SHOWN = 3
_CONNECTIONS_OF_EACH = 2
"""Connections of each upload for the bytes that it sends."""
_TILE_BYTES = MIB
_WILDCARD = re.compile(r"[*?[]")
_MAX_SHARD_BYTES = 5_000_000_000  # as huggingface_hub's


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """Arguments of `export_checkpoint`, checked."""

    source: Location
    target: Location
    options: Options
    target_options: Options
    include: tuple[str, ...]
    strip_prefix: str
    max_shard_bytes: int
    skip_non_tensors: bool
    overwrite: bool
    allow_pickle: bool


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: ExportFormat = "safetensors",  # the common word for it
    include: str | Sequence[str] = (),
    strip_prefix: str = "",
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    skip_non_tensors: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
    on_progress: OnProgress | None = None,
) -> ConversionReport:
    """Write the checkpoint at `source` as files that other programs read, to `target` on any store.

    - ``"safetensors"``: a folder in Hugging Face's layout. Several files have an index, which is written last. Tensors
      of any size are streamed in at most ``options.read_bytes`` of memory. Tied tensors are written once for each name.
    - ``"torch"``: one file of ``torch.save`` with the nested state dict. Takes memory for the state dict, and as much
      room in the folder for temporary files.
      ``torch.distributed.checkpoint.format_utils.torch_save_to_dcp`` makes a checkpoint in torch's DCP format of it.

    Every byte that is read is checked, sharded tensors are put together, and all bits are those of the save. After an
    error, no index and no single file exists. `target` may hold other files.

    Args:
        source: URI of the checkpoint.
        target: URI of the folder, or of the file for ``"torch"``.
        format: One of the two formats.
        include: Patterns of names, as of files (``"model.*"``). Empty for all entries.
        strip_prefix: Prefix to remove from names. Makes the state dict of ``"torch"`` flat.
        max_shard_bytes: Largest size of a safetensors file, unless one tensor is larger.
        skip_non_tensors: Leave Python objects out of safetensors files, which cannot hold them.
        overwrite: Remove the files of an earlier export before the first new one is written.
        allow_pickle: Consent to run code from the checkpoint, as in `load`.
        options: Options for the source.
        target_options: Options for the target.
        on_progress: Called with the bytes done and their total.

    Raises:
        UnsupportedValueError: The format cannot hold some entries, which the message names.
        CheckpointExistsError: Files of an earlier export exist.
        InvalidOptionError: An argument is wrong, or matches no entry.
        CloudckptError: The source cannot be read, as in `load`.

    """
    begun_s = time.monotonic()
    if format not in _EXPORTERS:
        raise InvalidOptionError(
            f"format must be one of {', '.join(map(repr, _EXPORTERS))}, not {format!r}. For torch's DCP format, export "
            "as 'torch' and convert the file with torch.distributed.checkpoint.format_utils.torch_save_to_dcp"
        )
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise InvalidOptionError(f"max_shard_bytes must be a positive whole number, not {max_shard_bytes!r}")
    options, target_options = options or Options(), target_options or Options()
    plan = ExportPlan(
        source=parse_location(source),
        target=parse_location(target),
        options=options,
        target_options=target_options,
        include=parse_patterns(include),
        strip_prefix=strip_prefix,
        max_shard_bytes=max_shard_bytes,
        skip_non_tensors=skip_non_tensors,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
    )
    check_apart(plan.source, plan.target, options, target_options)
    report = build_report(
        plan.source, plan.target, format, _EXPORTERS[format](plan, Progress(on_progress)), begun_s=begun_s
    )
    _log.info("exported %s", report)
    return report


def export_safetensors(plan: ExportPlan, progress: Progress) -> Conversion:
    """Export as safetensors files, streamed."""
    source = Context(plan.source, plan.options, rank=0)
    target = Context(plan.target, plan.target_options, rank=0)
    manifest = resolve(source.store, source.retrier).manifest
    names = choose_names(
        [*manifest.tensors, *manifest.values],
        include=plan.include,
        strip_prefix=plan.strip_prefix,
        uri=source.uri,
    )
    left_out = tuple(fqn for fqn in names if fqn in manifest.values)
    _check_values(left_out, plan)
    fqns = {name: fqn for fqn, name in names.items() if fqn in manifest.tensors}
    entries = _entries(manifest, fqns, source.uri)
    shards = split_into_shards(entries, max_shard_bytes=plan.max_shard_bytes)
    files = Files(
        target,
        progress,
        patterns=_SAFETENSORS_PATTERNS,
        entries=(INDEX_NAME, _SINGLE_NAME),  # an earlier export had one of these
        overwrite=plan.overwrite,
    )
    files.check()
    index = build_index(shards)
    progress.expect(sum(shard.layout.size_bytes for shard in shards) + (len(index) if len(shards) > 1 else 0))
    files.clear([*(shard.name for shard in shards), *([INDEX_NAME] if len(shards) > 1 else [])])
    # One half is for the parts that are sent. The other is for what is read beside them: the rest of tiles, and gaps.
    budget_bytes = plan.options.read_bytes // 2
    reader = CheckpointReader(_limited(source, budget_bytes // target.connections), manifest)
    try:
        with files.upload(budget_bytes=budget_bytes) as submit:
            for shard in shards:
                submit(shard.name, functools.partial(_body_of, shard, fqns, reader))
    except BaseException:
        reader.stop()
        raise
    if len(shards) > 1:
        files.put_last(INDEX_NAME, index)
    return Conversion(num_tensors=len(fqns), num_values=0, files=files.written, left_out=left_out)


def _limited(source: Context, budget_bytes: int) -> Context:
    """Return a context of which each load holds at most `budget_bytes` beside what it fills."""
    advanced = source.options.advanced
    request_bytes = max(min(advanced.request_bytes, budget_bytes), advanced.tile_bytes)
    options = dataclasses.replace(
        source.options,
        connections=_CONNECTIONS_OF_EACH,
        read_bytes=max(budget_bytes, advanced.tile_bytes),
        advanced=dataclasses.replace(advanced, request_bytes=request_bytes),
    )
    return Context(source.location, options, rank=source.rank, recorder=source.recorder)


def _check_values(fqns: tuple[str, ...], plan: ExportPlan) -> None:
    if fqns and not plan.skip_non_tensors:
        raise UnsupportedValueError(
            f"safetensors files hold tensors alone, and of {plan.source.uri} these are Python objects: "
            f"{quote_names(sorted(fqns))}",
            uri=plan.source.uri,
            hint=Hint(
                advice="Leave them out with {option}, include only names of tensors, or export in the format 'torch'.",
                option="skip_non_tensors",
                value="True",
            ),
        )


def _entries(manifest: Manifest, fqns: dict[str, str], uri: str) -> list[HeaderEntry]:
    """Return the tensors of the files under their new names. Raises `UnsupportedValueError` for a dtype or a name."""
    unknown = {
        fqn: manifest.tensors[fqn].dtype for fqn in fqns.values() if manifest.tensors[fqn].dtype not in SAFETENSORS_TAG
    }
    if unknown:
        raise UnsupportedValueError(
            f"safetensors files that every reader can open have no dtype for "
            f"{quote_names([f'{fqn} ({dtype})' for fqn, dtype in unknown.items()])} of {uri}. Convert them before "
            "they are saved, leave them out with include, or export in the format 'torch'",
            uri=uri,
        )
    if _RESERVED_NAME in fqns:
        raise UnsupportedValueError(
            f"no tensor of a safetensors file can be called {_RESERVED_NAME!r}, as one of {uri} is", uri=uri
        )
    entries = []
    for name, fqn in fqns.items():
        tensor = manifest.tensors[fqn]
        num_bytes = ITEMSIZE_BYTES[tensor.dtype]
        for length in tensor.shape:
            num_bytes *= length
        entries.append(HeaderEntry(fqn=name, dtype=tensor.dtype, shape=tensor.shape, offsets=None, num_bytes=num_bytes))
    return entries


def _body_of(shard: Shard, fqns: dict[str, str], reader: CheckpointReader, arena: Arena) -> TensorsBody:
    layout = shard.layout
    return TensorsBody(
        layout.header,
        [fqns[entry.fqn] for entry in shard.entries],
        layout.begins,
        size_bytes=layout.size_bytes,
        reader=reader,
        arena=arena,
    )


def export_torch(plan: ExportPlan, progress: Progress) -> Conversion:
    """Export as one file of ``torch.save``."""
    folder, name = folder_and_name(plan.target)
    target = Context(folder, plan.target_options, rank=0)
    files = Files(target, progress, patterns=(glob.escape(name),), entries=(name,), overwrite=plan.overwrite)
    files.check()
    state_dict, done = _load(plan)
    with tempfile.TemporaryDirectory(prefix="cloudckpt-export-") as scratch:
        path = Path(scratch, "state.pt")
        torch.save(state_dict, path)
        size_bytes = path.stat().st_size
        progress.expect(size_bytes)
        files.clear([name])
        with files.upload(budget_bytes=plan.options.read_bytes) as submit:
            submit(name, functools.partial(FileBody, path, size_bytes=size_bytes))
    return Conversion(num_tensors=done[0], num_values=done[1], files=files.written)


def _load(plan: ExportPlan) -> tuple[dict[str, Any], tuple[int, int]]:
    """Load the state dict. Return it with the number of its tensors and of its values."""
    state_dict = load_whole(
        plan.source,
        plan.options,
        include=plan.include,
        strip_prefix=plan.strip_prefix,
        allow_pickle=plan.allow_pickle,
    )
    if not state_dict:
        raise UnsupportedValueError(f"{plan.source.uri} holds nothing to export", uri=plan.source.uri)
    flat = flatten_entries(state_dict, uri=plan.source.uri)
    num_tensors = sum(isinstance(value, torch.Tensor) for value in flat.values())
    return state_dict, (num_tensors, len(flat) - num_tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file of an export."""

    name: str
    entries: tuple[HeaderEntry, ...]
    """In the order in which they are stored."""
    layout: Layout


def split_into_shards(entries: Sequence[HeaderEntry], *, max_shard_bytes: int) -> list[Shard]:
    """Split tensors into files of at most `max_shard_bytes` each. A larger tensor gets a file of its own.

    The entries keep their order from file to file, as in ``huggingface_hub.split_torch_state_dict_into_shards``. In
    each file, the largest elements come first, so that all are aligned.
    """
    groups = pack([entry.num_bytes for entry in entries], object_bytes=max_shard_bytes) or [range(0)]
    shards = []
    for number, group in enumerate(groups, start=1):
        members = [entries[i] for i in group]
        members = [members[i] for i in sort_for_storage(members)]
        name = _SINGLE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shards.append(Shard(name=name, entries=tuple(members), layout=lay_out(members)))
    return shards


def build_index(shards: Sequence[Shard]) -> bytes:
    """Build the index that ``transformers`` and torch's reader expect beside several files."""
    weight_map = {entry.fqn: shard.name for shard in shards for entry in shard.entries}
    total_bytes = sum(entry.num_bytes for shard in shards for entry in shard.entries)
    document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"


class Files:
    """Files of one export in one folder of a store.

    `patterns` match the names that an export of this format writes. If such a file exists, `check` fails, unless
    `overwrite`. `clear` then removes the old export before any file is written, beginning with `entries`, the files by
    which readers find the others.
    """

    def __init__(
        self, target: Context, progress: Progress, *, patterns: Sequence[str], entries: Sequence[str], overwrite: bool
    ) -> None:
        self._target = target
        self._progress = progress
        self._patterns = patterns
        self._entries = entries
        self._overwrite = overwrite
        self.written: dict[str, int] = {}
        """The sizes, by their names."""

    def check(self) -> None:
        """Raise `CheckpointExistsError` if a file exists that may not be replaced."""
        if not self._overwrite:
            self._refuse(self._find_names())

    def _refuse(self, found: Sequence[str]) -> None:
        if found:
            more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
            raise CheckpointExistsError(
                f"{', '.join(self._target.store.url(name) for name in found[:_MAX_SHOWN])}{more} is there already: "
                "nothing was written",
                uri=self._target.uri,
                hint=Hint(
                    advice="Choose another place, or pass {option} to replace it.", option="overwrite", value="True"
                ),
            )

    def clear(self, names: Iterable[str]) -> None:
        """Remove the export that is to be replaced. Without `overwrite`, make sure that no file has one of `names`.

        Raises what `check` raises. A HEAD finds what a listing may have left out.
        """
        target = self._target
        if not self._overwrite:
            self._refuse([name for name in names if self._is_there(name)])
            return
        doomed = sorted(self._find_names(), key=lambda name: name not in self._entries)
        if doomed:
            target.retrier.call(target.store.delete, doomed)

    @contextlib.contextmanager
    def upload(self, *, budget_bytes: int) -> Iterator[Callable[[str, Callable[[Arena], Body]], None]]:
        """Yield a function that uploads a file of a given name and body. All files exist when the context ends."""
        part_bytes = choose_held_part_bytes(
            budget_bytes,
            connections=self._target.connections,
            most_bytes=self._target.options.advanced.part_bytes,
            tile_bytes=_TILE_BYTES,
        )
        with (
            contextlib.closing(Arena(budget_bytes=budget_bytes)) as arena,
            upload_session(
                self._target, self._progress, part_bytes=part_bytes, tile_bytes=_TILE_BYTES, resumable=False
            ) as session,
        ):

            def submit(name: str, body_in: Callable[[Arena], Body]) -> None:
                session.submit(name, body_in(arena))

            yield submit
            session.tasks.join()
            self.written |= {receipt.key: receipt.size_bytes for receipt in session.receipts()}

    def put_last(self, name: str, content: bytes) -> None:
        """Put the file by which readers find the others. A failure removes all files."""
        target, views = self._target, [memoryview(content)]
        try:
            target.retrier.call(target.store.put, name, views, crc32c=crc32c_of(views))
        except StoreError:
            try:
                target.new_retrier().call(target.store.delete, [name, *self.written])  # the put may have succeeded
            except StoreError as error:
                _log.warning("could not remove what a failed export left: %s", error)
            raise
        self.written[name] = len(content)
        self._progress.add(len(content))

    def _find_names(self) -> list[str]:
        """Find the files of an earlier export. Two listings must agree, because one may lack a file."""

        def look() -> tuple[list[str], Hashable]:
            names = self._list_names()
            return names, ("found", *names)

        def changing() -> CheckpointChangedError:
            return CheckpointChangedError(
                f"{self._target.uri} lists other files each time: nothing was written. Export to a place of its own",
                uri=self._target.uri,
            )

        return look_until_stable(look, changing=changing)

    def _is_there(self, name: str) -> bool:
        try:
            self._target.retrier.call(self._target.store.head, name)
        except ObjectNotFoundError:
            return False
        return True

    def _list_names(self) -> list[str]:
        target = self._target
        # A folder can hold very many other files, so only these prefixes are listed.
        prefixes = {_WILDCARD.split(pattern, maxsplit=1)[0] for pattern in self._patterns}
        infos = target.retrier.call(lambda: [info for prefix in prefixes for info in target.store.list(prefix)])
        names = {info.key for info in infos if "/" not in info.key}
        return sorted(name for name in names if any(fnmatch.fnmatchcase(name, each) for each in self._patterns))


_EXPORTERS = {"safetensors": export_safetensors, "torch": export_torch}
