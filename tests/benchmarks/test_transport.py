"""The comparison of ways to move bytes: each way moves them, and the comparison sees where one does not."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil

import pytest
from awscrt.checksums import crc32c
from benchmarks.certificates import make_certificates
from benchmarks.moving import CANDIDATES
from benchmarks.moving.candidate import MIB, OBJECT, Candidate, Connection, Where
from benchmarks.moving.ours import Bare, store_at
from benchmarks.transport import Turns
from tests.stores.scripted import ScriptedServer, reply

from benchmarks import servers, transport, wires
from cloudckpt.errors import BucketNotFoundError

PART_BYTES = 5 * MIB  # S3 takes none that are smaller, but for the last
NUM_PARTS = 3
ALWAYS_THERE = {"bare", "cloudckpt", "awscrt"}  # with what the tests need anyway

needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/bin") is None, reason="needs haproxy"
)
all_candidates = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[]
            if name in ALWAYS_THERE
            else pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed"),
        )
        for name in CANDIDATES
    ],
)


@pytest.fixture(scope="module")
def content():
    return bytearray(os.urandom(NUM_PARTS * PART_BYTES))


@pytest.fixture(scope="module")
def http(content):
    with servers.moto() as server:
        where = Where(endpoint_url=server.endpoint_url, ca_bundle=None, bucket=servers.BUCKET)
        store_at(where).put(OBJECT, [memoryview(content)], crc32c=crc32c(content))
        yield where


@pytest.fixture(scope="module")
def tls(http, tmp_path_factory):
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    with wires.tls(http.endpoint_url, certificates, cipher="TLS_AES_128_GCM_SHA256") as url:
        yield Where(endpoint_url=url, ca_bundle=certificates.ca_bundle, bucket=http.bucket)


def turns_of(candidate: Candidate, content: bytearray, num_threads: int = 2) -> Turns:
    return Turns({"it": candidate}, content, part_bytes=PART_BYTES, num_threads=num_threads)


def assert_moves(name, where, http, content):
    with contextlib.closing(CANDIDATES[name](where)) as candidate:
        turns = turns_of(candidate, content)
        for _ in range(2):  # on new connections, and on those that were kept
            (sent,) = turns.up().values()
            turns.compare_sent(store_at(http))
            (fetched,) = turns.down().values()
            assert min(sent.wall, fetched.wall) > 0


@all_candidates
def test_a_candidate_moves_all_bytes_both_ways(name, http, content):
    """A way of moving bytes would be measured that moves fewer, or others."""
    assert_moves(name, http, http, content)


@needs_haproxy
@all_candidates
def test_a_candidate_moves_them_over_tls(name, tls, http, content):
    """The comparison over TLS, which the choice rests upon, could not be made again."""
    assert_moves(name, tls, http, content)


@all_candidates
def test_a_refusal_is_no_transfer(name, http, content):
    """A server that refuses everything at once would make the fastest way of all."""
    absent = Where(endpoint_url=http.endpoint_url, ca_bundle=None, bucket="absent")
    if name == "cloudckpt":  # it begins its upload at once
        with pytest.raises(BucketNotFoundError):
            CANDIDATES[name](absent)
        return
    with contextlib.closing(CANDIDATES[name](absent)) as refused:
        turns = turns_of(refused, content, num_threads=1)
        for turn in (turns.up, turns.down):
            with pytest.raises(Exception, match=r"404|NoSuchBucket"):
                turn()


class Nothing(Candidate):
    """The fastest."""

    def up(self, number, part):
        pass

    def down(self, number, part):
        pass


class Confused(Bare):
    """Takes each part for the first."""

    def up(self, number, part):
        super().up(0, part)

    def down(self, number, part):
        super().down(0, part)

    def sent(self, store, num_parts, part_bytes):
        for _ in range(num_parts):
            yield store.read(self.key_of(0), max_bytes=part_bytes)


def test_bytes_that_went_elsewhere_are_found(http, content):
    """A candidate that mixes up its parts, or leaves some out, would win."""
    with contextlib.closing(Confused(http)) as confused:
        turns = turns_of(confused, content, num_threads=1)  # moto fails where two write one key
        turns.up()
        with pytest.raises(RuntimeError, match="it sent other bytes"):
            turns.compare_sent(store_at(http))
        with pytest.raises(RuntimeError, match="it fetched other bytes"):
            turns.down()
    turns = turns_of(Nothing(http), content)
    turns.up()
    with pytest.raises(Exception, match="Nothing-0"):
        turns.compare_sent(store_at(http))
    with pytest.raises(RuntimeError, match="it fetched other bytes"):
        turns.down()


def test_bare_sockets_see_the_end_of_a_connection():
    """The limit would wait for ever for a server that was killed."""
    part = memoryview(bytearray(100))
    for answer, text in (
        (reply(206, b"x" * 10, length=100), "ended after 10 bytes"),
        (lambda connection, _: connection.shutdown(2), "no answer"),
    ):
        server = ScriptedServer((answer,))
        try:
            bare = Bare(Where(endpoint_url=server.endpoint_url, ca_bundle=None, bucket="b"))
            with pytest.raises(ConnectionError, match=text):
                bare.down(0, part)
            assert not bare._kept._idle
        finally:
            server.close()


def test_connections_are_kept_unless_they_end():
    """Some candidates would greet a server for each part, others once: they could not be compared."""
    server = ScriptedServer((reply(), reply(), reply(200, headers={"Connection": "close"}), reply()))
    try:
        with contextlib.closing(Bare(Where(endpoint_url=server.endpoint_url, ca_bundle=None, bucket="b"))) as bare:
            for number in range(4):
                bare.up(number, memoryview(b"part"))
        assert [request.path for request in server.requests] == [f"/b/Bare-{number}" for number in range(4)]
        assert server.num_connections == 2
    finally:
        server.close()
    assert Connection(None).ends  # until somebody says that it can go on


def test_the_command_prints_a_table_for_each_verb(capsys, monkeypatch):
    """The figures that the choice of a transport rests upon could not be made again."""
    monkeypatch.delenv("FASTS3", raising=False)
    monkeypatch.setitem(CANDIDATES, "no_such_module", Bare)
    sizes = ["--total-mib", "10", "--part-mib", "5", "--threads", "2", "--repetitions", "1"]
    assert transport.main([*sizes, "--wire", "http", "--candidates", "bare", "cloudckpt", "no_such_module"]) == 0
    printed = capsys.readouterr().out
    assert "not installed: no_such_module" in printed
    for verb in ("up", "down"):
        _, _, table = printed.partition(f"http, {verb}: medians of 1")
        rows = [line.split("|")[1].strip() for line in table.partition("\n\n")[0].splitlines() if line.startswith("|")]
        assert rows == ["candidate", "---", "bare", "cloudckpt"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--total-mib", "50", "--part-mib", "32"], "multiple"),
        (["--threads", "0"], "at least 1"),
        (["--repetitions", "0"], "at least 1"),
        (["--part-mib", "x"], "--part-mib"),
        (["--candidates", "carrier-pigeon"], "carrier-pigeon"),
        (["--wire", "slow"], "--wire"),
    ],
)
def test_arguments_that_say_nothing_sensible_are_told(arguments, why, capsys):
    """Parts that are left over would be found minutes later, as bytes that did not arrive."""
    with pytest.raises(SystemExit) as caught:
        transport.main(arguments)
    assert caught.value.code == 2
    assert why in capsys.readouterr().err
