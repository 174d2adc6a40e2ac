"""The commands that the documents show, carried out in their order, on S3 and GCS."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.docs.markdown import snippets_of
from tests.docs.picture import PICTURE, render
from tests.docs.tables import ROOT

import cloudckpt
from cloudckpt.cli import main
from cloudckpt.testing.servers import S3Server, fake_gcs_server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

DOCUMENTS = ["docs/command-line.md", "docs/exports.md", "docs/migrating.md"]
SMALLER = {"4GiB": "4MiB", "16GiB": "4MiB", "5": "1", "8": "2"}
"""For `bench`, which has to end within a test."""


@pytest.fixture
def places(tmp_path: Path, s3_bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the documents take to be there: two runs, and buckets to copy to."""
    monkeypatch.chdir(tmp_path)
    s3_bucket.create_bucket("other")
    state = {"model": {"layer.weight": torch.arange(6.0)}}
    with fake_gcs_server() as gcs:
        for name, value in gcs.environment.items():
            monkeypatch.setenv(name, value)
        gcs.create_bucket("bucket")
        gcs.create_bucket("archive")
        for uri in (
            *(f"s3://bucket/{name}" for name in ("run/step-100", "run/step-200", "a/step-100")),
            "gs://bucket/b/step-100",
        ):
            cloudckpt.save(state, uri)
        yield


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_do_what_they_say(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, a command that a user copies from the document fails, on what it is meant for."""
    lines = [
        line
        for snippet in snippets_of(ROOT / name)
        if snippet.language == "sh"
        for line in snippet.text.splitlines()
        if line.startswith("cloudckpt ")
    ]
    assert len(lines) >= 3
    if name == "docs/migrating.md":
        state = {"model": {"layer.weight": torch.arange(6.0)}}
        dcp.save(state, storage_writer=dcp.FileSystemWriter("old/step-100"))
        torch.save(state, "step-100.pt")
    for line in lines:
        words = shlex.split(line)[1:]
        if words[0] == "bench":
            words = [SMALLER.get(word, word) for word in words]
        with pytest.raises(SystemExit) as end:
            main(words)
        out, err = capsys.readouterr()
        asks = words[0] == "rm" and "--dry-run" not in words  # and nobody is there to answer
        assert (end.value.code or 0) == (2 if asks else 0), (line, out, err)


def test_the_picture_is_of_the_commands() -> None:
    """If this fails, the picture shows output that no command prints: run tests/docs/picture.py."""
    assert PICTURE.read_text() == render()
