"""First and last steps of every process of the demo, and its messages to the driver."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.report import LoadReport, SaveReport

COLLECTIVE_TIMEOUT = timedelta(seconds=120)


@contextmanager
def distributed(device_type: str) -> Iterator[torch.device]:
    """A process group on this rank's device, with a CPU side for checkpoints; repeatable to the last bit."""
    # More threads, or another number of them, would add up in another order.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=COLLECTIVE_TIMEOUT, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Record:
    """A rank's diary for the driver: one JSON object per line, on disk before the next thing happens."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, what: str, **values: Any) -> None:
        """Add a line."""
        with self._path.open("a") as file:
            file.write(json.dumps({"what": what, **values}) + "\n")

    def write_report(self, what: str, report: SaveReport | LoadReport | None, **values: Any) -> None:
        """Add a save's or load's report, if there is one."""
        if report is not None:
            self.write(what, **asdict(report), **values)


def read_record(path: Path, what: str) -> list[dict[str, Any]]:
    """The lines of one kind; a file that is not there has none."""
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if line["what"] == what]
