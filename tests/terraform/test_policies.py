"""The documents that the modules hand to AWS and Google, as Terraform itself renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.terraform.evaluated import GIVEN, MODULES_DIR, POLICIES_DIR, TERRAFORM, evaluate, rendered

pytestmark = pytest.mark.skipif(TERRAFORM is None, reason="needs terraform or tofu")

_PROVIDER = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/ABC"
_BUCKET = "arn:aws:s3:::checkpoints"


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_tried_on_moto_is_what_the_module_makes(name: str, tmp_path: Path) -> None:
    """If this fails, the roles' tests are about policies that no user gets: `python -m tests.terraform.evaluated`."""
    assert rendered([name], tmp_path)[name] == json.loads((POLICIES_DIR / f"{name}.json").read_text())


def test_a_bucket_of_its_own_needs_no_prefix(tmp_path: Path) -> None:
    """If this fails, roles for a whole bucket match no key of it, or lists are bound to a prefix that is none."""
    policies = evaluate("s3-roles", "local.policies", {"bucket_arn": _BUCKET}, tmp_path)
    text = "".join(policies.values())
    assert "Condition" not in text
    assert f'"{_BUCKET}/*"' in text
    assert f'"{_BUCKET}/manifest.json"' in text
    assert "//" not in text


def test_a_kms_key_is_granted_where_there_is_one(tmp_path: Path) -> None:
    """If this fails, saves to a bucket with SSE-KMS are denied, or a reader can encrypt."""
    key = "arn:aws:kms:eu-west-1:123456789012:key/abc"
    policies = evaluate("s3-roles", "local.policies", {"bucket_arn": _BUCKET, "kms_key_arn": key}, tmp_path)
    granted = {role: _statement(policy, "Encrypt") for role, policy in policies.items()}
    assert granted["reader"]["Action"] == ["kms:Decrypt"]
    assert granted["trainer"]["Action"] == granted["janitor"]["Action"] == ["kms:GenerateDataKey", "kms:Decrypt"]
    assert all(statement["Resource"] == [key] for statement in granted.values())
    assert "s3:ListMultipartUploadParts" in _statement(policies["trainer"], "Save")["Action"]


def test_only_roles_that_somebody_may_assume_are_made(tmp_path: Path) -> None:
    """If this fails, a role is made that trusts nobody, which AWS refuses, or one that was asked for is missing."""
    principal = "arn:aws:iam::123456789012:role/nodes"
    variables = {
        "bucket_arn": _BUCKET,
        "trusted_principals": {"trainer": [principal]},
        "oidc_provider_arn": _PROVIDER,
        "service_accounts": {"trainer": ["ml:trainer"], "janitor": ["ml:gc", "ml:cleanup"]},
    }
    trust = evaluate("s3-roles", "local.trust", variables, tmp_path)
    assert set(trust) == {"trainer", "janitor"}
    assert _statement(trust["trainer"], "Assume")["Principal"] == {"AWS": [principal]}
    issuer = "oidc.eks.eu-west-1.amazonaws.com/id/ABC"
    assert _statement(trust["janitor"], "ServiceAccounts") == {
        "Sid": "ServiceAccounts",
        "Effect": "Allow",
        "Principal": {"Federated": _PROVIDER},
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Condition": {
            "StringEquals": {
                f"{issuer}:aud": "sts.amazonaws.com",
                f"{issuer}:sub": ["system:serviceaccount:ml:cleanup", "system:serviceaccount:ml:gc"],
            }
        },
    }


def test_a_machine_may_run_as_a_role(tmp_path: Path) -> None:
    """If this fails, the benchmark runner's instance gets no credentials, or others than machines do."""
    variables = {"bucket_arn": _BUCKET, "trusted_services": {"trainer": ["ec2.amazonaws.com"]}}
    trust = evaluate("s3-roles", "local.trust", variables, tmp_path)
    assert set(trust) == {"trainer"}
    assert json.loads(trust["trainer"])["Statement"] == [
        {
            "Sid": "Machines",
            "Effect": "Allow",
            "Principal": {"Service": ["ec2.amazonaws.com"]},
            "Action": "sts:AssumeRole",
        }
    ]


@pytest.mark.parametrize("is_required", [False, True])
def test_the_bucket_asks_for_tls_and_for_conditional_commits(tmp_path: Path, *, is_required: bool) -> None:
    """If this fails, the bucket takes requests in clear text, or refuses data, which goes up without a condition."""
    variables = {"name": "checkpoints", "require_conditional_commits": is_required}
    policy = json.loads(evaluate("s3-bucket", "local.bucket_policy", variables, tmp_path))
    assert all(statement["Effect"] == "Deny" for statement in policy["Statement"])
    transport = _statement(json.dumps(policy), "OnlyOverTLS")
    assert transport["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert transport["Resource"] == [_BUCKET, f"{_BUCKET}/*"]
    commits = [statement for statement in policy["Statement"] if statement["Sid"] == "ManifestsAreNeverReplaced"]
    assert bool(commits) == is_required
    for statement in commits:
        assert all("manifest" in resource for resource in statement["Resource"])


def test_nothing_current_expires() -> None:
    """If this fails, a lifecycle rule removes data that a manifest still names."""
    text = (MODULES_DIR / "s3-bucket" / "main.tf").read_text()
    rules = text.split("resource ")[-1]
    assert "aws_s3_bucket_lifecycle_configuration" in rules
    expirations = rules.split("expiration {")[1:]
    # Of noncurrent versions, and of markers under which there is nothing.
    assert len(expirations) == 2
    assert [body.split("}")[0].split("=")[0].strip() for body in expirations] == [
        "noncurrent_days",
        "expired_object_delete_marker",
    ]


def _statement(policy: str, sid: str) -> dict[str, Any]:
    (found,) = (statement for statement in json.loads(policy)["Statement"] if statement["Sid"] == sid)
    return dict(found)
