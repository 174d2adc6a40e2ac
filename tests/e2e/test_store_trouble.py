"""A store that denies or loses its answers, seen by ranks that save and load."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import S3Place
from tests.e2e.servers import FlakyS3, Trouble
from tests.options import make_options
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.options import MIB

single_process = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
RANK_1_DATA = re.compile(r"/data/[^/]+/1-")
MANIFEST = re.compile(r"/manifest\.json")


def values() -> dict[str, torch.Tensor]:
    own = dist.get_rank() if dist.is_initialized() else 0
    return {"shared": torch.arange(1000.0), f"own-{own}": torch.full((500,), own + 1.0)}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in values().items()}


def save_while_rank_1_is_denied(root: str) -> None:
    for name, save in {
        "ours": cloudckpt.save,
        "torchs": lambda state, uri: dcp.save(state, storage_writer=cloudckpt.ObjectStoreWriter(uri)),
    }.items():
        with pytest.raises(CheckpointException, match=r"data/[^/]+/1-0") as caught:
            save(values(), f"{root}/{name}")
        assert sorted(caught.value.failures) == [1]
        ((cause, _),) = caught.value.failures.values()
        assert isinstance(cause, cloudckpt.errors.AccessDeniedError)


@pytest.mark.multirank
@pytest.mark.slow
def test_one_denied_object_fails_the_save_on_every_rank(s3: S3Place, s3_application: FlakyS3) -> None:
    """If this fails, a save that lost an object returns success, as others' do."""
    with s3_application.troubled(
        lambda method, url: "deny" if method in {"PUT", "POST"} and RANK_1_DATA.search(url) else None
    ):
        run_ranks(save_while_rank_1_is_denied, s3.root, world_size=2)
    assert s3.manifest_keys() == []
    assert not any(key.startswith("ours/") for key in s3.contents())
    assert s3.num_unfinished_uploads() == 0


@single_process
def test_a_denied_part_leaves_nothing_behind(s3: S3Place, s3_application: FlakyS3) -> None:
    """If this fails, interrupted multipart uploads are paid for, for ever, or become half an object."""
    options = make_options(part_bytes=5 * MIB)
    with (
        s3_application.troubled(lambda _, url: "deny" if "partNumber=2" in url else None),
        pytest.raises(cloudckpt.errors.AccessDeniedError, match=r"data/[^/]+/0-0"),
    ):
        cloudckpt.save({"x": torch.zeros(4 * MIB)}, s3.uri(), options=options)
    assert s3.keys() == []
    assert s3.num_unfinished_uploads() == 0


@single_process
def test_a_lost_answer_to_the_commit_is_looked_up(s3: S3Place, s3_application: FlakyS3) -> None:
    """If this fails, a save that did commit reports a failure, or blames another writer."""
    commits = itertools.count()

    def lose_first(method: str, url: str) -> Trouble | None:
        is_commit = method == "PUT" and MANIFEST.search(url) is not None
        return "lose the answer" if is_commit and next(commits) == 0 else None

    with s3_application.troubled(lose_first):
        cloudckpt.save(values(), s3.uri())
    assert len(s3.manifest_keys()) == 1
    state = zeros()
    cloudckpt.load(state, s3.uri())
    assert_same(state, values())
