"""Ray Train: a worker that fails, and is started again from what it reported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from common import tell
from ray.train.torch import TorchTrainer

import cloudckpt


def train(config: dict[str, Any]) -> None:
    from cloudckpt.integrations.ray import report, uri_of  # noqa: PLC0415  # on the worker

    model = torch.nn.Linear(4, 4)
    state = {"model": model.state_dict(), "step": 0}
    uri = uri_of(ray.train.get_checkpoint())
    if uri is not None:
        cloudckpt.load(state, uri)
        model.load_state_dict(state["model"])
    first = state["step"] + 1
    with Path(config["log"]).open("a") as log:
        log.write(f"{first}\n")
    for step in range(first, 5):
        with torch.no_grad():
            model.weight.add_(1.0)
        state = {"model": model.state_dict(), "step": step}
        uri = f"{config['root']}/step-{step}"
        cloudckpt.save(state, uri)
        report({"step": step}, uri)
        if step == 2 and first == 1:
            raise RuntimeError("the test asked for it")


root, scratch = sys.argv[1:]
log = Path(scratch) / "log"
log.parent.mkdir(parents=True)
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 1024 * 1024)
trainer = TorchTrainer(
    train,
    train_loop_config={"root": root, "log": str(log)},
    scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
    run_config=ray.train.RunConfig(
        storage_path=str(Path(scratch) / "results"), failure_config=ray.train.FailureConfig(max_failures=1)
    ),
)
result = trainer.fit()
from cloudckpt.integrations.ray import uri_of  # noqa: E402

found = uri_of(result.checkpoint)
ray.shutdown()
tell({"uri": found, "begun_at": [int(line) for line in log.read_text().split()]})
