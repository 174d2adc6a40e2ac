"""torchtitan's checkpointing with its own optimizers and schedulers: whole, stopped, resumed; on one rank, resumed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from common import NUM_RANKS, Noisy, data, end, places, tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

import cloudckpt
from cloudckpt.integrations.torchtitan import CloudCheckpointManager

MODES = ["disabled", "async", "async_with_pinned_mem"]


class Loader:
    """Which knows how far it has come, as torchtitan's."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> torch.Tensor:
        batches = data().split(8)
        self.position += 1
        return batches[(self.position - 1) % len(batches)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def fit(folder: str, mode: str, *, until: int, stop: bool = False, load_step: int = -1, **more: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Noisy()
    model.drop.p = 0.0
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    optimizers = OptimizersContainer.Config(
        param_groups=default_adamw(1e-2).param_groups, implementation="foreach"
    ).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=12)
    loader, train_state = Loader(), TrainState()
    config = CloudCheckpointManager.Config(
        enable=True,
        folder=folder,
        interval=2,
        keep_latest_k=2,
        last_save_model_only=False,
        async_mode=mode,
        **more,
    )
    checkpointer = config.build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": train_state},
        sd_adapter=None,
        base_folder="outputs",
    )
    was_loaded = checkpointer.load(step=load_step)
    first = train_state.step
    losses = []
    while train_state.step < until:
        train_state.step += 1
        loss = torch.nn.functional.mse_loss(model(batch := next(loader)), batch)
        loss.backward()
        checkpointer.maybe_wait_for_staging()  # as torchtitan's train_step does
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
        checkpointer.save(train_state.step, last_step=train_state.step == until and not stop)
    checkpointer.maybe_wait_for_saving()
    checkpointer.close()
    return {"losses": losses, "loaded": was_loaded, "first": first}


dist.init_process_group("gloo")
for place, root in places():
    results: dict[str, Any] = {}
    for mode in MODES if NUM_RANKS == 2 else MODES[:1]:
        folder, result = f"{root}/{mode}", {}
        if NUM_RANKS == 2:
            result["whole"] = fit(f"{folder}-whole", mode, until=9)
            result["part"] = fit(folder, mode, until=5, stop=True)  # saved at 4
            result["between"] = [info.step for info in cloudckpt.CheckpointManager(folder).steps()]
        result["resumed"] = fit(folder, mode, until=9 if NUM_RANKS == 2 else 11)
        result["kept"] = [info.step for info in cloudckpt.CheckpointManager(folder).steps()]
        try:
            fit(folder, mode, until=0, load_step=7)
        except cloudckpt.CheckpointNotFoundError as error:
            result["missing"] = str(error)
        earlier, last = result["kept"][-2:]
        try:
            fit(folder, mode, until=last, load_step=earlier)
        except cloudckpt.CheckpointExistsError as error:
            result["earlier"] = str(error)
        result["only"] = fit(folder, mode, until=0, load_step=earlier, load_only=True)
        newest = f"{folder}/step-{result['kept'][-1]}"
        result["initial"] = fit(f"{folder}-new-{NUM_RANKS}", mode, until=0, initial_load_path=newest)
        results[mode] = result
    tell(place, results)
end()
