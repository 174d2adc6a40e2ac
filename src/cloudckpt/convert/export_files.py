"""The files of an export in their folder: earlier ones, companions of the weights, and the files of each process."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from cloudckpt._messages import join_first
from cloudckpt.commit.entries import manifest_number
from cloudckpt.convert.bodies import FileBody
from cloudckpt.convert.transfer import Assemble, BodyIn, Transfer, head_file, upload_bodies
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CloudckptError,
    Hint,
    InvalidOptionError,
    ObjectNotFoundError,
    ShortObjectError,
)
from cloudckpt.io.download import download_range
from cloudckpt.io.leftovers import Leftover
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.safetensors_files import find_files, list_links
from cloudckpt.uri import parse_location

TILE_BYTES = MIB
_log = logging.getLogger("cloudckpt")
_MAX_SHOWN_URLS = 3
_WILDCARD = re.compile(r"[*?[]")
_WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".h5", ".hdf5", ".keras", ".msgpack",
    ".gguf", ".ggml", ".onnx", ".onnx_data", ".onnx.data", ".ot", ".npy", ".npz", ".pkl", ".pickle", ".tflite",
    ".mlmodel", ".pdparams", ".nemo", ".tar", ".gz", ".zip",
)  # fmt: skip
"""The ends of the names of files that hold weights in some format, or that name such files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file to write."""

    size_bytes: int
    body_in: BodyIn
    header: bytes = b""
    """Its first bytes, by which a process recognizes the file. Each file of an export by parts has its own."""


class ExportFolder:
    """Files of one export in one folder of a store.

    `patterns` match the names that an export of this format writes. If a file with a matching name exists, `check`
    fails, unless the export may overwrite. In that case, `write` removes the old export before it writes a file. It
    first removes the files whose patterns have no wildcard, since readers find the others by them.

    `reader` reads the source, if that is done while the files are written. `assemble` is that of `upload`.
    """

    def __init__(
        self,
        transfer: Transfer,
        target: Context,
        *,
        patterns: Sequence[str],
        budget_bytes: int,
        reader: CheckpointReader | None = None,
        assemble: Assemble = lambda *_: False,
    ) -> None:
        self._target = target
        self._progress = transfer.progress
        self._overwrite = transfer.overwrite
        self._patterns = patterns
        self._budget_bytes = budget_bytes
        self._reader = reader
        self._assemble = assemble

    def check(self) -> None:
        """Raise `CheckpointExistsError` if a file exists that may not be replaced."""
        if not self._overwrite:
            self._refuse(self._find_names())

    def find_missing(self, companions: Mapping[str, NewFile]) -> dict[str, NewFile]:
        """Return those of the files to copy along that do not exist yet. Warn of those that differ in size."""
        missing: dict[str, NewFile] = {}
        for name, file in companions.items():
            info = self._target.client.head(name)
            if info is None:
                missing[name] = file
            elif info.size_bytes != file.size_bytes:
                _log.warning("%s exists already, and stays as it is", self._target.store.url(name))
        return missing

    def write(self, files: Mapping[str, NewFile], last: Mapping[str, NewFile] = MappingProxyType({})) -> dict[str, int]:
        """Replace the earlier export by new files, and return their sizes. A failure removes all files.

        Readers find the other files by those of `last`. Raises the errors of `check`.
        """
        names = [*files, *last]
        if self._overwrite:
            self._remove(self._find_names())
        else:  # a HEAD finds what a listing may have left out
            self._refuse(list(filter(self._exists, names)))
        return self._upload(files, last, check_source=self._check_source)

    def write_part(
        self,
        part: tuple[int, int],
        shards: Mapping[str, NewFile],
        *,
        index: Mapping[str, NewFile],
        companions: Mapping[str, NewFile],
    ) -> tuple[dict[str, int], bool]:
        """Write the files of one of several processes, and the index if all other files are there.

        Every process plans the same files. A file with the planned size and header belongs to this export, since files
        appear whole and each export has headers of its own. The process that is the last to write its files finds all
        files, and writes the index. If two processes find all files, they write the same index.

        Returns:
            The sizes of the files that were written, and True if the export is whole.

        """
        number, num_parts = part
        own = set(list(shards)[number::num_parts])
        others = set(shards) - own
        existing = {*self._find_names(changing=others), *filter(self._exists, [*own, *index])}
        written = {name for name in existing if name in shards and self._is_written(name, shards[name])}
        is_indexed = len(written) == len(shards) and set(index) <= existing
        stale = sorted(existing - written - others - (set(index) if is_indexed else set()))
        if self._overwrite:
            self._remove(stale)
        else:
            self._refuse(stale)
        new = {name: shards[name] for name in shards if name in own - written}
        to_copy = self.find_missing(companions) if number == 0 else {}
        sizes = self._upload(new | to_copy) if index else self._upload(to_copy, new, check_source=self._check_source)
        is_whole = all(self._is_written(*shard) for shard in shards.items()) and not self.find_missing(companions)
        # A failure of this check removes no file, because another process may have written the index meanwhile.
        self._check_source(every=is_whole)
        if is_whole and index and not is_indexed:
            sizes |= self._upload(index, leftovers={})
        return sizes, is_whole

    def _check_source(self, *, every: bool = False) -> None:
        if self._reader is not None:
            self._reader.check_unchanged(every=every)

    def _upload(
        self,
        files: Mapping[str, NewFile],
        last: Mapping[str, NewFile] = MappingProxyType({}),
        *,
        leftovers: Mapping[str, Sequence[Leftover]] | None = None,
        check_source: Callable[[], None] = lambda: None,
    ) -> dict[str, int]:
        self._progress.expect(sum(file.size_bytes for group in (files, last) for file in group.values()))
        receipts, _ = upload_bodies(
            self._target,
            {name: file.body_in for name, file in files.items()},
            last={name: file.body_in for name, file in last.items()},
            leftovers=leftovers,
            progress=self._progress,
            budget_bytes=self._budget_bytes,
            tile_bytes=TILE_BYTES,
            stop_reading=(lambda: None) if self._reader is None else self._reader.context.stop,
            check_source=check_source,
            assemble=self._assemble,
        )
        return {receipt.key: receipt.size_bytes for receipt in receipts}

    def _refuse(self, names: Sequence[str]) -> None:
        if names:
            shown = join_first([self._target.store.url(name) for name in names], _MAX_SHOWN_URLS, separator=", ")
            raise CheckpointExistsError(
                f"{shown} {'exist' if len(names) > 1 else 'exists'} already: nothing was written",
                uri=self._target.uri,
                hint=Hint(advice="Choose another place, or {option} to replace it.", option="overwrite", value="True"),
            )

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files of an earlier export, first those by which readers find the others."""
        names = list(names)
        first = [name for name in names if name in self._patterns]
        # Make two calls: within one, a store removes objects in any order.
        for batch in (first, [name for name in names if name not in first]):
            if batch:
                self._target.client.delete(batch)

    def _find_names(self, *, changing: AbstractSet[str] = frozenset()) -> list[str]:
        """Find the files of an earlier export. Two listings must agree, because one may lack a file.

        They may differ in those that are `changing`, which other processes are writing.
        """

        def explain() -> CheckpointChangedError:
            return CheckpointChangedError(
                f"{self._target.uri} lists other files each time: nothing was written. Export to a place of its own",
                uri=self._target.uri,
            )

        return self._target.client.confirm(
            self._list_names, unconfirmed=lambda names: ("names", *set(names) - changing), changing=explain
        )

    def _exists(self, name: str) -> bool:
        return self._target.client.head(name) is not None

    def _is_written(self, name: str, file: NewFile) -> bool:
        """Return True if the file exists with its planned size and header."""
        client = self._target.client
        info, header = client.head(name), bytearray(len(file.header))
        if info is None or info.size_bytes != file.size_bytes:
            return False
        try:
            download_range(client, key=name, begin=0, views=[memoryview(header)])
        except (ObjectNotFoundError, ShortObjectError):
            return False
        return header == file.header

    def _list_names(self) -> list[str]:
        target = self._target
        # A folder can hold very many other files, so only these prefixes are listed.
        prefixes = {_WILDCARD.split(pattern, maxsplit=1)[0] for pattern in self._patterns}
        infos = [info for prefix in prefixes for info in target.client.list(prefix)]
        keys = {info.key for info in infos if "/" not in info.key}
        return sorted(key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in self._patterns))


