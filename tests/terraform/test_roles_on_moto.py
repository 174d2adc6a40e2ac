"""The roles that Terraform makes, on an S3 that enforces their policies: what each needs, and no more."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.terraform.evaluated import GIVEN, POLICIES_DIR, TERRAFORM, rendered
from tests.terraform.iam import IAMServer, iam_server
from tests.terraform.jobs import JOBS, Place
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt

BUCKET = "checkpoints"
_READING = "load list_checkpoints verify"
_WRITING = "save put_data copy"
MAY = {
    "s3-trainer": f"{_WRITING} {_READING} overwrite fail delete gc examine",
    "s3-trainer-resuming": "save resume overwrite fail delete copy",
    "s3-trainer-without-delete": f"{_WRITING} {_READING} fail",
    "s3-reader": _READING,
    "s3-janitor": f"{_READING} delete gc",
}
"""The jobs that each role must be able to do."""
MAY_NOT = {
    "s3-trainer": "resume leave_the_prefix",
    "s3-trainer-resuming": "leave_the_prefix",
    "s3-trainer-without-delete": "overwrite resume delete gc examine leave_the_prefix",
    "s3-reader": f"{_WRITING} overwrite delete gc examine leave_the_prefix",
    "s3-janitor": f"{_WRITING} overwrite examine leave_the_prefix",
}
NEEDED_BY = {
    "s3:AbortMultipartUpload": {
        "s3-trainer": "fail",
        "s3-trainer-resuming": "fail",
        "s3-trainer-without-delete": "fail",
        "s3-janitor": "gc",
    },
    "s3:DeleteObject": {"s3-trainer": "overwrite", "s3-trainer-resuming": "overwrite", "s3-janitor": "gc"},
    "s3:ListBucketMultipartUploads": {"s3-trainer": "delete", "s3-trainer-resuming": "resume", "s3-janitor": "gc"},
    "s3:ListMultipartUploadParts": {"s3-trainer-resuming": "resume"},
    "s3:PutObject": {"s3-janitor": "gc"},
}
"""Which work is tried without an action; all others are tried with the first that there is."""
REFUSED = (cloudckpt.CloudckptError, CheckpointException, AssertionError)
_numbers = itertools.count()


def policy(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((POLICIES_DIR / f"{name}.json").read_text())
    return found


def actions(name: str) -> list[str]:
    return sorted({action for statement in policy(name)["Statement"] for action in statement["Action"]})


def without(document: dict[str, Any], action: str) -> dict[str, Any]:
    """The policy but for one action."""
    changed = copy.deepcopy(document)
    for statement in changed["Statement"]:
        statement["Action"] = [one for one in statement["Action"] if one != action]
    changed["Statement"] = [statement for statement in changed["Statement"] if statement["Action"]]
    return changed


@pytest.fixture(scope="module")
def server() -> Iterator[IAMServer]:
    with iam_server() as started:
        with started.unenforced():
            started.client("s3").create_bucket(Bucket=BUCKET)
        yield started


@pytest.fixture(scope="module")
def owner(server: IAMServer) -> dict[str, Any]:
    everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    return server.options_of(everything)


def place(server: IAMServer, owner: dict[str, Any], document: dict[str, Any]) -> Place:
    return Place(root=f"s3://{BUCKET}/run/{next(_numbers)}", role=server.options_of(document), owner=owner)


@pytest.mark.parametrize(("role", "job"), [(role, job) for role, jobs in MAY.items() for job in jobs.split()])
def test_a_role_does_its_work(server: IAMServer, owner: dict[str, Any], role: str, job: str) -> None:
    """If this fails, whoever uses the module is denied what the role is for."""
    JOBS[job](place(server, owner, policy(role)))


@pytest.mark.parametrize(("role", "job"), [(role, job) for role, jobs in MAY_NOT.items() for job in jobs.split()])
def test_a_role_does_nothing_else(server: IAMServer, owner: dict[str, Any], role: str, job: str) -> None:
    """If this fails, a role reaches further than it says: a reader that writes, a trainer in others' folders."""
    with pytest.raises(REFUSED):
        JOBS[job](place(server, owner, policy(role)))


@pytest.mark.parametrize(("role", "action"), [(role, action) for role in GIVEN for action in actions(role)])
def test_each_action_of_a_role_is_needed(server: IAMServer, owner: dict[str, Any], role: str, action: str) -> None:
    """If this fails, the policy grants what nothing needs."""
    lessened = without(policy(role), action)
    job = NEEDED_BY.get(action, {}).get(role) or MAY[role].split()[0]
    with pytest.raises(REFUSED):
        JOBS[job](place(server, owner, lessened))


@pytest.mark.skipif(TERRAFORM is None, reason="needs terraform or tofu")
def test_the_policies_are_those_of_the_module(tmp_path: Path) -> None:
    """If this fails, the tests here are about policies that no user gets: `python -m tests.terraform.evaluated`."""
    assert rendered(list(GIVEN), tmp_path) == {name: policy(name) for name in GIVEN}
