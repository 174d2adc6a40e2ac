"""Read safetensors files: a single file, or a folder in Hugging Face's layout."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cloudckpt.commit.entries import manifest_number
from cloudckpt.commit.log import TORCH_METADATA_KEY
from cloudckpt.convert.conversion import check_unchanged, folder_and_name, head_file, naming_missing_file
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedValueError,
    quote_names,
)
from cloudckpt.format.model import ITEMSIZE_BYTES, SAFETENSORS_TAG
from cloudckpt.format.safetensors import LENGTH_BYTES, MEMBER_DECODER, HeaderMember, find_header_end
from cloudckpt.io.download import download_range
from cloudckpt.options import MIB
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.wants import TensorBytes
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.tensors.tensor_bytes import bytes_view
from cloudckpt.uri import Location

_METADATA_KEY = "__metadata__"
# Exports do not write these tags, because older readers do not know them.
_DTYPE_OF_TAG = {tag: dtype for dtype, tag in SAFETENSORS_TAG.items()} | {
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_NDIM = 64
INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 256 * MIB
_SHARDS_KEY = "DCP_SHARDING_INFO"
_FRAMEWORK_KEY = "format"
"""Key in the metadata of nearly all files. Its value, such as ``pt``, is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor of a file. Its bytes are ``[begin, end)`` of the file."""

    file: ObjectInfo
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _parse_header(header: bytes, file: ObjectInfo) -> tuple[list[SourceTensor], dict[str, str]]:
    """Return a file's tensors, in the order of their bytes, and its metadata, from the bytes up to the header's end.

    Raises `ValueError` if the file is cut or no safetensors file.
    """
    try:
        members = msgspec.json.decode(header[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(members.pop(_METADATA_KEY, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: MEMBER_DECODER.decode(raw) for name, raw in members.items()}
    except _UNDECODABLE as error:
        raise ValueError(f"its header is not that of a safetensors file: {error}") from error
    tensors = [_tensor(file, name, entry, len(header)) for name, entry in entries.items()]
    tensors.sort(key=lambda each: (each.begin, each.end))
    ends = [len(header), *(each.end for each in tensors)]
    begins = [*(each.begin for each in tensors), file.size_bytes]
    if ends != begins:
        if ends[-1] > file.size_bytes:
            raise ValueError(f"it has {file.size_bytes} bytes, but its header describes {ends[-1]}: it was cut")
        raise ValueError("its tensors are not stored back to back, from the header's end to the file's")
    return tensors, metadata


def _tensor(file: ObjectInfo, name: str, entry: HeaderMember, base: int) -> SourceTensor:
    dtype = _DTYPE_OF_TAG.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{name!r:.200} has the dtype {entry.dtype!r:.20}, which torch or cloudckpt does not have")
    begin, end = entry.data_offsets
    if not 0 <= begin <= end or len(entry.shape) > _MAX_NDIM or any(length < 0 for length in entry.shape):
        raise ValueError(f"{name!r:.200} has the impossible shape {entry.shape!r:.200} at [{begin}, {end})")
    if end - begin != math.prod(entry.shape) * ITEMSIZE_BYTES[dtype]:
        raise ValueError(
            f"{name!r:.200} has {end - begin} bytes, and a tensor of shape {entry.shape!r:.200} has another number"
        )
    return SourceTensor(file=file, name=name, dtype=dtype, shape=entry.shape, begin=base + begin, end=base + end)


class SafetensorsSource:
    """The tensors of safetensors files by their names. The constructor reads the headers only.

    Raises `CheckpointNotFoundError`, `CorruptCheckpointError` for a file that is cut or no safetensors file, and
    `UnsupportedValueError`.
    """

    def __init__(self, source: Context) -> None:
        self._name: str | None = None
        self._uri, self._context = source.uri, source
        if source.location.name.endswith((_SUFFIX, _INDEX_SUFFIX)):
            folder, self._name = folder_and_name(source.location)
            self._context = Context(folder, source.options, rank=source.rank)
        elif (path := source.location.local_path) is not None and Path(path).is_file():
            raise CheckpointNotFoundError(
                f"{source.uri} is no {_SUFFIX} file. Import a file of torch.save in the format 'torch'", uri=source.uri
            )
        self.tensors: dict[str, SourceTensor] = {}
        """Tensors by their names, in the order of the files and of the bytes in them."""
        self._metadata: dict[str, str] = {}
        # No checksum covers these files, so an answer that is wrong once must not count.
        self._context.client.confirm(self._look, errors=(CheckpointNotFoundError, CorruptCheckpointError))

    def _look(self) -> None:
        """Find the tensors."""
        self.tensors, self._metadata = {}, {}
        files, weight_map = self._files()
        for file in files:
            self._add(file, weight_map)
        lost = sorted(set(weight_map or ()) - self.tensors.keys())
        if lost:
            raise CorruptCheckpointError(
                f"{self._uri} lacks {quote_names(lost)}, which its index names: a file is incomplete",
                uri=self._uri,
            )

    @property
    def ties(self) -> dict[str, str]:
        """Names of tensors by the names that `safetensors.torch.save_model` left out and recorded in the metadata."""
        return {
            name: kept
            for name, kept in self._metadata.items()
            if kept in self.tensors and name not in self.tensors and name != _FRAMEWORK_KEY
        }

    def stop(self) -> None:
        """Stop retries."""
        self._context.stop()

    def read_bytes(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all buffers. Tensors that are neighbours in a file are read by one request."""
        runs: list[list[TensorBytes]] = []
        reached: tuple[str, int] | None = None
        for want in wanted:
            tensor = self.tensors[want.name]
            if not runs or reached != (tensor.file.key, tensor.begin + want.begin):
                runs.append([])
            runs[-1].append(want)
            reached = tensor.file.key, tensor.begin + want.end
        for run in runs:
            first = self.tensors[run[0].name]
            views = [bytes_view(want.buffer) for want in run]
            self._fetch(first.file.key, first.begin + run[0].begin, views)

    def check_unchanged(self) -> None:
        """Raise `CheckpointChangedError` if a file was replaced since the constructor read it."""
        check_unchanged(self._context, {each.file.key: each.file for each in self.tensors.values()}.values())

    def _files(self) -> tuple[list[ObjectInfo], dict[str, str] | None]:
        """Find the files, and the file of each tensor if there is an index."""
        name = self._name
        if name is not None and name.endswith(_SUFFIX):
            return [head_file(self._context, name)], None
        index_name = name
        if index_name is None:
            changing = CheckpointChangedError(
                f"{self._uri} lists other files each time, and has no index that names them. Import again",
                uri=self._uri,
            )
            keys, here = self._context.client.confirm(
                self._list_files,
                evidence=lambda found: None if INDEX_NAME in found[1] else ("no index", *found[1]),
                changing=lambda: changing,
            )
            indices = [key for key in here if key.endswith(_INDEX_SUFFIX)]
            if not indices:
                names = [key for key in here if key.endswith(_SUFFIX)]
                if not names:
                    raise CheckpointNotFoundError(
                        f"no safetensors file exists at {self._uri}{_suggest_folders(keys)}", uri=self._uri
                    )
                return [head_file(self._context, key) for key in names], None
            if len(indices) > 1 and INDEX_NAME not in indices:
                raise UnsupportedValueError(
                    f"{self._uri} has several indices: name one of {quote_names(indices)}",
                    uri=self._uri,
                )
            index_name = INDEX_NAME if INDEX_NAME in indices else indices[0]
        weight_map = self._index(index_name)
        return [head_file(self._context, key) for key in sorted(set(weight_map.values()))], weight_map

    def _list_files(self) -> tuple[list[str], list[str]]:
        """List all keys, and the files of the folder. Without an index, two listings must agree on the files."""
        context = self._context
        keys = sorted(info.key for info in context.client.list())
        here = sorted({key for key in keys if "/" not in key} | _list_links(context.location))
        return keys, here

    def _index(self, name: str) -> dict[str, str]:
        context, url = self._context, self._context.client.url(name)
        with naming_missing_file():  # `confirm` repeats the whole look
            document = context.client.call(context.store.read, name, max_bytes=_MAX_INDEX_BYTES)
        try:
            weight_map = json.loads(document)["weight_map"]
            names = {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{url} is no index of safetensors files: {error!r}", uri=url) from error
        foreign = sorted({file for file in names.values() if "/" in file or not file.endswith(_SUFFIX)})
        if foreign or not names:
            raise CorruptCheckpointError(f"{url} names no files beside it, but {quote_names(foreign)}", uri=url)
        return names

    def _add(self, file: ObjectInfo, weight_map: dict[str, str] | None) -> None:
        url = self._context.client.url(file.key)
        try:
            end = find_header_end(
                self._read_beginning(file, min(LENGTH_BYTES, file.size_bytes)), size_bytes=file.size_bytes
            )
            tensors, metadata = _parse_header(self._read_beginning(file, end), file)
        except ValueError as error:
            raise CorruptCheckpointError(f"{url} cannot be read: {error}", uri=self._uri) from error
        if _SHARDS_KEY in metadata:
            raise UnsupportedValueError(
                f"{url} holds shards of tensors, as torch's HuggingFaceStorageWriter writes them. Put them together "
                "first: torch.distributed.checkpoint.HuggingFaceStorageWriter(…, enable_consolidation=True)",
                uri=self._uri,
            )
        self._metadata |= metadata
        for tensor in tensors:
            if weight_map is not None and weight_map.get(tensor.name) != file.key:
                continue
            if tensor.name in self.tensors:
                other = self._context.client.url(self.tensors[tensor.name].file.key)
                raise UnsupportedValueError(
                    f"{tensor.name!r} is in {other} and in {url}, and no index says which one to take",
                    uri=self._uri,
                )
            self.tensors[tensor.name] = tensor

    def _read_beginning(self, file: ObjectInfo, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        if num_bytes:
            self._fetch(file.key, 0, [memoryview(content)])
        return bytes(content)

    def _fetch(self, key: str, begin: int, views: Sequence[memoryview]) -> None:
        with naming_missing_file():
            download_range(self._context.client, key=key, begin=begin, views=views)


def _list_links(folder: Location) -> set[str]:
    """Return the symbolic links to safetensors files in a local folder.

    Listings leave out links that may not be followed. An import must not leave out tensors.
    """
    if folder.local_path is None or not Path(folder.local_path).is_dir():
        return set()
    with os.scandir(folder.local_path) as entries:
        return {entry.name for entry in entries if entry.is_symlink() and entry.name.endswith((_SUFFIX, _INDEX_SUFFIX))}


def _suggest_folders(keys: Sequence[str]) -> str:
    """Say what the folder holds instead of safetensors files, and what to do."""
    if TORCH_METADATA_KEY in keys:
        return ", but a checkpoint of torch's own writer: import it in the format 'dcp'"
    if any(manifest_number(key) is not None for key in keys):
        return ", but a checkpoint of cloudckpt's: cloudckpt cp copies it"
    with_files = {key.rpartition("/")[0] for key in keys if key.endswith((_SUFFIX, _INDEX_SUFFIX))}
    # huggingface_hub uses hidden folders itself, and data/ is mostly a checkpoint's.
    if folders := sorted(folder for folder in with_files if "/." not in f"/{folder}" and "/data/" not in f"/{folder}/"):
        return f", but its folders {quote_names(folders)} hold some: name one of them"
    return ". Check the URI; import a file of torch.save in the format 'torch'"
