"""Versions that are pulled into folders, which the safetensors library reads."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.kit.options import make_options
from tests.kit.ranks import RankError, run_ranks
from tests.publication.turns import Mortal
from tests.publication.weights import Bits, Policy, bits_of, train

import cloudckpt
from cloudckpt.commit.log import resolve
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidOptionError,
    UnsupportedValueError,
)
from cloudckpt.io.client import open_client
from cloudckpt.options import Options
from cloudckpt.testing.damage import flip_bit
from cloudckpt.testing.faults import Faults, Rule, Tell

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 600


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "hf"


def pull(root: Path, folder: Path, **settings: Any) -> Any:
    return cloudckpt.pull(root, folder, max_shard_bytes=SHARD_BYTES, **settings)


def publish(publisher: cloudckpt.Publisher, model: Policy, version: int) -> Bits:
    train(model, version)
    publisher.publish(model=model, version=version)
    return bits_of(model)


def shards_of(folder: Path) -> list[str]:
    """The files that the index names."""
    return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))


def read(folder: Path) -> Bits:
    """Return the tensors that a program reads that follows the index."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert sum(map(len, files.values())) == len(weight_map)
    return tuple(
        (name, bytes(files[weight_map[name]][name].reshape(-1).view(torch.uint8).numpy()))
        for name in sorted(weight_map)
    )


def test_a_folder_has_the_bits_of_each_version_and_reads_what_a_model_reads(root: Path, folder: Path) -> None:
    """If this fails, an engine reloads other bits than a model gets, or a folder reads all weights for each version."""
    model, beside = Policy(1, size=64), Policy(2, size=64)
    publisher = cloudckpt.Publisher(root, anchor_every=3)
    for version in range(5):
        published = publish(publisher, model, version)
        expected = cloudckpt.pull(root, model=beside)
        weights = pull(root, folder)
        assert (weights.version, weights.num_versions_read) == (version, 1)
        assert weights.starts_at_anchor == expected.starts_at_anchor == (version == 0)
        assert read(folder) == published == bits_of(beside)
        assert len(shards_of(folder)) > 2
        if version:
            entries = cloudckpt.describe(root / f"version-{version}").tensors
            changed = sum(tensor.num_bytes for tensor in entries if tensor.name.startswith("delta."))
            assert weights.num_bytes_read == changed < 0.5 * sum(len(content) for _, content in published)
    found = {name: tensor for file in shards_of(folder) for name, tensor in load_file(folder / file).items()}
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }


