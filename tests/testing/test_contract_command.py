"""``python -m cloudckpt.testing``: what a user runs against the store they pay for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from cloudckpt.options import Options
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Store
from cloudckpt.testing.__main__ import main
from cloudckpt.testing.servers import S3Server, ask, clean_environment, moto_server
from cloudckpt.testing.wire import S3_ACCESS_DENIED, Rule, Tell, Wire

_WAIT_S = 240.0
# What moto breaks: it holds no lock for a condition, and says of every upload that it began in 2010.
_NOT_ON_MOTO = "not exactly_one and not just_completed and not unfinished"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


@pytest.fixture
def bucket(server: S3Server) -> str:
    name = f"command-{uuid.uuid4().hex}"
    server.create_bucket(name)
    return name


def options_of(server: S3Server, endpoint_url: str | None = None) -> list[str]:
    options = {**server.storage_options, "endpoint_url": endpoint_url or server.endpoint_url}
    return [f"--option={name}={value}" for name, value in options.items()]


def opened(server: S3Server, bucket: str) -> Store:
    return open_store(f"s3://{bucket}", Options(storage_options=server.storage_options))


def start(arguments: Sequence[str], directory: os.PathLike[str]) -> subprocess.Popen[str]:
    """The command, as a user starts it, in a directory of theirs."""
    return subprocess.Popen(
        [sys.executable, "-m", "cloudckpt.testing", *arguments],
        cwd=directory,
        env={**clean_environment(), "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=_WAIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def run(arguments: Sequence[str], directory: os.PathLike[str]) -> tuple[int, str, str]:
    return finish(start(arguments, directory))


@pytest.mark.slow
def test_a_path_keeps_the_contract_and_is_left_as_it_was(tmp_path):
    """The whole of it, in a directory whose own pytest settings would break any run that looked at them."""
    (tmp_path / "conftest.py").write_text("raise RuntimeError('a conftest of the user')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    before = sorted(tmp_path.rglob("*"))
    status, out, err = run(["checkpoints/of/mine", "--keys", "20", "--rounds", "2"], tmp_path)
    assert status == 0, (out, err)
    assert err == ""
    assert sorted(tmp_path.rglob("*")) == before
    assert "✓ create-if-absent: the store has it" in out
    assert "✓ of two processes exactly one creates" in out
    assert "○ a throttled call says so: the store has no address" in out
    assert "✗" not in out
    assert "hold, " in out.splitlines()[-1]


@pytest.mark.slow
def test_a_server_is_asked_through_a_broken_wire_and_left_empty(server, bucket, tmp_path):
    """A user's own MinIO or Ceph gets every clause, those about the network too."""
    put_by_others = opened(server, bucket)
    put_by_others.put("theirs/a", [], crc32c=0)
    arguments = [f"s3://{bucket}/pre fix", *options_of(server), "--keys", "20", "-k", _NOT_ON_MOTO]
    status, out, err = run([*arguments, "--denied", "secret_access_key=wrong"], tmp_path)
    assert "✓ after a lost answer any call can be made again" in out
    assert "✓ silence ends in time" in out
    assert "○ checksums: the store looks at none" in out
    # moto lets strangers in, and the clause about it must say so.
    assert "✗ a denied call says so" in out
    assert out.splitlines()[-1].startswith("✗ 2 of ")
    assert status == 1, (out, err)
    assert [info.key for info in put_by_others.list()] == ["theirs/a"]
    assert list(put_by_others.list_uploads()) == []


@pytest.fixture
def liar() -> Iterator[str]:
    """moto, behind a proxy that drops ``If-None-Match``."""
    moto = DomainDispatcherApplication(create_backend_app)

    def forgetful(environ, start_response):
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, forgetful, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(_WAIT_S)
        server.server_close()


def test_a_store_that_ignores_conditions_is_told_apart(server, tmp_path, liar):
    """The one thing that must never pass for good: there, of two saves to one place both would succeed."""
    assert ask(liar, "PUT", "/bucket", timeout_s=_WAIT_S)[0] == 200
    arguments = ["s3://bucket/x", *options_of(server, liar), "-k", "create_if_absent or put_replaces"]
    status, out, err = run(arguments, tmp_path)
    assert status == 1, (out, err)
    assert "✗ create-if-absent: the store does not keep it" in out
    assert "ignores the condition" in out
    assert "commit='unconditional'" in out
    assert "✓ a put replaces the object whole" in out
    assert "no create-if-absent" in out.splitlines()[-1]


def test_an_interrupted_run_removes_what_it_wrote(server, bucket, tmp_path):
    """Ctrl-C in the middle of a clause that writes many objects, whose names nobody else knows."""
    started: list[subprocess.Popen[str]] = []
    interrupt = Tell(function=lambda _: started[0].send_signal(signal.SIGINT))
    rule = Rule(action=interrupt, method="PUT", path="step-00", skip=9)
    with Wire(server.endpoint_url, rule) as wire:
        arguments = [f"s3://{bucket}/x", *options_of(server, wire.url), "--keys", "60", "-k", "page_of_keys"]
        started.append(start(arguments, tmp_path))
        status, out, err = finish(started[0])
        assert wire.num_acted == 1
    assert status == 2, (out, err)
    assert "nterrupted" in out + err
    assert list(opened(server, bucket).list()) == []


