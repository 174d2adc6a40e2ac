"""Exports: a checkpoint as files that other programs read."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from cloudckpt._convert.export_safetensors import export_safetensors
from cloudckpt._convert.export_whole import export_dcp, export_torch
from cloudckpt._convert.names import patterns_of
from cloudckpt._convert.plan import ExportPlan, reported
from cloudckpt._convert.progress import OnProgress, Progress
from cloudckpt._convert.reports import ConversionReport, Format
from cloudckpt._convert.sides import check_apart
from cloudckpt._uri import parse_location
from cloudckpt.errors import InvalidOptionError
from cloudckpt.options import Options

_log = logging.getLogger("cloudckpt")

_MAX_SHARD_BYTES = 5_000_000_000  # as huggingface_hub's
_EXPORTS = {"safetensors": export_safetensors, "torch": export_torch, "dcp": export_dcp}


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Format = "safetensors",  # noqa: A002  # the word that it is
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
    """Write the checkpoint at `source` to `target`, on any store, as files that other programs read.

    - ``"safetensors"``: a folder in Hugging Face's layout, files of at most `max_shard_bytes` and, where there are
      several, an index, which is written last. Tensors are streamed, in at most ``options.read_bytes`` of memory,
      however large they are. Python objects have no place in it: they are an error, or left out with
      `skip_non_tensors`. So is a dtype that the format lacks. Tied tensors are written once for each name.
    - ``"torch"``: one file, as ``torch.save`` writes it, with the nested state dict. Takes the state dict's memory, and
      as much room in the folder for temporary files.
    - ``"dcp"``: a folder in torch's own format, for ``dcp.load`` with a ``FileSystemReader``. Takes as much.

    Every byte that is read is checked, sharded tensors are put together, and what is read is equal to what was saved
    bit for bit. `include` are patterns of names as of files (``"model.*"``); `strip_prefix` goes from the names, which
    for ``"torch"`` and ``"dcp"`` makes the state dict flat. `target` may hold other files; those of an earlier export
    make this one fail unless `overwrite`, which removes them before the first new one is written. `allow_pickle` is as
    in `load`. `options` are for the source, `target_options` for the target.

    Raises `UnsupportedValueError`, with names, for what the format cannot hold; `CheckpointExistsError`;
    `InvalidOptionError`; and what `load` raises of the source. After an error, no index and no single file is there.
    """
    begun_s = time.monotonic()
    if format not in _EXPORTS:
        raise InvalidOptionError(f"format must be one of {', '.join(map(repr, _EXPORTS))}, not {format!r}")
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise InvalidOptionError(f"max_shard_bytes must be a positive whole number, not {max_shard_bytes!r}")
    options, target_options = options or Options(), target_options or Options()
    plan = ExportPlan(
        source=parse_location(source),
        target=parse_location(target),
        options=options,
        target_options=target_options,
        include=patterns_of(include),
        strip_prefix=strip_prefix,
        max_shard_bytes=max_shard_bytes,
        skip_non_tensors=skip_non_tensors,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
    )
    check_apart(plan.source, plan.target, options, target_options)
    report = reported(plan, format, _EXPORTS[format](plan, Progress(on_progress)), begun_s=begun_s)
    _log.info("exported %s", report)
    return report
