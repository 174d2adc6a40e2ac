"""Lightning with FSDP2: whole training, and the same stopped in the middle and resumed; on one rank, only resumed."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from common import Noisy, data, tell
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

import cloudckpt
from cloudckpt.integrations.lightning import CloudModelParallelStrategy

NUM_RANKS = int(os.environ["WORLD_SIZE"])


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Noisy()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.model.drop.p = 0.0  # so that the number of ranks changes nothing
        loss = torch.nn.functional.mse_loss(self.model(batch), batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(root: str, *, num_epochs: int, resume: str | None = None) -> list[float]:
    pl.seed_everything(1, verbose=False)
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=CloudModelParallelStrategy(data_parallel_size=NUM_RANKS, tensor_parallel_size=1),
        max_epochs=num_epochs,
        callbacks=[ModelCheckpoint(dirpath=root, save_top_k=-1, filename="{epoch}")],
        use_distributed_sampler=False,  # all ranks see the same batches
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=8), ckpt_path=resume)
    trainer.strategy.barrier()
    return module.losses


root = sys.argv[1]
if NUM_RANKS == 2:
    whole = fit(f"{root}/whole", num_epochs=4)
    part = fit(f"{root}/run", num_epochs=2)
else:
    whole, part = [], []
middle = f"{root}/run/epoch=1.ckpt"
resumed = fit(f"{root}/run-{NUM_RANKS}", num_epochs=4, resume=middle)
tell({"whole": whole, "part": part, "resumed": resumed, "verified": cloudckpt.verify(middle).num_tensors})
