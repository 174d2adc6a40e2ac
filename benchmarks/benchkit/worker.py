"""One rank of one system: a process in that system's interpreter that obeys commands from its standard input.

A command is one line of JSON, `{"do": …}`; its answer is one line of JSON, `{"ok": …}` or `{"error": …}`.
Whatever libraries print goes to standard error. The process ends with its input.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchkit.measure import measured
from benchkit.systems import SYSTEMS, Settings, System

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_COLUMNS = 1024
"""Tensors are matrices, as weights are: of a DTensor, torch's planner makes an index as long as the sharded side."""
ROW_BYTES = 4 * NUM_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What one worker is told when it starts."""

    system: str
    rank: int
    num_ranks: int
    rendezvous_path: str
    """A file that does not exist yet, where the ranks of one system meet; unused by a single rank."""
    num_tensors: int
    tensor_bytes: int
    """Of one whole tensor, over all ranks."""
    timeout_s: float
    settings: Settings

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        fields = json.loads(text)
        return cls(**{**fields, "settings": Settings(**fields["settings"])})


class Worker:
    """The tensors of one rank, and the system that saves and loads them."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._locals: list[torch.Tensor] = []
        self._state_dict: dict[str, Any] = {}
        self._system: System = SYSTEMS[spec.system](spec.settings)
        self._noise = _noise(spec.tensor_bytes // spec.num_ranks // ROW_BYTES)
        self._mesh = self._join_group() if spec.num_ranks > 1 else None

    def versions(self) -> dict[str, str]:
        return {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in self._system.distributions},
        }

    def prepare(self) -> None:
        """Make this rank's tensors, each a storage of its own, filled with what belongs there."""
        self._locals = [torch.empty(self._noise.shape, dtype=torch.float32) for _ in range(self._spec.num_tensors)]
        for index, local in enumerate(self._locals):
            self._fill(local, index)
        self._state_dict = {f"layers.{index}.weight": self._global(local) for index, local in enumerate(self._locals)}

    def zero(self) -> None:
        for local in self._locals:
            local.zero_()

    def verify(self) -> None:
        """Raise ValueError unless each tensor holds what `prepare` put there, to the bit."""
        expected = torch.empty_like(self._locals[0])
        wrong = []
        for index, local in enumerate(self._locals):
            self._fill(expected, index)
            if not torch.equal(expected.view(torch.int32), local.view(torch.int32)):
                wrong.append(f"layers.{index}.weight")
        if wrong:
            raise ValueError(f"rank {self._spec.rank} loaded other values than were saved: {', '.join(wrong)}")

    def release(self) -> None:
        self._locals, self._state_dict = [], {}

    def save(self, uri: str) -> dict[str, Any]:
        return self._timed(lambda: self._system.save(self._state_dict, uri))

    def load(self, uri: str) -> dict[str, Any]:
        return self._timed(lambda: self._system.load(self._state_dict, uri))

    def _timed(self, operation: Callable[[], object]) -> dict[str, Any]:
        if self._mesh is not None:
            dist.barrier()
        return dataclasses.asdict(measured(operation))

    def _fill(self, local: torch.Tensor, index: int) -> None:
        # Random mantissas, another pattern in each tensor: compressing or deduplicating would gain nothing.
        pattern = (index * self._spec.num_ranks + self._spec.rank + 1) * 40503 & 0x7FFFFF
        torch.bitwise_xor(self._noise, pattern, out=local.view(torch.int32))

    def _join_group(self) -> DeviceMesh:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self._spec.rendezvous_path}",
            rank=self._spec.rank,
            world_size=self._spec.num_ranks,
            timeout=timedelta(seconds=self._spec.timeout_s),
        )
        return init_device_mesh("cpu", (self._spec.num_ranks,))

    def _global(self, local: torch.Tensor) -> Any:
        """What training would hold: the plain tensor on one rank, a DTensor sharded by rows on several."""
        if self._mesh is None:
            return local
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False)


def _noise(num_rows: int) -> torch.Tensor:
    """The bits of float32 values in [1, 2), the same in every process; shape [num_rows, NUM_COLUMNS]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1 << 23, (num_rows, NUM_COLUMNS), dtype=torch.int32, generator=generator) | 0x3F800000


def main() -> None:
    """Serve commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(run: Callable[[], object]) -> bool:
        try:
            line = {"ok": run()}
        # CheckpointException, which dcp raises, is a BaseException.
        except BaseException as error:  # noqa: BLE001
            traceback.print_exc()
            line = {
                "error": "".join(traceback.format_exception_only(error)).strip(),
                "kind": type(error).__name__,
            }
        print(json.dumps(line), file=answers, flush=True)
        return "ok" in line

    worker: Worker

    def start() -> dict[str, str]:
        nonlocal worker
        worker = Worker(WorkerSpec.from_json(sys.argv[1]))
        return worker.versions()

    if not answer(start):
        return
    for command in sys.stdin:
        request = json.loads(command)
        operation = getattr(worker, request.pop("do"))
        answer(lambda operation=operation, request=request: operation(**request))
    sys.stderr.flush()
    # Libraries leave threads behind that may not end; nothing here needs them to.
    os._exit(0)


if __name__ == "__main__":
    main()
