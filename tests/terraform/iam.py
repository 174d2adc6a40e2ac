"""Roles on the server of `tests.terraform.iam_server`, and their credentials."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from cloudckpt.testing.servers import Program, answers, ask, clean_environment, reserved_port, running

ROOT = Path(__file__).parents[2]
_REGION = "us-east-1"
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class IAMServer:
    """S3 that asks IAM."""

    endpoint_url: str

    def enforce(self, *, is_enforced: bool) -> None:
        """From here on policies count, or not."""
        count = "0" if is_enforced else "inf"
        status, answer = ask(self.endpoint_url, "POST", "/moto-api/reset-auth", timeout_s=10.0, body=count.encode())
        assert status == 200, answer

    @contextlib.contextmanager
    def unenforced(self) -> Iterator[None]:
        """For what the test itself does."""
        self.enforce(is_enforced=False)
        try:
            yield
        finally:
            self.enforce(is_enforced=True)

    def client(self, service: str) -> Any:
        """boto3's, for the test itself."""
        return boto3.client(
            service,
            endpoint_url=self.endpoint_url,
            region_name=_REGION,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",  # noqa: S106  # moto takes anything
        )

    def options_of(self, policy: Mapping[str, Any]) -> dict[str, Any]:
        """The storage options of a session under a fresh role that has nothing but this policy."""
        with self.unenforced():
            name = f"role-{next(_numbers)}"
            iam = self.client("iam")
            role = iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(_TRUST))["Role"]
            iam.put_role_policy(RoleName=name, PolicyName="checkpoints", PolicyDocument=json.dumps(policy))
            session = self.client("sts").assume_role(RoleArn=role["Arn"], RoleSessionName="test")["Credentials"]
        return {
            "endpoint_url": self.endpoint_url,
            "region": _REGION,
            "path_style": True,
            "access_key_id": session["AccessKeyId"],
            "secret_access_key": session["SecretAccessKey"],
            "session_token": session["SessionToken"],
        }


_TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"}],
}


@contextlib.contextmanager
def iam_server() -> Iterator[IAMServer]:
    """A fresh one, with policies enforced; gone at the end."""
    with reserved_port() as port:
        endpoint_url = f"http://127.0.0.1:{port}"
        program = Program(
            name="moto with IAM",
            command=[sys.executable, "-m", "tests.terraform.iam_server", str(port)],
            environment={**clean_environment(), "PYTHONPATH": str(ROOT)},
            is_ready=lambda timeout_s: answers(endpoint_url, "/moto-api/", timeout_s=timeout_s),
        )
        with running(program, start_timeout_s=120.0):
            server = IAMServer(endpoint_url=endpoint_url)
            server.enforce(is_enforced=True)
            yield server
