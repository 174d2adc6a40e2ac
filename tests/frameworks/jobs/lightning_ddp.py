"""Lightning with DDP: whole training, and the same stopped in the middle and resumed from its last checkpoint."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from common import Noisy, data, end, places, tell
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import cloudckpt
from cloudckpt.integrations.lightning import CloudCheckpointIO, load_from_checkpoint


class Module(pl.LightningModule):
    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
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


def fit(
    root: str | None, *, num_epochs: int, resume: str | None = None, is_async: bool = False
) -> tuple[list[float], Any]:
    pl.seed_everything(1, verbose=False)
    module = Module(name="fitted")
    io = CloudCheckpointIO()
    keep = ModelCheckpoint(dirpath=root, monitor="loss", save_top_k=2, save_last=True, filename="{epoch}")
    is_kept = root is not None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=num_epochs,
        callbacks=[keep] if is_kept else [],
        enable_checkpointing=is_kept,
        plugins=[AsyncCheckpointIO(io) if is_async else io],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=8), ckpt_path=resume)
    trainer.strategy.barrier()
    return module.losses, keep


whole, _ = fit(None, num_epochs=4)
for place, root in places():
    part, _ = fit(root, num_epochs=2, is_async=True)
    resumed, keep = fit(root, num_epochs=4, resume=f"{root}/last.ckpt")
    infos = cloudckpt.list_checkpoints(root)
    shown = CloudCheckpointIO().load_checkpoint(keep.best_model_path, map_location="cpu")
    module = load_from_checkpoint(Module, keep.best_model_path)
    before = {info.name: info.committed_at for info in infos}
    fit(root, num_epochs=1)  # where there are some already
    after = {info.name: info.committed_at for info in cloudckpt.list_checkpoints(root)}
    tell(
        place,
        {
            "whole": whole,
            "part": part,
            "resumed": resumed,
            "names": sorted(info.name for info in infos),
            "verified": [cloudckpt.verify(info.uri).num_tensors for info in infos],
            "keys": sorted(shown),
            "is_module": module.hparams.name == "fitted"
            and all(torch.equal(shown["state_dict"][name], each) for name, each in module.state_dict().items()),
            "anew": sorted(after.keys() - before.keys()),
            "are_untouched": before.items() <= after.items(),
            "tensors": [each.name for each in cloudckpt.describe(keep.best_model_path).tensors],
        },
    )
end()
