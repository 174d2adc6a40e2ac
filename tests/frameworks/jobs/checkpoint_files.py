"""torch_checkpointing's own manager over cloudckpt's storage: saves, loads on other numbers of ranks, refusals."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import NUM_RANKS, Noisy, data, end, places, tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.barriers import TCPStoreBarrierConfig
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager

import cloudckpt
from cloudckpt.integrations.torch_checkpointing import CloudStorageConfig
from cloudckpt.stores import open_store
from cloudckpt.testing import damage

RANK = int(os.environ.get("RANK", "0"))
SMALL = cloudckpt.Options(
    staging_bytes=2**20,
    read_bytes=2**20,
    advanced=cloudckpt.AdvancedOptions(tile_bytes=4096, part_bytes=2**16, object_bytes=2**17, request_bytes=2**16),
)
FORMATS = {
    "torch": None,
    "safetensors": LayoutInfo("shards/model_{rank}.safetensors", SafetensorsSerialization()),
}


def manager_of(config: CloudStorageConfig, save: Any, layout: LayoutInfo | None = None) -> CheckpointManager:
    items = {"model": ItemSpec(resharder=DefaultResharder(), layout=layout, required=False)}
    return CheckpointManager(CheckpointManager.Config(items=items, save=save, storage_config=config))


def race(root: str) -> str:
    """Each rank as a job of its own, before there is a process group."""
    manager = manager_of(CloudStorageConfig(root), SyncCheckpointSaverConfig())
    try:
        manager.save("race", {"model": {"w": torch.full((1000,), float(RANK))}})
    except FileExistsError:
        return "lost"
    finally:
        manager.close()
    return "won"


def train(seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Noisy()
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in data().split(8)[:steps]:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def save_and_load(config: CloudStorageConfig, name: str, save: Any, layout: LayoutInfo | None) -> dict[str, Any]:
    """Save, and load into other weights, on all ranks; then be refused."""
    model, optimizer = train(3, 2)
    big = torch.randn(2**17, generator=torch.Generator().manual_seed(RANK))
    payload = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rank": {"big": big, "step": 2}}
    manager = manager_of(config, save, layout)
    written = manager.save(name, payload)
    if written is not None:
        written.result()
    dist.barrier()  # the others return before rank 0 has committed
    other, other_optimizer = train(4, 1)
    into = {
        "model": other.state_dict(),
        "optimizer": other_optimizer.state_dict(),
        "rank": {"big": torch.zeros_like(big), "step": 0},
    }
    loaded = manager.load(name, into=into, strict=True)
    other.load_state_dict(loaded["model"])
    result = {
        "model": is_equal(whole(other.state_dict()), whole(model.state_dict())),
        "rank": torch.equal(loaded["rank"]["big"], big) and loaded["rank"]["step"] == 2,
    }
    manager.close()
    again = manager_of(config, SyncCheckpointSaverConfig(), layout)
    try:
        again.save(name, payload)
    except FileExistsError as error:
        result["again"] = str(error)
    again.close()
    return result


def damage_file(uri: str, name: str) -> None:
    store = open_store(uri, cloudckpt.Options())
    infos = [info for info in store.list("data/") if name.encode() in store.read(info.key, max_bytes=2**30)[:200]]
    damage.flip_bit(store, max(infos, key=lambda info: info.size_bytes).key, bit=8 * 10_000)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def as_torchtitan(root: str) -> dict[str, Any]:
    """The calls of torchtitan's manager (its main branch): async saves, retention, a last save, a search and a load."""
    config = CloudStorageConfig(root, options=SMALL)
    barrier = TCPStoreBarrierConfig(
        master_address="127.0.0.1",
        tcpstore_port=gather(free_port())[0],
        timeout_barrier_init_sec=60,
        use_checkpoint_barrier_tcpstore_libuv=True,
    )
    writer = CheckpointWriterConfig(barrier_config=barrier)
    storage = config.create_storage()
    folder = Path("./outputs/checkpoint")
    before = storage.isdir(folder)
    dist.barrier()
    manager = manager_of(config, AsyncCheckpointSaverConfig(writer_config=writer))
    model, optimizer = train(3, 1)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "train_state": {"step": 0}}
    manager.prewarm_staging(states)
    for step in (1, 2, 3):
        written = manager.save(str(folder / f"step-{step}"), {**states, "train_state": {"step": step}})
        with manager.lock():
            pass
        assert written is not None
        written.result()
    manager.close()
    manager = manager_of(config, SyncCheckpointSaverConfig(writer_config=writer))
    manager.save(str(folder / "step-4"), {**states, "train_state": {"step": 4}})
    manager.close()
    dist.barrier()
    found = sorted(
        int(name.removeprefix("step-"))
        for name in storage.ls(folder)
        if storage.exists(folder / name / "metadata.pkl") and not storage.isdir(folder / name / "metadata.pkl")
    )
    dist.barrier()
    if RANK == 0:
        for step in found[:-2]:
            storage.rmdir(folder / f"step-{step}")
    dist.barrier()
    kept = storage.ls(folder)
    manager = manager_of(config, SyncCheckpointSaverConfig())
    into = {"model": train(5, 1)[0].state_dict(), "train_state": {"step": 0}}
    loaded = manager.load(str(folder / f"step-{found[-1]}"), into=into, strict=True)
    manager.close()
    return {
        "before": before,
        "found": found,
        "kept": kept,
        "step": loaded["train_state"]["step"],
        "model": is_equal(whole(loaded["model"]), whole(states["model"])),
    }


