"""The whole benchmark, small, with workers and servers as a user has them."""

from __future__ import annotations

import json
import signal
import sys

import boto3
import pytest
from benchmarks.payloads import KIB, uniform
from benchmarks.sweeps import Cell, Sweep

from benchmarks import command, runner
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
def test_small_sweep(sweep, tmp_path, capsys):
    """The benchmark would not run on a machine with nothing but this package, or not record what it measured."""
    sweep(
        Cell(
            payload=SMALL,
            verbs=("save", "load", "async_blocking", "resharded_load"),
            server="moto",
            systems=("cloudckpt", "s3torchconnector"),
        ),
        Cell(payload=SMALL, server="path", wire="none", systems=("cloudckpt-path", "filesystem", "limit")),
        Cell(payload=SMALL, verbs=("shared_load",), num_ranks=2, server="moto", systems=("cloudckpt",)),
    )
    # An interpreter without the rival.
    status, document = run(tmp_path, "--python-s3torchconnector", sys.executable)
    assert status == 0
    assert (document["schema"], document["sweep"]) == (1, "small")
    cells = {(cell["system"], cell["verb"]): cell for cell in document["cells"]}
    complete = [name for name, cell in cells.items() if cell["failed"] is None]
    assert complete == [
        *(("cloudckpt", verb) for verb in ("save", "load", "async_blocking", "resharded_load")),
        *(("cloudckpt-path", verb) for verb in ("save", "load")),
        *(("filesystem", verb) for verb in ("save", "load")),
        ("limit", "write_disk"),
        ("limit", "memcpy"),
        ("cloudckpt", "shared_load"),
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
    assert "not installed" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(sweep, tmp_path, monkeypatch, number):
    """Hours of measuring would be lost with one key, or with a scheduler's limit."""
    sweep(Cell(payload=SMALL, server="path", wire="none", systems=("filesystem",)), repetitions=3)

    def interrupt(text):
        if "2/3" in text:
            signal.raise_signal(number)

    monkeypatch.setattr(command, "_say", interrupt)
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
