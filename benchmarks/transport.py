"""Measure the cost of each way to move bytes: CPU and GIL seconds per GB of uploads and ranged downloads, HTTP and TLS.

Starts fasts3 (see README.md; moto's server where there is none, for a look) and, before it, haproxy as TLS terminator
with a certificate of its own. The candidates move the same parts from as many threads, in turns; the time is that of
this process, without the servers'. Candidates that are not installed are left out. After the first turn, which warms
up, what was sent is read back.

Further turns look at Python's lock (see lock.py): how long it is held for a GB, which bounds a process on any number of
cores, and how often another thread gets it. They leave one core to the process that looks.

    python -m benchmarks.transport --fasts3-binary PATH [--wire tls] [--verb down] [--threads 2 16] [--record-kib 16 4]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import resource
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import awscrt.checksums

from benchmarks import lock, servers, wires
from benchmarks.certificates import make_certificates
from benchmarks.moving import CANDIDATES
from benchmarks.moving.candidate import KIB, MIB, OBJECT, Candidate, Where
from benchmarks.moving.ours import store_at
from cloudckpt.stores.base import Store

_ALWAYS = ("bare", "gathering", "memory-bio", "cloudckpt")

_LOCK_S = 1.0
"""Least length of a turn in which the lock is looked at."""

T = TypeVar("T")
Move = Callable[[int, memoryview], None]
"""Moves the part with a number; called from many threads at once."""


class Seconds(NamedTuple):
    """Seconds for a GB."""

    user: float
    system: float
    wall: float


class Lock(NamedTuple):
    """Python's lock, for a GB."""

    held_s: float
    num_hand_overs: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table for each wire and verb."""
    arguments = _arguments(argv)
    names = [name for name in arguments.candidates if name in _ALWAYS or importlib.util.find_spec(name) is not None]
    missing = [name for name in arguments.candidates if name not in names]
    content = bytearray(os.urandom(MIB * arguments.total_mib))
    print(f"{ssl.OPENSSL_VERSION}; Python {sys.version.split()[0]}; {arguments.cipher}")
    print(f"a take of the lock beside a second thread that wants it costs {lock.contended_take_s() * 1e6:.1f} µs more")
    if missing:
        print(f"not installed: {', '.join(missing)}")
    with _served(arguments) as (plain, places):
        plain.put(OBJECT, [memoryview(content)], crc32c=awscrt.checksums.crc32c(content))
        for wire, place in places.items():
            with contextlib.ExitStack() as stack:
                candidates = {name: CANDIDATES[name](place) for name in names}
                for candidate in candidates.values():
                    stack.callback(candidate.close)
                for verb, num_threads in itertools.product(arguments.verb, arguments.threads):
                    part_bytes = arguments.part_mib * MIB
                    turns = Turns(candidates, content, verb, part_bytes=part_bytes, num_threads=num_threads)
                    turns.move()
                    if verb == "up":
                        turns.compare_sent(plain)
                    samples = _repeated(turns.move, arguments.repetitions)
                    locks = _repeated(turns.hold, arguments.repetitions)
                    _print_table(f"{wire}, {verb}, {num_threads} threads", samples, locks)
    return 0


class Turns:
    """The candidates, one after the other, with the same content."""

    def __init__(
        self, candidates: Mapping[str, Candidate], content: bytearray, verb: str, *, part_bytes: int, num_threads: int
    ) -> None:
        self._candidates = candidates
        self._content = content
        self._moved = content if verb == "up" else bytearray(content)  # touched, as the tensors of a load are
        self._moves: dict[str, Move] = {name: getattr(candidate, verb) for name, candidate in candidates.items()}
        self._part_bytes = part_bytes
        self._num_threads = num_threads

    def move(self) -> dict[str, Seconds]:
        """Each sends or fetches all parts. Raises `RuntimeError` where others came."""
        taken = {}
        for name, move in self._moves.items():
            if self._moved is not self._content:
                self._moved[:] = bytes(len(self._moved))
            taken[name] = self._measured(move)
            if self._moved != self._content:
                raise RuntimeError(f"{name} fetched other bytes")
        return taken

    def hold(self) -> dict[str, Lock]:
        """Each moves all parts again, for a second at least."""
        return {name: self._held(move) for name, move in self._moves.items()}

    def compare_sent(self, store: Store) -> None:
        """Raises `RuntimeError` where other bytes lie there than were to be sent."""
        num_parts = len(self._content) // self._part_bytes
        for name, candidate in self._candidates.items():
            if b"".join(candidate.sent(store, num_parts, self._part_bytes)) != self._content:
                raise RuntimeError(f"{name} sent other bytes")

    def _held(self, move: Move) -> Lock:
        num_passes = 0

        def work() -> None:
            nonlocal num_passes
            end_s = time.perf_counter() + _LOCK_S
            while time.perf_counter() < end_s:
                self._measured(move)
                num_passes += 1

        found = lock.held_during(work)
        gb = num_passes * len(self._content) / 1e9
        return Lock(held_s=found.seconds / gb, num_hand_overs=found.num_hand_overs / gb)

    def _measured(self, move: Move) -> Seconds:
        memory = memoryview(self._moved)
        numbers = iter(range(memory.nbytes // self._part_bytes))
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for number in numbers:
                    move(number, memory[number * self._part_bytes : (number + 1) * self._part_bytes])
            except BaseException as error:  # noqa: BLE001 (raised below)
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(self._num_threads)]
        before, begun_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_SELF)
        if failures:
            raise failures[0]
        gb = memory.nbytes / 1e9
        user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        return Seconds(user=user_s / gb, system=system_s / gb, wall=wall_s / gb)


def _repeated(turn: Callable[[], dict[str, T]], num_repetitions: int) -> dict[str, list[T]]:
    samples: dict[str, list[T]] = defaultdict(list)
    for _ in range(num_repetitions):
        for name, sample in turn().items():
            samples[name].append(sample)
    return samples


def _print_table(title: str, samples: Mapping[str, Sequence[Seconds]], locks: Mapping[str, Sequence[Lock]]) -> None:
    print(f"\n{title}: medians of {len(next(iter(samples.values())))} (range)")
    columns = (
        "candidate",
        "CPU s/GB",
        "user",
        "system",
        "GB/s",
        "GIL s/GB",
        "GB/s at most",
        "hand-overs/GB",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, rows in samples.items():
        cpu, held = [row.user + row.system for row in rows], [row.held_s for row in locks[name]]
        user_s, system_s, wall_s = (statistics.median(column) for column in zip(*rows, strict=True))
        held_s, hand_overs = (statistics.median(column) for column in zip(*locks[name], strict=True))
        cells = f"{statistics.median(cpu):.2f} ({min(cpu):.2f}-{max(cpu):.2f}) | {user_s:.2f} | {system_s:.2f}"
        lock_cells = f"{held_s:.3f} ({min(held):.3f}-{max(held):.3f}) | {1 / held_s:.1f} | {hand_overs:,.0f}"
        print(f"| {name} | {cells} | {1 / wall_s:.2f} | {lock_cells} |", flush=True)


@contextlib.contextmanager
def _served(arguments: argparse.Namespace) -> Iterator[tuple[Store, dict[str, Where]]]:
    """A store, and its bucket by the wires that lead there."""
    with contextlib.ExitStack() as stack:
        binary = arguments.fasts3_binary
        server = stack.enter_context(servers.moto() if binary is None else servers.fasts3(binary))
        plain_url = str(server.endpoint_url)
        where = partial(Where, bucket=servers.BUCKET, connections=max(arguments.threads))
        plain = where(endpoint_url=plain_url, ca_bundle=None)
        places = {"http": plain} if "http" in arguments.wire else {}
        if "tls" in arguments.wire:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-certificates-"))
            certificates = make_certificates(Path(scratch))
            for kib in arguments.record_kib:
                line = wires.tls(plain_url, certificates, cipher=arguments.cipher, record_bytes=kib * KIB)
                url = stack.enter_context(line)
                places[f"tls, records of {kib} KiB"] = where(endpoint_url=url, ca_bundle=certificates.ca_bundle)
        yield store_at(plain), places


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fasts3 = Path(os.environ["FASTS3"]) if os.environ.get("FASTS3") else None
    parser.add_argument("--fasts3-binary", type=Path, default=fasts3, help="a server in memory, built ($FASTS3)")
    parser.add_argument("--wire", nargs="+", choices=("http", "tls"), default=["http", "tls"])
    parser.add_argument("--verb", nargs="+", choices=("up", "down"), default=["up", "down"])
    parser.add_argument("--candidates", nargs="+", choices=sorted(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--cipher", default="TLS_AES_128_GCM_SHA256", help="what the terminator offers")
    parser.add_argument("--total-mib", type=_at_least_one, default=256)
    parser.add_argument("--part-mib", type=_at_least_one, default=32, help="S3 takes no parts below 5")
    parser.add_argument("--threads", nargs="+", type=_at_least_one, default=[8])
    records = "of TLS, as the terminator sends them; the client's have 16"
    parser.add_argument("--record-kib", nargs="+", type=_at_least_one, default=[16], help=records)
    parser.add_argument("--repetitions", type=_at_least_one, default=5)
    arguments = parser.parse_args(argv)
    if arguments.total_mib % arguments.part_mib:
        parser.error("--total-mib must be a multiple of --part-mib")
    if arguments.total_mib < max(arguments.threads) * arguments.part_mib:
        parser.error("--total-mib must have a part for each thread")
    return arguments


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


if __name__ == "__main__":
    os.environ.pop("LD_LIBRARY_PATH", None)  # an OpenSSL that is tried out by it is loaded by now; not for the servers
    sys.exit(main())
