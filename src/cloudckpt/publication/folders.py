"""A folder in Hugging Face's layout that has a published version, for programs that read files.

The files of each version have names of their own. The index is replaced last, and names the version and its files. So a
reader that follows the index has the files of one version.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from cloudckpt._messages import quote_names
from cloudckpt.convert.export_files import TILE_BYTES, ExportFolder, find_companions
from cloudckpt.convert.exports import build_index, check_tensors, name_shards
from cloudckpt.convert.transfer import Progress, Transfer, upload_bodies
from cloudckpt.errors import CheckpointError, CheckpointExistsError
from cloudckpt.format.model import StoredTensor
from cloudckpt.format.safetensors import INDEX_NAME, INDEX_SUFFIX, SINGLE_NAME, SUFFIX
from cloudckpt.io.boxes import Box
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.safetensors_files import SafetensorsFiles, list_links
from cloudckpt.pipeline.wanted_items import TensorBytes
from cloudckpt.publication.pieces import HeldPiece, combine_sums, sum_pieces
from cloudckpt.publication.versions import Version, hash_state
from cloudckpt.stores.base import crc32c_of
from cloudckpt.tensors.tensor_bytes import dtype_of

_log = logging.getLogger("cloudckpt")
_OWN = re.compile(r"model-(?:0|[1-9][0-9]*)-[0-9a-f]{8}(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_STATE_KEY = "cloudckpt.state"
"""Key in the metadata of the index: the `hash_state` of the tensors that the files have."""
_MAX_INDEX_BYTES = 256 * MIB


class ModelFolder:
    """The folder at `folder`, which versions under `root` are pulled into. One process at a time uses it.

    Raises `CheckpointExistsError` if the folder has weights of another program.
    """

    def __init__(
        self,
        root: str,
        folder: str | os.PathLike[str],
        *,
        strip_prefix: str,
        config_from: str | os.PathLike[str] | None,
        max_shard_bytes: int,
        options: Options,
        target_options: Options | None,
    ) -> None:
        self._transfer = Transfer(
            root,
            folder,
            options=options,
            target_options=target_options,
            overwrite=False,
            on_progress=None,
            strip_prefix=strip_prefix,
        )
        self._config_from, self._max_shard_bytes = config_from, max_shard_bytes
        self._target = self._transfer.target
        self._client = self._target.client
        self._names: dict[str, str] = {}
        """The name of each published tensor in the files."""
        self._tensors: dict[str, StoredTensor] = {}
        self.state_hash = ""
        """The `hash_state` that the index names; empty if there is none."""
        indexed, own, foreign = self._read_index(), set(), []
        for name in {info.key for info in self._client.list()} | list_links(self._target.location):
            if _OWN.fullmatch(name):
                own.add(name)
            elif (
                "/" not in name
                and name.endswith((SUFFIX, INDEX_SUFFIX))
                and not (name == INDEX_NAME and self.state_hash)
            ):
                foreign.append(name)
        if foreign:
            raise CheckpointExistsError(
                f"{self._target.uri} has other weights, {quote_names(sorted(foreign))}, and nothing was written. Pull "
                "into a folder of its own; config_from copies the files of config and tokenizer along",
                uri=self._target.uri,
            )
        if not indexed <= own:
            self.state_hash = ""  # a file was lost
        self._superseded = sorted(own - indexed)

    def _read_index(self) -> set[str]:
        """Find the state that the index names. Return the names of its files."""
        content = self._client.read(INDEX_NAME, max_bytes=_MAX_INDEX_BYTES)
        try:
            document = json.loads(content or b"{}")
            self.state_hash = str(document["metadata"][_STATE_KEY])
            return {str(name) for name in document["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return set()  # none of a pull

    def new_pieces(self, target: Version) -> list[HeldPiece]:
        """Return memory for the tensors of a version, which safetensors files can hold.

        Raises `InvalidOptionError` for the prefix, and `UnsupportedValueError`.
        """
        published = target.publication.tensors
        self._names = self._transfer.selection.choose_names(published)
        self._tensors = {
            self._names[fqn]: StoredTensor(dtype=tensor.dtype, shape=tensor.shape, chunks=[])
            for fqn, tensor in published.items()
        }
        fqns = {name: fqn for fqn, name in self._names.items()}
        check_tensors(fqns, self._tensors, target.manifest, target.location.uri)
        pieces = []
        for fqn, tensor in published.items():
            memory = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype), device="cpu")
            box = Box((0,) * len(tensor.shape), tensor.shape)
            pieces.append(HeldPiece(fqn, box, tensor.shape, tensor.dtype, memory))
        return pieces

    def read(self, pieces: Sequence[HeldPiece]) -> bool:
        """Fill `pieces` from the files. Return False unless these have the bytes of the state that the index names."""
        uri, why = self._target.uri, "its tensors are others than the index says"
        try:
            manifest = SafetensorsFiles(self._target, INDEX_NAME, uri=uri).manifest
            forms = {self._names[piece.name]: (piece.dtype, piece.shape) for piece in pieces}
            if forms == {name: (tensor.dtype, tensor.shape) for name, tensor in manifest.tensors.items()}:
                read_pieces(CheckpointReader(self._target, manifest), pieces, self._names)
                if hash_state(combine_sums([sum_pieces(pieces)], uri=uri)) == self.state_hash:
                    return True
        except CheckpointError as error:
            why = str(error)
        _log.warning("the pull into %s starts at the anchor: %s", uri, why)
        return False

    def write(self, pieces: Sequence[HeldPiece], target: Version) -> None:
        """Write the files of a version, and then the index. The files of the version before stay until the next one."""
        publication, options = target.publication, self._target.options
        budget_bytes = options.read_bytes // 2
        shards = {
            name.replace("model", f"model-{publication.version}-{publication.state_hash[:8]}", 1): shard
            for name, shard in name_shards(
                self._tensors, max_shard_bytes=self._max_shard_bytes, single_name=SINGLE_NAME, metadata={}
            ).items()
        }
        contents = _Contents({piece.name: _as_bytes(piece) for piece in pieces})
        fqns = {name: fqn for fqn, name in self._names.items()}
        bodies = {name: shard.body_in(contents, fqns) for name, shard in shards.items()}
        if self._config_from is not None:
            files = ExportFolder(self._transfer, self._target, patterns=(), budget_bytes=budget_bytes)
            missing = files.find_missing(find_companions(self._transfer, self._config_from))
            bodies |= {name: file.body_in for name, file in missing.items()}
        for unfinished in self._client.list_uploads():
            if unfinished.key in {*bodies, INDEX_NAME} or _OWN.fullmatch(unfinished.key):
                self._client.abort_multipart(unfinished.key, unfinished.upload_id)
        if self._superseded:
            self._client.delete(self._superseded)
        upload_bodies(self._target, bodies, progress=Progress(None), budget_bytes=budget_bytes, tile_bytes=TILE_BYTES)
        index = memoryview(build_index(shards, metadata={_STATE_KEY: publication.state_hash}))
        # By itself: an upload that fails removes the file, and the folder would have no version.
        self._client.call(self._client.store.put, INDEX_NAME, [index], crc32c=crc32c_of([index]))


class _Contents(NamedTuple):
    """The bytes of tensors in memory, by name."""

    tensors: Mapping[str, torch.Tensor]

    def read_bytes(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all buffers."""
        for part in wanted:
            part.buffer.copy_(self.tensors[part.name][part.begin : part.end])


def read_pieces(reader: CheckpointReader, pieces: Sequence[HeldPiece], names: Mapping[str, str]) -> None:
    """Fill whole tensors. `names` are the reader's names of them."""
    reader.read_bytes(
        [
            TensorBytes(name=names[piece.name], begin=0, end=buffer.nbytes, buffer=buffer)
            for piece in pieces
            for buffer in [_as_bytes(piece)]
        ]
    )


def _as_bytes(piece: HeldPiece) -> torch.Tensor:
    return piece.tensor.view(-1).view(torch.uint8)
