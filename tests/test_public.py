"""The public names: one sorted list, and all of it there."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch.distributed.checkpoint as dcp

import cloudckpt


def test_the_list_is_sorted_unique_and_real() -> None:
    """If this fails, `from cloudckpt import *` breaks, or a public name is not where the documentation says."""
    assert list(cloudckpt.__all__) == sorted(set(cloudckpt.__all__))
    assert all(hasattr(cloudckpt, name) for name in cloudckpt.__all__)


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_our_calls_take_every_keyword_of_torchs(name: str) -> None:
    """If this fails, moving from torch's call to ours needs more than another name."""
    ours = inspect.signature(getattr(cloudckpt, name)).parameters
    torchs = inspect.signature(getattr(dcp, name)).parameters
    assert set(torchs) <= set(ours)
    for parameter in set(torchs) - {"state_dict"}:
        assert ours[parameter].default == torchs[parameter].default, parameter


def test_import_loads_no_client() -> None:
    """If this fails, every script that imports cloudckpt waits for clients that it does not use."""
    script = """
import sys, cloudckpt
print([name for name in ("boto3", "botocore", "s3fs", "gcsfs", "google.cloud.storage", "moto") if name in sys.modules])
"""
    answer = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() == "[]"