def test_what_cannot_be_removed_is_named(server, bucket, tmp_path):
    """It costs money, and only whoever is told can remove it."""
    with Wire(server.endpoint_url, Rule(action=S3_ACCESS_DENIED, method="DELETE", times=None)) as wire:
        arguments = [f"s3://{bucket}/x", *options_of(server, wire.url), "-k", "what_was_put"]
        status, out, err = run(arguments, tmp_path)
    assert status == 1, (out, err)
    assert "✓ what was put can be read at once" in out
    assert "✗ Could not be removed" in out
    left = [info.key for info in opened(server, bucket).list()]
    assert left
    assert f"s3://{bucket}/x/cloudckpt-contract-" in out
    assert "s3:DeleteObject" in out


def test_a_failure_says_what_the_clause_is_for(server, bucket, tmp_path):
    """Whoever reads it has never seen the clause."""
    refusal = Rule(action=S3_ACCESS_DENIED, method="GET", path="clause-.*/a/b", times=None)
    with Wire(server.endpoint_url, refusal) as wire:
        arguments = [f"s3://{bucket}/x", *options_of(server, wire.url), "-k", "what_was_put or put_replaces"]
        status, out, err = run(arguments, tmp_path)
    assert status == 1, (out, err)
    lines = out.splitlines()
    index = lines.index("✗ what was put can be read at once")
    assert lines[index + 1].strip().startswith("Without read-after-write a rank cannot check its objects")
    assert "AccessDenied" in lines[index + 2]
    assert "✓ a put replaces the object whole" in lines
    assert lines[-1].startswith("✗ 1 of 2 clauses")


def test_no_clause_of_that_name_is_an_error(tmp_path):
    """A typing error must not pass for a store that keeps everything."""
    status, out, _ = run([str(tmp_path / "here"), "-k", "no_such_clause"], tmp_path)
    assert status == 2
    assert "No clause is called so" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["s3:/bucket/x"], "InvalidURIError"),
        (["s3://bucket/x", "--option", "region"], "NAME=VALUE"),
        (["s3://bucket/x", "--option", "no_such_option=1"], "no_such_option"),
        (["/srv/x", "--option", "region=here"], "takes no storage options"),
        (["/srv/x", "--timeout", "-1"], "timeout_s"),
        (["s3://bucket/x", "--option", "profile=A", "--denied", "anonymous=true"], "anonymous"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_written(arguments, message, capsys, monkeypatch):
    """Exit status 2 is for the caller's own mistakes: a script must not take one for a bad store."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_bucket_that_does_not_exist_is_told(server, capsys, monkeypatch):
    """A name mistyped must not look like a store that breaks its contract."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["s3://no-such-bucket-here/x", *options_of(server)]) == 2
    captured = capsys.readouterr()
    assert "BucketNotFoundError" in captured.err
    assert "no-such-bucket-here" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--keys", "-3"], []])
def test_the_usage_is_shown_where_nothing_else_helps(arguments, capsys):
    """argparse's own exit status is ours for the same thing."""
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "/srv/x"] if arguments else [])
    assert caught.value.code == 2
    assert "usage: python -m cloudckpt.testing" in capsys.readouterr().err


def test_option_values_are_what_they_look_like(monkeypatch):
    """``Options(storage_options=…)`` wants true and numbers as such, and account names as text."""
    seen = {}
    monkeypatch.setattr("cloudckpt.testing.command.check", lambda target, **_: seen.update(target=target) or 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    options = ["anonymous=True", "a=17", "b=-2.5", 'c="17"', 'd={"x": 1}', "e=eu-west-1", "f=a=b", "g=", "h=1e3"]
    assert main(["s3://bucket/x", *(f"--option={option}" for option in options), "--keys", "7"]) == 0
    assert seen["target"].options.storage_options == {
        "anonymous": True,
        "a": 17,
        "b": -2.5,
        "c": "17",
        "d": {"x": 1},
        "e": "eu-west-1",
        "f": "a=b",
        "g": "",
        "h": 1000.0,
    }
    assert seen["target"].num_keys == 7
    assert seen["target"].root.uri.startswith("s3://bucket/x/cloudckpt-contract-")


def test_a_secret_in_a_malformed_option_is_not_repeated(capsys, monkeypatch):
    """Command lines are copied into bug reports together with what they printed."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["s3://bucket/x", "--option", '"SECRET']) == 2
    assert main(["s3://bucket/x", "--option", 'secret_access_key="SECRET']) == 2
    assert "SECRET" not in capsys.readouterr().err
