"""Whole training states on a GPU: saved, resumed, cast, sharded, in the background. Skipped where there is no GPU."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.in_memory import Memory
from tests.kit.options import make_options
from tests.kit.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt
from cloudckpt.options import MIB

DEVICE = "cuda"
TIMEOUT_S = 120

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Net(nn.Module):
    """Dropout asks for the generator of the GPU, BatchNorm for buffers that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(256, 8, dtype=torch.bfloat16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.layers(inputs).bfloat16())
        return output


def make_training(*, seed: int = 0, **settings: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net().to(DEVICE)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, **settings)


def train(net: Net, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(32, 64, device=DEVICE)
        loss = net(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal(found: Any, wanted: Any) -> None:
    """Bit by bit."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(found[key], value)
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found.cpu(), wanted.cpu())
    else:
        assert found == wanted


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"capturable": True}], ids=["plain", "fused", "capturable"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(
    tmp_path: Path,
    settings: dict[str, bool],
    is_async: bool,  # noqa: FBT001  # pytest's
) -> None:
    """If this fails, a part of the state is not saved: the GPU's generator, an optimizer's step on the GPU, buffers."""
    net, optimizer = make_training(**settings)
    train(net, optimizer, 3)
    with cloudckpt.CheckpointManager(tmp_path, async_=is_async) as manager:
        manager.save(3, model=net, optimizer=optimizer)
        wanted = train(net, optimizer, 5)  # beside the save
    net, optimizer = make_training(seed=1, **settings)
    with cloudckpt.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(model=net, optimizer=optimizer)
        assert restored is not None
    assert train(net, optimizer, 5) == wanted


@pytest.mark.parametrize("overlap", [False, True])
def test_a_forward_pass_beside_the_copy_does_not_get_into_buffers(memory: Memory, overlap: bool) -> None:  # noqa: FBT001
    """If this fails, `async_overlap` saves the running statistics of a later step beside the weights of this one."""
    net, optimizer = make_training()
    ballast = {f"{n}": torch.zeros(16 * MIB, device=DEVICE) for n in range(8)}  # so that the copy takes a while
    for number in range(3):
        train(net, optimizer, 2)
        wanted = copy.deepcopy(net.state_dict())
        state = {"ballast": ballast, "model": net, "optimizer": optimizer}
        handle = cloudckpt.async_save(state, memory.uri(f"c{number}"), options=make_options(async_overlap=overlap))
        for _ in range(3):
            net(torch.randn(32, 64, device=DEVICE)).float().sum().backward()  # changes the buffers alone
        handle.staged.result(TIMEOUT_S)
        optimizer.step()
        handle.result(TIMEOUT_S)
        target = Net().to(DEVICE)
        cloudckpt.load({"model": target}, memory.uri(f"c{number}"))
        assert_equal(target.state_dict(), wanted)
    cloudckpt.close(TIMEOUT_S)


def test_a_state_of_both_devices_loads_on_either(memory: Memory) -> None:
    """If this fails, a checkpoint of a GPU cannot be inspected on a laptop, or the other way round."""
    state = {
        "gpu": torch.randn(1000, 1000, device=DEVICE),
        "cpu": torch.randn(1000, 1000),
        "pinned": torch.randn(100, 100).pin_memory() if DEVICE == "cuda" else torch.randn(100, 100),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0], device=DEVICE),
        "device": torch.device(DEVICE, 0),
        "strided": torch.randn(64, 64, device=DEVICE)[::2, 1::3],
    }
    cloudckpt.save(dict(state), memory.uri())
    for device in ("cpu", DEVICE):
        target = {
            name: torch.zeros(value.shape, dtype=value.dtype, device=device) if torch.is_tensor(value) else None
            for name, value in state.items()
        }
        cloudckpt.load(target, memory.uri())
        assert target["device"] == state["device"]
        for name, value in state.items():
            if torch.is_tensor(value):
                found = target[name]
                assert torch.is_tensor(found)
                assert found.device.type == device
                assert torch.equal(found.cpu().view(torch.int32), value.cpu().contiguous().view(torch.int32)), name


def test_loads_on_a_gpu_cast_and_fill_views(memory: Memory) -> None:
    """If this fails, a load into another dtype or into a view of a GPU's tensor leaves other values there."""
    source = torch.randn(300, 200, device=DEVICE)
    cloudckpt.save({"w": source}, memory.uri())
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        target = {"w": torch.zeros(300, 200, dtype=dtype, device=DEVICE)}
        cloudckpt.load(target, memory.uri())
        assert torch.equal(target["w"], source.to(dtype))
    whole = torch.zeros(200, 600, device=DEVICE)
    cloudckpt.load({"w": whole.t()[::2]}, memory.uri())
    assert torch.equal(whole.t()[::2], source)
    assert not whole.t()[1::2].any()


def test_a_load_is_seen_by_the_streams_that_go_on(memory: Memory) -> None:
    """If this fails, a kernel that follows a load reads a tensor before its bytes are on the GPU."""
    source = {f"{n}": torch.full((4 * MIB,), float(n + 1), device=DEVICE) for n in range(8)}
    cloudckpt.save(dict(source), memory.uri())
    for is_side in (False, True):
        target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        for tensor in target.values():  # queued before the load: they must not overwrite what it brings
            for _ in range(20):
                tensor.add_(1).sub_(1)
        with torch.cuda.stream(torch.cuda.Stream() if is_side else None):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            cloudckpt.load(target, memory.uri())
            sums = {name: tensor.double().mean() for name, tensor in target.items()}
        assert {name: value.item() for name, value in sums.items()} == {f"{n}": n + 1.0 for n in range(8)}


def test_damage_is_found(tmp_path: Path) -> None:
    """If this fails, a byte that is flipped in the store reaches the GPU as a weight."""
    cloudckpt.save({"w": torch.randn(MIB, device=DEVICE)}, tmp_path / "checkpoint")
    data = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data.chmod(0o600)
    with data.open("r+b") as file:
        file.seek(MIB)
        byte = file.read(1)
        file.seek(MIB)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(cloudckpt.CorruptCheckpointError, match="w"):
        cloudckpt.load({"w": torch.zeros(MIB, device=DEVICE)}, tmp_path / "checkpoint")


def test_saves_from_several_threads_and_streams(memory: Memory) -> None:
    """If this fails, saves that share pinned buffers mix their bytes."""
    states = [
        {f"t{n}": torch.full((MIB + n,), number * 10.0 + n, device=DEVICE) for n in range(6)} for number in range(4)
    ]
    problems: list[BaseException] = []

    def save(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(3):
                    cloudckpt.save(dict(states[number]), memory.uri(f"c{number}-{turn}"), no_dist=True)
        except BaseException as error:  # noqa: BLE001  # shown by the test
            problems.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not problems
    for number, state in enumerate(states):
        for turn in range(3):
            target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            cloudckpt.load(target, memory.uri(f"c{number}-{turn}"), no_dist=True)
            assert_equal(target, state)


def test_torchs_own_calls_under_enable(tmp_path: Path) -> None:
    """If this fails, `enable()` serves CPU tensors alone."""
    net, optimizer = make_training()
    train(net, optimizer, 2)
    state = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    wanted = copy.deepcopy(state)
    cloudckpt.enable()
    try:
        uri = f"file://{tmp_path}/sync"
        dcp.save(state, checkpoint_id=uri)
        response = dcp.async_save(state, checkpoint_id=f"file://{tmp_path}/async")
        train(net, optimizer, 1)
        response.result(TIMEOUT_S)  # type: ignore[union-attr]  # no future of both was asked for
        for name in ("sync", "async"):
            other, its_optimizer = make_training(seed=1)
            train(other, its_optimizer, 1)
            target = {"model": other.state_dict(), "optim": its_optimizer.state_dict()}
            dcp.load(target, checkpoint_id=f"file://{tmp_path}/{name}")
            assert_equal(target, wanted)
    finally:
        cloudckpt.disable()


def _save_and_load_fsdp2(uri: str, backend: str) -> str:
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=None, rank=0, world_size=1, store=dist.HashStore())
    torch.cuda.set_device(0)
    mesh = init_device_mesh(DEVICE, (1,))

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(128, 256, device=DEVICE), nn.ReLU(), nn.Linear(256, 8, device=DEVICE))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 128, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = make(0)
    wanted = [copy.deepcopy(part) for part in get_state_dict(model, optimizer)]
    with cloudckpt.CheckpointManager(uri, async_=backend != "nccl") as manager:
        manager.save(1, model=model, optimizer=optimizer)
    model, optimizer = make(1)
    with cloudckpt.CheckpointManager(uri) as manager:
        assert manager.restore(model=model, optimizer=optimizer)
    for found, part in zip(get_state_dict(model, optimizer), wanted, strict=True):
        for name, value in part.items():
            other = found[name]
            if isinstance(value, DTensor):
                assert torch.equal(other.to_local(), value.to_local()), name
    set_state_dict(model, optimizer, model_state_dict=wanted[0], optim_state_dict=wanted[1])
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return "done"


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_fsdp2_under_the_backends_that_jobs_use(tmp_path: Path, backend: str) -> None:
    """If this fails, a job whose only process group is NCCL's cannot save, or loads other shards."""
    assert run_ranks(_save_and_load_fsdp2, str(tmp_path), backend, world_size=1) == ["done"]


def _save_sharded(uri: str, num_rows: int) -> str:
    state = _sharded(num_rows)
    for value in state.values():
        local = value.to_local()
        start = dist.get_rank() * (num_rows // dist.get_world_size()) if value.placements[0].is_shard() else 0
        rows = torch.arange(start, start + local.shape[0], device=DEVICE, dtype=local.dtype)
        local.copy_(rows[:, None].expand_as(local))
    cloudckpt.save(dict(state), uri)
    handle = cloudckpt.async_save(dict(state), uri + "-async")
    handle.staged.result(TIMEOUT_S)
    for value in state.values():
        value.to_local().zero_()
    handle.result(TIMEOUT_S)
    return "saved"


def _load_sharded(uri: str, num_rows: int) -> str:
    for name in (uri, uri + "-async"):
        state = _sharded(num_rows)
        cloudckpt.load(dict(state), name)
        for value in state.values():
            local = value.to_local()
            start = dist.get_rank() * (num_rows // dist.get_world_size()) if value.placements[0].is_shard() else 0
            rows = torch.arange(start, start + local.shape[0], device=DEVICE, dtype=local.dtype)
            assert torch.equal(local, rows[:, None].expand_as(local))
    return "loaded"


def _sharded(num_rows: int) -> dict[str, DTensor]:
    if DEVICE == "cuda":
        torch.cuda.set_device(0)  # else each rank takes the GPU of its number, and this machine has one
    mesh = DeviceMesh(DEVICE, range(dist.get_world_size()))
    rows = num_rows // dist.get_world_size()
    return {
        "shard": DTensor.from_local(torch.zeros(rows, 1024, device=DEVICE), mesh, [Shard(0)], run_check=False),
        "copy": DTensor.from_local(torch.zeros(num_rows, 64, device=DEVICE), mesh, [Replicate()], run_check=False),
    }


def test_shards_of_gpus_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    """If this fails, shards of GPUs land elsewhere when a job resumes on more or fewer of them."""
    uri = f"{tmp_path}/checkpoint"
    assert run_ranks(_save_sharded, uri, 1200, world_size=4) == ["saved"] * 4
    for world_size in (1, 2, 3):
        assert run_ranks(_load_sharded, uri, 1200, world_size=world_size) == ["loaded"] * world_size
