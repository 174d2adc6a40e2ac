"""Train on one GPU, or on the CPU, and resume in mid-epoch with the losses of a run that was never interrupted.

    python examples/single_gpu.py checkpoints/single-gpu   (or s3://…, gs://…)

Press Ctrl-C or kill it, and start it again with the same arguments. It saves model, EMA model, AdamW, cosine schedule,
GradScaler, random generators and the position in the shuffled data, and keeps the three best by validation loss.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import cloudckpt

parser = argparse.ArgumentParser()
parser.add_argument("root", help="folder of the run's checkpoints: a path, s3://…, gs://…")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
inputs = torch.randn(1000, 16)
data = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
train_data, val_data = torch.utils.data.random_split(data, [800, 200])
shuffle = torch.Generator().manual_seed(0)  # a generator of the loader's own: its state is the order of an epoch
train_loader = DataLoader(train_data, batch_size=32, shuffle=True, generator=shuffle)
val_loader = DataLoader(val_data, batch_size=200)

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader))
scaler = torch.amp.GradScaler(device, init_scale=2.0**12, growth_interval=40)

# The position in the data. `order` is the state of the loader's generator at the beginning of the epoch.
position = {"epoch": 0, "batch": 0, "order": shuffle.get_state()}
state = {
    "model": {"net": model, "ema": ema},
    "optimizer": optimizer,
    "scheduler": scheduler,
    "extra": {"position": position, "scaler": scaler},
}


def predict_loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of one batch in mixed precision."""
    with torch.autocast(device, dtype=torch.float16):
        return nn.functional.mse_loss(net(x.to(device)).float(), y.to(device))


def validate() -> float:
    """Return the mean loss of the EMA model on the validation data."""
    ema.eval()
    with torch.no_grad():
        return sum(predict_loss(ema, x, y).item() for x, y in val_loader) / len(val_loader)


with cloudckpt.CheckpointManager(args.root, save_every=10, keep_last=1, keep_best=("val_loss", "min", 3)) as manager:
    restored = manager.restore(**state)  # fills all that is in `state`; None: a fresh start
    step = restored.step if restored else 0
    print(f"starts after step {step}", flush=True)
    while position["epoch"] < args.epochs:
        shuffle.set_state(position["order"])
        for x, y in islice(train_loader, position["batch"], None):  # skips the batches that the model has seen
            loss = predict_loss(model, x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            ema.update_parameters(model)
            step += 1
            position["batch"] += 1
            print(f"step {step} loss {loss.item()!r}", flush=True)
            metrics = None
            if position["batch"] == len(train_loader):
                metrics = {"val_loss": validate()}
                position.update(epoch=position["epoch"] + 1, batch=0, order=shuffle.get_state())
            # After all that changes the state. It saves in the background, if the step is due or ends an epoch.
            manager.save(step, **state, metrics=metrics, force=metrics is not None)

best = manager.best("val_loss")
print(f"best: step {best.step}, val_loss {best.metrics['val_loss']:.4f}, {best.uri}")
