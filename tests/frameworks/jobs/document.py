"""The snippets of docs/frameworks.md, as they stand there, with a small model in the place of the reader's."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from common import DOCUMENT, Noisy, begin_anew, data, end, places, tell
from torch.distributed.fsdp import fully_shard
from transformers import TrainingArguments

import cloudckpt


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Noisy()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.model(batch), batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ShardedModule(Module):
    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class ModelWithLoss(Noisy):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(super().forward(x), x)}


def of_lightning() -> dict[str, Any]:
    return {"module": Module(), "sharded_module": ShardedModule(), "loader": loader(), "dataset": data()}


def of_fabric() -> dict[str, Any]:
    model = Noisy()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "cloudckpt": cloudckpt}


def of_accelerate() -> dict[str, Any]:
    begin_anew()
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    given = {"accelerator": Accelerator(cpu=True), "model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {**given, "loader": loader(), "train_step": lambda step: None}


def of_trainer() -> dict[str, Any]:
    begin_anew()
    Path("base").mkdir(exist_ok=True)
    Path("base/config.json").write_text("{}")
    args = TrainingArguments(output_dir="out", use_cpu=True, max_steps=2, save_steps=1, report_to=[])
    return {"model": ModelWithLoss(), "args": args, "dataset": [{"x": each} for each in data()]}


def loader() -> torch.utils.data.DataLoader[torch.Tensor]:
    return torch.utils.data.DataLoader(data(), batch_size=8)


GIVEN = {
    "Lightning": of_lightning,
    "Fabric": of_fabric,
    "Accelerate": of_accelerate,
    "Transformers' Trainer": of_trainer,
    "torchtitan": lambda: {"config": SimpleNamespace()},
    "torch_checkpointing": lambda: {"model": Noisy()},
}

for place, root in places():
    told = {}
    for section in re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]:
        name = section.partition("\n")[0]
        snippets = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        if (
            name in ("Ray Train", "torchao", "Experiment trackers", "vLLM and SGLang") or not snippets
        ):  # those are run by tests of their own
            continue
        variables = {"__name__": "__main__", **GIVEN[name]()}
        under = f"{root}/{re.sub('[^a-z]', '', name.lower())}"
        for snippet in snippets:
            exec(compile(snippet.replace("s3://bucket", under), name, "exec"), variables)  # noqa: S102  # ours
        cloudckpt.close()
        found = [
            each
            for below in ("run", "shards", "steps", "two/steps", "two/best", "fabric")
            for each in cloudckpt.list_checkpoints(f"{under}/{below}")
        ]
        told[name] = [each.name for each in found]
        if name in ("Lightning", "Accelerate", "Transformers' Trainer"):
            told[f"{name}, exported"] = sorted(one.name for one in cloudckpt.describe(f"{under}/hub").tensors)
    tell(place, told)
end()
