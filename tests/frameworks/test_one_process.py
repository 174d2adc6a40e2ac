"""Frameworks in one process: the changes by a save, the additions by an evaluation, and removals by a framework."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler
from transformers import Trainer, TrainingArguments

import cloudckpt
from cloudckpt.dcp.live.objects import RandomState
from cloudckpt.events import Event
from cloudckpt.integrations._nested_state import serialize
from cloudckpt.integrations.accelerate import AcceleratorState
from cloudckpt.integrations.lightning import CloudCheckpointIO, LoaderStates
from cloudckpt.integrations.transformers import CloudCheckpoints

FEATURES = 4
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    from accelerate.state import AcceleratorState as Shared  # noqa: PLC0415  # beside ours

    Shared._reset_state(reset_partial_state=True)
    yield
    gc.collect()


def samples(num: int = 32) -> torch.Tensor:
    return torch.randn(num, FEATURES, generator=torch.Generator().manual_seed(7))


def prepared(kind: str = "adamw", **settings: Any) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **settings)
    model = nn.Linear(FEATURES, FEATURES)
    return accelerator, *accelerator.prepare(model, OPTIMIZERS[kind](model.parameters()))


def step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_accelerate_save_before_the_first_step_changes_nothing(kind: str, tmp_path: Path) -> None:
    """If this fails, a job that saves at step 0 trains to other weights than one that does not save."""
    weights = []
    for is_saved in (False, True):
        accelerator, model, optimizer = prepared(kind)
        if is_saved:
            cloudckpt.save({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")
        for batch in samples().split(8):
            step(model, optimizer, batch)
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_accelerate_checkpoint_of_torchs_form_loads(tmp_path: Path) -> None:
    """If this fails, what version 0.1 saved, by torch's function for optimizers, no longer loads."""
    accelerator, model, optimizer = prepared()
    step(model, optimizer, samples(8))
    saved = AcceleratorState(accelerator).state_dict()
    saved["models"] = {"0": get_model_state_dict(model)}
    saved["optimizers"] = {"0": get_optimizer_state_dict(model, optimizer.optimizer)}
    rank = {"random": serialize(tuple(RandomState.capture())), "loaders": []}
    saved["ranks"] = [serialize(rank)]
    cloudckpt.save({"accelerator": saved}, tmp_path / "c")
    step(model, optimizer, samples(8))

    accelerator, fresh, fresh_optimizer = prepared()
    with torch.no_grad():
        fresh.weight.zero_()
    cloudckpt.load({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")
    step(fresh, fresh_optimizer, samples(8))
    assert torch.equal(fresh.weight, model.weight)


def test_accelerate_only_models_leaves_the_rest(tmp_path: Path) -> None:
    """If this fails, the models alone cannot be loaded, or the optimizer changes with them."""
    accelerator, model, optimizer = prepared()
    step(model, optimizer, samples(8))
    cloudckpt.save({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")
    accelerator, fresh, fresh_optimizer = prepared()
    cloudckpt.load({"accelerator": AcceleratorState(accelerator, only_models=True)}, tmp_path / "c")
    assert torch.equal(fresh.weight, model.weight)
    assert not fresh_optimizer.state


def test_accelerate_optimizer_of_two_models_comes_back(tmp_path: Path) -> None:
    """If this fails, one optimizer of two prepared models loses the state of the second."""

    def make() -> tuple[Accelerator, nn.Module, nn.Module, Any]:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        one, two = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        optimizer = OPTIMIZERS["adamw"]([*one.parameters(), *two.parameters()])
        return accelerator, *accelerator.prepare(one, two, optimizer)

    def train(one: nn.Module, two: nn.Module, optimizer: Any) -> None:
        step(nn.Sequential(one, two), optimizer, samples(8))

    accelerator, *parts = make()
    train(*parts)
    cloudckpt.save({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")
    train(*parts)
    accelerator, *resumed = make()
    cloudckpt.load({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")
    train(*resumed)
    assert torch.equal(resumed[0].weight, parts[0].weight)
    assert torch.equal(resumed[1].weight, parts[1].weight)


def test_accelerate_evaluations_before_a_save_are_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, loaders and models that an evaluation prepares make the resume fail, or get the training
    loader's position.
    """

    def make() -> tuple[Accelerator, nn.Module, Any, Any]:
        accelerator, model, optimizer = prepared(
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
        )
        loader = torch.utils.data.DataLoader(samples(), batch_size=4)
        return accelerator, model, optimizer, accelerator.prepare(loader)

    def evaluate(accelerator: Accelerator, model: nn.Module) -> None:
        loader = accelerator.prepare(torch.utils.data.DataLoader(samples(8), batch_size=2))
        accelerator.prepare_model(model, evaluation_mode=True)
        accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)
        list(loader)

    accelerator, model, optimizer, loader = make()
    batches = iter(loader)
    for _ in range(3):
        step(model, optimizer, next(batches))
        evaluate(accelerator, model)
    cloudckpt.save({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")
    rest = list(batches)

    accelerator, fresh, _, loader = make()
    cloudckpt.load({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")
    assert torch.equal(fresh.weight, model.weight)
    assert len(rest) == 5
    assert all(torch.equal(*pair) for pair in zip(loader, rest, strict=True))
    assert "has more models than are prepared" in caplog.text
    assert "prepared data loader" not in caplog.text

    caplog.clear()
    accelerator, fresh, *_ = prepared(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    evaluate(accelerator, fresh)
    accelerator.prepare(torch.utils.data.DataLoader(samples(), batch_size=4))
    with pytest.raises(cloudckpt.errors.StateDictMismatchError, match="was saved with 8 batches, and this job has 4"):
        cloudckpt.load({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")


@pytest.mark.parametrize("sets_epoch", [True, False])
@pytest.mark.parametrize(
    ("num_workers", "shuffle", "is_seedable"), [(0, False, False), (2, False, False), (0, True, True)]
)
def test_accelerate_stateful_loader_goes_on_with_the_batches_of_uninterrupted_training(
    *, num_workers: int, shuffle: bool, is_seedable: bool, sets_epoch: bool, tmp_path: Path
) -> None:
    """If this fails, a job resumes before other batches, shuffles with the seed of another process or in the order of
    the first epoch, or repeats an epoch that was saved at its last batch.
    """

    def make(seed: int) -> tuple[Accelerator, Any]:
        torch.manual_seed(seed)
        config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=is_seedable)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        data = torch.arange(20.0)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle, num_workers=num_workers)
        return accelerator, accelerator.prepare(loader)

    def batches(loader: Any, first: int) -> Iterator[tuple[int, list[float]]]:
        for epoch in range(first, 3):
            if sets_epoch:
                loader.set_epoch(epoch)
            for batch in loader:
                yield epoch, batch.tolist()

    accelerator, loader = make(seed=1)
    state = AcceleratorState(accelerator)
    expected, epochs = [], []
    for epoch, batch in batches(loader, 0):
        expected.append(batch)
        epochs.append(epoch)
        if len(expected) in (3, 5, 8, 10):
            cloudckpt.save({"accelerator": state}, tmp_path / str(len(expected)))
    for num_seen in (3, 5, 8, 10):
        accelerator, loader = make(seed=2)
        cloudckpt.load({"accelerator": AcceleratorState(accelerator)}, tmp_path / str(num_seen))
        rest = [batch for _, batch in batches(loader, epochs[num_seen - 1])]
        assert rest == expected[num_seen:], num_seen


@pytest.mark.parametrize("sets_epoch", [True, False])
def test_accelerate_stateful_loader_saved_after_its_loop_begins_the_next_epoch(
    *, sets_epoch: bool, tmp_path: Path
) -> None:
    """If this fails, a job that is resumed between two epochs skips one or repeats one."""

    def make() -> tuple[Accelerator, Any]:
        config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        return accelerator, accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8.0), shuffle=True))

    accelerator, loader = make()
    list(loader)
    cloudckpt.save({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")
    expected = list(loader)
    accelerator, resumed = make()
    cloudckpt.load({"accelerator": AcceleratorState(accelerator)}, tmp_path / "c")
    if sets_epoch:
        resumed.set_epoch(1)
    assert list(resumed) == expected


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("has_generator", [True, False])
def test_accelerate_resume_within_an_epoch_has_the_dropout_of_uninterrupted_training(
    *, has_generator: bool, is_stateful: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a job resumes within an epoch with other dropout, and nothing says so."""

    def train(stop_at: int | None) -> torch.Tensor:
        torch.manual_seed(1)
        config = DataLoaderConfiguration(use_stateful_dataloader=is_stateful, use_seedable_sampler=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.5))
        generator = torch.Generator() if has_generator else None
        loader = torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        state = {"accelerator": AcceleratorState(accelerator), "num_batches": 0}
        with cloudckpt.CheckpointManager(tmp_path, async_=False) as manager:
            if manager.latest() is not None:
                manager.restore(state)
            rest = loader if is_stateful else accelerator.skip_first_batches(loader, state["num_batches"])
            for num_batches, batch in enumerate(rest, state["num_batches"] + 1):
                step(model, optimizer, batch)
                state["num_batches"] = num_batches
                if stop_at is not None:
                    manager.save(num_batches, state)
                if num_batches == stop_at:
                    break
        return model[0].weight.detach().clone()

    whole = train(None)
    train(2)
    assert caplog.text.count("generator=torch.Generator()") == (not has_generator)
    assert torch.equal(train(None), whole) == has_generator


def test_accelerate_dispatched_batches_that_would_be_repeated_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, nobody hears that a resume from the last batch of an epoch repeats the epoch."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(torch.utils.data.DataLoader(samples(8), batch_size=4))
    for number, _ in enumerate(loader):
        cloudckpt.save({"accelerator": AcceleratorState(accelerator)}, tmp_path / str(number))
        assert ("data loader 0 is saved at its last batch" in caplog.text) == (number == 1)
    assert "After a resume, begin with epoch 1" in caplog.text


@pytest.mark.parametrize(("num_workers", "is_seedable"), [(0, False), (2, True)])
def test_accelerate_stateful_loader_whose_order_is_not_saved_is_refused(*, num_workers: int, is_seedable: bool) -> None:
    """If this fails, a job resumes with other batches, as it does with Accelerate's own `load_state`."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=is_seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    accelerator.prepare(torch.utils.data.DataLoader(samples(), shuffle=True, num_workers=num_workers))
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match="data loader 0 is stateful and shuffles"):
        AcceleratorState(accelerator)
    AcceleratorState(accelerator, only_models=True)  # neither saves nor loads it


class CloudTrainer(CloudCheckpoints, Trainer):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.inner(torch.nn.functional.dropout(x, training=self.training))
        return {"loss": nn.functional.mse_loss(out, x), "out": out}


def trainer_of(root: Path, output: Path, num_samples: int = 32, **settings: Any) -> CloudTrainer:
    torch.manual_seed(5)
    args = TrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        save_steps=2,
        learning_rate=1e-2,
        accelerator_config={"use_seedable_sampler": True},  # as for an exact resume without us
        label_names=["x"],
        report_to=[],
        disable_tqdm=True,
        **{"per_device_train_batch_size": 4, **settings},
    )
    data = [{"x": x} for x in samples(num_samples)]
    return CloudTrainer(Model(), args, train_dataset=data, eval_dataset=data[:8], cloud_root=str(root))


@pytest.mark.parametrize(
    "evaluates",
    [
        {"eval_strategy": "steps", "eval_steps": 1},
        {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True},
        {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
        {"eval_strategy": "steps", "eval_steps": 3, "dataloader_num_workers": 1},
    ],
    ids=["before", "best", "between", "workers"],
)
def test_trainer_that_has_evaluated_resumes(
    evaluates: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this fails, a Trainer that evaluates before or between its saves cannot resume, or ends with other weights.

    Or its user does not see that it resumes.
    """
    whole = trainer_of(tmp_path / "whole", tmp_path / "out", max_steps=10, **evaluates)
    whole.evaluate()
    whole.train()
    root = tmp_path / "root"
    part = trainer_of(root, tmp_path / "out", max_steps=10, **evaluates)
    part.evaluate()
    part.train()
    for later in (6, 8, 10):
        cloudckpt.delete(f"{root}/step-{later}")
    resumed = trainer_of(root, tmp_path / "out", max_steps=10, **evaluates)
    capsys.readouterr()
    resumed.train(resume_from_checkpoint=True)
    assert f"Resuming from {root}/step-4\n" in capsys.readouterr().out
    assert torch.equal(resumed.model.inner.weight, whole.model.inner.weight)
    losses = [
        [entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry and entry["step"] > 4]
        for one in (whole, resumed)
    ]
    assert losses[0] == losses[1]
    assert losses[0]
    resumed.evaluate()


def test_trainer_that_saves_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a Trainer with a cloud_root and without a strategy trains, and leaves nothing without a word."""
    trainer_of(tmp_path / "root", tmp_path / "out", max_steps=1, save_strategy="no").train()
    assert f'save_strategy="no": nothing is saved under {tmp_path}/root' in caplog.text


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_samples": 48}, "with samples=32, and this job has samples=48"),
        ({"per_device_train_batch_size": 2}, "samples_per_step=4, .* samples_per_step=2"),
        ({"seed": 7}, "seed=42, .* seed=7"),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, None),
        ({"num_samples": 48, "ignore_data_skip": True}, None),
    ],
)
def test_trainer_with_other_samples_is_refused_before_it_trains(
    other: dict[str, Any], named: str | None, tmp_path: Path
) -> None:
    """If this fails, a Trainer that gets more data, other ranks or another seed skips samples that it has not seen, and
    repeats others, without a word.
    """
    trainer_of(tmp_path / "root", tmp_path / "out", max_steps=4).train()
    resumed = trainer_of(tmp_path / "root", tmp_path / "out", max_steps=6, **other)
    if named is None:
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 6
        return
    with pytest.raises(cloudckpt.errors.StateDictMismatchError, match=rf"root/step-4 was saved .*{named}"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 0


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("score", -float(self.global_step))  # each is better than those before it
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def fit(
    dirpath: str,
    *,
    until: int,
    resume: str | None = None,
    is_async: bool = False,
    cloud: CloudCheckpointIO | None = None,
    **settings: Any,
) -> None:
    """Save each second step, as the callback's settings say."""
    settings = {"filename": "{step}", "monitor": None, **settings}
    keep = ModelCheckpoint(dirpath=dirpath, every_n_train_steps=2, **settings)
    cloud = cloud or CloudCheckpointIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = LightningTrainer(
            accelerator="cpu",
            devices=1,
            max_steps=until,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[keep],
            plugins=[AsyncCheckpointIO(cloud) if is_async else cloud],
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(samples(64), batch_size=2), ckpt_path=resume)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fabric_state_of_any_form_is_saved(num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a state of the user's whose names are those of Lightning's cannot be saved."""
    ranks = SimpleNamespace(is_initialized=lambda: num_ranks > 1, get_world_size=lambda: num_ranks)
    monkeypatch.setattr("cloudckpt.integrations.lightning.dist", ranks)
    cloud, uri = CloudCheckpointIO(), str(tmp_path / "c")
    for value in (3, None, {"fit_loop": {"state_dict": {"combined_loader": [3]}}}):
        cloud.save_checkpoint({"loops": value, "callbacks": {"mine": {"dirpath": 3}}, "weight": torch.ones(2)}, uri)
        assert cloud.load_checkpoint(uri)["loops"] == value


def names_under(root: str) -> list[str]:
    return sorted(info.name.removesuffix(".ckpt") for info in cloudckpt.list_checkpoints(root))


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("kind", ["path", "memory"])
def test_lightning_removes_at_a_uri_what_it_removes_on_a_path(
    kind: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, `save_top_k` removes at a URI the run that was resumed from, which stays on a path, or leaves what
    an earlier process of the same run made; or a warning takes an earlier start of the run for another run.
    """
    is_async = how == "async"
    root = str(tmp_path) if kind == "path" else f"memory://one-process/{tmp_path.name}"
    fit(f"{root}/a", until=4, save_top_k=1, is_async=is_async)
    assert names_under(f"{root}/a") == ["step=4"]
    fit(f"{root}/b", until=8, save_top_k=1, resume=f"{root}/a/step=4.ckpt", is_async=is_async)
    assert names_under(f"{root}/a") == ["step=4"]
    assert names_under(f"{root}/b") == ["step=8"]

    best = {"monitor": "score", "mode": "min", "save_top_k": 2, "is_async": is_async}
    fit(f"{root}/c", until=6, **best)
    assert names_under(f"{root}/c") == ["step=4", "step=6"]
    fit(f"{root}/c", until=8, resume=f"{root}/c/step=6.ckpt", **best)
    assert names_under(f"{root}/c") == ["step=6", "step=8"]
    fit(f"{root}/c", until=12, resume=f"{root}/c/step=8.ckpt", **best)
    assert names_under(f"{root}/c") == ["step=10", "step=12", "step=8"]  # what was resumed from stays
    if kind == "memory":
        assert f"{root}/c/step=8.ckpt stays, because this run was loaded from it" in caplog.text

    nested = {"filename": "{step}/all", "save_top_k": 2, "monitor": "score", "mode": "min", "is_async": is_async}
    fit(f"{root}/d", until=4, **nested)
    fit(f"{root}/d", until=6, resume=f"{root}/d/step=4/all.ckpt", **nested)
    made = [step for step in (2, 4, 6) if names_under(f"{root}/d/step={step}")]
    assert made == [4, 6]


def test_lightning_removes_what_still_waits_to_be_saved(tmp_path: Path) -> None:
    """If this fails, `save_top_k=1` leaves a checkpoint behind for each save that a slow store could not follow."""
    removed: list[str] = []
    are_all_removed = threading.Event()

    def wait(event: Event) -> None:
        if event.name == "save.committing":
            assert are_all_removed.wait(60)

    class CountingIO(CloudCheckpointIO):
        def remove_checkpoint(self, path: Any) -> None:
            super().remove_checkpoint(path)
            removed.append(Path(path).name)
            if len(removed) == 3:
                are_all_removed.set()

    cloudckpt.save({"w": torch.ones(1)}, tmp_path / "earlier.ckpt", no_dist=True)
    cloud = CountingIO(options=cloudckpt.Options(on_event=wait))
    fit(str(tmp_path), until=8, save_top_k=1, cloud=cloud, is_async=True)
    assert removed == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert names_under(str(tmp_path)) == ["earlier", "step=8"]
    cloud.save_checkpoint({"w": torch.ones(1)}, tmp_path / "step=6.ckpt")
    cloud.remove_checkpoint(tmp_path / "step=2.ckpt")
    cloud.save_checkpoint({"w": torch.ones(1)}, tmp_path / "step=2.ckpt")
    assert names_under(str(tmp_path)) == ["earlier", "step=2", "step=6", "step=8"]


def fit_batches(
    loader: Any, root: Path, *, resume: str | None = None, states: bool = True, **limits: int
) -> list[list[float]]:
    """Train with saves of each step and of the end of each epoch; return the batches."""
    seen: list[list[float]] = []

    class Recorder(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            seen.append(batch[:, 0].tolist())
            return super().training_step(batch, index)

    steps = ModelCheckpoint(root / "steps", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    ends = ModelCheckpoint(root / "ends", save_top_k=-1, filename="{step}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = LightningTrainer(
            accelerator="cpu",
            devices=1,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[steps, ends, *([LoaderStates()] if states else [])],
            plugins=[CloudCheckpointIO()],
            **{"max_epochs": None, "max_steps": -1, **limits},
        )
        trainer.fit(Recorder(), loader, ckpt_path=None if resume is None else str(root / resume))
    return seen


def lightning_loader(kind: str = "shuffled", *, num_workers: int = 0, num_samples: int = 20, seed: int = 1) -> Any:
    data = samples(num_samples)
    order: Any = None
    if kind == "shuffled":
        order = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    elif kind == "distributed":
        order = StatefulDistributedSampler(data, num_replicas=2, rank=0, seed=seed)
    elif kind == "torch's":  # as Lightning adds it
        order = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0, seed=seed)
    return StatefulDataLoader(data, batch_size=4 if order is None else 2, sampler=order, num_workers=num_workers)


@pytest.mark.parametrize("limits", [{"max_steps": 15}, {"max_epochs": 3}], ids=["steps", "epochs"])
@pytest.mark.parametrize(
    ("kind", "num_workers"), [("in order", 0), ("shuffled", 2), ("distributed", 0), ("distributed", 2), ("torch's", 2)]
)
def test_lightning_goes_on_with_the_batches_of_uninterrupted_training(
    kind: str, num_workers: int, limits: dict[str, int], tmp_path: Path
) -> None:
    """If this fails, training that is resumed within an epoch, at its last batch or at its end sees other batches."""
    length = len(lightning_loader(kind))
    limits = {name: value if name == "max_epochs" else 3 * length for name, value in limits.items()}
    expected = fit_batches(lightning_loader(kind, num_workers=num_workers), tmp_path, **limits)
    assert len(expected) == 3 * length
    for name, num_seen in (("steps", 2), ("steps", length), ("steps", length + 1), ("ends", length)):
        resumed = lightning_loader(kind, num_workers=num_workers, seed=2 if kind == "shuffled" else 1)
        rest = fit_batches(resumed, tmp_path, resume=f"{name}/step={num_seen}.ckpt", **limits)
        assert rest == expected[num_seen:], (name, num_seen)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_samples": 24}, "samples=20.* samples=24"),
        ({"kind": "in order"}, "sampler=RandomSampler.* sampler=SequentialSampler"),
        ({"num_workers": 1}, "workers=0.* workers=1"),
    ],
)
def test_lightning_with_other_data_within_an_epoch_is_refused(
    other: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """If this fails, a job that gets more data, or another loader, skips samples that it has not seen, and repeats
    others, without a word; or data that grow from epoch to epoch cannot be trained on.
    """
    whole = fit_batches(lightning_loader(), tmp_path, max_epochs=2)
    resume = "steps/step=3.ckpt"
    with pytest.raises(cloudckpt.errors.StateDictMismatchError, match=f"'data loader 0' of .*{resume} .*{named}"):
        fit_batches(lightning_loader(**other), tmp_path, resume=resume, max_epochs=2)
    with pytest.raises(cloudckpt.errors.StateDictMismatchError, match="samples=24"):  # Lightning runs the end again
        fit_batches(lightning_loader(num_samples=24), tmp_path, resume="ends/step=10.ckpt", max_steps=20)
    grown = fit_batches(lightning_loader(num_samples=24), tmp_path, resume="ends/step=10.ckpt", max_epochs=2)
    assert (len(whole), len(grown)) == (20, 12)


def test_lightning_without_the_states_of_its_loaders_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, nobody hears that a resume may go on with other batches; or a stream of which one would be lost,
    and a loader whose order would be lost, are trained on.
    """
    monkeypatch.setattr("cloudckpt._this_process.given_warnings", {})
    fit_batches(torch.utils.data.DataLoader(samples(4)), tmp_path / "plain", states=False, max_steps=1)
    fit_batches(lightning_loader(), tmp_path / "with", max_steps=1)
    assert "LoaderStates" not in caplog.text
    fit_batches(lightning_loader(), tmp_path / "without", states=False, max_steps=1)
    assert caplog.text.count("Give the Trainer the callback cloudckpt.integrations.lightning.LoaderStates()") == 1
    assert "StatefulDataLoader" not in caplog.text
    fit_batches(torch.utils.data.DataLoader(samples(4)), tmp_path / "stateless", max_steps=1)
    assert "a resume begins its epoch anew. Use torchdata.stateful_dataloader.StatefulDataLoader" in caplog.text
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match="data loader 0 has no length"):
        fit_batches(StatefulDataLoader(Stream()), tmp_path / "stream", max_steps=1)
    order = torch.utils.data.RandomSampler(samples())
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match=r"loader 0 is not saved by its sampler \(Random"):
        fit_batches(StatefulDataLoader(samples(), sampler=order), tmp_path / "order", max_steps=1)


class Stream(torch.utils.data.IterableDataset):
    """Samples that the workers share out."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        yield from range(0 if worker is None else worker.id, 18, 1 if worker is None else worker.num_workers)


def loader_of(kind: str, num_workers: int, seed: int) -> Any:
    data: Any = Stream() if kind == "stream" else list(range(18))
    sampler: Any = None
    if kind == "shuffled":  # as docs/manager.md advises
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    elif kind == "distributed":
        sampler = StatefulDistributedSampler(data, num_replicas=2, rank=1, seed=7)
    elif kind == "torch's":
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=1, seed=7)
    settings = {"batch_size": 4, "num_workers": num_workers, "generator": torch.Generator()}
    return StatefulDataLoader(data, sampler=sampler, **settings)


def batches_of(loader: Any, epoch: int) -> Iterator[list[int]]:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    yield from (batch.tolist() for batch in loader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "distributed", "torch's", "stream"])
def test_loader_goes_on_with_the_batches_of_uninterrupted_training(
    kind: str, num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, training that is resumed before the first batch, within an epoch or between two sees other
    batches, at once or in a later epoch.
    """
    whole = loader_of(kind, num_workers, seed=1)
    expected = [batch for epoch in range(3) for batch in batches_of(whole, epoch)]
    loader, saved = loader_of(kind, num_workers, seed=1), {}
    with cloudckpt.CheckpointManager(tmp_path) as manager:

        def save(epoch: int) -> None:
            saved[len(seen)] = epoch
            manager.save(len(saved), dataloader=loader)

        seen: list[list[int]] = []
        save(0)  # before the first batch
        for epoch in range(3):
            for batch in batches_of(loader, epoch):
                seen.append(batch)
                if len(seen) in (1, len(expected) // 3 + 2):
                    save(epoch)
            if epoch == 0:
                save(1)  # between two epochs
        assert seen == expected
        for step, (num_seen, first) in enumerate(saved.items(), start=1):
            resumed = loader_of(kind, num_workers, seed=2)
            manager.restore(dataloader=resumed, step=step)
            rest = [batch for epoch in range(first, 3) for batch in batches_of(resumed, epoch)]
            assert rest == expected[num_seen:], step
    assert "generator" not in caplog.text


@pytest.mark.parametrize("num_workers", [0, 3])
def test_loader_with_other_workers_is_refused(num_workers: int, tmp_path: Path) -> None:
    """If this fails, the first batch after a restore fails in torchdata with an assertion that names nothing."""
    cloudckpt.save(tmp_path / "c", dataloader=loader_of("stream", 2, seed=1))
    with pytest.raises(cloudckpt.errors.StateDictMismatchError, match=rf"workers=2.* workers={num_workers}"):
        cloudckpt.load(tmp_path / "c", dataloader=loader_of("stream", num_workers, seed=1))


@pytest.mark.parametrize(
    "settings",
    [{"shuffle": True}, {"sampler": torch.utils.data.RandomSampler(range(4), generator=torch.Generator())}],
    ids=["shuffle", "sampler"],
)
def test_shuffled_loader_that_does_not_save_its_order_is_named(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, nobody hears that training goes on with other batches after a resume."""
    loader = StatefulDataLoader(range(4), generator=torch.Generator(), **settings)
    with cloudckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, dataloader=loader)
    assert "does not save the generator of its sampler" in caplog.text
