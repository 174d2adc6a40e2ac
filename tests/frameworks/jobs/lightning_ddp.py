"""Lightning with DDP: whole training, and the same stopped in the middle and resumed from the root."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from common import Noisy, data, tell
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import cloudckpt
from cloudckpt.integrations.lightning import CloudCheckpointIO


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Noisy()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        torch.manual_seed(1000 * self.global_step + self.global_rank)  # Lightning saves no generators
        loss = torch.nn.functional.mse_loss(self.model(batch), batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def fit(root: str, *, num_epochs: int, resume: str | None = None, is_async: bool = False) -> tuple[list[float], Any]:
    pl.seed_everything(1, verbose=False)
    module = Module()
    io = CloudCheckpointIO()
    keep = ModelCheckpoint(dirpath=root, monitor="loss", save_top_k=2, save_last=True, filename="{epoch}")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=num_epochs,
        callbacks=[keep],
        plugins=[AsyncCheckpointIO(io) if is_async else io],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=8), ckpt_path=resume)
    trainer.strategy.barrier()
    return module.losses, keep


root = sys.argv[1]
whole, _ = fit(f"{root}/whole", num_epochs=4)
part, _ = fit(f"{root}/run", num_epochs=2, is_async=True)
resumed, keep = fit(f"{root}/run", num_epochs=4, resume=f"{root}/run/last.ckpt")
names = sorted(info.name for info in cloudckpt.list_checkpoints(f"{root}/run"))
verified = [cloudckpt.verify(info.uri).num_tensors for info in cloudckpt.list_checkpoints(f"{root}/run")]
shown = CloudCheckpointIO().load_checkpoint(keep.best_model_path, map_location="cpu")
tell(
    {
        "whole": whole,
        "part": part,
        "resumed": resumed,
        "names": names,
        "verified": verified,
        "best": keep.best_model_path,
        "keys": sorted(shown),
        "tensors": [t.name for t in cloudckpt.describe(keep.best_model_path).tensors],
    }
)
