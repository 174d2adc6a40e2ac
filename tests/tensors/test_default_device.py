"""Where tensors are made on a device of the user's choice, all of ours are made on the CPU (``set_default_device``)."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt.tensors.stager import PinnedStager
from cloudckpt.tensors.tensor_bytes import is_short

WAIT_S = 60
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state_of(fill: int) -> dict[str, Any]:
    """Tensors of all ways in which they are copied."""
    flat = torch.arange(200_000, dtype=torch.float32) + fill
    return {
        "small": torch.full((3,), fill),
        "large": flat,
        "tied": flat,
        "part": flat[100:150],
        "columns": flat.view(400, 500).t(),
        "thin": (flat * 2)[::17],
        "conj": flat.to(torch.complex64).conj(),
        "bits": flat.to(torch.bfloat16),
        "none": torch.empty(0, 3),
        "nested": {"in": [torch.full((5,), fill)], "step": fill},
    }


@pytest.fixture(autouse=True)
def _elsewhere() -> Iterator[None]:
    """On a device that has no memory: what is made there by mistake can hold nothing."""
    with torch.device("meta"):
        yield
    with contextlib.suppress(cloudckpt.CloudckptError):
        cloudckpt.close(WAIT_S)


def made(fill: int) -> dict[str, Any]:
    """The same on the CPU."""
    with torch.device("cpu"):
        return state_of(fill)


def assert_like(got: Any, expected: Any) -> None:
    """All values, on the CPU."""
    for name, value in expected.items():
        if isinstance(value, dict):
            assert torch.equal(got[name]["in"][0], value["in"][0])
            assert got[name]["step"] == value["step"]
        else:
            assert got[name].device.type == "cpu"
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_snapshots_are_in_host_memory(*, shared: bool) -> None:
    """If this fails, background saves fail for whoever has set a GPU as the default device."""
    state = made(1)
    freed = torch.ones(10, device="cpu")
    freed.untyped_storage().resize_(0)
    with closing(PinnedStager(shared=shared)) as stager:
        for _ in range(2):
            staging = stager.begin(state | {"freed": freed})
            staging.completed.result(WAIT_S)
            assert_like(staging.state_dict, state)
            assert is_short(staging.state_dict["freed"])
            staged: Any = stager.stage(state)
            assert_like(staged, state)


@pytest.mark.parametrize("in_background", [False, True], ids=["waited-for", "background"])
@pytest.mark.parametrize("extensions", [(), (cloudckpt.Zstandard(),)], ids=["plain", "compressed"])
def test_saves_and_loads_are_of_host_memory(extensions: tuple[Any, ...], *, in_background: bool) -> None:
    """If this fails, a save or a load fails for whoever has set a GPU as the default device, or copies by way of it."""
    uri = f"memory://{uuid.uuid4()}"
    options = cloudckpt.Options(extensions=extensions)
    for fill in (1, 2):
        target = f"{uri}/{fill}"
        if in_background:
            cloudckpt.async_save(made(fill), target, options=options).result(WAIT_S)
        else:
            cloudckpt.save(made(fill), target, options=options)
        loaded, expected = made(0), made(fill)
        for shared in ("tied", "part"):  # in the target they would be loaded into one memory
            del loaded[shared], expected[shared]
        cloudckpt.load(loaded, target, options=options)
        assert_like(loaded, expected)
    found = cloudckpt.compare(f"{uri}/1", f"{uri}/2")
    assert {"small", "large", "columns"} <= {each.name for each in found.differences}
