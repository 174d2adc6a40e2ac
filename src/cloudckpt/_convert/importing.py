"""Imports: files of other programs, as a checkpoint."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence

from cloudckpt._convert.import_safetensors import import_safetensors
from cloudckpt._convert.import_whole import import_dcp, import_torch
from cloudckpt._convert.names import patterns_of
from cloudckpt._convert.plan import ImportPlan, reported
from cloudckpt._convert.progress import OnProgress, Progress
from cloudckpt._convert.reports import ConversionReport, Format
from cloudckpt._convert.sides import check_apart
from cloudckpt._uri import parse_location
from cloudckpt.errors import InvalidOptionError
from cloudckpt.options import Options

_log = logging.getLogger("cloudckpt")

_IMPORTS = {"safetensors": import_safetensors, "torch": import_torch, "dcp": import_dcp}


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Format = "safetensors",  # noqa: A002  # the word that it is
    include: str | Sequence[str] = (),
    add_prefix: str = "",
    tie: Mapping[str, str] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
    on_progress: OnProgress | None = None,
) -> ConversionReport:
    """Save what lies at `source`, on any store, as a checkpoint at `target`.

    - ``"safetensors"``: a file, a folder of files, with or without Hugging Face's index, or the index. Tensors are
      streamed, in at most ``options.read_bytes`` of memory.
    - ``"torch"``: a file of ``torch.save`` with a state dict. Its tensors are mapped from the file, which is copied to
      the folder for temporary files where it is not local.
    - ``"dcp"``: a folder in torch's own format, of any version that torch reads. Takes the state dict's memory.

    Files of ``torch.save`` are read with ``weights_only=True``, and the metadata of torch's own format is a pickle,
    which could run any code: both are read in full only with `allow_pickle`. None of the formats has checksums, so
    that damage from before the import cannot be seen; from here on it can. `include` are patterns of names as of files;
    `add_prefix` goes before each name (``"model."``), and, for ``"torch"`` and ``"dcp"``, makes the state dict flat.
    With ``"safetensors"``, `tie` gives tensors that are there further names (``{"lm_head.weight": "embed.weight"}``, as
    in the files), as a save of the model that ties them would have: for what ``save_pretrained`` leaves out. What
    ``safetensors.torch.save_model`` left out has its names in the file, and gets them back by itself.
    The checkpoint is committed as by `save`, also as far as `overwrite` goes. `options` are for the source,
    `target_options` for the target.

    Raises `CheckpointNotFoundError`, `CorruptCheckpointError` for a file that is cut or no such file,
    `UnsafePickleError`, `UnsupportedValueError`, `CheckpointChangedError` where a file was replaced meanwhile, and what
    saves raise.
    """
    begun_s = time.monotonic()
    if format not in _IMPORTS:
        raise InvalidOptionError(f"format must be one of {', '.join(map(repr, _IMPORTS))}, not {format!r}")
    options, target_options = options or Options(), target_options or Options()
    plan = ImportPlan(
        source=parse_location(source),
        target=parse_location(target),
        options=options,
        target_options=target_options,
        include=patterns_of(include),
        add_prefix=add_prefix,
        tie=_checked(tie, format),
        overwrite=overwrite,
        allow_pickle=allow_pickle,
    )
    check_apart(plan.source, plan.target, options, target_options)
    report = reported(plan, format, _IMPORTS[format](plan, Progress(on_progress)), begun_s=begun_s)
    _log.info("imported %s", report)
    return report


def _checked(tie: Mapping[str, str] | None, kind: Format) -> dict[str, str]:
    found = dict(tie or {})
    if not all(isinstance(name, str) and name for pair in found.items() for name in pair):
        raise InvalidOptionError(f"tie must be names of tensors by further names for them, not {tie!r}")
    if found and kind != "safetensors":
        raise InvalidOptionError(f"tie is for safetensors files: those of format={kind!r} have the tied tensors' names")
    return found