def find_companions(
    transfer: Transfer, folder: str | os.PathLike[str], dtype: str | None = None, *, tensors: Collection[str] = ()
) -> dict[str, NewFile]:
    """Find the files directly in `folder` that hold no weights, such as its ``config.json`` and its tokenizer's.

    The folder is opened with the options of the source if one service holds both, or else with those of the target.
    Raises `InvalidOptionError` if there are none. Warns of a ``config.json`` that names another dtype than `dtype`, and
    of weights in the folder that have no name of the exported `tensors`.
    """
    location = parse_location(folder)
    ends = (end for end in (transfer.source, transfer.target) if location.is_of_kind(end.location))
    context = Context(location, next((end.options for end in ends), Options()), rank=0)

    def list_names() -> list[str]:
        keys = {info.key for info in context.client.list() if "/" not in info.key} | list_links(location)
        return sorted(key for key in keys if not _is_left_out(key))

    def changing() -> CheckpointChangedError:
        return CheckpointChangedError(f"{context.uri} lists other files each time. Try again", uri=context.uri)

    names = context.client.confirm(list_names, unconfirmed=tuple, changing=changing)
    if not names:
        raise InvalidOptionError(f"config_from={context.uri!r} has no file beside weights. Name the folder of a model")
    files = {name: head_file(context, name) for name in names}
    config = files.get("config.json")
    if dtype is not None and config is not None and config.size_bytes <= MIB:
        named = _find_dtype(context.client.read("config.json", max_bytes=MIB) or b"")
        if named not in (None, dtype):
            _log.warning(
                "%s says dtype %s, and this export has %s: programs that follow the file cast the weights when they "
                'load. Change the dtype in the exported config.json, or pass dtype="%s" to from_pretrained',
                context.client.url("config.json"),
                named,
                dtype,
                dtype,
            )
    with contextlib.suppress(CloudckptError):  # a hint does without the weights there, which may be incomplete
        if tensors and (found := find_files(context)) is not None:
            theirs = found[1].manifest.tensors
            if theirs.keys().isdisjoint(tensors):
                _log.warning(
                    "the weights in %s have other names, such as %s, and this export has %s: programs that follow its "
                    "config.json will not find them. To remove what the names begin with, pass strip_prefix",
                    context.uri,
                    min(theirs, default="none"),
                    min(tensors),
                )
    return {
        name: NewFile(size_bytes=file.size_bytes, body_in=functools.partial(FileBody, context, file))
        for name, file in files.items()
    }


def _find_dtype(config: bytes) -> str | None:
    """Return the dtype that a ``config.json`` names; None if it names none, or is not one of transformers."""
    with contextlib.suppress(ValueError):
        match json.loads(config):
            case {"dtype": str(name)} | {"torch_dtype": str(name)}:
                return name.removeprefix("torch.")
    return None


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name.lower().endswith(_WEIGHTS) or manifest_number(name) is not None
