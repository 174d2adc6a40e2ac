"""The public names: one sorted list, and all of it there."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import errors, types


def test_the_list_is_sorted_unique_and_real() -> None:
    """If this fails, `from cloudckpt import *` breaks, or a public name is not where the documentation says."""
    assert list(cloudckpt.__all__) == sorted(set(cloudckpt.__all__))
    assert all(hasattr(cloudckpt, name) for name in cloudckpt.__all__)


def test_the_surface_is_small() -> None:
    """If this fails, a new user has to read more than a page of names to find the few that matter."""
    assert len(cloudckpt.__all__) <= 45
    at_top = set(cloudckpt.__all__) & set(errors.__all__)
    assert at_top == {
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "CloudckptError",
        "CommitUnknownError",
        "CorruptCheckpointError",
        "RankLostError",
    }


def test_the_classes_of_results_are_in_one_module() -> None:
    """If this fails, a user cannot annotate what a call returns, or finds the same class under two identities."""
    assert types.__all__ == sorted(set(types.__all__))
    for name in types.__all__:
        assert inspect.isclass(getattr(types, name))
        if name in cloudckpt.__all__:
            assert getattr(types, name) is getattr(cloudckpt, name)


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_our_calls_take_every_keyword_of_torchs(name: str) -> None:
    """If this fails, moving from torch's call to ours needs more than another name."""
    ours = inspect.signature(getattr(cloudckpt, name)).parameters
    torchs = inspect.signature(getattr(dcp, name)).parameters
    assert set(torchs) <= set(ours)
    for parameter in set(torchs) - {"state_dict"}:
        assert ours[parameter].default == torchs[parameter].default, parameter


def test_what_is_imported_is_little() -> None:
    """If this fails, every script that imports cloudckpt waits for clients that it does not use."""
    script = """
import sys, cloudckpt
print([name for name in ("boto3", "botocore", "s3fs", "gcsfs", "google.cloud.storage", "moto") if name in sys.modules])
"""
    answer = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() == "[]"
