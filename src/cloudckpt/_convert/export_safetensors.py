"""Exports as safetensors files, in Hugging Face's layout, streamed."""

from __future__ import annotations

import functools

from cloudckpt._commit.resolve import holds_torch_checkpoint, resolve
from cloudckpt._convert.bodies import TensorsBody
from cloudckpt._convert.files import Files
from cloudckpt._convert.names import chosen_names, shown
from cloudckpt._convert.plan import Done, ExportPlan
from cloudckpt._convert.progress import Progress
from cloudckpt._convert.reading import CheckpointReader
from cloudckpt._convert.shards import INDEX_NAME, SINGLE_NAME, Shard, index_of, shards_of
from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES, SAFETENSORS_TAG
from cloudckpt._manifest.model import Manifest
from cloudckpt._pipeline.context import Context
from cloudckpt._plan.layout import Entry
from cloudckpt._stage.arena import Arena
from cloudckpt.errors import CheckpointNotFoundError, UnsupportedValueError
from cloudckpt.options import MIB

_PATTERNS = (SINGLE_NAME, "model-?????-of-?????.safetensors", INDEX_NAME)
_TILE_BYTES = MIB
_RESERVED = "__metadata__"


def export_safetensors(plan: ExportPlan, progress: Progress) -> Done:
    """See `cloudckpt.export_checkpoint`."""
    source = Context(plan.source, plan.options, rank=0)
    target = Context(plan.target, plan.target_options, rank=0)
    manifest = _manifest_at(source)
    names = chosen_names(
        [*manifest.tensors, *manifest.values],
        include=plan.include,
        strip_prefix=plan.strip_prefix,
        uri=source.uri,
    )
    left_out = tuple(fqn for fqn in names if fqn in manifest.values)
    _check_values(left_out, plan)
    fqns = {name: fqn for fqn, name in names.items() if fqn in manifest.tensors}
    entries = _entries(manifest, fqns, source.uri)
    shards = shards_of(entries, max_shard_bytes=plan.max_shard_bytes)
    files = Files(
        target,
        progress,
        patterns=_PATTERNS,
        entries=(INDEX_NAME, SINGLE_NAME),  # the earlier export may have been the one or the other
        overwrite=plan.overwrite,
        tile_bytes=_TILE_BYTES,
    )
    files.check()
    index = index_of(shards)
    progress.expect(sum(shard.layout.size_bytes for shard in shards) + (len(index) if len(shards) > 1 else 0))
    files.clear([*(shard.name for shard in shards), *([INDEX_NAME] if len(shards) > 1 else [])])
    # A half for the parts that are sent, the other for what is read beside them: whole tiles, and gaps; or chunks that
    # can only be unpacked whole.
    budget_bytes = plan.options.read_bytes // 2
    reader = CheckpointReader(
        source, manifest, budget_bytes=budget_bytes // target.connections, kept_bytes=budget_bytes
    )
    try:
        if len(shards) == 1:
            (shard,) = shards
            size_bytes = shard.layout.size_bytes
            body_in = functools.partial(_body_of, shard, fqns, reader)
            files.upload_only(shard.name, body_in, size_bytes=size_bytes, budget_bytes=budget_bytes)
        else:
            with files.upload(budget_bytes=budget_bytes) as submit:
                for shard in shards:
                    submit(shard.name, functools.partial(_body_of, shard, fqns, reader))
    except BaseException:
        reader.stop()
        raise
    if len(shards) > 1:
        files.put_last(INDEX_NAME, index)
    return Done(num_tensors=len(fqns), num_values=0, files=files.written, left_out=left_out)


def _manifest_at(source: Context) -> Manifest:
    try:
        return resolve(source.store, source.retrier).manifest
    except CheckpointNotFoundError as error:
        if holds_torch_checkpoint(source.store, source.retrier):
            raise CheckpointNotFoundError(
                f"{source.uri} holds a checkpoint of torch's own writer, which cannot be read in pieces. Import it "
                "first: cloudckpt import --format dcp, or cloudckpt.import_checkpoint",
                uri=source.uri,
            ) from error
        raise


def _check_values(fqns: tuple[str, ...], plan: ExportPlan) -> None:
    if fqns and not plan.skip_non_tensors:
        raise UnsupportedValueError(
            f"safetensors files hold tensors alone, and of {plan.source.uri} these are Python objects: "
            f"{shown(sorted(fqns))}. Leave them out (skip_non_tensors=True, or include='model.*' for what is wanted), "
            "or export in the format 'torch'",
            uri=plan.source.uri,
        )


def _entries(manifest: Manifest, fqns: dict[str, str], uri: str) -> list[Entry]:
    """What the files hold, under the new names."""
    unknown = {
        fqn: manifest.tensors[fqn].dtype for fqn in fqns.values() if manifest.tensors[fqn].dtype not in SAFETENSORS_TAG
    }
    if unknown:
        raise UnsupportedValueError(
            f"safetensors files that every reader can open have no dtype for "
            f"{shown([f'{fqn} ({dtype})' for fqn, dtype in unknown.items()])} of {uri}. Convert them before they are "
            "saved, leave them out with include, or export in the format 'torch'",
            uri=uri,
        )
    if _RESERVED in fqns:
        raise UnsupportedValueError(
            f"no tensor of a safetensors file can be called {_RESERVED!r}, as one of {uri} is", uri=uri
        )
    entries = []
    for name, fqn in fqns.items():
        tensor = manifest.tensors[fqn]
        num_bytes = ITEMSIZE_BYTES[tensor.dtype]
        for length in tensor.shape:
            num_bytes *= length
        entries.append(Entry(fqn=name, dtype=tensor.dtype, shape=tensor.shape, offsets=None, num_bytes=num_bytes))
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
