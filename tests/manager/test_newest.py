"""`load_latest`: the newest checkpoint that is whole, on all ranks the same, and never anything else in silence."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.in_memory import Memory, assert_holds, state_of
from tests.kit.ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import cloudckpt
from cloudckpt import CorruptCheckpointError, Options
from cloudckpt.errors import AccessDeniedError, CredentialsError, TransientStoreError
from cloudckpt.stores.base import crc32c_of

STEPS = (1, 2, 3)


@pytest.fixture
def run(memory: Memory) -> Memory:
    """Three checkpoints, the values of each the number of its step."""
    for step in STEPS:
        cloudckpt.save(state_of(float(step)), memory.uri(f"step-{step}"))
    return memory


def replace(memory: Memory, name: str, key: str, data: bytes) -> None:
    memory.at(name).inner.put(key, [memoryview(data)], crc32c=crc32c_of([memoryview(data)]))


def flip(memory: Memory, name: str) -> None:
    (key,) = memory.data_keys(name)
    data = bytearray(memory.at(name).inner.read(key, max_bytes=2**30))
    data[-1] ^= 1
    replace(memory, name, key, bytes(data))


def cut(memory: Memory, name: str) -> None:
    (key,) = memory.data_keys(name)
    replace(memory, name, key, memory.at(name).inner.read(key, max_bytes=2**30)[:-1])


def remove_data(memory: Memory, name: str) -> None:
    memory.at(name).inner.delete(memory.data_keys(name))


def break_manifest(memory: Memory, name: str) -> None:
    replace(memory, name, "manifest.json", b'{"format":"cloudckpt","version":[1,0]')


def empty_manifest(memory: Memory, name: str) -> None:
    replace(memory, name, "manifest.json", b"x" * 200)


DAMAGES: dict[str, Callable[[Memory, str], None]] = {
    "flip": flip,
    "cut": cut,
    "remove data": remove_data,
    "break manifest": break_manifest,
    "foreign manifest": empty_manifest,
}


@pytest.mark.parametrize("verify_first", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_skipped_with_a_warning(
    run: Memory, damage: str, caplog: pytest.LogCaptureFixture, *, verify_first: bool
) -> None:
    """If this fails, one bad object stops a job that has older checkpoints, or its loss of steps goes unnoticed."""
    DAMAGES[damage](run, "step-2")
    DAMAGES[damage](run, "step-3")  # the later, since the order is that of the manifests' times
    state = state_of(-1.0)
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        reader = cloudckpt.ObjectStoreReader(run.root)
        report = cloudckpt.load_latest(
            state, run.root, verify_first=verify_first, storage_reader=reader, options=cloudckpt.Options()
        )
    assert reader.report == report
    assert_holds(state, 1.0)
    assert [one.uri for one in report.skipped] == [run.uri("step-3"), run.uri("step-2")]
    for one in report.skipped:
        assert re.search("damaged|cut|shorter|missing|truncated|not JSON", one.why), one.why
        assert any(one.uri in record.message and one.why in record.message for record in caplog.records)


def test_a_checkpoint_that_vanishes_is_skipped(run: Memory) -> None:
    """If this fails, a checkpoint that retention removes while a job starts keeps the job from starting."""

    def remove() -> None:
        run.at("step-3").inner.delete(run.all_keys("step-3"))

    run.at("step-3").once_before("read", "manifest", remove)
    state = state_of(-1.0)
    report = cloudckpt.load_latest(state, run.root)
    assert_holds(state, 2.0)
    assert [one.uri for one in report.skipped] == [run.uri("step-3")]


@pytest.mark.parametrize("verify_first", [False, True])
@pytest.mark.parametrize(
    ("kind", "operation"), [(AccessDeniedError, "read"), (CredentialsError, "read_into"), (TransientStoreError, "read")]
)
def test_trouble_with_the_store_is_not_damage(run: Memory, kind: Any, operation: str, *, verify_first: bool) -> None:
    """If this fails, a network that fails for a minute throws away the steps since the last checkpoint but one."""
    error = kind("no", key=run.uri("step-3"), operation=operation)
    run.at("step-3").fail(operation, error=lambda: error, times=100)
    with pytest.raises(kind):
        cloudckpt.load_latest(state_of(-1.0), run.root, options=Options(retries=1), verify_first=verify_first)
    assert run.at("step-2").count("read_into") == 0


def test_a_state_dict_that_does_not_fit_is_raised(run: Memory) -> None:
    """If this fails, a renamed layer makes training begin at the last checkpoint that still had the old name."""
    cloudckpt.save({**state_of(0.0), "new": torch.ones(1)}, run.uri("step-0"))
    flip(run, "step-0")  # the newest, since commits are ordered by time
    with pytest.raises(cloudckpt.errors.StateDictMismatchError, match="new"):
        cloudckpt.load_latest({**state_of(-1.0), "new": torch.zeros(1)}, run.root)


def test_the_one_before_a_newest_checkpoint_that_does_not_fit_is_named(
    run: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a mean among the steps stops each restart, and nobody learns which step would do."""
    cloudckpt.save({"mean": torch.ones(1)}, run.uri("step-4"))
    with caplog.at_level(logging.INFO), pytest.raises(cloudckpt.errors.StateDictMismatchError):
        cloudckpt.CheckpointManager(run.root).restore(state_of(-1.0))
    named = f"{run.uri('step-4')} was chosen, because it was committed last"
    assert (named in caplog.text, f"the one before it, {run.uri('step-3')}: " in caplog.text) == (True, True)


