"""cloudckpt in DLIO, the program that MLPerf Storage runs: a checkpointing class that DLIO loads by name.

``++workload.checkpoint.checkpoint_mechanism_classname=benchmarks.dlio.Cloudckpt`` takes the place of DLIO's own class.
All else is DLIO's: the tensors of each rank, the storage options, the folder, the barriers and the clocks. DLIO's base
class names one state for each file that a rank would write. This class saves the states of all ranks as one
checkpoint, which is committed when every rank has sent its part. Written against DLIO's commit e1919d7b.

DLIO's log times each state that its base class hands over, which takes no time here. Its figures of whole checkpoints
count the save and the load.
"""

from __future__ import annotations

import socket
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing

import cloudckpt

_LOOPBACK = "127.0.0.1"


class Cloudckpt(PyTorchCheckpointing):  # type: ignore[misc]  # DLIO has no types
    """One cloudckpt checkpoint for each step, at ``checkpoint_folder``: an S3 URI, or a path."""

    _instance: ClassVar[Any] = None

    @classmethod
    def get_instance(cls) -> Any:
        """Return the one object of this process, as DLIO asks for it."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def __init__(self) -> None:
        BaseCheckpointing.__init__(self, "cloudckpt")
        _join_group(self.comm)
        given = self.args.storage_options or {}
        names = {
            "endpoint_url": "endpoint_url",
            "region": "region",
            "access_key_id": "aws_access_key_id",
            "secret_access_key": "aws_secret_access_key",
        }
        self._options = cloudckpt.Options(storage_options={names[key]: given[key] for key in names if given.get(key)})
        self._states: dict[str, Any] = {}

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002  # DLIO's
        """Note a state that DLIO would write to a file of this rank."""
        self._states[suffix.rpartition("/")[2]] = state

    def load_state(self, suffix: str, state: Any) -> None:
        """Note a state that DLIO would read from a file."""
        self._states[suffix.rpartition("/")[2]] = state

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        """Save the states of all ranks, and return once they are committed."""
        self._states.clear()
        super().save_checkpoint(epoch, step_number)
        # DLIO's classes overwrite their files, so a second run with the same folder has to work here too.
        cloudckpt.save(self._states, self._uri(epoch, step_number), overwrite=True, options=self._options)

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        """Load this rank's states into new memory, which DLIO's classes allocate too."""
        self._states.clear()
        super().load_checkpoint(epoch, step_number)
        loaded = _new_like(self._states)
        cloudckpt.load(loaded, self._uri(epoch, step_number), options=self._options)
        self.check(loaded)

    def check(self, loaded: dict[str, Any]) -> None:
        """Drop the states, as DLIO's classes do."""

    def finalize(self) -> None:
        """Leave the process group."""
        super().finalize()
        dist.destroy_process_group()

    def _uri(self, epoch: int, step_number: int) -> str:
        return f"{self.args.checkpoint_folder}/global_epoch{epoch}_step{step_number}"


class Verified(Cloudckpt):
    """The same, which compares each loaded tensor with the one that was saved: for a warm-up."""

    _instance: ClassVar[Any] = None

    def check(self, loaded: dict[str, Any]) -> None:
        """Raise a ValueError with the name of the first tensor that differs, or report how many are equal."""
        saved, read = dict(_tensors("", self._states)), dict(_tensors("", loaded))
        for name, tensor in saved.items():
            if not torch.equal(tensor, read[name]):
                raise ValueError(f"{name} of rank {self.args.my_rank} differs from what was saved")
        num_bytes = sum(tensor.nbytes for tensor in saved.values())
        print(f"rank {self.args.my_rank}: {len(saved)} tensors, {num_bytes} bytes are equal to those saved", flush=True)


def _new_like(state: Any) -> Any:
    return (
        {key: _new_like(value) for key, value in state.items()}
        if isinstance(state, dict)
        else state.new_empty(state.shape)
    )


def _tensors(prefix: str, state: Any) -> Any:
    for key, value in state.items():
        yield from _tensors(f"{prefix}{key}.", value) if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def _join_group(comm: Any) -> None:
    """Make a gloo group of MPI's ranks; rank 0 listens where its host name leads, on loopback for a single host."""
    name = socket.gethostname()
    is_one_host = len(set(comm.allgather(name))) == 1
    host = comm.bcast(_LOOPBACK if is_one_host else name)
    port = 0
    if comm.rank == 0:  # the kernel chooses a free port, which the others are told
        store = dist.TCPStore(host, 0, comm.size, is_master=True, wait_for_workers=False)
        port = store.port
    port = comm.bcast(port)
    if comm.rank != 0:
        store = dist.TCPStore(host, port, comm.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
