"""Under ``set_default_device`` of the user, cloudckpt still makes all of its own tensors on the CPU."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cloudckpt

WAIT_S = 60


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


def test_saves_and_loads_are_of_host_memory() -> None:
    """If this fails, a save or a load fails for whoever has set a GPU as the default device, or copies by way of it."""
    uri = f"memory://{uuid.uuid4()}"
    for fill, extensions in ((1, ()), (2, (cloudckpt.Zstandard(),)), (3, ()), (4, ())):
        options, target = cloudckpt.Options(extensions=extensions), f"{uri}/{fill}"
        if fill > 2:  # the second one in memory of the first
            cloudckpt.async_save(made(fill), target, options=options).result(WAIT_S)
        else:
            cloudckpt.save(made(fill), target, options=options)
        loaded, expected = made(0), made(fill)
        for shared in ("tied", "part"):  # in the target they would be loaded into one memory
            del loaded[shared], expected[shared]
        cloudckpt.load(loaded, target, options=options)
        for name, value in expected.items():
            got = loaded[name]["in"][0] if name == "nested" else loaded[name]
            assert got.device.type == "cpu"
            assert torch.equal(got, value["in"][0] if name == "nested" else value), name
    found = cloudckpt.compare(f"{uri}/1", f"{uri}/2")
    assert {"small", "large", "columns"} <= {each.name for each in found.differences}
