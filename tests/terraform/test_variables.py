"""What the modules refuse to be given, by Terraform's own word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.terraform.evaluated import TERRAFORM, complaints

pytestmark = pytest.mark.skipif(TERRAFORM is None, reason="needs terraform or tofu")

GOOD: Mapping[str, Mapping[str, Any]] = {
    "s3-bucket": {"name": "my-checkpoints", "kms_key_arn": "arn:aws:kms:eu-west-1:123456789012:key/abc-def"},
    "s3-roles": {
        "bucket_arn": "arn:aws:s3:::my-checkpoints",
        "prefix": "team/run.1",
        "trusted_principals": {"trainer": ["arn:aws:iam::123456789012:role/nodes"]},
        "trusted_services": {"trainer": ["ec2.amazonaws.com", "ec2.amazonaws.com.cn"]},
        "oidc_provider_arn": "arn:aws:iam::123456789012:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/ABC",
        "service_accounts": {"reader": ["ml:evaluation"]},
    },
    "gcs-bucket": {"name": "my-checkpoints", "project": "my-project", "location": "europe-west4"},
    "gcs-roles": {
        "bucket": "my-checkpoints",
        "project": "my-project",
        "prefix": "team/run.1",
        "members": {"trainer": ["serviceAccount:a@my-project.iam.gserviceaccount.com"]},
        "service_accounts": {"reader": ["ml:evaluation"]},
    },
    "benchmark-runner-aws": {
        "bucket_uri": "s3://my-checkpoints/bench",
        "subnet_id": "subnet-0123456789abcdef0",
        "vpc_id": "vpc-0123456789abcdef0",
        "role_name": "bench-trainer",
    },
    "benchmark-runner-gcp": {
        "bucket_uri": "gs://my-checkpoints/bench",
        "project": "my-project",
        "zone": "europe-west4-a",
        "subnetwork": "default",
        "service_account_email": "bench@my-project.iam.gserviceaccount.com",
    },
}
BAD = [
    ("s3-bucket", {"name": "My_Bucket"}),
    ("s3-bucket", {"name": "a..b"}),
    ("s3-bucket", {"partition": "aws-moon"}),
    ("s3-bucket", {"kms_key_arn": "arn:aws:kms:eu-west-1:123456789012:alias/mine"}),
    ("s3-bucket", {"abort_uploads_after_days": 0}),
    ("s3-bucket", {"keep_noncurrent_days": 1.5}),
    ("s3-roles", {"bucket_arn": "arn:aws:s3:::*"}),
    ("s3-roles", {"bucket_arn": "arn:aws:s3:::bucket/key"}),
    ("s3-roles", {"prefix": "*"}),
    ("s3-roles", {"prefix": "run/"}),
    ("s3-roles", {"prefix": "${aws:username}"}),
    ("s3-roles", {"trusted_principals": {"trainer": ["*"]}}),
    ("s3-roles", {"trusted_principals": {"reader": ["arn:aws:iam::123456789012:role/*"]}}),
    ("s3-roles", {"trusted_services": {"trainer": ["*"]}}),
    ("s3-roles", {"trusted_services": {"trainer": ["lambda.amazonaws.com"]}}),
    ("s3-roles", {"service_accounts": {"reader": ["ml:*"]}}),
    ("s3-roles", {"service_accounts": {"reader": ["evaluation"]}}),
    ("s3-roles", {"oidc_provider_arn": "oidc.eks.eu-west-1.amazonaws.com/id/ABC"}),
    ("s3-roles", {"max_session_hours": 24}),
    ("gcs-bucket", {"name": "goog-bucket"}),
    ("gcs-bucket", {"name": "My Bucket"}),
    ("gcs-bucket", {"remove_parts_after_days": 0}),
    ("gcs-bucket", {"soft_delete_days": 3}),
    ("gcs-bucket", {"kms_key_name": "my-key"}),
    ("gcs-roles", {"prefix": "a'b"}),
    ("gcs-roles", {"members": {"reader": ["allUsers"]}}),
    ("gcs-roles", {"members": {"reader": ["allAuthenticatedUsers"]}}),
    ("gcs-roles", {"service_accounts": {"reader": ["ml:*"]}}),
    ("benchmark-runner-aws", {"bucket_uri": "s3://my-checkpoints/$(reboot)"}),
    ("benchmark-runner-aws", {"package": "cloudckpt; reboot"}),
    ("benchmark-runner-gcp", {"bucket_uri": "s3://my-checkpoints"}),
    ("benchmark-runner-gcp", {"package": "cloudckpt; reboot"}),
]


@pytest.mark.parametrize("module", GOOD)
def test_what_is_right_is_taken(module: str, tmp_path: Path) -> None:
    """If this fails, a validation refuses what users have to pass."""
    assert complaints(module, GOOD[module], tmp_path) == ""


@pytest.mark.parametrize(
    ("module", "wrong"), BAD, ids=[f"{module}-{'-'.join(wrong)}-{n}" for n, (module, wrong) in enumerate(BAD)]
)
def test_what_is_wrong_is_refused(module: str, wrong: Mapping[str, Any], tmp_path: Path) -> None:
    """If this fails, a mistake reaches the cloud: a role that anybody may assume, a rule that removes live uploads."""
    (name,) = wrong
    said = complaints(module, {**GOOD[module], **wrong}, tmp_path)
    assert "Invalid value for variable" in said
    assert f"var.{name}" in said
