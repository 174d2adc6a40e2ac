"""The whole benchmark, small, with workers and servers as a user has them."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import boto3
import pytest
from benchmarks.payloads import KIB, uniform
from benchmarks.progress import Progress
from benchmarks.sweeps import Cell, Sweep

from benchmarks import command, runner, servers
from cloudckpt.testing.servers import clean_environment, moto_server

SMALL = uniform(2, 64 * KIB)


@pytest.fixture
def sweep(monkeypatch):
    """Makes a sweep called ``small`` of these cells."""

    def declare(*cells, repetitions=1):
        declared = Sweep(name="small", about="For a test.", cells=cells, repetitions=repetitions)
        monkeypatch.setattr(command, "SWEEPS", {"small": declared})

    return declare


def run(tmp_path, *arguments):
    results = tmp_path / "results" / "small.json"
    status = command.main(
        ["--sweep", "small", "--timeout-s", "120", "--local-dir", str(tmp_path), "--results", str(results), *arguments]
    )
    return status, json.loads(results.read_text())


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(900)  # it starts ten processes that import torch, which takes minutes where others do the same
def test_a_small_sweep_writes_its_figures(sweep, tmp_path, capsys):
    """The benchmark would not run on a machine with nothing but this package, or not record what it measured."""
    sweep(
        Cell(
            payload=SMALL,
            verbs=("save", "load", "async_blocking", "resharded_load"),
            server="moto",
            systems=("cloudckpt", "s3torchconnector"),
        ),
        Cell(payload=SMALL, server="path", wire="none", systems=("cloudckpt-path", "filesystem", "limit")),
        Cell(payload=SMALL, verbs=("load",), num_ranks=2, server="moto", systems=("cloudckpt",)),
    )
    # An interpreter without the rival.
    status, document = run(tmp_path, "--python-s3torchconnector", sys.executable)
    assert status == 0
    assert (document["schema"], document["sweep"]) == (1, "small")
    *alone, of_two_ranks = document["cells"]
    assert (of_two_ranks["num_ranks"], of_two_ranks["failed"], len(of_two_ranks["samples"])) == (2, None, 2)
    cells = {(cell["system"], cell["verb"]): cell for cell in alone}
    complete = [name for name, cell in cells.items() if cell["failed"] is None]
    assert complete == [
        *(("cloudckpt", verb) for verb in ("save", "load", "async_blocking", "resharded_load")),
        *(("cloudckpt-path", verb) for verb in ("save", "load")),
        *(("filesystem", verb) for verb in ("save", "load")),
        ("limit", "write_disk"),
        ("limit", "memcpy"),
    ]
    for name in complete:
        assert [sample["repetition"] for sample in cells[name]["samples"]] == [0, 1], name
        assert all(sample["wall_s"] > 0 and sample["cpu_s"] >= 0 for sample in cells[name]["samples"]), name
    load = cells["cloudckpt", "load"]
    assert (load["server"], load["wire"], load["num_ranks"], load["num_bytes"]) == ("moto", "http", 1, 128 * KIB)
    assert all(sample["num_bytes_read"] >= 128 * KIB for sample in load["samples"])
    assert all(sample["blocking_s"] > 0 for sample in cells["cloudckpt", "async_blocking"]["samples"])
    assert cells["cloudckpt", "resharded_load"]["num_bytes"] == 16 * KIB
    absent = cells["s3torchconnector", "save"]
    assert absent["samples"] == []
    assert absent["failed"].startswith("not installed: ")
    assert document["provenance"]["versions"]["cloudckpt"]["torch"]
    assert document["provenance"]["machine"]["num_cores"] >= 1
    shown = capsys.readouterr()
    assert "about 1 min" in shown.err
    assert "not installed" in shown.out
    printed = [Path(line) for line in shown.out.splitlines() if line.startswith(str(tmp_path))]
    assert all(path.is_file() for path in printed)
    assert [path.name for path in printed[:2]] == ["small.json", "index.html"]
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cargo") is None, reason="needs cargo")
def test_a_fresh_clone_builds_its_server(sweep, tmp_path, monkeypatch):
    """The chart of the README could not be measured from the repository alone."""
    sweep(Cell(payload=SMALL, systems=("cloudckpt", "limit")))
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setenv("RUSTFLAGS", "-D warnings")
    assert command.main(["--sweep", "small"]) == 0
    (results,) = (tmp_path / "results").glob("small-*.json")
    cells = json.loads(results.read_text())["cells"]
    assert [(cell["system"], cell["verb"], cell["failed"]) for cell in cells] == [
        *(("cloudckpt", verb, None) for verb in ("save", "load")),
        *(("limit", verb, None) for verb in ("send", "receive")),
    ]
    assert all(sample["num_bytes_read"] >= 128 * KIB for sample in cells[1]["samples"])


def test_without_cargo_a_slower_server_serves(tmp_path, monkeypatch, capsys):
    """A machine without Rust would measure nothing, and not learn why."""
    local = Cell(payload=SMALL, server="path", wire="none", systems=("filesystem",))
    sweeps = {"headline": Cell(payload=SMALL, systems=("cloudckpt",)), "short": local}
    declared = {name: Sweep(name=name, about="For a test.", cells=(cell,)) for name, cell in sweeps.items()}
    monkeypatch.setattr(command, "SWEEPS", declared)
    monkeypatch.setattr(servers, "find_cargo", lambda: None)
    assert command.main(["--results", str(tmp_path / "r.json"), "--local-dir", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["sweep"] == "short"
    assert "cargo is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(sweep, tmp_path, monkeypatch, number):
    """Hours of measuring would be lost with one key, or with a scheduler's limit."""
    sweep(Cell(payload=SMALL, server="path", wire="none", systems=("filesystem",)), repetitions=3)

    def interrupt(_progress, text):
        if "2/3" in text:
            signal.raise_signal(number)

    monkeypatch.setattr(Progress, "say", interrupt)
    status, document = run(tmp_path)
    assert status == 130
    assert [cell["failed"] for cell in document["cells"]] == [runner.INTERRUPTED] * 2
    assert [len(cell["samples"]) for cell in document["cells"]] == [3, 3]


@pytest.fixture
def bucket(monkeypatch):
    """A client of a server of the user's, whose bucket ``theirs`` has an object in it."""
    with moto_server() as server:
        for name, value in (clean_environment() | server.environment).items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=server.endpoint_url)
        client.create_bucket(Bucket="theirs")
        client.put_object(Bucket="theirs", Key="precious", Body=b"x")
        yield client
        client.close()


def test_a_given_bucket_is_left_as_it_was(sweep, tmp_path, bucket):
    """A run on a user's bucket would leave gigabytes there, or remove what is theirs."""
    sweep(Cell(payload=SMALL, server="fasts3", systems=("cloudckpt", "limit")))
    status, document = run(tmp_path, "--endpoint-url", bucket.meta.endpoint_url, "--bucket", "theirs")
    assert status == 0
    assert {(cell["system"], cell["server"], cell["failed"]) for cell in document["cells"]} == {
        ("cloudckpt", "given", None)
    }
    assert [found["Key"] for found in bucket.list_objects_v2(Bucket="theirs")["Contents"]] == ["precious"]
    assert "Uploads" not in bucket.list_multipart_uploads(Bucket="theirs")
