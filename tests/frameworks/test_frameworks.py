"""Each framework with its real package: training that is resumed goes on as training that was never interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_save

import cloudckpt
from cloudckpt.integrations.lightning import CloudFSDPStrategy, CloudModelParallelStrategy
from cloudckpt.integrations.torchtitan import CloudCheckpointManager
from cloudckpt.testing.servers import clean_environment

if TYPE_CHECKING:
    from tests.frameworks.conftest import Jobs

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_lightning_on_ddp(every_place: str, jobs: Jobs) -> None:
    """`ModelCheckpoint` with a URI would not save, keep the best, overwrite the last, or resume to the same losses; a
    fresh start would overwrite; or the module could not be loaded alone.
    """
    found = jobs.at(every_place, "lightning_ddp")
    assert found["part"] == found["whole"][: len(found["part"])]
    assert found["resumed"] == found["whole"][len(found["part"]) :]
    assert len(found["names"]) == 3, found["names"]  # the two best, and the last
    assert "last.ckpt" in found["names"]
    assert "state_dict.model.first.weight" in found["tensors"]
    assert found["is_module"]
    assert found["anew"] == ["epoch=0-v1.ckpt", "last-v1.ckpt"]
    assert found["are_untouched"]
    assert {"callbacks", "loops", "lr_schedulers", "optimizer_states", "state_dict"} <= set(found["keys"])


def test_lightning_resumes_within_an_epoch(place: str, jobs: Jobs) -> None:
    """A run with two callbacks would resume from `last.ckpt` with other batches on a rank, or in other data; or nobody
    would hear that it may without the states of its loaders.
    """
    found = jobs.at(place, "lightning_ddp")["within"]
    for of_rank in found["ranks"]:
        assert of_rank["resumed"] == of_rank["whole"][6:]
        assert len(of_rank["resumed"]) == 6
        assert of_rank["order"][0] == of_rank["order"][1]
        other_length, unsaved = of_rank["refused"]
        assert "samples=64, and this job has samples=80" in other_length
        assert "the order of stateful data loader 0 is not saved by its sampler (DistributedSamplerWrapper)" in unsaved
    assert found["ranks"][0]["whole"] != found["ranks"][1]["whole"]
    assert sorted(found["names"]["steps"]) == ["last.ckpt", "step=12.ckpt", "step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]
    assert found["names"]["best"]
    num_warned = [sum("LoaderStates()" in text for text in texts) for texts in found["warned"]]
    assert num_warned == [0, 1], found["warned"]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_lightning_on_shards(kind: str, every_place: str, jobs: Jobs) -> None:
    """FSDP's shards under Lightning would not be saved to a URI, or not go on from there on two ranks; a save before
    the first step would change the training; or `save_top_k=1` would remove the checkpoint that the run resumed from.
    """
    found = jobs.at(every_place, "lightning_sharded")[kind]
    assert found["part"] + found["resumed"] == found["whole"]
    assert found["verified"] > 0
    assert found["is_module"]
    assert found["names"] == [["epoch=0.ckpt", "epoch=1.ckpt"], ["epoch=3.ckpt"]]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_lightnings_next_release_on_shards(kind: str, every_place: str, jobs: Jobs) -> None:
    """Under `cloudckpt.enable()`, what Lightning after 2.6.6 saves to a URI could not be resumed, or would not be ours;
    or `enable` would break its checkpoints on a path.
    """
    found = jobs.at(every_place, "lightning_sharded")[f"{kind}, next"]
    assert found["part"] + found["resumed"] == found["whole"]
    assert found["names"] == ([] if every_place == "path" else ["epoch=0.ckpt", "epoch=1.ckpt"])


def test_lightning_on_fewer_ranks(one_place: str, jobs: Jobs) -> None:
    """If this fails, training under Lightning that two ranks saved does not resume on one rank."""
    whole = jobs.at(one_place, "lightning_sharded")["fsdp2"]["whole"]
    resumed = jobs.at(one_place, "lightning_sharded", num_ranks=1)["fsdp2"]["resumed"]
    assert resumed == pytest.approx(whole[len(whole) - len(resumed) :], rel=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_accelerate(kind: str, place: str, jobs: Jobs) -> None:
    """Something of what an accelerator prepared would be lost: weights, optimizer, scheduler, generators, objects."""
    found = jobs.at(place, "accelerate_state")[kind]
    assert found["first"] == 3
    losses, lr = found["whole"][:6], found["whole"][6]
    assert found["part"][:3] == losses[:3]
    assert found["resumed"] == [*losses[3:], lr]


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_accelerate_on_fewer_ranks(kind: str, one_place: str, jobs: Jobs) -> None:
    """If this fails, one rank cannot load the state of an accelerator of two ranks, or changes the generators."""
    jobs.at(one_place, "accelerate_state")
    alone = jobs.at(one_place, "accelerate_state", num_ranks=1)[kind]
    assert alone["first"] == 6
    assert len(alone["resumed"]) == 3


def test_accelerate_with_two_models_and_a_stateful_loader(one_place: str, jobs: Jobs) -> None:
    """Two models with an optimizer each, or the position in the data of each rank, would not come back, within an epoch
    or at its last batch; or one rank would take the position that two ranks had, or two that of dispatched batches, and
    repeat or skip samples without a word.
    """
    found = jobs.at(one_place, "accelerate_state")["pair"]
    assert len(found["whole"]) == 16
    assert found["3"] == found["8"] == found["whole"]
    assert "data loader 0 is stateful and dispatches" in found["dispatched"]
    refused = jobs.at(one_place, "accelerate_state", num_ranks=1)["pair"]
    assert "was saved with 2 ranks, and this job has 1" in refused


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_transformers_trainer(kind: str, place: str, jobs: Jobs) -> None:
    """A Trainer that resumes in the middle of an epoch would see other batches, dropout, learning rates or weights."""
    results = jobs.at(place, "trainer")
    found = results[kind]
    whole, resumed = found["whole"], found["resumed"]
    assert {"ddp": "DistributedDataParallel", "fsdp1": "FullyShardedDataParallel", "fsdp2": "FSDPModel"}[kind] == (
        resumed["model"]
    )
    assert found["steps"] == [2, 4, 6]
    assert resumed["losses"] == whole["losses"][6:]
    assert resumed["history"] == whole["history"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["num_steps"] == whole["num_steps"] == 12
    assert found["kept"] == [8, 10, 12]
    assert results["left"] == []  # nothing in output_dir


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_transformers_trainer_keeps_the_best(kind: str, one_place: str, jobs: Jobs) -> None:
    """The best model would be removed by `save_total_limit`, forgotten by a resume, or not be the one in the end; or a
    rank would train with more data than the run that saved had, and skip samples that it has not seen.
    """
    found = jobs.at(one_place, "trainer")["best"][kind]
    assert "was saved with samples=64, and this job has samples=72" in found["refused"]
    assert found["kept"] == [4, 8]
    assert found["scores"] == [0.9, 0.9]
    assert found["part"] == found["resumed"] == found["saved"]
    assert found["saved"] != found["last"]
    assert found["uri"] == f"{jobs.root_of(one_place, 'trainer')}/{kind}-best/step-4"


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_transformers_trainer_on_fewer_ranks(kind: str, one_place: str, jobs: Jobs) -> None:
    """If this fails, one rank cannot resume what two ranks of a Trainer saved, or resumes it with other samples."""
    whole = jobs.at(one_place, "trainer")[kind]["whole"]
    alone = jobs.at(one_place, "trainer", num_ranks=1)[kind]
    assert "with samples_per_step=16, and this job has samples_per_step=8" in alone["refused"]
    assert alone["history"][:12] == whole["history"]
    assert alone["num_steps"] == 16


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_torchtitan(mode: str, place: str, jobs: Jobs) -> None:
    """torchtitan with a URI as its folder would begin anew instead of going on, remove what is not superseded, or find
    out at its first save that later steps are there.
    """
    found = jobs.at(place, "titan")[mode]
    assert not found["part"]["loaded"]
    assert found["between"] == [2, 4]
    assert found["resumed"]["loaded"]
    assert found["resumed"]["first"] == 4
    assert found["part"]["losses"][:4] + found["resumed"]["losses"] == found["whole"]["losses"]
    assert found["kept"] == [8, 9]
    assert "committed there: steps 8, 9" in found["missing"]
    assert found["initial"]["loaded"]
    root = f"{jobs.root_of(place, 'titan')}/{mode}"
    assert found["earlier"].startswith(
        f"training continues from step 8, but {root} already has step 9. Continue from the"
    )
    assert (found["only"]["loaded"], found["only"]["first"]) == (True, 8)


def test_torchtitan_on_fewer_ranks(one_place: str, jobs: Jobs) -> None:
    """If this fails, one rank cannot resume what two ranks of torchtitan saved."""
    jobs.at(one_place, "titan")
    alone = jobs.at(one_place, "titan", num_ranks=1)["disabled"]
    assert alone["resumed"]["first"] == 9
    assert alone["kept"] == [10, 11]


def test_ray_train(one_bucket: str, jobs: Jobs) -> None:
    """A run under Ray Train would never get over a worker that died after a commit and before Ray was told of it."""
    found = jobs.at(one_bucket, "ray_train", num_ranks=1, is_torchrun=False)
    assert found["uri"] == f"{jobs.root_of(one_bucket, 'ray_train')}/step-4"
    assert found["steps"] == [1, 2, 3, 4], "the worker failed after the commit of step 2"
    assert found["verified"] > 0


def test_the_snippets_of_the_document_run(one_bucket: str, jobs: Jobs) -> None:
    """If this fails, a snippet of docs/frameworks.md does not work with the framework."""
    found = jobs.at(one_bucket, "document", num_ranks=1)
    exported = {name: found.pop(name) for name in list(found) if name.endswith(", exported")}
    assert set(found) == {
        "Lightning",
        "Fabric",
        "Accelerate",
        "Transformers' Trainer",
        "torchtitan",
        "torch_checkpointing",
    }
    assert "last.ckpt" in found["Lightning"]
    assert "epoch=24-step=200.ckpt" in found["Lightning"]
    assert found["Fabric"] == ["step-0", "step-1"]
    assert found["Accelerate"] == ["step-2", "step-4"]
    assert found["Transformers' Trainer"] == ["step-1", "step-2"]
    assert found["torch_checkpointing"] == ["step-100"]
    assert found["Lightning"].count("last.ckpt") == 4, "of two callbacks with a folder each, too"
    assert all(exported.values())
    assert exported["Lightning, exported"] == [f"model.{name}" for name in exported["Accelerate, exported"]], (
        "the names of the module's and of the model's state dict"
    )
    assert exported["Transformers' Trainer, exported"] == exported["Accelerate, exported"]


def test_a_uri_that_lightnings_release_breaks_is_refused() -> None:
    """Lightning 2.6.6 would save below a folder called ``s3:``, and the job would find out when it resumes."""
    cloudckpt.enable()
    try:
        with pytest.raises(cloudckpt.errors.InvalidURIError, match=r"pathlib\.Path removes a slash"):
            _distributed_checkpoint_save({"w": torch.ones(1)}, Path("s3://bucket/run"))
    finally:
        cloudckpt.disable()


def test_unsupported_settings_of_frameworks_are_refused_before_training() -> None:
    """If this fails, an unsupported setting stops a run in training, not before it."""
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match="Remove save_distributed_checkpoint"):
        CloudModelParallelStrategy(save_distributed_checkpoint=False)
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match="Remove state_dict_type"):
        CloudFSDPStrategy(state_dict_type="full")
    assert CloudCheckpointManager.Config().overwrite is False


def test_torch_checkpointing(every_place: str, jobs: Jobs) -> None:
    """If this fails, a save of torch_checkpointing's manager loads changed or not at all, a second save replaces the
    first, damage is loaded, or torchtitan, which calls the manager, finds no step to resume from, or keeps others.
    """
    titan = {"before": False, "found": [1, 2, 3, 4], "kept": ["step-3", "step-4"], "step": 4, "model": True}
    assert check_torch_checkpointing(every_place, jobs, num_ranks=2)["titan"] == [titan] * 2


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_torch_checkpointing_on_other_ranks(num_ranks: int, one_place: str, jobs: Jobs) -> None:
    """If this fails, another number of ranks cannot load what two ranks of torch_checkpointing saved."""
    jobs.at(one_place, "checkpoint_files")
    check_torch_checkpointing(one_place, jobs, num_ranks=num_ranks)


def check_torch_checkpointing(place: str, jobs: Jobs, *, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = jobs.at(place, "checkpoint_files", num_ranks=num_ranks)
    for name in ("torch/sync", "torch/async", "safetensors/sync"):
        for of_rank in found[name]:
            assert of_rank["model"], name
            assert of_rank["rank"], name
            assert "Checkpoint already exists" in of_rank["again"], name
    files = [f"{item}_{rank}.pt" for item in ("model", "optimizer", "rank") for rank in range(num_ranks)]
    root = f"{jobs.root_of(place, 'checkpoint_files')}/{num_ranks}"
    assert found["verified"] == len(files) + 1
    size = found["storage"].pop("size")
    assert size > 2**19
    assert found["storage"] == {
        "ls": sorted([*files, "metadata.pkl"]),
        "folder": ["async", "sync"],
        "kinds": [True, False, False, False],
        "glob": [f"/torch/sync/rank_{rank}.pt" for rank in range(num_ranks)],
        "staged": False,
        "url": f"{root}/torch/sync",
    }
    assert found["infos"] == [num_ranks] * 2
    assert "damaged" in found["damaged"][0]
    assert "'rank_0.pt'" in found["damaged"][0]
    assert found["damaged"][1:] == ["loaded"] * (num_ranks - 1)
    if num_ranks == 2:
        assert sorted(found["race"]) == ["lost", "won"]
    else:
        assert found["resharded"]
    return found


def test_torch_checkpointing_after_a_crash(every_place: str, jobs: Jobs) -> None:
    """If this fails, the files of a rank that was killed in a save count as a checkpoint, enter the next save, or stay
    for ever.
    """
    found = jobs.at(every_place, "checkpoint_crash", max_restarts=len(jobs.places))
    assert found["before"] == [[], False, False]
    assert found["ls"] == ["model_0.pt", "model_1.pt"]  # without the file that only the first save had
    assert found["garbage"] >= 1  # the upload of the rank that died; torchrun may end the other before it writes
    assert found["left"] == 0
    assert found["verified"] == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoint_files", ["saved and loaded; 4 files are whole"]),
        ("megatron_core", ["has loaded what it saved"] * 2),
    ],
)
def test_an_example_runs(name: str, message: list[str], tmp_path: Path) -> None:
    """The example would not run as its first lines say."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.run(
        [*torchrun, str(EXAMPLES / f"{name}.py"), f"file://{tmp_path}"],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-6000:]
    assert process.stdout.count(message[0]) == len(message)


def test_verl(place: str, jobs: Jobs) -> None:
    """verl's workers would go on with other weights, optimizer, learning rate or random numbers; or keep the wrong
    checkpoints.
    """
    found = jobs.at(place, "verl_fsdp")
    assert found["resumed"] == found["whole"]
    assert found["kept"] == [0, 1, 1]
    assert found["refused"].startswith("hf_model and save_lora_only are not saved")


def test_verl_on_fewer_ranks(one_place: str, jobs: Jobs) -> None:
    """If this fails, one worker of verl cannot load what two saved, as with verl's own manager."""
    jobs.at(one_place, "verl_fsdp")
    alone = jobs.at(one_place, "verl_fsdp", num_ranks=1)
    assert alone["lr"] == [1e-2 / 8]
    assert alone["kept"] == [0, 1, 1]


def test_olmo_core(one_place: str, jobs: Jobs) -> None:
    """With the lines of the document, OLMo-core would save through its own writer, or load other values."""
    found = jobs.at(one_place, "olmo_fsdp")
    assert found["weights"][0] == found["weights"][1]
    assert found["moments"][0] == found["moments"][1]
