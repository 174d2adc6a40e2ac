"""A training loop beside a save: what counts of it, the line it goes over, and what the bars make of both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from benchmarks.outcomes import Outcome, Settings
from benchmarks.payloads import KIB, uniform
from benchmarks.relay import Line
from benchmarks.results.bars import CAPPED, LARGE, verdicts
from benchmarks.results.model import MIB, MalformedResultsError, parsed
from benchmarks.results.report import text
from benchmarks.state import State
from benchmarks.sweeps import SWEEPS
from benchmarks.systems import system_named
from tests.benchmarks.test_results import cell, document

from benchmarks import training, wires
from cloudckpt.options import Options
from cloudckpt.stores.open import open_store
from cloudckpt.testing.servers import moto_server

needs_cores = pytest.mark.skipif(training.Cores().loop is None, reason="needs two cores, and to choose among them")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(training, "ALONE_S", 0.2)


def test_a_thread_that_keeps_pythons_lock_is_seen(short):
    """An upload that stops training would be said to cost nothing."""
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(1000))

    spinners = [threading.Thread(target=spin) for _ in range(3)]

    def begin():
        for thread in spinners:
            thread.start()
        end_s = time.monotonic() + 0.5
        return lambda: time.monotonic() > end_s and not stop.set()

    speeds = training.compared(begin)
    for thread in spinners:
        thread.join(60)
    assert speeds.steps_per_s < 0.8 * speeds.steps_per_s_alone
    assert speeds.waiting_share > 0.2


@needs_cores
def test_the_loop_has_a_core_of_its_own(short):
    """The loop would wait for a core that an upload has, and the bar would be about the machine."""
    seen = {}
    waiting = threading.Event()
    all_cores = os.sched_getaffinity(0)

    def begin():
        def look():
            seen["started beside it"] = os.sched_getaffinity(0)
            waiting.wait(60)

        threading.Thread(target=look).start()
        seen["child"] = subprocess.run(
            [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"], capture_output=True, check=True
        ).stdout

        def is_done():
            seen["loop"] = os.sched_getaffinity(0)
            return "started beside it" in seen

        return is_done

    training.compared(begin)
    waiting.set()
    cores = training.Cores()
    assert seen["loop"] == {cores.loop}
    assert cores.loop not in seen["started beside it"]
    assert str(cores.loop).encode() not in seen["child"].split()
    assert os.sched_getaffinity(0) == all_cores


def test_the_line_is_shared():
    """More connections would get more than the rate, and the systems be measured at different rates."""
    line = Line(8 * MIB)
    started_s = time.monotonic()
    senders = [threading.Thread(target=line.carry, args=(MIB,)) for _ in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(60)
    assert time.monotonic() - started_s >= 0.5


def test_the_relay_passes_on_what_it_gets():
    """Systems would be measured on a line that loses, or holds back, what they send or are answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received = []

        def serve():
            # The first to come asks only whether the relay is there.
            while not received:
                connection, _ = listener.accept()
                connection.settimeout(60)
                with connection:
                    body = b""
                    while len(body) < 3 * MIB and (piece := connection.recv(MIB)):
                        body += piece
                    if body:
                        received.append(body)
                        connection.sendall(b"thanks")

        thread = threading.Thread(target=serve)
        thread.start()
        with wires.capped(f"http://127.0.0.1:{listener.getsockname()[1]}", bytes_per_s=30e6) as url:
            sent = os.urandom(3 * MIB)
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as client:
                started_s = time.monotonic()
                client.sendall(sent)
                assert client.recv(100) == b"thanks"
                assert time.monotonic() - started_s >= 0.1
        thread.join(60)
        assert received == [sent]


