"""Safetensors files as a checkpoint: a single file, or a folder in Hugging Face's layout.

Their headers become a manifest without checksums, so that `CheckpointReader` reads them as it reads any checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from cloudckpt._messages import quote_names
from cloudckpt._workers import run_all
from cloudckpt.commit.entries import manifest_number
from cloudckpt.commit.log import TORCH_METADATA_KEY, Resolved, has_torch_checkpoint, read_current, require_current
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Hint,
    ObjectNotFoundError,
    ShortObjectError,
    UnsupportedValueError,
)
from cloudckpt.format.model import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    ITEMSIZE_BYTES,
    SAFETENSORS_TAG,
    Chunk,
    FilesManifest,
    StoredObject,
    StoredTensor,
)
from cloudckpt.format.safetensors import (
    INDEX_NAME,
    INDEX_SUFFIX,
    LENGTH_BYTES,
    SINGLE_NAME,
    SUFFIX,
    HeaderMember,
    decode_header,
    find_header_end,
)
from cloudckpt.format.validation import MAX_NDIM
from cloudckpt.io.download import download_range
from cloudckpt.options import KIB, MIB
from cloudckpt.pipeline.context import Context
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.uri import Location, folder_and_name

_log = logging.getLogger("cloudckpt")
# The four tags that are written out here occur only in files of other programs: older readers do not know them.
_DTYPE_OF_TAG = {
    tag: dtype
    for tag, dtype in {
        **{tag: dtype for dtype, tag in SAFETENSORS_TAG.items()},
        "C64": "complex64",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }.items()
    if hasattr(torch, dtype)
}
_MAX_INDEX_BYTES = 256 * MIB
_FIRST_READ_BYTES = 64 * KIB  # holds the header of most files
_UNIT_BYTES = 64  # keeps elements of every size whole in each request
_SHA256 = re.compile("[0-9a-f]{64}")
_SHARDS_KEY = "DCP_SHARDING_INFO"
_TORCH_HINT = Hint(advice="To import a file of torch.save by its name, {option}", option="format", value="'torch'")
_FRAMEWORK_KEY = "format"
"""Key in the metadata of nearly all files. Its value, such as ``pt``, is no tensor."""


def folder_of(source: Context) -> tuple[Context, str | None]:
    """Return the folder of safetensors files that `source` names, and the name of a file or index if it names one."""
    if not source.location.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return source, None
    folder, name = folder_and_name(source.location)
    return Context(folder, source.options, rank=source.rank, recorder=source.recorder), name


def find_source(context: Context) -> tuple[Context, Resolved]:
    """Return the checkpoint at `context`, or else the safetensors files there, with the folder that has the objects.

    A URI with the name of a safetensors file or index stands for that file, if it exists. Raises the errors of
    `resolve` if there is neither, and if there is a checkpoint of torch's own writer.
    """
    names_file = folder_of(context)[1] is not None
    if names_file and (files := find_files(context)) is not None:
        return files
    log, manifest = read_current(context.client)
    if log.current_number is None and not names_file:
        files = find_files(context)
        if files is not None and not has_torch_checkpoint(context.client):
            return files
    return context, require_current(context.client, log, manifest)


def find_files(source: Context) -> tuple[Context, Resolved] | None:
    """Return the safetensors files at `source` as a manifest, with their folder. None if there are none.

    A folder needs ``model.safetensors`` or its index, so that two requests tell whether it has any.
    """
    context, name = folder_of(source)
    names = [file for file in ([INDEX_NAME, SINGLE_NAME] if name is None else [name]) if context.client.head(file)]
    if not names:
        return None
    files = SafetensorsFiles(context, names[0], uri=source.uri)
    if len(names) > 1 and SINGLE_NAME not in {file.key for file in files.files}:
        raise UnsupportedValueError(
            f"{source.uri} has {INDEX_NAME} and also {SINGLE_NAME}, which the index does not name: programs differ in "
            "which counts. Name one of the two files",
            uri=source.uri,
        )
    if files.unknown:
        shown = quote_names([f"{name} ({tag})" for name, tag in files.unknown.items()])
        _log.warning("%s has tensors of dtypes that torch does not have, taken as uint8 bytes: %s", source.uri, shown)
    return context, Resolved(number=0, manifest=files.manifest)


def list_source(source: Context) -> SafetensorsFiles:
    """Return the safetensors files at `source`, of any names. Raises `CheckpointNotFoundError` if there are none."""
    context, name = folder_of(source)
    if name is None and (path := source.location.local_path) is not None and Path(path).is_file():
        raise CheckpointNotFoundError(f"{source.uri} is no {SUFFIX} file", uri=source.uri, hint=_TORCH_HINT)
    return SafetensorsFiles(context, name, uri=source.uri)


class PublishedSha256(NamedTuple):
    """The SHA-256 that Hugging Face's hub has published of a file."""

    digest: str
    is_outdated: bool = False
    """True if the file was written later, such as changed or copied: another SHA-256 then proves no damage."""


