"""Values that Terraform computes in the modules without a provider, and the commands that scheduled jobs run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.terraform.evaluated import TERRAFORM, TERRAFORM_DIR, evaluate

from cloudckpt.cli import main

pytestmark = pytest.mark.skipif(TERRAFORM is None, reason="needs terraform or tofu")

_ROLE = "arn:aws:iam::123456789012:role/janitor"
_ACCOUNT = "janitor@my-project.iam.gserviceaccount.com"
_JOBS: Mapping[str, Mapping[str, Any]] = {
    "gc-job-aws": {
        "uri": "s3://run",
        "image": "gc:1",
        "role_arn": _ROLE,
        "vpc_id": "vpc-1",
        "subnet_ids": ["subnet-1"],
    },
    "gc-job-gcp": {"uri": "gs://run", "image": "gc:1", "project": "my-project", "region": "europe-west4"}
    | {"service_account_email": _ACCOUNT},
}
_PODS = {"bucket_arn": "arn:aws:s3:::run", "service_accounts": {"trainer": ["ml:job"]}, "eks_cluster_name": "gpus"}
_POD = {"eks-cluster-name": "gpus", "kubernetes-namespace": "ml", "kubernetes-service-account": "job"}
_CONDITION = "jsondecode(local.trust.trainer).Statement[*].Condition.StringEquals"
_RESOURCES = "jsondecode(local.vpc_endpoint_policy).Statement[*].Resource"


@pytest.mark.parametrize(
    ("module", "variables", "expression", "expected"),
    [
        ("s3-roles", _PODS, _CONDITION, [{f"aws:RequestTag/{tag}": value for tag, value in _POD.items()}]),
        ("s3-bucket", {"name": "run"}, _RESOURCES, [["arn:aws:s3:::run", "arn:aws:s3:::run/*"]]),
        *((job, variables, "local.command[1]", variables["uri"]) for job, variables in _JOBS.items()),
    ],
)
def test_a_module_computes(
    tmp_path: Path, module: str, variables: Mapping[str, Any], expression: str, expected: Any
) -> None:
    """If this fails, a pod, an endpoint or a job reaches more than the module says, or something else."""
    assert evaluate(module, expression, variables, tmp_path) == expected


@pytest.mark.parametrize("job", ["README.md", *_JOBS])
def test_a_scheduled_job_removes_garbage(tmp_path: Path, job: str) -> None:
    """If this fails, gc ends with a usage error each night, or asks a question that nobody answers."""
    if job in _JOBS:
        command = evaluate(job, "local.command", _JOBS[job], tmp_path / "module")
    else:
        (line,) = [line for line in (TERRAFORM_DIR / job).read_text().splitlines() if " args: [" in line]
        command = json.loads(line.partition("args: ")[2])
    garbage = tmp_path / "root/step-1/data/20200101T000000000Z-0123456789ab/0-0.safetensors"
    garbage.parent.mkdir(parents=True)
    garbage.write_bytes(b"x")
    os.utime(garbage, (0, 0))
    with pytest.raises(SystemExit) as end:
        main(["gc", str(tmp_path / "root"), *command[2:]])
    assert (command[0], end.value.code or 0, garbage.exists()) == ("gc", 0, False)
