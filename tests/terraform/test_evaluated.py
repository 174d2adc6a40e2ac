"""Values that Terraform computes in the modules without a provider, and the commands that scheduled jobs run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.terraform.evaluated import TERRAFORM, TERRAFORM_DIR, evaluate

from cloudckpt.cli import main

pytestmark = pytest.mark.skipif(TERRAFORM is None, reason="needs terraform or tofu")

_AWS = {"role_arn": "arn:aws:iam::123456789012:role/janitor", "vpc_id": "vpc-1", "subnet_ids": ["subnet-1"]}
_GCP = {"project": "my-project", "region": "europe-west4", "service_account_email": "x@y.iam.gserviceaccount.com"}
_JOBS = {
    "gc-job-aws": {"uri": "s3://bucket/run", "image": "gc:1", **_AWS},
    "gc-job-gcp": {"uri": "gs://bucket/run", "image": "gc:1", **_GCP},
}
_PODS = {"bucket_arn": "arn:aws:s3:::run", "service_accounts": {"trainer": ["ml:job"]}, "eks_cluster_name": "gpus"}
_TAGS = {"eks-cluster-name": "gpus", "kubernetes-namespace": "ml", "kubernetes-service-account": "job"}


def test_access_is_limited(tmp_path: Path) -> None:
    """If this fails, any pod has a role, or an endpoint reaches other buckets."""
    conditions = "jsondecode(local.trust.trainer).Statement[*].Condition.StringEquals"
    found = evaluate("s3-roles", conditions, _PODS, tmp_path / "roles")
    assert found == [{f"aws:RequestTag/{tag}": value for tag, value in _TAGS.items()}]
    resources = "jsondecode(local.vpc_endpoint_policy).Statement[*].Resource"
    found = evaluate("s3-bucket", resources, {"name": "run"}, tmp_path / "bucket")
    assert found == [["arn:aws:s3:::run", "arn:aws:s3:::run/*"]]


@pytest.mark.parametrize("job", ["README.md", *_JOBS])
def test_a_scheduled_job_removes_garbage(tmp_path: Path, job: str) -> None:
    """If this fails, gc ends with a usage error each night, or asks a question that nobody answers."""
    if job in _JOBS:
        command = evaluate(job, "local.command", _JOBS[job], tmp_path / "module")
        assert command[1] == _JOBS[job]["uri"]
    else:
        (line,) = [line for line in (TERRAFORM_DIR / job).read_text().splitlines() if " args: [" in line]
        command = json.loads(line.partition("args: ")[2])
    garbage = tmp_path / "root/step-1/data/20200101T000000000Z-0123456789ab/0-0.safetensors"
    garbage.parent.mkdir(parents=True)
    garbage.write_bytes(b"x")
    for age in ([], ["--older-than", "0s"]):
        with pytest.raises(SystemExit) as end:
            main([command[0], str(tmp_path / "root"), *command[2:5], *age])
        assert not end.value.code
    assert not garbage.exists()
