"""Loads into tensors of another dtype, on each way that bytes take to a tensor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import cloudckpt
from cloudckpt.errors import StateDictMismatchError

LOST: dict[str, tuple[torch.Tensor, torch.dtype]] = {
    "spectrum": (torch.tensor([1 + 2j]), torch.float32),
    "scale": (torch.tensor([0.0, 2.7]), torch.int64),
    "not_a_number": (torch.tensor([float("nan")]), torch.int32),
    "endless": (torch.tensor([float("inf")]), torch.int32),
    "byte": (torch.tensor([44, 300]), torch.int8),
    "negative": (torch.tensor([-1]), torch.uint8),
    "step": (torch.tensor(2**24 + 1), torch.float32),
    "mask": (torch.tensor([0, 2]), torch.bool),
    "large": (torch.tensor([1e30]), torch.float16),
}
KEPT: dict[str, tuple[torch.Tensor, torch.dtype]] = {
    "spectrum": (torch.tensor([1 + 0j]), torch.float32),
    "scale": (torch.tensor([0.0, -2.0]), torch.int64),
    "byte": (torch.tensor([44, -128]), torch.int8),
    "step": (torch.tensor(2**30), torch.float32),
    "mask": (torch.tensor([0.0, 1.0]), torch.bool),
    "wide": (torch.tensor([1.5, float("inf")], dtype=torch.bfloat16), torch.float64),
}


@pytest.fixture(params=["plain", "transformed", "strided", "parts", "torch"])
def way(request: pytest.FixtureRequest) -> str:
    """A way from stored bytes to a tensor."""
    return str(request.param)


def save_and_load(way: str, saved: torch.Tensor, dtype: torch.dtype, uri: str, **options: Any) -> None:
    """Save a tensor that holds `saved`, and load it as `dtype`."""
    whole = saved.reshape(1, -1).repeat(3, 4)
    taken = torch.zeros(whole.shape, dtype=dtype)
    extensions = [cloudckpt.Zstandard()] if way == "transformed" else []
    if way == "torch":
        dcp.save({"w": whole}, checkpoint_id=uri, no_dist=True)
    else:
        made = cloudckpt.Options(extensions=extensions)
        cloudckpt.save({"w": whole}, uri, no_dist=True, options=made)
    if way == "strided":
        taken = torch.zeros(whole.shape[1], 6, dtype=dtype)[:, ::2].T
    chosen = cloudckpt.Options(**options, advanced=cloudckpt.AdvancedOptions(request_bytes=2**20, max_gap_bytes=0))
    if way == "parts":  # a rank's part, which is planned as a box of the stored chunk
        from torch.distributed.checkpoint.planner import LoadPlan, ReadItem  # noqa: PLC0415

        class Part(dcp.DefaultLoadPlanner):
            def create_local_plan(self) -> LoadPlan:
                (item,) = super().create_local_plan().items
                offsets, lengths = torch.Size((0, 1)), torch.Size((3, whole.shape[1] - 1))
                made = {**vars(item), "dest_offsets": offsets, "storage_offsets": offsets, "lengths": lengths}
                return LoadPlan([ReadItem(**made)])

        cloudckpt.load({"w": taken}, uri, no_dist=True, options=chosen, planner=Part())
        taken[:, 0] = whole.real[:, 0].to(dtype)
    else:
        cloudckpt.load({"w": taken}, uri, no_dist=True, options=chosen, allow_pickle=way == "torch")
    real = whole.real if whole.is_complex() and not dtype.is_complex else whole
    assert torch.equal(taken, real.to(dtype))


@pytest.mark.parametrize("name", LOST)
def test_a_value_that_does_not_fit_is_refused_by_name(name: str, way: str, tmp_path: Path) -> None:
    """If this fails, a load changes a value without a word: a phase, a fraction, the number of a step."""
    saved, dtype = LOST[name]
    with pytest.raises(StateDictMismatchError, match=r"'w' of .*/a was saved as .*allow_lossy_casts=True"):
        save_and_load(way, saved, dtype, str(tmp_path / "a"))


@pytest.mark.parametrize("name", KEPT)
def test_a_value_that_fits_is_loaded(name: str, way: str, tmp_path: Path) -> None:
    """If this fails, a checkpoint does not load although no value of it would change."""
    save_and_load(way, *KEPT[name], str(tmp_path / "a"))


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_an_option_casts_as_torch_does(way: str, tmp_path: Path) -> None:
    """If this fails, nobody can drop imaginary parts on purpose."""
    save_and_load(way, *LOST["spectrum"], str(tmp_path / "a"), allow_lossy_casts=True)


@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_a_load_into_another_dtype_is_logged_once(
    writer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a run goes on with rounded weights and its log says nothing, or says it for each tensor."""
    caplog.set_level(logging.INFO, "cloudckpt")
    saved: dict[str, Any] = {f"w{number}": torch.ones(3) for number in range(9)} | {"n": torch.tensor([3])}
    if writer == "torch":
        dcp.save(saved, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    else:
        cloudckpt.save(saved, str(tmp_path / "a"), no_dist=True)
    for dtype, number, level in (
        (torch.float32, torch.int64, None),
        (torch.bfloat16, torch.int64, logging.WARNING),
        (torch.float64, torch.int8, logging.INFO),
        (torch.int16, torch.float32, logging.INFO),
    ):
        caplog.clear()
        taken = {name: torch.zeros(3, dtype=dtype) for name in saved} | {"n": torch.zeros(1, dtype=number)}
        cloudckpt.load(taken, str(tmp_path / "a"), no_dist=True, allow_pickle=writer == "torch")
        records = [record for record in caplog.records if "are to be loaded in another dtype than" in record.message]
        assert [record.levelno for record in records] == ([] if level is None else [level])
        for record in records:
            assert f"float32 → {dtype} (9 of them, such as 'w0')".replace("torch.", "") in record.message
            shown = f"int64 → {number} (1 of them, such as 'n')".replace("torch.", "")
            assert (shown in record.message) == (number is not torch.int64)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_moments_of_another_dtype_than_the_model_are_logged(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, the step after a load of float32 state beside a bfloat16 model fails, and nobody said why."""
    net = nn.Linear(2, 2)
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(net.parameters(), **settings)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    cloudckpt.save(tmp_path / "a", model=net, optimizer=optimizer, no_dist=True)
    for dtype in (torch.float32, torch.bfloat16):
        caplog.clear()
        net = nn.Linear(2, 2).to(dtype)
        other = kind(net.parameters(), **settings)
        cloudckpt.load(tmp_path / "a", model=net, optimizer=other, no_dist=True)
        messages = [
            record.message for record in caplog.records if "of the optimizer's state keep the dtype" in record.message
        ]
        assert len(messages) == (dtype is torch.bfloat16)
        for message in messages:
            name = "momentum_buffer" if settings else "exp_avg"
            assert f"'optimizer.state.weight.{name}' (torch.float32, and torch.bfloat16)" in message
            assert "call optimizer.load_state_dict(optimizer.state_dict())" in message
            other.load_state_dict(other.state_dict())  # as the message advises
        net(torch.ones(2, dtype=dtype)).sum().backward()
        other.step()


def test_a_model_and_its_optimizer_are_checked(tmp_path: Path) -> None:
    """If this fails, live objects take values that they cannot hold, or refuse state that they keep as it was saved."""
    net = nn.Linear(2, 2)
    net.register_buffer("counter", torch.tensor(1.5))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    cloudckpt.save(tmp_path / "a", model=net, optimizer=optimizer, no_dist=True)
    fresh = nn.Linear(2, 2).to(torch.bfloat16)
    fresh.register_buffer("counter", torch.tensor(0.0))
    other = torch.optim.Adam(fresh.parameters())
    cloudckpt.load(tmp_path / "a", model=fresh, optimizer=other, no_dist=True)
    assert other.state[fresh.weight]["exp_avg"].dtype is torch.float32
    fresh.counter = torch.tensor(0)
    with pytest.raises(StateDictMismatchError, match=r"'model\.counter'.*1\.5"):
        cloudckpt.load(tmp_path / "a", model=fresh, optimizer=other, no_dist=True)
