"""One rank of one system: a process in that system's interpreter that obeys commands from its standard input.

A command is one line of JSON, `{"do": …}`; its answer is one line of JSON, `{"ok": …}` or `{"error": …}`.
Whatever libraries print goes to standard error. The process ends with its input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.measure import measured
from benchmarks.outcomes import Outcome, Settings
from benchmarks.payloads import Payload
from benchmarks.state import Layout, State
from benchmarks.sweeps import NUM_PARTS_OF_A_SHARD, Verb
from benchmarks.systems import System, system_named

_PART = 3
_SCRATCH_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Message that a worker gets when it starts."""

    system: str
    rank: int
    num_ranks: int
    rendezvous_path: str
    """A file that does not exist yet, where the ranks of one system meet; unused by a single rank."""
    timeout_s: float

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        return cls(**json.loads(text))


class Worker:
    """The tensors of one rank, and the system that saves and loads them."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._kind = system_named(spec.system)
        begun_s = time.perf_counter()
        self._kind.require()
        self._import_s = time.perf_counter() - begun_s
        self._system: System | None = None
        self._state: State | None = None
        self._mesh = self._join_group() if spec.num_ranks > 1 else None
        self._layout = contextlib.ExitStack()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._has_saved = self._has_begun = False
        """In the background: ever, and the tensors that there are now."""

    def versions(self) -> dict[str, str]:
        return {
            "python": platform.python_version(),
            **{name: _find_version(name) for name in self._kind.distributions},
            f"import of {self._kind.module} after torch": f"{self._import_s * 1e3:.0f} ms",
        }

    def configure(self, settings: dict[str, Any]) -> None:
        """Use these `Settings` from here on."""
        self._system = self._kind(Settings(**settings))

    def prepare(self, payload: dict[str, Any], layout: Layout) -> int:
        """Make this rank's tensors, filled with what belongs there; returns their bytes."""
        self.release()
        mesh = self._mesh
        if layout == "part":
            mesh = self._layout.enter_context(_mesh_of_a_pretended_job())
        self._state = State(Payload.of_json(payload), mesh)
        self._state.fill()
        return self._state.num_bytes

    def zero(self) -> None:
        self._its_state.zero()

    def verify(self) -> None:
        """Raise ValueError unless each tensor holds what `prepare` put there, to the bit."""
        self._its_state.verify()

    def release(self) -> None:
        self._state = None
        self._has_begun = False
        self._layout.close()

    def measure(self, verb: Verb, uri: str) -> dict[str, Any]:
        """Do it once; the fields of a `Usage` and of an `Outcome`."""
        system, state_dict = self._its_system, self._its_state.state_dict
        operations: dict[Verb, Callable[[], Outcome]] = {
            "save": lambda: system.save(state_dict, uri),
            "load": lambda: system.load(state_dict, uri),
            "async_blocking": lambda: system.async_save(state_dict, uri),
            "async_training": lambda: system.save_beside_training(state_dict, uri),
            "resharded_load": lambda: system.load(state_dict, uri),
        }
        if self._mesh is not None:
            dist.barrier()
        if verb == "async_blocking" and not self._has_begun:
            if self._has_saved:
                # The tensors are new. What training waits for later is the second save of its tensors, not the first.
                system.async_save(state_dict, f"{uri}-before")
            self._has_begun = self._has_saved = True
        copies_s = [self._copy_s()] if verb == "async_blocking" else []
        usage, outcome = measured(operations[verb])
        if copies_s:
            outcome = dataclasses.replace(outcome, copy_s=(copies_s[0] + self._copy_s()) / 2)
        return {"usage": dataclasses.asdict(usage), "outcome": dataclasses.asdict(outcome)}

    def _copy_s(self) -> float:
        """Measure one plain copy of all tensors, into memory that is in use already and that no cache holds."""
        sources = [value.to_local() if isinstance(value, DTensor) else value for value in self._tensors]
        most_bytes = max(source.nbytes for source in sources)
        if self._scratch.nbytes < max(most_bytes, min(_SCRATCH_BYTES, sum(source.nbytes for source in sources))):
            self._scratch = torch.zeros(max(most_bytes, _SCRATCH_BYTES), dtype=torch.uint8)
        position = 0
        started_s = time.perf_counter()
        for source in sources:
            if position + source.nbytes > self._scratch.nbytes:
                position = 0
            self._scratch[position : position + source.nbytes].view(source.dtype).view(source.shape).copy_(source)
            position += source.nbytes
        return time.perf_counter() - started_s

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return list(self._its_state.state_dict.values())

    @property
    def _its_system(self) -> System:
        if self._system is None:
            raise RuntimeError("configure comes first")
        return self._system

    @property
    def _its_state(self) -> State:
        if self._state is None:
            raise RuntimeError("prepare comes first")
        return self._state

    def _join_group(self) -> DeviceMesh:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self._spec.rendezvous_path}",
            rank=self._spec.rank,
            world_size=self._spec.num_ranks,
            timeout=timedelta(seconds=self._spec.timeout_s),
        )
        return init_device_mesh("cpu", (self._spec.num_ranks,))


@contextlib.contextmanager
def _mesh_of_a_pretended_job() -> Iterator[DeviceMesh]:
    """The mesh that one rank of a larger job would see: a load by this rank alone wants its part of each tensor."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  # registers its backend

    dist.init_process_group("fake", store=FakeStore(), rank=_PART, world_size=NUM_PARTS_OF_A_SHARD)
    try:
        yield init_device_mesh("cpu", (NUM_PARTS_OF_A_SHARD,))
    finally:
        dist.destroy_process_group()


def _find_version(name: str) -> str:
    """Return the version of the distribution `name`; cloudckpt may run from a checkout that is not installed."""
    if name != "cloudckpt":
        return importlib.metadata.version(name)
    from cloudckpt import __version__  # noqa: PLC0415  # not in the processes of the rivals

    return __version__


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
