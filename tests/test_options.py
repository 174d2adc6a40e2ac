"""Options: defaults that fit together, and every problem at once."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.options import make_options

import cloudckpt
from cloudckpt import Zstandard
from cloudckpt.errors import InvalidOptionError
from cloudckpt.options import KIB, MIB, Options

WRONG: list[tuple[str, Any]] = [
    ("timeout_s", 0),
    ("timeout_s", -1),
    ("retries", -1),
    ("connections", 0),
    ("part_bytes", 4 * KIB),
    ("object_bytes", 0),
    ("tile_bytes", 0),
    ("tile_bytes", 4 * KIB - 64),
    ("tile_bytes", 4 * KIB + 1),
    ("tile_bytes", 4 * KIB + 4),
    ("staging_bytes", 1 * MIB),
    ("request_bytes", 4 * KIB),
    ("read_bytes", 1 * MIB),
    ("max_gap_bytes", -1),
    ("max_over_read", -0.5),
    ("max_over_read", 1000.5),
    ("commit", "maybe"),
    ("timeout_s", "5"),
    ("timeout_s", float("inf")),
    ("timeout_s", float("nan")),
    ("timeout_s", True),
    ("connections", 2.5),
    ("part_bytes", "32MiB"),
    ("verify", "no"),
    ("verify", None),
    ("async_in_flight", "cancel"),
    ("compare_replicas", "all"),
    ("async_overlap", 1),
    ("metadata", None),
    ("metadata", {"loss": float("nan")}),
    ("metadata", {"model": print}),
    ("on_event", 3),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_invalid_option_is_refused_by_name_and_value(name: str, value: Any) -> None:
    """If this fails, a wrong option surfaces in the middle of a save, as something else."""
    with pytest.raises(InvalidOptionError) as caught:
        make_options(**{name: value})
    assert f"{name} must be" in str(caught.value)
    assert f"not {value!r}" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_class_of_an_extension_is_not_taken_for_one() -> None:
    """If this fails, ``extensions=[Zstandard]`` without parentheses fails a save from deep inside."""
    make_options(extensions=[Zstandard()])
    with pytest.raises(InvalidOptionError, match="extensions must be a list of StreamTransformExtension objects"):
        make_options(extensions=[Zstandard])


def test_wrong_storage_options_are_not_repeated() -> None:
    """If this fails, a secret passed in the wrong shape stands in the log."""
    with pytest.raises(InvalidOptionError, match="storage_options must be a mapping, not a list") as caught:
        Options(storage_options=["secret-value"])  # type: ignore[arg-type]
    assert "secret-value" not in str(caught.value)


def test_every_problem_is_named_at_once() -> None:
    """If this fails, a user with three wrong options needs three runs to find them."""
    with pytest.raises(InvalidOptionError) as caught:
        Options(timeout_s=0, retries="5", connections=0, commit="never")  # type: ignore[arg-type]
    message = str(caught.value)
    assert all(f"{name} must be" in message for name in ("timeout_s", "retries", "connections", "commit"))
    assert message.count(";") == 3


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"timout_s": 5, "retrys": 1}, r"has no timout_s, retrys \(did you mean 'timeout_s', 'retries'\?\)$"),
        ({"part_bytes": 5}, r"has no part_bytes \(did you mean 'AdvancedOptions\.part_bytes'\?\)$"),
        ({"nothing_alike": 5}, r"Options has no nothing_alike$"),
    ],
)
def test_misspelt_option_comes_with_the_one_that_is_meant(keywords: dict[str, Any], told: str) -> None:
    """If this fails, a user looks up two dozen names of options for one letter."""
    with pytest.raises(TypeError, match=told):
        Options(**keywords)
    assert "timeout_s" in inspect.signature(Options).parameters  # for help and completion


def test_misspelt_argument_comes_with_the_one_that_is_meant() -> None:
    """If this fails, Python before 3.13 names no neighbour of a misspelt argument of the calls of every script."""
    root = "memory://misspelt"
    manager = cloudckpt.CheckpointManager(root)
    calls: list[tuple[Callable[..., Any], str]] = [
        *((call, f"{call.__name__} has") for call in (cloudckpt.save, cloudckpt.async_save, cloudckpt.load)),
        (cloudckpt.load_latest, "load_latest has"),
        (cloudckpt.CheckpointManager, "CheckpointManager has"),
        (manager.save, "CheckpointManager.save has"),
        (manager.restore, "CheckpointManager.restore has"),
    ]
    for call, begin in calls:
        wrong, meant = ("keeplast", "keep_last") if call is cloudckpt.CheckpointManager else ("optimzer", "optimizer")
        told = f"{begin} no {wrong}, retries (did you mean '{meant}', 'Options.retries'?)"
        with pytest.raises(TypeError, match=rf"^{re.escape(told)}$"):
            call(root, **{wrong: None, "retries": 3})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_to_keep", "keep_last"),
        ("save_total_limit", "keep_last"),
        ("keep_n_latest", "keep_last"),
        ("save_interval_steps", "save_every"),
        ("async_save", "async_"),
        ("checkpoint_id", "root"),
        ("path", "root"),
    ],
)
def test_argument_of_another_library_comes_with_ours(name: str, meant: str) -> None:
    """If this fails, ``max_to_keep``, which Orbax has, is taken for ``fast_keep``, and a bucket fills up."""
    with pytest.raises(TypeError, match=rf"CheckpointManager has no {name} \(did you mean '{meant}'\?\)$"):
        cloudckpt.CheckpointManager("memory://other", **{name: 3})


def test_argument_of_another_call_comes_with_that_call() -> None:
    """If this fails, a user who trusts a checkpoint does not learn how to restore it."""
    manager = cloudckpt.CheckpointManager("memory://other")
    with pytest.raises(
        TypeError, match=r"restore has no allow_pickle \(did you mean 'CheckpointManager\(allow_pickle=…"
    ):
        manager.restore({}, allow_pickle=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"has no path \(did you mean 'uri'\?\)$"):
        cloudckpt.save({}, path="memory://other")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "arguments", "told"),
    [
        (cloudckpt.load, {"weights_only": True}, "no weights_only. Loads are safe without it: no pickle is run"),
        (cloudckpt.load, {"map_location": "cpu"}, "no map_location. Tensors are loaded on the devices of"),
        (cloudckpt.load, {"num_workers": 4}, "no num_workers. Options(connections=…) is the number"),
        (cloudckpt.save, {"step": 4}, "no step. End the URI with the step, as in"),
        (cloudckpt.save, {"metrics": {}}, "no metrics. CheckpointManager.save(step, …, metrics=…) saves metrics"),
        (cloudckpt.async_save, {"blocking": True}, "no blocking. async_save never waits: call result()"),
        (cloudckpt.copy, {"overwite": True}, "copy has no overwite (did you mean 'overwrite'?)"),
        (cloudckpt.merge, {"weight": [1]}, "merge has no weight (did you mean 'weights'?)"),
        (cloudckpt.export_checkpoint, {"skip_non_tensor": True}, "(did you mean 'skip_non_tensors'?)"),
        (cloudckpt.import_checkpoint, {"overwite": True}, "(did you mean 'overwrite'?)"),
        (cloudckpt.delete, {"overwrite": True}, "delete has no overwrite"),
        (cloudckpt.gc, {"dry": True}, "gc has no dry (did you mean 'dry_run'?)"),
        (
            cloudckpt.CheckpointManager,
            {"monitor": "acc", "mode": "max", "save_top_k": 2},
            "monitor, mode, save_top_k (did you mean 'keep_best'?). For example, keep_best=('acc', 'max', 3)",
        ),
    ],
)
def test_argument_without_a_like_comes_with_what_to_do(call: Any, arguments: dict[str, Any], told: str) -> None:
    """If this fails, who comes from torch or Lightning is sent to an unsafe argument, or learns nothing."""
    with pytest.raises(TypeError, match=re.escape(told)) as caught:
        call("memory://other", **arguments)
    assert "allow_pickle" not in str(caught.value)


_manager = cloudckpt.CheckpointManager("memory://other", no_dist=True)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: _manager.restore(1, model=None), "pass step=100; without a step, restore takes the newest"),  # type: ignore[arg-type]
        (lambda: _manager.restore("latest"), "not 'latest'. To restore a step, pass step=100;"),  # type: ignore[arg-type]
        (lambda: _manager.save(model=None), "save needs the number of the step: save(step, model=…)"),  # type: ignore[call-arg]
        (lambda: cloudckpt.load("s3://b/c", {}), "The two arguments are swapped: the URI is the second"),  # type: ignore[arg-type]
        (lambda: cloudckpt.load("s3://b/c"), "cloudckpt.read('s3://b/c') returns what was saved"),
        (lambda: cloudckpt.CheckpointManager("a", save_every="10m"), "For ten minutes: timedelta(minutes=10)"),  # type: ignore[arg-type]
        (lambda: Options(read_bytes="4GB"), "a whole number, such as 4 * 1024**3, not '4GB'"),  # type: ignore[arg-type]
        (lambda: cloudckpt.export_checkpoint("a", "b", dtype="bf16"), "not 'bf16' (did you mean 'bfloat16'?)"),
    ],
)
def test_a_call_in_another_form_comes_with_ours(call: Any, told: str) -> None:
    """If this fails, who writes a call from habit learns that it is wrong, and not how it is written here."""
    with pytest.raises((TypeError, InvalidOptionError), match=re.escape(told)):
        call()


@pytest.mark.parametrize(("name", "meant"), [("load", "restore"), ("latest_step", "latest"), ("stesp", "steps")])
def test_method_of_another_library_comes_with_ours(name: str, meant: str) -> None:
    """If this fails, who comes from Orbax reads a bare ``AttributeError``."""
    with pytest.raises(AttributeError, match=rf"^CheckpointManager has no {name} \(did you mean '{meant}'\?\)$"):
        getattr(cloudckpt.CheckpointManager("memory://other"), name)
    assert not hasattr(cloudckpt.CheckpointManager("memory://other"), "_unknown")


def test_options_are_values() -> None:
    """If this fails, options change under a running save, or cannot go to another process."""
    options = Options(retries=7, storage_options={"region": "eu-west-1"}, metadata={"note": 1})
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.retries = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options(60.0)  # type: ignore[misc]  # keywords only


def test_object_without_an_argument_goes_into_extra(tmp_path: Path) -> None:
    """If this fails, the error for `scaler=` leads its user to `scheduler=`."""
    scaler: Any = torch.amp.GradScaler("cpu")
    with pytest.raises(TypeError, match=r"has no scaler \(did .*\. An .* extra=\{'scaler': scaler\}$"):
        cloudckpt.CheckpointManager(tmp_path).save(1, scaler=scaler)  # type: ignore[call-arg]
    load: Any = cloudckpt.load
    for wrong in ("strip_prefix", "prefix"):
        with pytest.raises(TypeError, match=rf"load has no {wrong} \(did you mean 'rename'\?\)$"):
            load(tmp_path, model=torch.nn.Linear(2, 2), **{wrong: "model"})
    model = torch.nn.Linear(2, 2)
    cloudckpt.save(tmp_path, model=model)
    with pytest.raises(InvalidOptionError, match=r"not an? OrderedDict\. Pass a state dict as state_dict"):
        load(tmp_path, model=model.state_dict())
    with pytest.raises(AttributeError) as caught:
        cloudckpt.verfy  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("verfy", cloudckpt)
