"""Tensors of safetensors files on a store: a single file, or a folder in Hugging Face's layout."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from cloudckpt._commit.resolve import TORCH_METADATA_KEY, manifest_number, settle
from cloudckpt._convert.bodies import TensorBytes
from cloudckpt._convert.names import shown
from cloudckpt._convert.safetensors_header import FileTensor, parsed_header
from cloudckpt._convert.shards import INDEX_NAME
from cloudckpt._convert.sides import folder_and_name
from cloudckpt._pipeline.context import Context
from cloudckpt._plan.header import LENGTH_BYTES, header_end
from cloudckpt._stage.tensors import bytes_view
from cloudckpt._transfer.download import fetch
from cloudckpt._uri import Location
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    UnsupportedValueError,
)
from cloudckpt.options import MIB, Options
from cloudckpt.stores.base import ObjectInfo

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 256 * MIB
_SHARDS_KEY = "DCP_SHARDING_INFO"
_FRAMEWORK_KEY = "format"
"""In the metadata of nearly all files, with ``pt`` or the like, by which no tensor is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    file: ObjectInfo
    tensor: FileTensor


class SafetensorsSource:
    """All tensors there, by their names. Reads each header when it is made, and nothing else.

    Raises `CheckpointNotFoundError`, `CorruptCheckpointError` for a file that is none, or is not all there, and
    `UnsupportedValueError`.
    """

    def __init__(self, location: Location, options: Options) -> None:
        is_file = location.name.endswith((_SUFFIX, _INDEX_SUFFIX))
        folder: Location = location
        self._name: str | None = None
        if is_file:
            folder, self._name = folder_and_name(location)
        self._location = location
        self._context = Context(folder, options, rank=0)
        self._found: dict[str, _Found] = {}
        self._metadata: dict[str, str] = {}
        # Nothing here is covered by a checksum, and each answer may be wrong once.
        self._context.retrier.confirmed(self._look, (CheckpointNotFoundError, CorruptCheckpointError))

    def _look(self) -> None:
        """Find the tensors."""
        location = self._location
        self._found, self._metadata = {}, {}
        files, weight_map = self._files()
        for file in files:
            self._add(file, weight_map)
        lost = sorted(set(weight_map or ()) - self._found.keys())
        if lost:
            raise CorruptCheckpointError(
                f"{location.uri} lacks {shown(lost)}, which its index names: a file is not all there", uri=location.uri
            )

    @property
    def tensors(self) -> dict[str, FileTensor]:
        """By their names, in the order of the files and of the bytes in them."""
        return {name: found.tensor for name, found in self._found.items()}

    @property
    def ties(self) -> dict[str, str]:
        """Tensors by the names that `safetensors.torch.save_model` left out: it says so in a file's metadata."""
        return {
            name: kept
            for name, kept in self._metadata.items()
            if kept in self._found and name not in self._found and name != _FRAMEWORK_KEY
        }

    def stop(self) -> None:
        """Give up what would have to be tried again."""
        self._context.retrier.stop()

    def read(self, wanted: Sequence[TensorBytes]) -> None:
        """See `TensorReader`. What lies side by side in a file is read at once."""
        runs: list[list[TensorBytes]] = []
        reached: tuple[str, int] | None = None
        for want in wanted:
            found = self._found[want.name]
            if not runs or reached != (found.file.key, found.tensor.begin + want.begin):
                runs.append([])
            runs[-1].append(want)
            reached = found.file.key, found.tensor.begin + want.end
        for run in runs:
            first = self._found[run[0].name]
            views = [bytes_view(want.buffer) for want in run]
            self._fetch(first.file.key, first.tensor.begin + run[0].begin, views)

    def check_unchanged(self) -> None:
        """Raises `CheckpointChangedError` where a file was replaced since it was looked at first."""
        context = self._context
        for file in {found.file.key: found.file for found in self._found.values()}.values():
            # Two HEADs have to say so: one may be wrong.
            if not any(self._head(file.key).is_same_write(file) for _ in range(2)):
                raise CheckpointChangedError(
                    f"{context.store.url(file.key)} was replaced while it was read, so nothing was committed. Import "
                    "again",
                    uri=self._location.uri,
                )

    def _files(self) -> tuple[list[ObjectInfo], dict[str, str] | None]:
        """The files, and what the index says lies where, if there is one."""
        name = self._name
        if name is not None and name.endswith(_SUFFIX):
            return [self._head(name)], None
        index_name = name
        if index_name is None:
            keys, here = settle(self._listed, changing=self._changing)
            indices = [key for key in here if key.endswith(_INDEX_SUFFIX)]
            if not indices:
                names = [key for key in here if key.endswith(_SUFFIX)]
                if not names:
                    raise CheckpointNotFoundError(
                        f"no safetensors file lies at {self._location.uri}{_instead(keys)}", uri=self._location.uri
                    )
                return [self._head(key) for key in names], None
            if len(indices) > 1 and INDEX_NAME not in indices:
                raise UnsupportedValueError(
                    f"{self._location.uri} has several indices: name one of {shown(indices)}", uri=self._location.uri
                )
            index_name = INDEX_NAME if INDEX_NAME in indices else indices[0]
        weight_map = self._index(index_name)
        return [self._head(key) for key in sorted(set(weight_map.values()))], weight_map

    def _listed(self) -> tuple[tuple[list[str], list[str]], Hashable]:
        """All keys, and the files of the folder. Without an index these say what there is: one look may lack some."""
        context = self._context
        keys = sorted(info.key for info in context.retrier.call(lambda: list(context.store.list())))
        here = sorted({key for key in keys if "/" not in key} | _linked(context.location))
        return (keys, here), None if INDEX_NAME in here else ("no index", *here)

    def _changing(self) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"{self._location.uri} lists other files each time, and no index says which there are. Import again",
            uri=self._location.uri,
        )

    def _index(self, name: str) -> dict[str, str]:
        context, url = self._context, self._context.store.url(name)
        try:
            document = context.retrier.call(lambda: context.store.read(name, max_bytes=_MAX_INDEX_BYTES))
            weight_map = json.loads(document)["weight_map"]
            names = {str(tensor): str(file) for tensor, file in weight_map.items()}
        except ObjectNotFoundError as error:
            raise self._missing(name, error) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{url} is no index of safetensors files: {error!r}", uri=url) from error
        foreign = sorted({file for file in names.values() if "/" in file or not file.endswith(_SUFFIX)})
        if foreign or not names:
            raise CorruptCheckpointError(f"{url} names no files beside it, but {shown(foreign)}", uri=url)
        return names

    def _head(self, key: str) -> ObjectInfo:
        context = self._context
        try:
            return context.retrier.call(lambda: context.store.head(key))
        except ObjectNotFoundError as error:
            raise self._missing(key, error) from error

    def _missing(self, key: str, error: ObjectNotFoundError) -> CheckpointNotFoundError:
        url = self._context.store.url(key)
        return CheckpointNotFoundError(f"{url} is not there: {error}", uri=self._location.uri)

    def _add(self, file: ObjectInfo, weight_map: dict[str, str] | None) -> None:
        url = self._context.store.url(file.key)
        try:
            end = header_end(self._beginning(file, min(LENGTH_BYTES, file.size_bytes)), size_bytes=file.size_bytes)
            header = parsed_header(self._beginning(file, end), size_bytes=file.size_bytes)
        except ValueError as error:
            raise CorruptCheckpointError(f"{url} cannot be read: {error}", uri=self._location.uri) from error
        if _SHARDS_KEY in header.metadata:
            raise UnsupportedValueError(
                f"{url} holds shards of tensors, as torch's HuggingFaceStorageWriter writes them. Put them together "
                "first: torch.distributed.checkpoint.HuggingFaceStorageWriter(…, enable_consolidation=True)",
                uri=self._location.uri,
            )
        self._metadata |= header.metadata
        for tensor in header.tensors:
            if weight_map is not None and weight_map.get(tensor.name) != file.key:
                continue
            if tensor.name in self._found:
                other = self._context.store.url(self._found[tensor.name].file.key)
                raise UnsupportedValueError(
                    f"{tensor.name!r} lies in {other} and in {url}, and no index says which counts",
                    uri=self._location.uri,
                )
            self._found[tensor.name] = _Found(file=file, tensor=tensor)

    def _beginning(self, file: ObjectInfo, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        if num_bytes:
            self._fetch(file.key, 0, [memoryview(content)])
        return bytes(content)

    def _fetch(self, key: str, begin: int, views: Sequence[memoryview]) -> None:
        context = self._context
        try:
            fetch(context.store, context.retrier, key=key, begin=begin, views=views)
        except ObjectNotFoundError as error:
            raise self._missing(key, error) from error


def _linked(folder: Location) -> set[str]:
    """Return the symbolic links to safetensors files in a local folder.

    Listings pass over those that may not be followed. An import that did so, too, would leave out tensors.
    """
    if folder.scheme != "file" or not os.path.isdir(folder.path):  # noqa: PTH112  # it is no `Path`
        return set()
    with os.scandir(folder.path) as entries:
        return {entry.name for entry in entries if entry.is_symlink() and entry.name.endswith((_SUFFIX, _INDEX_SUFFIX))}


def _instead(keys: Sequence[str]) -> str:
    """What `keys` without safetensors files are, and what to do with it."""
    if TORCH_METADATA_KEY in keys:
        return ", but a checkpoint of torch's own writer: cloudckpt.import_checkpoint(…, format='dcp') takes it"
    if any(manifest_number(key) is not None for key in keys):
        return ", but a checkpoint of cloudckpt's: cloudckpt.copy copies it"
    found = {key.rpartition("/")[0] for key in keys if key.endswith((_SUFFIX, _INDEX_SUFFIX))}
    # Hidden folders are of huggingface_hub's own use, and what data/ holds is mostly of checkpoints.
    if folders := sorted(folder for folder in found if "/." not in f"/{folder}" and "/data/" not in f"/{folder}/"):
        return f", but its folders {shown(folders)} hold some: name one of them"
    return ". Check the URI; for a file of torch.save, pass format='torch'"
