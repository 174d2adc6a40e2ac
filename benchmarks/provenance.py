"""Machine and versions behind a figure."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def provenance(root: Path) -> dict[str, Any]:
    """Machine, commit and time, in JSON's types; None where something cannot be found out."""
    return {
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_dirty": None if (status := _git(root, "status", "--porcelain")) is None else bool(status),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu_model": _first_field("/proc/cpuinfo", "model name") or platform.processor() or None,
            "num_cores": os.cpu_count(),
            "memory_bytes": _memory_bytes(),
            "kernel": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
            "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        },
    }


def write_results(path: Path, root: Path, **content: Any) -> None:
    """Write `content` as JSON, with the machine and the versions behind it."""
    path.write_text(json.dumps({"provenance": provenance(root), **content}, indent=1) + "\n", encoding="utf-8")


def _memory_bytes() -> int | None:
    text = _first_field("/proc/meminfo", "MemTotal")
    return None if text is None else int(text.removesuffix("kB")) * 1024


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _first_field(path: str, field: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None
