"""``python -m cloudckpt.testing``: what a user runs against the store they pay for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence

import pytest
from tests.kit.wire import Wire, WireCallback, WireRule

from cloudckpt.doctor import Check, DoctorReport
from cloudckpt.options import Options
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Store
from cloudckpt.testing.__main__ import main
from cloudckpt.testing.servers import S3Server, clean_environment

_WAIT_S = 240.0


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    name = f"command-{uuid.uuid4().hex}"
    s3_server.create_bucket(name)
    return name


def options_of(server: S3Server, endpoint_url: str | None = None) -> list[str]:
    options = {**server.storage_options, "endpoint_url": endpoint_url or server.endpoint_url}
    return [f"--option={name}={value}" for name, value in options.items()]


def opened(server: S3Server, bucket: str) -> Store:
    return open_store(f"s3://{bucket}", Options(storage_options=server.storage_options))


def start(arguments: Sequence[str], directory: os.PathLike[str]) -> subprocess.Popen[str]:
    """Start the command as a user does, in a directory of theirs."""
    return subprocess.Popen(
        [sys.executable, "-m", "cloudckpt.testing", *arguments],
        cwd=directory,
        env={**clean_environment(), "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=_WAIT_S)
    finally:
        process.kill()
    return process.returncode, out + err


def test_clauses_run_on_a_server_and_the_users_own_pytest_has_no_say(s3_server, bucket, tmp_path):
    """If this fails, the command does not run, breaks on a conftest of the user's, or leaves objects to be paid for."""
    (tmp_path / "conftest.py").write_text("raise RuntimeError('a conftest of the user')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    opened(s3_server, bucket).put("theirs/a", [], crc32c=0)
    arguments = [f"s3://{bucket}/pre fix", *options_of(s3_server), "--keys", "20", "-k", "page or lost_answer"]
    status, output = finish(start(arguments, tmp_path))
    assert status == 0, output
    assert "test_a_read_after_a_lost_answer_shows_whose_object_it_is PASSED" in output
    assert [info.key for info in opened(s3_server, bucket).list()] == ["theirs/a"]
    assert list(opened(s3_server, bucket).list_uploads()) == []


def test_an_interrupted_run_removes_what_it_wrote(s3_server, bucket, tmp_path):
    """If this fails, Ctrl-C leaves objects under names that nobody else knows."""
    started: list[subprocess.Popen[str]] = []
    interrupt = WireCallback(function=lambda _: started[0].send_signal(signal.SIGINT))
    rule = WireRule(action=interrupt, method="PUT", path="step-00", skip=9)
    with Wire(s3_server.endpoint_url, rule) as wire:
        arguments = [f"s3://{bucket}/x", *options_of(s3_server, wire.url), "--keys", "60", "-k", "page_of_keys"]
        started.append(start(arguments, tmp_path))
        status, output = finish(started[0])
        assert wire.num_acted == 1
    assert status == 2, output
    assert list(opened(s3_server, bucket).list()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["s3:/bucket/x"], "InvalidURIError"),
        (["s3://bucket/x", "--option", "region"], "NAME=VALUE"),
        (["s3://bucket/x", "--option", 'secret_access_key="SECRET'], "--option"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_written(arguments, message, capsys, monkeypatch):
    """A script must not take a mistake of its own for a bad store, nor repeat a secret in its log."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(arguments) == 2
    output = capsys.readouterr().err
    assert message in output
    assert "SECRET" not in output


@pytest.mark.parametrize(("failed", "status"), [("", 0), ("create-if-absent", 1), ("put", 2), ("list", 2)])
def test_a_check_that_the_doctor_did_not_make_is_not_taken_for_passed(failed, status, monkeypatch):
    """A store without create-if-absent would be said to do all, or one that denies puts to break promises."""
    names = ("list", "put", "create-if-absent")
    checks = [Check(name=name, outcome="skipped" if name == failed else "passed", found="") for name in names]
    report = DoctorReport(uri="memory://x", read_only=False, checks=tuple(checks))
    monkeypatch.setattr("cloudckpt.testing.__main__.examine", lambda *_, **__: report)
    monkeypatch.setattr(pytest, "main", lambda *_, **__: pytest.ExitCode.OK)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["memory://x"]) == status
