"""Ray Train: a worker that dies between a commit and its report, and is started again. Ray starts it, not torchrun."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
from common import DOCUMENT, end, places, tell
from ray.train.torch import TorchTrainer

import cloudckpt
from cloudckpt.integrations.ray import get_uri

_OF_RAY = DOCUMENT.read_text().partition("\n## Ray Train\n")[2].partition("\n## ")[0]
(SNIPPET,) = re.findall(r"^```python\n(.*?)^```$", _OF_RAY, re.DOTALL | re.MULTILINE)


def train(config: dict[str, Any]) -> None:
    """The document's, which fails once."""
    os.environ.update(config["environment"])  # a worker's own is that of the job's beginning
    variables: dict[str, Any] = {}
    exec(compile(config["snippet"], "snippet", "exec"), variables)  # noqa: S102  # ours
    log, report = Path(config["log"]), variables["report"]
    is_first_life = not log.exists()

    def logged(metrics: dict[str, Any], uri: str) -> None:
        with log.open("a") as file:
            file.write(f"{metrics['step']}\n")
        if is_first_life and metrics["step"] == 2:
            raise RuntimeError("the test asked for it")
        report(metrics, uri)

    variables["report"] = logged
    variables["train"](config)


scratch = Path(tempfile.mkdtemp())
ray.init(
    num_cpus=2,
    include_dashboard=False,
    log_to_driver=False,
    object_store_memory=100 * 1024 * 1024,
    _temp_dir=str(scratch / "r"),
)
for place, root in places():
    log = scratch / f"{place}.log"
    given = {"root": root, "snippet": SNIPPET, "log": str(log), "environment": dict(os.environ)}
    trainer = TorchTrainer(
        train,
        train_loop_config=given,
        scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            storage_path=str(scratch / place), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    uri = get_uri(result.checkpoint)
    told = {"uri": uri, "steps": [int(line) for line in log.read_text().split()]}
    tell(place, {**told, "verified": cloudckpt.verify(uri).num_tensors})
ray.shutdown()
shutil.rmtree(scratch, ignore_errors=True)
end()
