"""Versions that several ranks publish, and others pull, also while ranks and processes are killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.models import HIDDEN, HIDDEN_TP, MLP, Parallelism, build, local
from tests.kit.options import make_options
from tests.kit.places import Place
from tests.kit.ranks import RankError, on_ranks, run_ranks
from tests.publication.weights import Policy, bits_of, train
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import cloudckpt
from cloudckpt.errors import InvalidOptionError, UnsupportedValueError
from cloudckpt.testing.faults import Faults, Rule, Tell


def change(model: nn.Module, version: int) -> None:
    """Change an element of some tensors that this rank holds a part of: tiny differences are as large as the whole."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            part = local(parameter).view(-1)[: None if (number + version) % 3 == 0 else 0]
            if len(part):
                part[version * number % len(part)] += 0.5 + version


def full_state(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    states = full_state(first), full_state(second)
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def model_of(parallelism: Parallelism, *, seed: int, hidden: int) -> nn.Module:
    if parallelism == "none":
        torch.manual_seed(seed)
        return MLP(hidden)
    return build(parallelism, seed=seed).model


@pytest.mark.every_store
def test_a_version_comes_over_any_store(place: Place) -> None:
    """If this fails, publication works on some stores alone."""
    model, reading = Policy(1), Policy(2)
    publisher = cloudckpt.Publisher(f"{place.root}/policy", anchor_every=2, keep_chains=1)
    for version in range(5):
        train(model, version)
        publisher.publish(model=model, version=version)
        weights = cloudckpt.pull(f"{place.root}/policy", model=reading)
        assert (weights.version, weights.starts_at_anchor) == (version, version == 0)
        assert bits_of(reading) == bits_of(model)
    assert [info.name for info in cloudckpt.list_checkpoints(f"{place.root}/policy")] == ["version-4"]


@pytest.mark.parametrize(
    ("of_publisher", "of_reader", "hidden"),
    [
        ("fsdp2", "fsdp2", HIDDEN),
        ("fsdp2", "none", HIDDEN),
        ("none", "fsdp2", HIDDEN),
        ("fsdp1", "hsdp", HIDDEN),
        ("hsdp", "fsdp1", HIDDEN),
        ("ddp", "fsdp1_mesh", HIDDEN),
        ("fsdp_tp", "none", HIDDEN_TP),
        ("none", "fsdp_tp", HIDDEN_TP),
    ],
)
@on_ranks(2)
def test_ranks_pull_in_another_layout(
    tmp_path: Path, of_publisher: Parallelism, of_reader: Parallelism, hidden: int
) -> None:
    """If this fails, a rollout worker must shard as training does, or gets another rank's bits."""
    model, reading = (model_of(kind, seed=seed, hidden=hidden) for seed, kind in enumerate((of_publisher, of_reader)))
    publisher = cloudckpt.Publisher(tmp_path, anchor_every=3)
    for version in range(5):
        change(model, version)
        report = publisher.publish(model=model, version=version)
        weights = cloudckpt.pull(tmp_path, model=reading)
        assert (weights.version, weights.starts_at_anchor) == (version, version == 0)
        assert_equal(reading, model)
        assert report.rank == dist.get_rank()
    late = model_of("none", seed=7, hidden=hidden)
    assert cloudckpt.pull(tmp_path, model=late, no_dist=True).num_versions_read == 2
    assert_equal(late, model)


@on_ranks(2)
def test_each_rank_sends_and_reads_its_own_part(tmp_path: Path) -> None:
    """If this fails, a rank sends what others have, or reads differences of shards that are not its own."""
    model, reading = (model_of("fsdp2", seed=seed, hidden=HIDDEN) for seed in (0, 1))
    publisher = cloudckpt.Publisher(tmp_path)
    for version in range(2):
        change(model, version)
        report = publisher.publish(model=model, version=version)
        weights = cloudckpt.pull(tmp_path, model=reading)
    assert report.num_bytes > 0
    whole = cloudckpt.describe(tmp_path / "version-1")
    entries = [tensor for tensor in whole.tensors if tensor.name.startswith("delta.")]
    assert len({tensor.name for tensor in entries}) == len(entries)
    read: list[int] = [0, 0]
    dist.all_gather_object(read, weights.num_bytes_read)
    differences = sum(tensor.num_bytes for tensor in entries)
    shared = sum(tensor.num_bytes for tensor in entries if tensor.name.endswith("[]"))
    assert sum(read) <= differences + shared


@on_ranks(2)
def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    """If this fails, a version has the bits of one replica, and the checksums of another."""
    model = model_of("none", seed=dist.get_rank(), hidden=HIDDEN)
    with pytest.raises(UnsupportedValueError, match="different values"):
        cloudckpt.Publisher(tmp_path).publish(model=model, version=0)
    assert cloudckpt.list_checkpoints(tmp_path) == []


@on_ranks(2)
def test_replicas_that_differ_are_filled(tmp_path: Path) -> None:
    """If this fails, replicas with other seeds, or of a pull that was killed on one rank, cannot be pulled into."""
    model = model_of("none", seed=0, hidden=HIDDEN)
    publisher = cloudckpt.Publisher(tmp_path)
    publisher.publish(model=model, version=0)
    reading = model_of("none", seed=1 + dist.get_rank(), hidden=HIDDEN)
    assert cloudckpt.pull(tmp_path, model=reading).starts_at_anchor
    assert_equal(reading, model)
    change(model, 1)
    publisher.publish(model=model, version=1)
    if dist.get_rank() == 1:
        reading.load_state_dict(model.state_dict())
    assert cloudckpt.pull(tmp_path, model=reading).starts_at_anchor
    assert_equal(reading, model)


@on_ranks(2)
def test_ranks_with_different_settings_agree(tmp_path: Path) -> None:
    """If this fails, ranks wait for each other for ever, or an anchor has the tensors of some ranks alone."""
    model = model_of("fsdp2", seed=0, hidden=HIDDEN)
    with pytest.raises(InvalidOptionError, match=r"anchor_every must be the same on all ranks, not one of \[2, 3\]"):
        cloudckpt.Publisher(tmp_path, anchor_every=2 + dist.get_rank()).publish(model=model, version=0)
    publisher = cloudckpt.Publisher(tmp_path, max_copy_bytes=1 if dist.get_rank() else None)
    for version in range(2):
        publisher.publish(model=model, version=version)
        assert publisher.copy_bytes == 0
        assert cloudckpt.pull(tmp_path, model=model_of("fsdp2", seed=1, hidden=HIDDEN)).starts_at_anchor


def _publish_until_killed(root: str, victim: int, after_calls: int) -> None:
    calls: list[int] = []

    def die(_call: object) -> None:
        calls.append(1)
        if dist.get_rank() == victim and len(calls) > after_calls:
            os.kill(os.getpid(), signal.SIGKILL)

    model = model_of("fsdp2", seed=0, hidden=HIDDEN)
    cloudckpt.pull(root, model=model)
    options = make_options(timeout_s=20.0, wrap_store=Faults(Rule(fault=Tell(before=die), times=None)))
    publisher = cloudckpt.Publisher(root, options=options)
    for version in range(10, 13):
        change(model, version)
        publisher.publish(model=model, version=version)


def _publish(root: str, version: int) -> None:
    model = model_of("fsdp2", seed=0, hidden=HIDDEN)
    with contextlib.suppress(cloudckpt.CheckpointNotFoundError):
        cloudckpt.pull(root, model=model)
    change(model, version)
    cloudckpt.Publisher(root).publish(model=model, version=version)


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("after_calls", [3, 9, 16, 24, 31])
def test_a_rank_that_dies_leaves_whole_versions(tmp_path: Path, victim: int, after_calls: int) -> None:
    """If this fails, the death of one rank of a publisher leaves half of a version, or keeps the next job out."""
    root = str(tmp_path)
    run_ranks(_publish, root, 1, world_size=2)
    with contextlib.suppress(RankError):
        run_ranks(_publish_until_killed, root, victim, after_calls, world_size=2, grace_s=30.0)
    first, second = MLP(HIDDEN), MLP(HIDDEN)
    assert cloudckpt.pull(root, model=first).version in (1, 10, 11, 12)
    run_ranks(_publish, root, 20, world_size=2)
    assert cloudckpt.pull(root, model=first).version == 20
    cloudckpt.pull(root, model=second)
    assert_equal(first, second)


def _dying_options(num_calls: int) -> cloudckpt.Options:
    """Return options with which the process is killed at the call of the store after so many."""
    calls: list[int] = []

    def die(_call: object) -> None:
        calls.append(1)
        if len(calls) > num_calls:
            os.kill(os.getpid(), signal.SIGKILL)

    return make_options(connections=1, wrap_store=Faults(Rule(fault=Tell(before=die), times=None)))


def _publish_forever(root: str, scratch: str, last_version: int, seed: int) -> None:
    """Train and publish from the newest version on, and leave the bits of each version that is begun."""
    options = _dying_options(random.Random(seed).randrange(20, 400))
    model, first = Policy(1), 0
    with contextlib.suppress(cloudckpt.CheckpointNotFoundError):
        first = cloudckpt.pull(root, model=model).version + 1
    publisher = cloudckpt.Publisher(root, anchor_every=5, keep_chains=2, options=options)
    for version in range(first, last_version + 1):
        train(model, version)
        Path(scratch, f"{version}.json").write_text(json.dumps(_hex_of(model)))
        publisher.publish(model=model, version=version)


def _hex_of(model: nn.Module) -> dict[str, str]:
    return {name: content.hex() for name, content in bits_of(model)}


def _pull_forever(root: str, scratch: str, last_version: int, seed: int) -> None:
    """Pull each new version, and compare its bits; or die at some call."""
    options = _dying_options(random.Random(seed).randrange(10, 300))
    model, version = Policy(seed), -1
    while version < last_version:
        try:
            weights = cloudckpt.pull(root, model=model, newer_than=version, timeout_s=0.5, options=options)
        except (cloudckpt.CheckpointNotFoundError, cloudckpt.errors.CheckpointChangedError):
            return  # the parent goes on when the publisher does
        version = weights.version
        assert _hex_of(model) == json.loads(Path(scratch, f"{version}.json").read_text()), version


@pytest.mark.parametrize("last_version", [6, pytest.param(100, marks=[pytest.mark.faults, pytest.mark.timeout(900)])])
def test_all_versions_are_exact_though_both_sides_die(tmp_path: Path, last_version: int) -> None:
    """If this fails, a pulled version differs by a bit from what was published, after crashes on either side."""
    root, scratch = str(tmp_path / "policy"), tmp_path / "bits"
    scratch.mkdir()
    late, newest = Policy(99), -1
    for number in range(50 * last_version):
        for body in (_publish_forever, _pull_forever):
            with contextlib.suppress(RankError):
                run_ranks(
                    body, root, str(scratch), last_version, number, world_size=1, process_group=False, grace_s=0.0
                )
        with contextlib.suppress(cloudckpt.CheckpointNotFoundError):
            newest = cloudckpt.pull(root, model=late).version
            assert _hex_of(late) == json.loads((scratch / f"{newest}.json").read_text())
        if newest == last_version:
            break
    assert newest == last_version
