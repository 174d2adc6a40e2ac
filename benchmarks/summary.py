"""A plain table of a run: medians. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

GB = 1e9
MIB = 1024 * 1024


def summary(document: dict[str, Any]) -> str:
    """One line for each verb of each system, and why it is not complete where it is not."""
    header = (
        "cell",
        "verb",
        "server",
        "wire",
        "ranks",
        "system",
        "GB/s",
        "CPU s/GB",
        "peak MiB",
        "blocks s",
        "read MiB",
    )
    lines = [header, *(_line(cell) for cell in document["cells"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    table = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    failed = [
        f"{cell['system']} {cell['cell']} {cell['verb']} {cell['server']} {cell['wire']}: {cell['failed']}"
        for cell in document["cells"]
        if cell["failed"] is not None
    ]
    return "\n".join([*table, *(["", "Not complete:", *failed] if failed else [])])


def _line(cell: dict[str, Any]) -> tuple[str, ...]:
    counted = [sample for sample in cell["samples"] if sample["repetition"] > 0]
    gb = cell["num_bytes"] / GB
    peaks = [sample["peak_bytes"] for sample in cell["samples"] if sample["peak_bytes"] is not None]
    return (
        *(cell["cell"], cell["verb"], cell["server"], cell["wire"], str(cell["num_ranks"]), cell["system"]),
        _median([gb / sample["wall_s"] for sample in counted], 2),
        _median([sample["cpu_s"] / gb for sample in counted], 2),
        f"{max(peaks) / MIB:.0f}" if peaks else "-",
        _median([sample["blocking_s"] for sample in counted if sample["blocking_s"] is not None], 3),
        _median([sample["num_bytes_read"] / MIB for sample in counted if sample["num_bytes_read"] is not None], 1),
    )


def _median(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f}" if values else "-"
