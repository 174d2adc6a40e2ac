"""Lightning with DDP: whole training, and the same stopped in the middle and resumed from its last checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from common import Noisy, data, end, places, tell
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import cloudckpt
from cloudckpt import _this_process
from cloudckpt.integrations.lightning import CloudCheckpointIO, LoaderStates, load_from_checkpoint


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


def fit_within(
    root: str, *, until: int, resume: str | None = None, num_samples: int = 64, states: bool = True, kind: str = "own"
) -> list[list[float]]:
    """Train until a step, with two callbacks that save to places of their own: the first number of each sample."""
    seen: list[list[float]] = []

    class Recorder(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            seen.append(batch[:, 0].tolist())
            return super().training_step(batch, index)

    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=until,
        callbacks=[
            ModelCheckpoint(f"{root}/steps", every_n_train_steps=3, save_top_k=-1, save_last=True, filename="{step}"),
            ModelCheckpoint(f"{root}/best", monitor="loss", filename="{epoch}"),
            *([LoaderStates()] if states else []),
        ],
        plugins=[CloudCheckpointIO()],
        use_distributed_sampler=kind != "own",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = data(num_samples)
    sampler = StatefulDistributedSampler(samples, num_replicas=2, rank=trainer.global_rank) if kind == "own" else None
    # Otherwise Lightning adds one. In order, its state is complete.
    loader = StatefulDataLoader(samples, batch_size=8, sampler=sampler, shuffle=kind == "shuffled", num_workers=2)
    trainer.fit(Recorder(), loader, ckpt_path=resume)
    trainer.strategy.barrier()
    return seen


def refusal_of(root: str, **settings: Any) -> str:
    try:
        fit_within(f"{root}/other", until=12, **settings)
    except cloudckpt.errors.CloudckptError as error:
        return str(error)
    return ""


def within(root: str) -> dict[str, Any]:
    """Resume in the middle of the second epoch of four steps."""
    warned: list[str] = []
    _this_process.given_warnings.clear()  # of the place before
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cloudckpt").addHandler(handler)
    whole = fit_within(f"{root}/whole", until=12)
    fit_within(f"{root}/part", until=6)
    num_warned = len(warned)
    last = f"{root}/part/steps/last.ckpt"
    refused = [refusal_of(root, resume=last, num_samples=80), refusal_of(root, kind="shuffled")]
    resumed = fit_within(f"{root}/part", until=12, resume=last)
    in_order = fit_within(f"{root}/order", until=12, kind="in order")
    of_order = (
        in_order[6:],
        fit_within(f"{root}/x", until=12, kind="in order", resume=f"{root}/order/steps/step=6.ckpt"),
    )
    fit_within(f"{root}/lost", until=3, states=False)
    names = {
        name: [info.name for info in cloudckpt.list_checkpoints(f"{root}/part/{name}")] for name in ("steps", "best")
    }
    found = [None] * 2
    torch.distributed.all_gather_object(
        found, {"whole": whole, "resumed": resumed, "refused": refused, "order": of_order}
    )
    return {"ranks": found, "names": names, "warned": [warned[:num_warned], warned[num_warned:]]}


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
            "within": within(f"{root}/within") if place != "gcs" else None,
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
