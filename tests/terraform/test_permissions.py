"""``docs/permissions.md`` names the requests that are made, and the actions that the roles have."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.terraform.evaluated import POLICIES_DIR
from tests.terraform.jobs import JOBS, Place

from cloudckpt.stores.s3.client import APIS, S3Client
from cloudckpt.testing.servers import S3Server, moto_server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

_numbers = itertools.count()
TEXT = (Path(__file__).parents[2] / "docs" / "permissions.md").read_text()
S3_TEXT, _, GCS_TEXT = TEXT.partition("## Google Cloud Storage")
JOBS_OF_ROWS = {
    "save": ("save",),
    "fails": ("fail", "fail_late"),
    "overwrite": ("overwrite",),
    "resume": ("resume",),
    "load": ("load", "list_checkpoints", "verify"),
    "delete": ("delete", "gc"),
    "keep_last": ("manage",),
    "read": ("copy_out",),
    "same service": ("copy",),
}
OF_A_SAVE = ("fails", "overwrite", "resume", "keep_last", "same service")
"""Rows that tell of requests besides those of a save."""


def rows() -> dict[str, set[str]]:
    """Of the first table: by a word of its operation, the requests."""
    lines = [line for line in S3_TEXT.splitlines() if line.startswith("| ")]
    found = {line.split(" | ")[0]: set(re.findall(r"\b[A-Z]\w+", line.split(" | ")[1])) for line in lines}
    return {
        word: next(apis for name, apis in found.items() if re.search(rf"\b{word}\b", name) and apis)
        for word in JOBS_OF_ROWS
    }


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as started:
        started.create_bucket("checkpoints")
        yield started


@pytest.mark.parametrize("word", JOBS_OF_ROWS)
def test_the_requests_are_those_that_are_made(server: S3Server, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """If this fails, an operation makes a request that the document does not tell of, so that a role lacks it."""
    told = rows()[word] | (rows()["save"] if word in OF_A_SAVE else set())
    for job in JOBS_OF_ROWS[word]:
        assert made_by(job, server, monkeypatch) <= told, job


def made_by(job: str, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The requests of the role in a job; there are some."""
    made: set[str] = set()
    request_for = S3Client.request_for

    def watched(self: Any, api: str) -> Any:
        credentials = self.boto3_client._request_signer._credentials
        if credentials is not None and credentials.access_key == "role":
            made.add(api)
        return request_for(self, api)

    with monkeypatch.context() as patched:
        patched.setattr(S3Client, "request_for", watched)
        role = {**server.storage_options, "access_key_id": "role"}
        JOBS[job](Place(root=f"s3://checkpoints/run/{next(_numbers)}", role=role, owner=server.storage_options))
    assert made
    return made


def test_what_a_request_needs_is_in_the_table() -> None:
    """If this fails, the table of permissions lacks one that an operation needs."""
    granted = set(re.findall(r"`(s3:\w+)`", S3_TEXT))
    for apis in rows().values():
        for api in apis & set(APIS):
            assert set(re.findall(r"s3:\w+", APIS[api][1])) <= granted, api


@pytest.mark.parametrize("role", ["trainer", "reader", "janitor"])
def test_the_roles_have_what_the_table_says(role: str) -> None:
    """If this fails, the document promises a role that the module does not make."""
    header = next(line for line in S3_TEXT.splitlines() if line.startswith("| permission"))
    column = [cell.strip() for cell in header.split("|")].index(role)
    told = set()
    for line in S3_TEXT.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `s3:") and not cells[column].startswith(("–", "with resume")):  # noqa: RUF001  # a sign of the table
            told.add(cells[1].strip("`"))
    policy = json.loads((POLICIES_DIR / f"s3-{role}.json").read_text())
    assert {action for statement in policy["Statement"] for action in statement["Action"]} == told
