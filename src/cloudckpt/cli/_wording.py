"""The library's advice is for those who call it from Python. Here it is put as it is typed at a prompt."""

from __future__ import annotations

import re
from collections.abc import Collection

_FLAGGED: tuple[tuple[str, str, str], ...] = (
    (r",? and overwrite is False(?=:)", "", "--overwrite"),
    (r"\boverwrite=True\b", "--overwrite", "--overwrite"),
    (r"\bskip_non_tensors=True\b", "--skip-non-tensors", "--skip-non-tensors"),
    (r"\binclude='", "--include '", "--include"),
    (r"\bstrip_prefix='", "--strip-prefix '", "--strip-prefix"),
    (r"\bmax_shard_bytes\b", "--max-shard-size", "--max-shard-size"),
    (r"\ballow_pickle=True \(cloudckpt import --unsafe-pickle\)", "--unsafe-pickle", "--unsafe-pickle"),
    (r"\ballow_pickle=True \(and save it with cloudckpt afterwards\)", "--unsafe-pickle", "--unsafe-pickle"),
    (r"\ballow_pickle=True \(cloudckpt.load, [^)]*\)", "--unsafe-pickle", "--unsafe-pickle"),
    (r"\ballow_pickle=True\b", "--unsafe-pickle", "--unsafe-pickle"),
    (r"\bdeadline_s\b", "--deadline", "--deadline"),
    (r"\b([ra]tol) must\b", r"--\1 must", "--rtol"),
)
"""What to say instead where the command has the option; elsewhere it can only be done in Python."""

_ANYWHERE: tuple[tuple[str, str], ...] = (
    (r"^Options: ", ""),
    (r"\bOptions\(timeout_s=…\)|\btimeout_s\b", "--timeout"),
    (r"\bOptions\(storage_options=…\)", "--storage-option NAME=VALUE"),
    (r"\bpass anonymous=True in storage_options\b", "pass --storage-option anonymous=true"),
    (
        r"\bpass in storage_options credentials_file, or anonymous=True\b",
        "pass --storage-option credentials_file=FILE, or anonymous=true",
    ),
    (r"\bpass storage_options=\{'endpoint_url': '([^']*)'\}", r"pass --endpoint-url \1"),
    (r"\b(?:say so with |in )?storage_options endpoint_url\b", "--endpoint-url"),
    (r"\bCheck endpoint_url\b", "Check --endpoint-url"),
    (r"\bstorage_options\b", "--storage-option"),
    (
        r"\bA file lies where a directory is needed: remove it, or choose another path",
        "A file lies where a directory is needed: give another path",
    ),
    (
        r"Give it to the load: Options\(extensions=\[…\]\), or ObjectStoreReader\(_extension_registry=…\)",
        "A command cannot be given one: do it in Python, with Options(extensions=[…])",
    ),
    (r"\bolder_than\b", "--older-than"),
    (r"\(cloudckpt\.latest\(root\) finds the newest\)", "(cloudckpt ls ROOT shows them)"),
    (r"\bcloudckpt\.list_checkpoints\(root\)", "cloudckpt ls ROOT"),
    (r"\(cloudckpt\.latest\)", "(cloudckpt ls)"),
    (r"\bcloudckpt\.import_checkpoint\(…, format='dcp'\)", "cloudckpt import --format dcp"),
    (r"\bformat='torch'", "--format torch"),
    (r"\bcloudckpt\.copy\b", "cloudckpt cp"),
    (r", or cloudckpt\.import_checkpoint\b", ""),
    (r"\bcloudckpt\.import_checkpoint\b", "cloudckpt import"),
    (r"\bLoad it with allow_pickle=True and save it with cloudckpt\b", "cloudckpt import --format dcp makes one of it"),
    (
        r"\bis what is left of a URI that went through pathlib\.Path [^;]*; pass the URI itself, as a str:",
        "lacks one of the slashes after its scheme. Write",
    ),
)

PYTHON = re.compile(
    r"\b(?:overwrite|skip_non_tensors|dry_run|allow_pickle|anonymous)(?:=| is )(?:True|False)\b"
    r"|\b(?:storage_options|older_than|timeout_s|deadline_s|max_shard_bytes)\b|\b(?:cloudckpt\.[a-z_]+|ObjectStoreReader)\("
)
"""What makes no sense at a prompt."""


def as_typed(text: str, *, flags: Collection[str] = ()) -> str:
    """`text` for whoever called a command that has the options `flags`."""
    for pattern, replacement in _ANYWHERE:
        text = re.sub(pattern, replacement, text)
    for pattern, replacement, flag in _FLAGGED:
        if flag in flags:
            text = re.sub(pattern, replacement, text)
    return text