def find_published_sha256(folder: Context, key: str) -> PublishedSha256 | None:
    """Return the SHA-256 that Hugging Face's hub has published of a file; None if nothing here tells it.

    A snapshot in the hub's cache links to a blob of that name, and ``hf://`` has it as the version. A download into a
    folder leaves it in ``.cache/huggingface/``: https://huggingface.co/docs/huggingface_hub/guides/download
    Beside it is the time of the download. As ``huggingface_hub`` does, a time up to a second before the file's counts.
    """
    path, client, is_outdated = folder.location.local_path, folder.client, False
    if folder.location.is_hub:
        told = client.require(key).version
    elif path is not None and Path(path, key).is_symlink():
        told = Path(path, key).readlink().name
    else:
        try:
            note = client.call(client.store.read, f".cache/huggingface/download/{key}.metadata", max_bytes=MIB)
        except ObjectNotFoundError:
            return None
        _commit, told, time, *_ = [*note.decode(errors="replace").splitlines(), "", "", ""]
        try:
            is_outdated = not client.require(key).modified_at.timestamp() - 1 <= float(time)
        except ValueError:
            is_outdated = True
    return PublishedSha256(told, is_outdated) if _SHA256.fullmatch(told) else None


class _FileTensor(NamedTuple):
    """A tensor of a file. Its bytes are ``[begin, end)`` of the file."""

    name: str
    tag: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _parse_header(header: bytes, size_bytes: int) -> tuple[list[_FileTensor], dict[str, str]]:
    """Return a file's tensors, in the order of their bytes, and its metadata, from the bytes up to the header's end.

    Raises `ValueError` if the file is cut or no safetensors file.
    """
    entries, metadata = decode_header(header)
    tensors = [_check_entry(name, entry, len(header)) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    ends = [len(header), *(tensor.end for tensor in tensors)]
    begins = [*(tensor.begin for tensor in tensors), size_bytes]
    if ends != begins:
        if ends[-1] > size_bytes:
            raise ValueError(f"it has {size_bytes} bytes, but its header describes {ends[-1]}: it was cut")
        raise ValueError("its tensors are not stored back to back, from the header's end to the file's")
    return tensors, metadata


def _check_entry(name: str, entry: HeaderMember, header_bytes: int) -> _FileTensor:
    begin, end = entry.data_offsets
    if not 0 <= begin <= end or len(entry.shape) > MAX_NDIM or any(length < 0 for length in entry.shape):
        raise ValueError(f"{name!r:.200} has the impossible shape {entry.shape!r:.200} at [{begin}, {end})")
    dtype = _DTYPE_OF_TAG.get(entry.dtype)
    if dtype is not None and end - begin != math.prod(entry.shape) * ITEMSIZE_BYTES[dtype]:
        raise ValueError(
            f"{name!r:.200} has {end - begin} bytes, and a tensor of shape {entry.shape!r:.200} has another number"
        )
    return _FileTensor(name, entry.dtype, entry.shape, header_bytes + begin, header_bytes + end)


class SafetensorsFiles:
    """The tensors of safetensors files in a folder. The constructor reads the headers only.

    `name` is the name of a file or index. Without it, all files of the folder are taken, or those that its index names.

    Raises `CheckpointNotFoundError`, `CorruptCheckpointError` for a file that is missing, cut or no safetensors file,
    and `UnsupportedValueError`.
    """

    def __init__(self, context: Context, name: str | None, *, uri: str) -> None:
        self.context = context
        self._name, self._uri = name, uri
        self.files: list[ObjectInfo] = []
        self.unknown: dict[str, str] = {}
        """The tags of tensors whose dtype torch does not have, by name."""
        self._tensors: dict[str, StoredTensor] = {}
        self._metadata: dict[str, str] = {}
        # No checksum covers these files, so an answer that finds damage must be confirmed.
        unlisted = context.client.confirm(self._read_headers, errors=(CheckpointNotFoundError, CorruptCheckpointError))
        if unlisted:
            _log.warning("%s has tensors that its index does not name, left out: %s", uri, quote_names(unlisted))

    @property
    def ties(self) -> dict[str, str]:
        """Names of tensors by the names that `safetensors.torch.save_model` left out and recorded in the metadata."""
        return {
            name: stored_name
            for name, stored_name in self._metadata.items()
            if stored_name in self._tensors and name not in self._tensors and name != _FRAMEWORK_KEY
        }

    @property
    def manifest(self) -> FilesManifest:
        """The files as a checkpoint: its tensors are in the order of the files and of the bytes in them."""
        tensors = self._tensors | {name: self._tensors[stored_name] for name, stored_name in self.ties.items()}
        content = msgspec.json.encode([[(file.key, file.size_bytes) for file in self.files], tensors])
        return FilesManifest(
            format=FORMAT_NAME,
            version=(FORMAT_MAJOR, FORMAT_MINOR),
            attempt=f"files-{hashlib.sha256(content).hexdigest()[:12]}",
            created_at=max(file.modified_at for file in self.files).isoformat(),
            world_size=1,
            software={},
            tile_bytes=_UNIT_BYTES,
            objects=[StoredObject(key=file.key, size=file.size_bytes, crc32c="") for file in self.files],
            tensors=tensors,
            values={},
            write_ids=tuple(file.write_id for file in self.files),
            unknown=self.unknown,
        )

    def _read_headers(self) -> list[str]:
        """Read the index and the headers of the files, and fill the attributes from them.

        Returns the names of the tensors that the index lacks.
        """
        keys, weight_map = self._choose_files()
        headers: dict[str, tuple[ObjectInfo, list[_FileTensor], dict[str, str]]] = {}

        def read(key: str) -> None:
            headers[key] = self._read_header(key, is_indexed=weight_map is not None)

        run_all(keys, read, num_threads=self.context.max_connections, name="cloudckpt-headers")
        self.files, self.unknown, self._tensors, self._metadata = [], {}, {}, {}
        for number, key in enumerate(keys):
            file, entries, metadata = headers[key]
            self.files.append(file)
            self._metadata |= metadata
            for entry in entries:
                if weight_map is None or weight_map.get(entry.name) == key:
                    self._add(entry, number)
        missing = sorted(set(weight_map or ()) - self._tensors.keys())
        if missing:
            raise CorruptCheckpointError(
                f"{self._uri} lacks {quote_names(missing)}, which its index names: a file is incomplete", uri=self._uri
            )
        in_files = {entry.name for _, entries, _ in headers.values() for entry in entries}
        return [] if weight_map is None else sorted(in_files - weight_map.keys())

    def _add(self, entry: _FileTensor, number: int) -> None:
        if (other := self._tensors.get(entry.name)) is not None:
            files = (self.files[index] for index in (other.chunks[0].object_index, number))
            urls = [self.context.client.url(file.key) for file in files]
            raise UnsupportedValueError(
                f"{entry.name!r} is in {urls[0]} and in {urls[1]}, and no index says which one to take", uri=self._uri
            )
        dtype, shape = _DTYPE_OF_TAG.get(entry.tag), entry.shape
        if dtype is None:
            self.unknown[entry.name] = entry.tag
            dtype, shape = "uint8", (entry.end - entry.begin,)
        chunk = Chunk((0,) * len(shape), shape, number, entry.begin, entry.end)
        self._tensors[entry.name] = StoredTensor(dtype=dtype, shape=shape, chunks=[chunk])

    def _choose_files(self) -> tuple[list[str], dict[str, str] | None]:
        """Return the names of the files, and the file of each tensor if there is an index."""
        name = self._name
        if name is not None and name.endswith(SUFFIX):
            return [name], None
        index_name = name
        if index_name is None:
            changing = CheckpointChangedError(
                f"{self._uri} lists other files each time, and has no index that names them. Try again", uri=self._uri
            )
            keys, names_here = self.context.client.confirm(
                self._list_files,
                unconfirmed=lambda listed: None if INDEX_NAME in listed[1] else ("no index", *listed[1]),
                changing=lambda: changing,
            )
            indices = [name for name in names_here if name.endswith(INDEX_SUFFIX)]
            if not indices:
                names = [name for name in names_here if name.endswith(SUFFIX)]
                if not names:
                    raise _no_files_error(self._uri, keys)
                return names, None
            if len(indices) > 1 and INDEX_NAME not in indices:
                raise UnsupportedValueError(
                    f"{self._uri} has several indices: name one of {quote_names(indices)}", uri=self._uri
                )
            index_name = INDEX_NAME if INDEX_NAME in indices else indices[0]
        weight_map = self._read_index(index_name)
        return sorted(set(weight_map.values())), weight_map

    def _list_files(self) -> tuple[list[str], list[str]]:
        """Return all keys below the folder, and the names of the files directly in it."""
        keys = sorted(info.key for info in self.context.client.list())
        return keys, sorted({key for key in keys if "/" not in key} | list_links(self.context.location))

    def _read_index(self, name: str) -> dict[str, str]:
        client, url = self.context.client, self.context.client.url(name)
        try:
            document = client.call(client.store.read, name, max_bytes=_MAX_INDEX_BYTES)
        except ObjectNotFoundError as error:  # `confirm` repeats the whole look
            raise CheckpointNotFoundError(f"{str(error).rstrip('.')}. Check the URI", uri=url) from error
        try:
            weight_map = json.loads(document)["weight_map"]
            names = {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{url} is no index of safetensors files: {error!r}", uri=url) from error
        foreign = sorted({file for file in names.values() if "/" in file or not file.endswith(SUFFIX)})
        if foreign or not names:
            raise CorruptCheckpointError(f"{url} names no files beside it, but {quote_names(foreign)}", uri=url)
        return names

    def _read_header(self, key: str, *, is_indexed: bool) -> tuple[ObjectInfo, list[_FileTensor], dict[str, str]]:
        client, url = self.context.client, self.context.client.url(key)
        try:
            file = client.require(key)
            header = self._extend_beginning(file, b"", _FIRST_READ_BYTES)
            end = find_header_end(header[:LENGTH_BYTES], size_bytes=file.size_bytes)
            header = self._extend_beginning(file, header, end)[:end]
            entries, metadata = _parse_header(header, file.size_bytes)
        except ObjectNotFoundError as error:
            if is_indexed:
                raise CorruptCheckpointError(f"{url} does not exist, and the index names it", uri=self._uri) from error
            raise CheckpointNotFoundError(f"{str(error).rstrip('.')}. Check the URI", uri=url) from error
        except (ValueError, ShortObjectError) as error:
            raise CorruptCheckpointError(f"{url} cannot be read: {error}", uri=self._uri) from error
        if _SHARDS_KEY in metadata:
            raise UnsupportedValueError(
                f"{url} holds shards of tensors, as torch's HuggingFaceStorageWriter writes them. Put them together "
                "first: torch.distributed.checkpoint.HuggingFaceStorageWriter(…, enable_consolidation=True)",
                uri=self._uri,
            )
        return file, entries, metadata

    def _extend_beginning(self, file: ObjectInfo, beginning: bytes, end: int) -> bytes:
        """Return the first `end` bytes of a file, or all if it is shorter. It begins with the bytes of `beginning`."""
        missing = bytearray(max(min(end, file.size_bytes) - len(beginning), 0))
        if missing:
            download_range(self.context.client, key=file.key, begin=len(beginning), views=[memoryview(missing)])
        return beginning + bytes(missing)


def list_links(folder: Location) -> set[str]:
    """Return the names of the symbolic links in a local folder, except for links to folders.

    A listing of the store leaves out links, but an import must not leave out tensors.
    """
    if folder.local_path is None or not Path(folder.local_path).is_dir():
        return set()
    with os.scandir(folder.local_path) as entries:
        return {entry.name for entry in entries if entry.is_symlink() and not Path(entry).is_dir()}


def _no_files_error(uri: str, keys: Sequence[str]) -> CheckpointNotFoundError:
    """Return an error that says of the other files in the folder, and what to do."""
    with_files = {key.rpartition("/")[0] for key in keys if key.endswith((SUFFIX, INDEX_SUFFIX))}
    # huggingface_hub uses hidden folders itself, and data/ is mostly a checkpoint's.
    folders = sorted(folder for folder in with_files if "/." not in f"/{folder}" and "/data/" not in f"/{folder}/")
    hint = None
    if TORCH_METADATA_KEY in keys:
        others = ", but a checkpoint of torch's own writer"
        hint = Hint(advice="To import it, {option}", option="format", value="'dcp'")
    elif any(manifest_number(key) is not None for key in keys):
        others = f", but a checkpoint of cloudckpt's: `cloudckpt cp {uri} TARGET` copies it"
    elif folders:
        others = f", but there are some in {quote_names(folders)}: name such a folder"
    else:
        others, hint = ". Check the URI", _TORCH_HINT
    return CheckpointNotFoundError(f"no safetensors file exists at {uri}{others}", uri=uri, hint=hint)