def gather_on_cpus(_: Any, value: Any, group: Any = None) -> dict[int, Any]:
    """In place of the package's own, which goes through a GPU."""
    found: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(found, value, group=group)
    return dict(enumerate(found))


def gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    DefaultMetadataManager._all_gather_pickled_data = gather_on_cpus
    outcomes = {place: race(f"{root}/{NUM_RANKS}") for place, root in places()} if NUM_RANKS == 2 else {}
    dist.init_process_group("gloo")
    for place, root in places():
        here = f"{root}/{NUM_RANKS}"
        config = CloudStorageConfig(here, options=SMALL)
        result: dict[str, Any] = {"race": gather(outcomes.get(place))}
        for name in ("torch/sync", "torch/async", "safetensors/sync"):  # each format, and each mode
            kind, mode = name.split("/")
            save = SyncCheckpointSaverConfig() if mode == "sync" else AsyncCheckpointSaverConfig()
            result[name] = gather(save_and_load(config, name, save, FORMATS[kind]))
        result["verified"] = cloudckpt.verify(f"{here}/torch/sync").num_tensors
        storage = config.create_storage()
        at = Path("/torch/sync")
        result["storage"] = {
            "ls": storage.ls(at),
            "folder": storage.ls(Path("torch")),
            "kinds": [
                storage.isdir(at),
                storage.isdir(at / "rank_0.pt"),
                storage.exists(at / "no"),
                storage.exists(Path("no")),
            ],
            "size": storage.getsize(at / "rank_0.pt"),
            "glob": storage.glob("/torch/sync/rank_*.pt"),
            "staged": storage.exists(Path("torch/tmp_sync")),
            "url": storage.remap_path(at),
        }
        dist.barrier()
        if NUM_RANKS == 2:
            result["titan"] = gather(as_torchtitan(f"{here}/titan"))
        else:  # of the same weights, but for how they are spread, which changes the last bits in training
            manager = manager_of(CloudStorageConfig(f"{root}/2"), SyncCheckpointSaverConfig())
            other, _ = train(4, 1)
            found = manager.load("torch/sync", into={"model": other.state_dict()}, strict=True)["model"]
            manager.close()
            expected, _ = train(3, 2)
            pairs = zip(whole(found).values(), whole(expected.state_dict()).values(), strict=True)
            result["resharded"] = all(torch.allclose(one, wanted, atol=1e-5) for one, wanted in pairs)
        if RANK == 0:
            result["infos"] = [info.world_size for info in cloudckpt.list_checkpoints(f"{here}/torch", all=True)]
            cloudckpt.copy(f"{here}/torch/sync", f"{here}/copied")
            damage_file(f"{here}/copied", "rank_0.pt")
        dist.barrier()
        manager = manager_of(CloudStorageConfig(here), SyncCheckpointSaverConfig())
        try:
            manager.load("copied", into={"rank": None})
            outcome = "loaded"
        except cloudckpt.CorruptCheckpointError as error:
            outcome = str(error)
        result["damaged"] = gather(outcome)
        manager.close()
        tell(place, result)
    end()


if __name__ == "__main__":  # the package spawns processes
    main()
