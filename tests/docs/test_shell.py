"""The commands that the documents show: cloudckpt's are carried out in their order, on S3 and GCS."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.docs.markdown import snippets_of
from tests.docs.picture import PICTURE, render
from tests.docs.tables import ROOT

import cloudckpt
from cloudckpt.cli import main
from cloudckpt.manager.drain import FAST_KEY, make_record
from cloudckpt.testing.servers import S3Server, fake_gcs_server
from cloudckpt.uri import parse_location

DOCUMENTS = [
    "docs/command-line.md",
    "docs/exports.md",
    "docs/manager.md",
    "docs/migrating.md",
    "docs/troubleshooting.md",
]


@pytest.fixture
def places(tmp_path: Path, s3_bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the places that the documents assume: two runs, and buckets to copy to."""
    monkeypatch.chdir(tmp_path)
    s3_bucket.create_bucket("other")
    state = {"model": {"layer.weight": torch.arange(6.0)}, "extra": {"scaler": {"scale": 65536.0}}}
    with fake_gcs_server() as gcs:
        for name, value in gcs.environment.items():
            monkeypatch.setenv(name, value)
        gcs.create_bucket("bucket")
        gcs.create_bucket("archive")
        options = cloudckpt.Options(trace="trace-{verb}-{rank}.json")
        with cloudckpt.CheckpointManager("s3://bucket/run", save_every=100, async_=False, options=options) as manager:
            for step in (100, 200):
                manager.save(step, state, metrics={"return": float(step), "val_loss": 1 / step})
        for uri in ("s3://bucket/a/step-100", "gs://bucket/b/step-100"):
            cloudckpt.save(state, uri)
        record = make_record(parse_location("s3://bucket/run"), is_owed=True, may_overwrite=False)
        options = cloudckpt.Options(metadata={"step": 300, FAST_KEY: record})
        cloudckpt.save(state, tmp_path / "nvme/step-300", options=options)
        (tmp_path / "base").mkdir()
        (tmp_path / "base/config.json").write_text("{}")
        yield


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_do_what_they_say(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, a command that a user copies from the document fails, on what it is meant for."""
    lines = [
        line
        for snippet in snippets_of(ROOT / name)
        if snippet.language == "sh"
        for line in snippet.text.splitlines()
        if line.startswith("cloudckpt ")
    ]
    assert len(lines) >= 2
    if name == "docs/migrating.md":
        state = {"model": {"layer.weight": torch.arange(6.0)}}
        dcp.save(state, storage_writer=dcp.FileSystemWriter("old/step-100"))
        torch.save(state, "step-100.pt")
    for line in lines:
        line = line.replace("$(cloudckpt latest s3://bucket/run)", "s3://bucket/run/step-200")  # noqa: PLW2901
        line = line.replace("/nvme/run", str(tmp_path / "nvme"))  # noqa: PLW2901
        words = [
            word
            for text in shlex.split(line, comments=True)[1:]
            for word in (map(str, tmp_path.glob(text)) if "*.json" in text else [text])
        ]
        with pytest.raises(SystemExit) as end:
            main(words)
        out, err = capsys.readouterr()
        asks = words[0] == "rm" and "--dry-run" not in words  # and nobody is there to answer
        assert (end.value.code or 0) == (2 if asks else 0), (line, out, err)


def test_the_picture_is_of_the_commands() -> None:
    """If this fails, the picture shows output that no command prints: run tests/docs/picture.py."""
    assert PICTURE.read_text() == render()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ShellLine:
    """One command of a page."""

    page: str
    command: str


def lines_of_shell() -> Iterator[ShellLine]:
    """Yield the commands of all pages."""
    for pattern in ("*.md", "docs/**/*.md", "terraform/**/*.md", "benchmarks/**/*.md"):
        for path in ROOT.glob(pattern):
            for snippet in snippets_of(path):
                if snippet.language == "sh":
                    for line in snippet.text.splitlines():
                        if command := line.partition("  #")[0].strip():
                            yield ShellLine(page=path.relative_to(ROOT).as_posix(), command=command)


PROGRAMS = {
    # The test above, test_the_quickstart_runs, test_the_program_of_the_readme_starts_and_resumes_as_told
    "cloudckpt": {*DOCUMENTS, "docs/quickstart.md", "README.md"},
    # test_the_quickstart_runs, tests/examples/test_elastic.py
    "torchrun": {"docs/quickstart.md", "docs/frameworks.md"},
    "python": {"README.md"},  # test_the_program_of_the_readme_starts_and_resumes_as_told
    "python3 -m venv": {"docs/quickstart.md"},
    ".": {"docs/quickstart.md"},
    "python examples/prometheus_metrics.py": {"docs/telemetry.md"},  # tests/examples
    "grep": {"docs/troubleshooting.md"},  # test_the_log_of_a_failed_save_is_searched
    "pip install torch": {"docs/quickstart.md"},  # from an index outside of the tests' reach
}
"""The pages whose commands a test carries out, by the beginnings of the commands."""


@pytest.mark.parametrize("line", sorted({*lines_of_shell()}), ids=lambda line: line.command)
def test_every_other_command_can_be_given(line: ShellLine) -> None:
    """If this fails, a page shows a command that no test carries out, or names an option that is gone."""
    command = line.command
    if any(command.startswith(f"{program} ") and line.page in pages for program, pages in PROGRAMS.items()):
        return
    if command.startswith("make "):
        assert f"\n{command.split()[1]}:" in (ROOT / "Makefile").read_text()
    elif extras := re.match(r"pip install (?:-e )?'\.\[([a-z0-9,]+)\]'$", command):
        project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
        assert all(f"\n{extra} = [" in project for extra in extras[1].split(","))
    else:
        python, *words = shlex.split(command)
        assert (python.rstrip("3"), words[0]) == ("python", "-m"), "no test carries it out"
        asked = [sys.executable, *words, "--help"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert set(re.findall(r"--[a-z][a-z0-9-]+", command)) <= set(re.findall(r"--[a-z][a-z0-9-]+", done.stdout))


def test_the_log_of_a_failed_save_is_searched(tmp_path: Path) -> None:
    """If this fails, an engineer on call searches the log for the cause, and finds nothing."""
    command, log = (snippet.text for snippet in snippets_of(ROOT / "docs/troubleshooting.md")[:2])
    (tmp_path / "job.log").write_text(f"epoch 1\n{log}")
    done = subprocess.run(["bash", "-euc", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == log