def test_the_version_that_the_folder_has_is_not_written_again(root: Path, folder: Path) -> None:
    """If this fails, each look for a version writes all weights."""
    publish(cloudckpt.Publisher(root), Policy(1), 1)
    pull(root, folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    weights = pull(root, folder)
    assert (weights.version, weights.num_versions_read, weights.num_bytes_read) == (1, 0, 0)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_the_files_before_stay_until_the_second_pull_after_them(root: Path, folder: Path) -> None:
    """If this fails, an engine that reads a version loses its files, or versions fill the disk."""
    model, publisher = Policy(1), cloudckpt.Publisher(root)
    named = []
    for version in (1, 2, 3):
        publish(publisher, model, version)
        pull(root, folder)
        named.append(shards_of(folder))
        there = {path.name for path in folder.glob("*.safetensors")}
        assert there == {name for names in named[-2:] for name in names}


def damage(path: Path) -> None:
    """Flip the last bit, as a disk does: the size and the header stay."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_wrong_base_is_found_before_anything_is_written(root: Path, folder: Path) -> None:
    """If this fails, a difference is added to bits of a folder that it was not made for."""
    model, publisher = Policy(1), cloudckpt.Publisher(root)
    publish(publisher, model, 1)
    pull(root, folder)
    published = publish(publisher, model, 2)
    damage(folder / shards_of(folder)[0])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.copytree(root / "version-1", root / "kept")
    cloudckpt.delete(root / "version-1")
    with pytest.raises(CheckpointChangedError, match="version 1, which it needs, is gone"):
        pull(root, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    shutil.rmtree(root / "version-1")
    (root / "kept").rename(root / "version-1")
    assert pull(root, folder).starts_at_anchor
    assert read(folder) == published


@pytest.mark.parametrize("loss", ["file", "names"])
def test_a_folder_that_cannot_be_a_base_is_written_anew(root: Path, folder: Path, loss: str) -> None:
    """If this fails, a folder that has lost a file stays broken, or tensors of other names are taken for the base."""
    model, publisher = Policy(1), cloudckpt.Publisher(root)
    published = publish(publisher, model, 1)
    if loss == "file":
        pull(root, folder)
        (folder / shards_of(folder)[0]).unlink()
    else:
        pull(root, folder, strip_prefix="")
        published = publish(publisher, model, 2)
    assert pull(root, folder).starts_at_anchor
    assert read(folder) == published


def test_a_damaged_difference_leaves_the_folder(root: Path, folder: Path) -> None:
    """If this fails, damage in the bucket reaches the folder, or takes the version before away."""
    model, publisher = Policy(1), cloudckpt.Publisher(root)
    published = publish(publisher, model, 1)
    pull(root, folder)
    publish(publisher, model, 2)
    client = open_client(f"{root}/version-2", Options())
    (stored,) = resolve(client).manifest.objects
    flip_bit(client.store, stored.key, bit=8 * stored.size - 1)
    with pytest.raises(CorruptCheckpointError, match="version-2"):
        pull(root, folder)
    assert read(folder) == published


def test_bits_that_were_never_a_state_are_not_written(root: Path, folder: Path) -> None:
    """If this fails, the checksums of the whole tensors are not compared before a folder is written."""
    model = Policy(1)

    def change(event: cloudckpt.Event) -> None:
        if event.name == "save.set_up":
            with torch.no_grad():
                model.norm.weight[0] += 1

    publish(cloudckpt.Publisher(root, options=Options(on_event=change)), model, 1)
    with pytest.raises(CorruptCheckpointError, match=r"'model\.norm\.weight' of .* nothing was written"):
        pull(root, folder)
    assert not folder.exists()


@pytest.mark.parametrize("carried_out", [False, True])
def test_a_death_at_any_call_leaves_one_of_the_two_versions(tmp_path: Path, root: Path, *, carried_out: bool) -> None:
    """If this fails, a pull that dies leaves half of a version, or files that nobody removes."""
    model, publisher = Policy(1), cloudckpt.Publisher(root)
    old = publish(publisher, model, 1)
    pull(root, tmp_path / "old")
    new = publish(publisher, model, 2)
    pull(root, tmp_path / "expected")
    allowed = {path.name for base in ("old", "expected") for path in (tmp_path / base).iterdir()}
    endings = set()
    for after_calls in range(200):
        folder = tmp_path / f"hf-{after_calls}"
        shutil.copytree(tmp_path / "old", folder)
        mortal = Mortal(carried_out=carried_out)
        is_dead = mortal.dies_in(lambda: pull(root, folder, target_options=mortal.options), after_calls=after_calls)  # noqa: B023
        found = read(folder)
        assert found in (old, new)
        endings.add(found)
        pull(root, folder)
        assert read(folder) == new
        assert {path.name for path in folder.iterdir()} <= allowed
        if not is_dead:
            break
    assert not is_dead
    assert endings == {old, new}


def _pull_until_killed(root: str, folder: str, operation: str) -> None:
    rule = Rule(fault=Tell(before=lambda _call: os.kill(os.getpid(), signal.SIGKILL)), operations={operation})
    options = make_options(connections=1, part_bytes=1 << 20, wrap_store=Faults(rule))
    cloudckpt.pull(root, folder, target_options=options)


@pytest.mark.parametrize("operation", ["complete_multipart", pytest.param("put", marks=pytest.mark.faults)])
def test_a_process_that_is_killed_leaves_the_version_before(root: Path, folder: Path, operation: str) -> None:
    """If this fails, what SIGKILL leaves on the disk stays there, or a reader takes it for a version."""
    model, publisher = Policy(1, size=1024), cloudckpt.Publisher(root)
    old = publish(publisher, model, 1)
    cloudckpt.pull(root, folder)
    new = publish(publisher, model, 2)
    with pytest.raises(RankError):
        run_ranks(_pull_until_killed, str(root), str(folder), operation, world_size=1, process_group=False, grace_s=0.0)
    assert len(list(folder.iterdir())) > len(shards_of(folder)) + 1
    assert read(folder) == old
    cloudckpt.pull(root, folder)
    assert read(folder) == new
    assert len(list(folder.iterdir())) == 3  # the index, and the file of each version


def test_other_weights_are_not_touched(root: Path, folder: Path) -> None:
    """If this fails, a pull writes over the base model, or beside it, where programs differ in what they read."""
    publish(cloudckpt.Publisher(root), Policy(1), 1)
    cloudckpt.export_checkpoint(root / "version-1", folder, include="model", strip_prefix="model")
    for name in ("model.safetensors", INDEX):
        with pytest.raises(CheckpointExistsError, match=f"has other weights, '{name}', and nothing was written"):
            pull(root, folder)
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / INDEX).write_text("{}")
    assert [path.name for path in folder.iterdir()] == [INDEX]


def test_files_of_config_and_tokenizer(tmp_path: Path, root: Path, folder: Path) -> None:
    """If this fails, the folder is no model to an engine, or a file that was edited there is lost."""
    base = tmp_path / "base"
    base.mkdir()
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (base / name).write_text(name)
    (folder / "config.json").write_text("edited")
    publish(cloudckpt.Publisher(root), Policy(1), 1)
    pull(root, folder, config_from=base)
    others = {path.name: path.read_text() for path in folder.iterdir() if "safetensors" not in path.name}
    assert others == {"config.json": "edited", "tokenizer.json": "tokenizer.json"}


def test_a_folder_waits_for_the_next_version(root: Path, folder: Path) -> None:
    """If this fails, the process beside an engine polls by itself."""
    model, publisher = Policy(1), cloudckpt.Publisher(root)
    publish(publisher, model, 1)
    assert pull(root, folder, newer_than=0).version == 1
    with pytest.raises(CheckpointNotFoundError, match="no version above 1"):
        pull(root, folder, newer_than=1)
    looks = Rule(fault=Tell(before=lambda _call: publish(publisher, model, 2)), operations={"list_directories"}, skip=1)
    options = make_options(wrap_store=Faults(looks))
    assert pull(root, folder, newer_than=1, timeout_s=60, options=options).version == 2
    assert read(folder) == bits_of(model)
    assert pull(root, folder, version=1).version == 1


def test_wrong_arguments_are_refused(root: Path, folder: Path) -> None:
    """If this fails, a pull fills one of two places, or writes names or dtypes that no program reads."""
    model = Policy(1)
    publish(cloudckpt.Publisher(root), model, 1)
    for places in ({}, {"folder": folder, "model": model}):
        with pytest.raises(InvalidOptionError, match="a model or a folder"):
            cloudckpt.pull(root, **places)
    with pytest.raises(InvalidOptionError, match="prefix"):
        pull(root, folder, strip_prefix="policy")
    model.register_buffer("rotation", torch.zeros(2, dtype=torch.complex64))
    publish(cloudckpt.Publisher(root), model, 2)
    with pytest.raises(UnsupportedValueError, match=r"model\.rotation"):
        pull(root, folder)
    assert not folder.exists()
