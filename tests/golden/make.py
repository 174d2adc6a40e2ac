"""Writes a golden checkpoint, once for each released version of the format:

    python -m tests.golden.make

It refuses to touch one that is there: golden files are read for ever and never made anew. The values lie beside the
checkpoints in ``expected.json``, taken from the tensors before they were saved.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import hashlib
import json
import os
import pathlib
import random
import shutil
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.kit.options import make_options
from tests.scaled import make_scaled, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt

HERE = Path(__file__).resolve().parent
VERSION = "1.4"
DTYPES = (
    "bfloat16", "bool", "complex64", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int16", "int64",
    "int8", "uint16", "uint8",
)  # fmt: skip
WORLD_SIZE = 4
OPTIONS = make_options(tile_bytes=4096, part_bytes=4096, metadata={"run": "golden", "steps": [1, 2]})


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose bytes count up, but for bool, which knows two."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    pattern = torch.arange(num_bytes, dtype=torch.int64) * 37 % 251
    raw = (pattern % 2 if dtype is torch.bool else pattern).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


def full_tensors() -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint as a whole."""
    return {
        **{f"model.of_{name}": bits(getattr(torch, name), 2, 3) for name in DTYPES},
        "model.rows": bits(torch.float32, 7, 5),
        "model.columns": bits(torch.bfloat16, 3, 9),
        "model.blocks": bits(torch.float32, 6, 10),
        "model.many_tiles": bits(torch.float32, 50, 25),
        "model.scalar": bits(torch.float64),
        "model.empty": bits(torch.float32, 0, 4),
        "model.scaled.data_": make_scaled(6, 4).data_,
        "model.scaled.scale": make_scaled(6, 4).scale,
        "optimizer.state.0.step": torch.tensor(12.0),
        "optimizer.moments.0": bits(torch.float32, 8, 3),
    }


NAN = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
VALUES: dict[str, Any] = {
    "optimizer.lr": 0.1,
    "optimizer.name": "sgd",
    "optimizer.betas": [0.9, 0.999],
    "optimizer.nothing": None,
    "optimizer.moments.1": 7,
    "epoch": 3,
}

SHARED = [1, 2]
PLAIN: dict[str, Any] = {
    "numbers": (0, -(2**63), 2**64, -(2**5000), 0.1, -0.0, 1e300, float("inf"), NAN, complex(1.5, float("-inf"))),
    "texts": ("", "é\u2028\U0001f600", "\ud83d\ude00"),
    "bytes": (b"", b"\x00\xff", bytearray(b"ab")),
    "constants": (None, True, False, ...),
    "moments": (
        dt.date(2026, 1, 2), dt.time(3, 4, 5, 6, fold=1), dt.timedelta(-1, 2, 3), dt.timezone(dt.timedelta(hours=-5)),
        dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.timezone(dt.timedelta(minutes=90), "é")),
    ),
    "sequences": ((), ((1,), [2]), range(3, 9, 2), slice(None, 3), collections.deque([1, "a"], 5)),
    "sets": (set(), {1}, frozenset({(1, "a")})),
    "dicts": (
        {"b": 1, "a": {}, 2: None, None: 3, (1, True): 4, 0.5: 5, b"k": 6},
        collections.OrderedDict(b=1, a=2), collections.Counter("aab"), collections.defaultdict(list, {"a": [1]}),
    ),
    "others": (decimal.Decimal("1.50"), pathlib.PurePosixPath("runs/1"), pathlib.PureWindowsPath("c:/a")),
    "types": (int, collections.OrderedDict, np.float32, np.ndarray),
    "numpy": (
        np.float32(0.5), np.datetime64("2026-01-02", "s"), np.str_("é"), np.dtype(">i4"), np.array(["a", "bcd"]),
        np.asfortranarray(np.arange(6, dtype=">u2").reshape(2, 3)), np.empty((0, 2), np.complex64), np.array([True]),
    ),
    "random": (random.Random(0).getstate(), np.random.MT19937(1).state, np.random.PCG64(1).state),
    "torch": (torch.bfloat16, torch.device("cuda:1"), torch.strided, torch.Size([2, 0])),
    "tensors": collections.deque([torch.tensor([1.5, -0.0]), torch.tensor(7), torch.empty(0, 3)]),
    "pickled": (SHARED, SHARED),
}  # fmt: skip
"""Values, since 1.4."""

SMALL_OLD = {"weight": torch.full((4,), 1.0), "epoch": 1}
SMALL_NEW = {"weight": torch.full((4,), 2.0), "epoch": 2}


def state_dict() -> dict[str, Any]:
    """The nested state dict, with some tensors in chunks."""
    whole = {name: tensor.clone() for name, tensor in full_tensors().items()}
    line = init_device_mesh("cpu", (WORLD_SIZE,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    whole["model.rows"] = distribute_tensor(whole["model.rows"], line, [Shard(0)])
    whole["model.columns"] = distribute_tensor(whole["model.columns"], line, [Shard(1)])
    whole["model.blocks"] = distribute_tensor(whole["model.blocks"], square, [Shard(0), Shard(1)])
    del whole["model.scaled.data_"], whole["model.scaled.scale"]
    whole["model.scaled"] = shard(make_scaled(6, 4), square["rows"])  # since 1.2
    return {
        "model": {name.removeprefix("model."): tensor for name, tensor in whole.items() if name.startswith("model.")},
        "optimizer": {
            "state": {0: {"step": whole["optimizer.state.0.step"]}},
            "moments": (distribute_tensor(whole["optimizer.moments.0"], line, [Shard(0)]), 7),  # since 1.3
            **{name: VALUES[f"optimizer.{name}"] for name in ("lr", "name", "betas", "nothing")},
        },
        "epoch": VALUES["epoch"],
        "callbacks": {},
        "plain": dict(PLAIN),
    }


def save_on_rank(rank: int, directory: Path, port: int) -> None:
    """One checkpoint saved once, and one as a crash leaves it between an overwrite's commit and its tidying."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    once, again, replaced = (str(directory / name) for name in ("once", "overwritten", "replaced"))
    cloudckpt.save(state_dict(), once, options=OPTIONS)
    cloudckpt.save(SMALL_OLD, again, options=OPTIONS)
    if rank == 0:
        shutil.copytree(again, replaced)
    dist.barrier()
    cloudckpt.save(SMALL_NEW, again, overwrite=True, options=OPTIONS)
    if rank == 0:
        shutil.copytree(replaced, again, dirs_exist_ok=True)
        shutil.rmtree(replaced)
    dist.barrier()
    dist.destroy_process_group()


def expected() -> dict[str, Any]:
    """Return what a load must give."""
    return {
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "hex": bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()).hex(),
            }
            for name, tensor in full_tensors().items()
        },
        "values": VALUES,
    }


def make(directory: Path, save: Callable[[int, Path, int], None]) -> None:
    """The checkpoints that `save` writes on each rank, what they hold, and a checksum of each file."""
    if directory.exists():
        sys.exit(f"{directory} exists: golden checkpoints are never made anew")
    mp.spawn(save, args=(directory, 29_000 + os.getpid() % 1000), nprocs=WORLD_SIZE)
    (directory / "expected.json").write_text(json.dumps(expected(), indent=1) + "\n")
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sums = (
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(directory).as_posix()}" for path in files
    )
    (directory / "SHA256SUMS").write_text("\n".join(sums) + "\n")


if __name__ == "__main__":
    make(HERE / VERSION, save_on_rank)
