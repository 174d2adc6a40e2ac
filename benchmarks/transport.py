"""Measure the cost of each way to move bytes: CPU seconds per GB of uploads and ranged downloads, over HTTP and TLS.

Starts fasts3 (see README.md; moto's server where there is none, for a look) and, before it, haproxy as TLS terminator
with a certificate of its own. The candidates move the same parts from as many threads, in turns; the time is that of
this process, without the servers'. Candidates that are not installed are left out. After the first turn, which warms
up, what was sent is read back.

    python -m benchmarks.transport --fasts3-binary PATH [--wire tls] [--verb down] [--repetitions 5]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
from pathlib import Path
from typing import NamedTuple

import awscrt.checksums

from benchmarks import servers, wires
from benchmarks.certificates import make_certificates
from benchmarks.moving import CANDIDATES
from benchmarks.moving.candidate import MIB, OBJECT, Candidate, Where
from benchmarks.moving.ours import store_at
from cloudckpt.stores.base import Store

_ALWAYS = ("bare", "gathering", "memory-bio", "cloudckpt")

Move = Callable[[int, memoryview], None]
"""Moves the part with a number; called from many threads at once."""


class Seconds(NamedTuple):
    """Seconds for a GB."""

    user: float
    system: float
    wall: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table for each wire and verb."""
    arguments = _arguments(argv)
    names = [name for name in arguments.candidates if name in _ALWAYS or importlib.util.find_spec(name) is not None]
    missing = [name for name in arguments.candidates if name not in names]
    content = bytearray(os.urandom(MIB * arguments.total_mib))
    part_bytes = arguments.part_mib * MIB
    print(f"{ssl.OPENSSL_VERSION}; Python {sys.version.split()[0]}; {arguments.cipher}; {arguments.threads} threads")
    if missing:
        print(f"not installed: {', '.join(missing)}")
    with _served(arguments) as places:
        plain = store_at(places["http"])
        plain.put(OBJECT, [memoryview(content)], crc32c=awscrt.checksums.crc32c(content))
        for wire in arguments.wire:
            with contextlib.ExitStack() as stack:
                candidates = {name: CANDIDATES[name](places[wire]) for name in names}
                for candidate in candidates.values():
                    stack.callback(candidate.close)
                for verb in arguments.verb:
                    turns = Turns(candidates, content, part_bytes=part_bytes, num_threads=arguments.threads)
                    if verb == "up":
                        turns.up()
                        turns.compare_sent(plain)
                        samples = turns.repeated(turns.up, arguments.repetitions)
                    else:
                        turns.down()
                        samples = turns.repeated(turns.down, arguments.repetitions)
                    _print_table(wire, verb, samples)
    return 0


class Turns:
    """The candidates, one after the other, with the same content."""

    def __init__(
        self, candidates: Mapping[str, Candidate], content: bytearray, *, part_bytes: int, num_threads: int
    ) -> None:
        self._candidates = candidates
        self._content = content
        self._target = bytearray(content)  # touched, as the tensors of a load are
        self._part_bytes = part_bytes
        self._num_threads = num_threads

    def up(self) -> dict[str, Seconds]:
        """Each sends all parts."""
        return {name: self._measured(candidate.up, self._content) for name, candidate in self._candidates.items()}

    def down(self) -> dict[str, Seconds]:
        """Each fetches all parts. Raises `RuntimeError` where others came."""
        taken = {}
        for name, candidate in self._candidates.items():
            self._target[:] = bytes(len(self._target))
            taken[name] = self._measured(candidate.down, self._target)
            if self._target != self._content:
                raise RuntimeError(f"{name} fetched other bytes")
        return taken

    def compare_sent(self, store: Store) -> None:
        """Raises `RuntimeError` where other bytes lie there than were to be sent."""
        num_parts = len(self._content) // self._part_bytes
        for name, candidate in self._candidates.items():
            if b"".join(candidate.sent(store, num_parts, self._part_bytes)) != self._content:
                raise RuntimeError(f"{name} sent other bytes")

    @staticmethod
    def repeated(turn: Callable[[], dict[str, Seconds]], num_repetitions: int) -> dict[str, list[Seconds]]:
        samples: dict[str, list[Seconds]] = defaultdict(list)
        for _ in range(num_repetitions):
            for name, seconds in turn().items():
                samples[name].append(seconds)
        return samples

    def _measured(self, move: Move, content: bytearray) -> Seconds:
        memory = memoryview(content)
        numbers = iter(range(len(content) // self._part_bytes))
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
        gb = len(content) / 1e9
        user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        return Seconds(user=user_s / gb, system=system_s / gb, wall=wall_s / gb)


def _print_table(wire: str, verb: str, samples: Mapping[str, Sequence[Seconds]]) -> None:
    print(f"\n{wire}, {verb}: medians of {len(next(iter(samples.values())))} (range)")
    print("| candidate | CPU s/GB | user | system | GB/s |\n|---|---|---|---|---|")
    for name, rows in samples.items():
        cpu = [row.user + row.system for row in rows]
        user_s, system_s, wall_s = (statistics.median(column) for column in zip(*rows, strict=True))
        cells = f"{statistics.median(cpu):.2f} ({min(cpu):.2f}-{max(cpu):.2f}) | {user_s:.2f} | {system_s:.2f}"
        print(f"| {name} | {cells} | {1 / wall_s:.2f} |", flush=True)


@contextlib.contextmanager
def _served(arguments: argparse.Namespace) -> Iterator[dict[str, Where]]:
    """One bucket, by the wires that lead to it."""
    with contextlib.ExitStack() as stack:
        binary = arguments.fasts3_binary
        server = stack.enter_context(servers.moto() if binary is None else servers.fasts3(binary))
        plain_url = str(server.endpoint_url)
        places = {"http": Where(endpoint_url=plain_url, ca_bundle=None, bucket=servers.BUCKET)}
        if "tls" in arguments.wire:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-certificates-"))
            certificates = make_certificates(Path(scratch))
            url = stack.enter_context(wires.tls(plain_url, certificates, cipher=arguments.cipher))
            places["tls"] = Where(endpoint_url=url, ca_bundle=certificates.ca_bundle, bucket=servers.BUCKET)
        yield places


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
    parser.add_argument("--threads", type=_at_least_one, default=8)
    parser.add_argument("--repetitions", type=_at_least_one, default=5)
    arguments = parser.parse_args(argv)
    if arguments.total_mib % arguments.part_mib:
        parser.error("--total-mib must be a multiple of --part-mib")
    return arguments


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


if __name__ == "__main__":
    os.environ.pop("LD_LIBRARY_PATH", None)  # an OpenSSL that is tried out by it is loaded by now; not for the servers
    sys.exit(main())
