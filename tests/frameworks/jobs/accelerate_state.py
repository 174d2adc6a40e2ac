"""Accelerate, with DDP and FSDP: whole training, and the same resumed in the middle; on one rank, only resumed."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from common import NUM_RANKS, Noisy, begin_anew, data, end, places, shard_on_cpus, tell
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

import cloudckpt
from cloudckpt.integrations.accelerate import AcceleratorState

MODELS = {
    "ddp": torch.nn.parallel.DistributedDataParallel,
    "fsdp1": FullyShardedDataParallel,
    "fsdp2": FSDPModule,
}


class Counter:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen, "nothing": {}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state["nothing"] == {}
        self.seen = state["seen"]


def fit(root: str, *, until: int, kind: str, drop: float) -> tuple[list[float], int]:
    begin_anew()
    version = {"fsdp1": 1, "fsdp2": 2}.get(kind)
    plugin = version and FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="NO_WRAP")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    set_seed(3 + accelerator.process_index)
    torch.manual_seed(3)
    model = Noisy()
    model.drop.p = drop
    if kind == "fsdp1":  # whose parameters are others than the model's, unlike FSDP2's
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert NUM_RANKS == 1 or isinstance(model, MODELS[kind])
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.95**step)
    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    scheduler, loader = accelerator.prepare(scheduler, loader)
    batches = list(loader)  # draws a random number, as each pass through a loader does
    torch.manual_seed(11 + accelerator.process_index)
    state = {"accelerator": AcceleratorState(accelerator), "step": 0}
    losses = []
    with cloudckpt.CheckpointManager(root) as manager:
        restored = manager.restore(state)
        first = 0 if restored is None else state["step"]
        for step in range(first, until):
            batch = batches[step % len(batches)]
            loss = torch.nn.functional.mse_loss(model(batch), batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.seen[step] = step * step
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        state["step"] = until
        manager.save(until, state, overwrite=True)
    assert counter.seen == {step: step * step for step in range(until)}
    return [*losses, *scheduler.get_last_lr()], first


def fit_pair(root: str, *, stop_at: int | None) -> list[list[float]]:
    """Train two models for two epochs of a stateful loader: the samples of each step, and what the models became."""
    begin_anew()
    torch.manual_seed(3)
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    loader = torch.utils.data.DataLoader(torch.arange(64.0)[:, None], batch_size=4, shuffle=True)
    first, second, *optimizers, loader = accelerator.prepare(*models, *optimizers, loader)
    state = {"accelerator": AcceleratorState(accelerator), "epoch": 0}
    seen = []
    with cloudckpt.CheckpointManager(root) as manager:
        manager.restore(state)
        for epoch, batch in ((epoch, batch) for epoch in range(state["epoch"], 2) for batch in loader):
            state["epoch"] = epoch
            accelerator.backward(second(first(batch)).square().mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            weights = [accelerator.unwrap_model(model).weight.item() for model in (first, second)]
            seen.append([*accelerator.gather(batch)[:, 0].tolist(), *weights])
            if len(seen) == stop_at:
                manager.save(stop_at, state)
                break
    return seen


if NUM_RANKS == 2:
    shard_on_cpus()
for place, root in places():
    result = {}
    for kind in MODELS:
        if NUM_RANKS == 2:
            whole, _ = fit(f"{root}/{kind}-whole", until=6, kind=kind, drop=0.5)
            part, first = fit(f"{root}/{kind}", until=3, kind=kind, drop=0.5)
            assert first == 0
            resumed, first = fit(f"{root}/{kind}", until=6, kind=kind, drop=0.5)
        else:
            whole, part = [], []
            resumed, first = fit(f"{root}/{kind}", until=8, kind="alone", drop=0.0)
        result[kind] = {"whole": whole, "part": part, "resumed": resumed, "first": first}
    pair = f"{root}/pair"
    if NUM_RANKS == 2:
        result["pair"] = {"whole": fit_pair(f"{pair}-whole", stop_at=None)}
        for stop_at, under in ((3, pair), (8, f"{pair}-8")):  # 8: the last batch of the first epoch
            part = fit_pair(under, stop_at=stop_at)
            result["pair"][str(stop_at)] = part + fit_pair(under, stop_at=None)
        config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=True)
        begin_anew()
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        accelerator.prepare(torch.utils.data.DataLoader(data(), num_workers=2))
        try:
            AcceleratorState(accelerator)
        except cloudckpt.errors.InvalidOptionError as error:
            result["pair"]["dispatched"] = str(error)
    else:
        try:
            fit_pair(pair, stop_at=None)
        except cloudckpt.errors.StateDictMismatchError as error:
            result["pair"] = str(error)
    tell(place, result)
end()
