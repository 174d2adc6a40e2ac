"""Lightning with FSDP: whole training, and the same stopped in the middle and resumed; on one rank, only resumed."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import torch
from common import NUM_RANKS, Noisy, data, end, places, tell
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_next import NextFSDPStrategy, NextModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import cloudckpt
from cloudckpt.integrations.lightning import (
    CloudFSDPStrategy,
    CloudModelParallelStrategy,
    LoaderStates,
    load_from_checkpoint,
)

KINDS = ("fsdp1", "fsdp2") if NUM_RANKS == 2 else ("fsdp2",)
_make = FullyShardedDataParallel.__init__


def _on_cpus(self: Any, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
    """Lightning gives no device for CPUs, and FSDP1 wants one then."""
    _make(self, *args, device_id=torch.device("cpu"), **kwargs)


FullyShardedDataParallel.__init__ = _on_cpus


class Module(pl.LightningModule):
    def __init__(self, kind: str = "fsdp2") -> None:
        super().__init__()
        self.kind = kind
        self.model = Noisy()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.kind == "fsdp2" and self.device_mesh is not None:  # there is none without a Trainer
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.model.drop.p = 0.0  # so that the number of ranks changes nothing
        loss = torch.nn.functional.mse_loss(self.model(batch), batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SavesFirst(pl.Callback):
    """Saves before the optimizer's first step."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def on_train_start(self, trainer: pl.Trainer, _: Any) -> None:
        trainer.save_checkpoint(self.uri)


def fit(
    kind: str,
    root: str | None,
    *,
    num_epochs: int,
    is_next: bool,
    resume: str | None = None,
    keeps: int = -1,
    first: str | None = None,
) -> list[float]:
    """Train, with the strategies of Lightning's main branch where `is_next`; return the losses."""
    pl.seed_everything(1, verbose=False)
    module = Module(kind)
    is_kept = root is not None
    if kind == "fsdp1":
        strategy = NextFSDPStrategy(state_dict_type="sharded") if is_next else CloudFSDPStrategy()
    else:
        make = NextModelParallelStrategy if is_next else CloudModelParallelStrategy
        strategy = make(data_parallel_size=NUM_RANKS, tensor_parallel_size=1)
    callbacks: list[Any] = [LoaderStates()]
    callbacks += [ModelCheckpoint(dirpath=root, save_top_k=keeps, filename="{epoch}")] if is_kept else []
    callbacks += [SavesFirst(first)] if first is not None else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=strategy,
        max_epochs=num_epochs,
        callbacks=callbacks,
        enable_checkpointing=is_kept,
        use_distributed_sampler=False,  # all ranks see the same batches
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    order = RandomSampler(data(), generator=torch.Generator().manual_seed(NUM_RANKS if resume is None else 7))
    trainer.fit(module, StatefulDataLoader(data(), batch_size=8, sampler=order), ckpt_path=resume)
    trainer.strategy.barrier()
    return module.losses


def run(kind: str, root: str) -> dict[str, Any]:
    part = fit(kind, root, num_epochs=2, is_next=False, first=f"{root}/first/0.ckpt") if NUM_RANKS == 2 else []
    middle = f"{root}/epoch=1.ckpt"
    resumed = fit(kind, f"{root}/resumed-{NUM_RANKS}", num_epochs=4, is_next=False, resume=middle)
    verified = cloudckpt.verify(middle).num_tensors
    alone = load_from_checkpoint(Module, middle)  # on each rank, whole
    state = {f"state_dict.{name}": torch.zeros_like(each) for name, each in alone.state_dict().items()}
    cloudckpt.load(state, middle, no_dist=True)
    is_module = all(torch.equal(state[f"state_dict.{name}"], each) for name, each in alone.state_dict().items())
    fit(kind, f"{root}/one-{NUM_RANKS}", num_epochs=4, is_next=False, resume=middle, keeps=1)
    names = [[info.name for info in cloudckpt.list_checkpoints(under)] for under in (root, f"{root}/one-{NUM_RANKS}")]
    return {"part": part, "resumed": resumed, "names": names, "verified": verified, "is_module": is_module}


def run_next(kind: str, root: str) -> dict[str, Any]:
    """Under `cloudckpt.enable()`. Lightning's own strategies change the training by a save before the first step."""
    cloudckpt.enable()
    part = fit(kind, root, num_epochs=2, is_next=True)
    resumed = fit(kind, f"{root}/resumed", num_epochs=4, is_next=True, resume=f"{root}/epoch=1.ckpt")
    cloudckpt.disable()
    return {"part": part, "resumed": resumed, "names": [info.name for info in cloudckpt.list_checkpoints(root)]}


whole = {
    (kind, is_next): fit(kind, None, num_epochs=4, is_next=is_next)
    for kind, is_next in itertools.product(KINDS, (False, True))
}
for place, root in places():
    result = {}
    for kind in KINDS:
        result[kind] = {"whole": whole[kind, False], **run(kind, f"{root}/{kind}")}
        if NUM_RANKS == 2:
            result[f"{kind}, next"] = {"whole": whole[kind, True], **run_next(kind, f"{root}/{kind}-next")}
    tell(place, result)
end()
