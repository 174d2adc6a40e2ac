"""Each framework with its real package: training that is resumed goes on as training that was never interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cloudckpt
from cloudckpt.integrations.lightning import CloudModelParallelStrategy
from cloudckpt.integrations.torchtitan import CloudCheckpointManager

Launch = Callable[..., Any]
on_a_path = pytest.mark.parametrize("root", ["path"], indirect=True)


def test_lightning_on_ddp(root: str, launch: Launch) -> None:
    """`ModelCheckpoint` with a URI would not save, keep the best, overwrite the last, or resume to the same losses."""
    found = launch("lightning_ddp", root)
    assert found["part"] == found["whole"][: len(found["part"])]
    assert found["resumed"] == found["whole"][len(found["part"]) :]
    assert len(found["names"]) == 3, found["names"]  # the two best, and the last
    assert "last.ckpt" in found["names"]
    assert "state_dict.model.first.weight" in found["tensors"]
    assert {"callbacks", "loops", "lr_schedulers", "optimizer_states", "state_dict"} <= set(found["keys"])


def test_lightning_on_shards(root: str, launch: Launch) -> None:
    """FSDP2's shards under Lightning would not be saved to a URI, or not go on from there on two ranks."""
    found = launch("lightning_sharded", root)
    assert found["part"] + found["resumed"] == found["whole"]


@on_a_path
def test_lightning_on_fewer_ranks(root: str, launch: Launch) -> None:
    """What two ranks saved under Lightning would not go on on one."""
    whole = launch("lightning_sharded", root)["whole"]
    resumed = launch("lightning_sharded", root, num_ranks=1)["resumed"]
    assert resumed == pytest.approx(whole[len(whole) - len(resumed) :], rel=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accelerate(kind: str, root: str, launch: Launch) -> None:
    """Something of what an accelerator prepared would be lost: weights, optimizer, scheduler, generators, objects."""
    found = launch("accelerate_state", root, kind)
    assert found["first"] == 3
    losses, lr = found["whole"][:6], found["whole"][6]
    assert found["part"][:3] == losses[:3]
    assert found["resumed"] == [*losses[3:], lr]
    if not root.startswith(("s3:", "gs:")):  # and on one rank, where the generators are left alone
        alone = launch("accelerate_state", root, kind, num_ranks=1)
        assert alone["first"] == 6
        assert len(alone["resumed"]) == 3


def test_transformers_trainer(root: str, launch: Launch) -> None:
    """A Trainer that resumes in the middle of an epoch would see other batches, dropout, learning rates or weights."""
    found = launch("trainer", root)
    whole, resumed = found["whole"], found["resumed"]
    assert found["steps"] == [2, 4, 6]
    assert resumed["losses"] == whole["losses"][6:]
    assert resumed["history"] == whole["history"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["num_steps"] == whole["num_steps"] == 12
    assert found["kept"] == [8, 10, 12]
    assert found["left"] == []  # nothing in output_dir


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_torchtitan(mode: str, root: str, launch: Launch, request: pytest.FixtureRequest) -> None:
    """torchtitan with a URI as its folder would begin anew instead of going on, or remove what is not superseded."""
    found = launch("titan", root, mode)
    assert not found["part"]["loaded"]
    assert found["between"] == [2, 4]
    assert found["resumed"]["loaded"]
    assert found["resumed"]["first"] == 4
    assert found["part"]["losses"][:4] + found["resumed"]["losses"] == found["whole"]["losses"]
    assert found["kept"] == [8, 9]
    assert "there are the steps 8, 9" in found["missing"]
    assert found["initial"]["loaded"]
    if mode == "disabled":
        alone: dict[str, Any] = launch("titan", root, mode, num_ranks=1)
        assert alone["resumed"]["first"] == 9
        assert alone["kept"] == [10, 11]


@on_a_path
def test_ray_train(root: str, launch: Launch, tmp_path: Any) -> None:
    """A checkpoint that Ray Train is told of would not be the one that is loaded after a failure."""
    found = launch("ray_train", root, str(tmp_path / "ray"), num_ranks=1, timeout_s=400.0)
    assert found["uri"] == f"{root}/step-4"
    assert found["begun_at"] == [1, 3]  # the worker failed after step 2
    assert cloudckpt.verify(found["uri"]).num_tensors > 0


def test_refusals() -> None:
    """What cannot be kept would be found out in training, not before."""
    with pytest.raises(cloudckpt.InvalidOptionError, match="leave out save_distributed_checkpoint"):
        CloudModelParallelStrategy(save_distributed_checkpoint=False)
    assert CloudCheckpointManager.Config().overwrite is False