def test_bars_of_saves_in_the_background():
    """A run would be held to other ratios than it should be: of other systems, or upside down."""
    alone = {"steps_per_s_alone": 100.0}
    rows = [
        cell("cloudckpt", "async_blocking", [9.0, 2.0, 2.0], blocking_s=0.22, copy_s=0.2),
        cell("cloudckpt-process", "async_blocking", [9.0, 2.0, 2.0], blocking_s=0.3, copy_s=0.2),
        cell("cloudckpt", "async_training", [9.0, 9.0], place=CAPPED, steps_per_s=96.0, **alone),
        cell(
            "cloudckpt-process", "async_training", [9.0, 9.0], place=CAPPED, steps_per_s=97.0, steps_per_s_alone=100.0
        ),
    ]
    results = document(*rows) | {"sweep": "background"}
    found = {
        (one.bar.name, one.bar.sense): (round(one.found.value, 3), one.is_met) for one in verdicts(parsed(results))
    }
    assert found == {
        ("async save, thread", "≤"): (1.1, True),
        ("async save, process", "≤"): (1.5, False),
        ("async save, thread", "≥"): (0.96, True),
        ("async save, process", "≥"): (0.97, False),
    }
    said = text(results)
    assert "Of 4 bars 2 are met, 2 missed and 0 not measured" in said
    assert "training's pace" in said
    assert "0.220" in said


def test_runs_of_before_can_be_read():
    """Published results would be refused because they say nothing of training, or nonsense in its place be taken."""
    parsed(document(cell("cloudckpt", "save", [1.0, 1.0])))
    with pytest.raises(MalformedResultsError, match="steps_per_s must be"):
        parsed(document(cell("cloudckpt", "save", [1.0, 1.0], steps_per_s=-1)))


def test_the_sweep_has_what_the_bars_ask_for():
    """The bars would never be judged, since no cell measures what they are about."""
    by_verb = {verb: one for one in SWEEPS["background"].cells for verb in one.verbs}
    for verb in ("async_blocking", "async_training"):
        assert {"cloudckpt", "cloudckpt-process", "s3torchconnector"} <= set(by_verb[verb].systems)
    for verb, place in (("async_blocking", LARGE), ("async_training", CAPPED)):
        one = by_verb[verb]
        assert (one.payload.name, one.server, one.wire, one.num_ranks) == (
            place.cell, place.server, place.wire, place.num_ranks,
        )  # fmt: skip
    assert by_verb["async_training"].payload.num_bytes == 2 << 30


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_save_beside_training_says_how_fast_it_went(short, tmp_path):
    """The cell would be empty, or a save that failed be counted."""
    state = State(uniform(2, 64 * KIB), "sharded", None)
    state.fill()
    settings = Settings(endpoint_url=None, region=None, ca_bundle=None, no_dist=True)
    for name in ("cloudckpt-path", "filesystem"):
        system = system_named(name)(settings)
        outcome = system.save_beside_training(state.state_dict, str(tmp_path / name))
        assert isinstance(outcome, Outcome)
        assert outcome.steps_per_s
        assert outcome.steps_per_s_alone
        state.zero()
        system.load(state.state_dict, str(tmp_path / name))
        state.verify()
    (tmp_path / "taken").write_text("")
    with pytest.raises(BaseException, match="taken"):
        system_named("cloudckpt-path")(settings).save_beside_training(state.state_dict, str(tmp_path / "taken" / "x"))


def test_the_limit_beside_training_sends_it_all_from_a_process_of_its_own(short):
    """What the machine takes of the loop could not be told from what a client does, or be that of bytes never sent."""
    state = State(uniform(2, 64 * KIB), "sharded", None)
    state.fill()
    with moto_server() as server:
        server.create_bucket("bucket")
        settings = Settings(endpoint_url=server.endpoint_url, region=None, ca_bundle=None, no_dist=True)
        outcome = system_named("limit")(settings).save_beside_training(state.state_dict, "s3://bucket/run")
        assert outcome.steps_per_s
        assert outcome.steps_per_s_alone
        store = open_store("s3://bucket", Options(storage_options=server.storage_options))
        assert sum(found.size_bytes for found in store.list()) == 2 * 64 * KIB
    with pytest.raises(RuntimeError, match="the process that sends ended with 1"):
        system_named("limit")(settings).save_beside_training(state.state_dict, "s3://bucket/run")


def test_a_capped_wire_needs_plain_http():
    """A run on a user's bucket would measure something else than it says."""
    with pytest.raises(ValueError, match="plain http"), wires.capped("https://s3.example.org", bytes_per_s=1e6):
        pass
