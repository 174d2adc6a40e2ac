"""Let the error for an unknown keyword name the right one, also for the names that other libraries use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from cloudckpt._messages import did_you_mean, find_near

_P = ParamSpec("_P")
_T = TypeVar("_T")

_OTHER_NAMES = {
    "keep_last": "max_to_keep save_total_limit total_limit keep_n_latest keep_latest_k keep_last_n num_to_keep",
    "keep_best": "save_top_k monitor mode best_fn best_mode metric_for_best_model checkpoint_score_attribute",
    "keep_every": "keep_period",
    "keep_one_per": "keep_time_interval keep_checkpoint_every_n_hours",
    "save_every": "save_interval_steps save_interval save_steps save_freq every_n_train_steps train_time_interval",
    "async_": "async_save async_mode use_async is_async asynchronous enable_async_checkpointing",
    "root": "checkpoint_id path dirpath directory folder checkpoint_dir output_dir save_dir uri",
    "uri": "path filepath checkpoint_path ckpt_path directory folder url f root",
    "overwrite": "force exist_ok",
    "model": "module net network pl_module",
    "optimizer": "optim opt",
    "scheduler": "lr_scheduler sched",
    "dataloader": "train_dataloader loader dataset_iterator",
    "random_state": "rng rng_state rng_states",
    "state_dict": "state item items obj args pytree",
    "process_group": "pg group",
    "rename": "strip_prefix add_prefix prefix key_mapping",
}
"""The names that other libraries, such as Orbax, torch, Lightning and Transformers, give to each argument."""
_ADVICE = {
    "map_location": "Tensors are loaded on the devices of the objects or tensors that they fill",
    "num_workers": "Options(connections=…) is the number of requests in flight",
    "weights_only": "Loads are safe without it: no pickle is run by default",
    "metrics": "CheckpointManager.save(step, …, metrics=…) saves metrics",
    "step": "End the URI with the step, as in s3://bucket/run/step-4, or use CheckpointManager.save(step, …)",
    "blocking": "async_save never waits: call result() of what it returns, or call save",
}
"""Sentences for names of other libraries that have no argument here."""
_options_by_field: dict[str, str] = {}
"""Each field of the classes of options, as in ``Options.timeout_s``."""


def suggest_keywords(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let the error for an unknown keyword suggest a similar one, as Python does since 3.13."""
    parameters = inspect.signature(function).parameters
    function_name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: _P.args, **keywords: _P.kwargs) -> _T:
        if unknown := [name for name in keywords if name not in parameters]:
            known = {
                other: name for name, others in _OTHER_NAMES.items() if name in parameters for other in others.split()
            }
            if "." in function_name:
                owner = type(args[0])
                known |= {name: f"{owner.__name__}({name}=…)" for name in inspect.signature(owner).parameters}
            known |= _options_by_field
            advice = [f". {_ADVICE[name]}" for name in unknown if name in _ADVICE and name not in known]
            others = [name for name in unknown if name not in _ADVICE]
            objects = [f"{name!r}: {name}" for name in others if hasattr(keywords[name], "state_dict")]
            if objects and "extra" in parameters:
                advice.append(f". An object without an argument of its own goes into extra={{{', '.join(objects)}}}")
            near = [known.get(name) or find_near(name, [*parameters]) for name in others]
            if "keep_best" in near:
                metric, mode = keywords.get("monitor", "loss"), keywords.get("mode", "min")
                advice.append(f". For example, keep_best={(metric, mode, 3)!r}")
            hint = did_you_mean(*dict.fromkeys(near)) + "".join(advice)
            raise TypeError(f"{function_name} has no {', '.join(unknown)}{hint}")
        if "step" in parameters and parameters["step"].default is inspect.Parameter.empty:
            is_given = "step" in keywords or len(args) > [*parameters].index("step")
            if not is_given:
                raise TypeError(f"{function_name} needs the number of the step: save(step, model=…)")
        return function(*args, **keywords)

    return checked


def suggest_fields(cls: type[_T]) -> type[_T]:
    """Let a class of options do so, too, and let all functions suggest its fields."""
    options_class: Any = cls
    _options_by_field.update({name: f"{cls.__name__}.{name}" for name in options_class.__slots__})
    options_class.__init__ = suggest_keywords(options_class.__init__)
    return cls