def test_a_newest_checkpoint_that_is_no_step_is_named(run: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, an evaluation measures the mean of a merge, and takes it for the newest step."""
    cloudckpt.save(state_of(7.0), run.uri("best"))
    cloudckpt.save(state_of(8.0), run.uri("step-8"))
    assert cloudckpt.load_latest(state_of(), run.root).uri == run.uri("step-8")
    assert "no step" not in caplog.text
    cloudckpt.save(state_of(9.0), run.uri("mean"))
    assert cloudckpt.load_latest(state_of(), run.root).uri == run.uri("mean")
    assert f"takes {run.uri('mean')}, which was committed last and is no step. The newest step" in caplog.text
    assert "beside it is step-8" in caplog.text


def test_a_newer_format_is_raised(run: Memory) -> None:
    """If this fails, an old cloudckpt that meets the checkpoints of a newer one resumes from before the upgrade."""
    document = b'{"format":"cloudckpt","version":[99,0]' + b" " * 200 + b"}"
    replace(run, "step-3", "manifest.json", document)
    with pytest.raises(cloudckpt.errors.UnsupportedFormatError):
        cloudckpt.load_latest(state_of(-1.0), run.root)


def test_an_unsafe_value_is_raised(run: Memory) -> None:
    """If this fails, a job that forgot its consent silently loses its newest steps."""
    with pytest.warns(UserWarning, match=r"'value' is of class .*Unknown: .* a load refuses it"):
        cloudckpt.save({"value": Unknown()}, run.uri("step-4"))
    with pytest.raises(cloudckpt.errors.UnsafePickleError):
        cloudckpt.load_latest({"value": None}, run.root)
    state: dict[str, Any] = {"value": None}
    assert cloudckpt.load_latest(state, run.root, allow_pickle=True).uri == run.uri("step-4")


class Unknown:
    """A class that no load knows."""


def test_a_root_without_checkpoints_is_an_error(memory: Memory) -> None:
    """If this fails, a mistyped root starts training from scratch."""
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match=re.escape(memory.root)) as caught:
        cloudckpt.load_latest(state_of(), memory.root)
    assert isinstance(caught.value, CheckpointException)


@pytest.mark.parametrize("verify_first", [False, True])
def test_a_root_without_a_whole_checkpoint_is_an_error_that_lists_all(run: Memory, *, verify_first: bool) -> None:
    """If this fails, training starts from scratch, or nobody learns what became of each checkpoint."""
    for step, damage in zip(STEPS, (flip, remove_data, break_manifest), strict=True):
        damage(run, f"step-{step}")
    with pytest.raises(CorruptCheckpointError) as caught:
        cloudckpt.load_latest(state_of(), run.root, verify_first=verify_first)
    assert isinstance(caught.value, CheckpointException)
    assert [problem.split(":")[1] for problem in caught.value.problems] == [
        f"{run.uri(f'step-{step}')}".split(":")[1] for step in (3, 2, 1)
    ]
    for step in STEPS:
        assert run.uri(f"step-{step}") in str(caught.value)


def test_verifying_first_fills_nothing_from_a_damaged_checkpoint(run: Memory) -> None:
    """If this fails, `verify_first` does not keep what it is for: tensors that no bad checkpoint has touched."""
    flip(run, "step-3")
    flip(run, "step-2")
    flip(run, "step-1")
    state = state_of(-1.0)
    with pytest.raises(CorruptCheckpointError):
        cloudckpt.load_latest(state, run.root, verify_first=True)
    assert_holds(state, -1.0)


def test_partial_loads_do_not_mix_checkpoints(run: Memory) -> None:
    """If this fails, what an older checkpoint lacks keeps what a damaged newer one had put there."""
    cloudckpt.save({"extra": torch.full((9,), 4.0), **state_of(4.0)}, run.uri("step-4"))
    flip(run, "step-4")
    state = {"extra": torch.full((9,), -1.0), **state_of(-1.0)}
    report = cloudckpt.load_latest(state, run.root, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert report.uri == run.uri("step-3")
    assert bool((state["extra"] == -1.0).all())
    assert_holds(state, 3.0)


# --- several ranks


def save_on_ranks(root: str) -> None:
    for step in STEPS:
        own = {f"own-{dist.get_rank()}": torch.full((2000,), 10.0 * step + dist.get_rank())}
        cloudckpt.save({**own, "step": step}, f"{root}/step-{step}")


def load_own(root: str, *modes: str) -> tuple[float, int, list[tuple[str, str]]]:
    own = f"own-{dist.get_rank()}"
    state: dict[str, Any] = {own: torch.zeros(2000), "step": 0}
    report = cloudckpt.load_latest(state, root, verify_first="verify first" in modes)
    return float(state[own][0]), state["step"], [(one.uri, one.why) for one in report.skipped]


@pytest.mark.multirank
@pytest.mark.parametrize("verify_first", [False, True])
def test_all_ranks_skip_what_one_of_them_finds_damaged(tmp_path: Path, *, verify_first: bool) -> None:
    """If this fails, ranks go on from different steps, or wait for each other for ever."""
    run_ranks(save_on_ranks, str(tmp_path), world_size=3)
    for step, rank in ((3, 2), (2, 0)):
        (path,) = (tmp_path / f"step-{step}").glob(f"data/*/{rank}-0.safetensors")
        data = bytearray(path.read_bytes())
        data[-8000 + 17] ^= 4
        path.write_bytes(data)
    results = run_ranks(load_own, str(tmp_path), *(["verify first"] if verify_first else []), world_size=3)
    assert [value for value, _, _ in results] == [10.0, 11.0, 12.0]
    assert [step for _, step, _ in results] == [1, 1, 1]
    assert all(skipped == results[0][2] for _, _, skipped in results)
    assert [Path(uri).name for uri, _ in results[0][2]] == ["step-3", "step-2"]
