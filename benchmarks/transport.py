"""What each way of moving bytes costs: CPU seconds per GB of uploads and ranged downloads, over HTTP and over TLS.

Starts fasts3 (see README.md) and, before it, haproxy as TLS terminator with a certificate of its own. The candidates
move the same parts from as many threads, in turns; the time is that of this process, without the servers'. Candidates
that are not installed are left out.

    python -m benchmarks.transport --fasts3-binary PATH [--wire tls] [--verb down] [--repetitions 5]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import os
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.transport_candidates import CANDIDATES, MIB, Candidate, Wire

_ALWAYS = ("bare", "cloudckpt")
_START_S = 10.0
# An OpenSSL that is tried out by this variable is for the client alone.
_SERVERS_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
_CONFIGURATION = """
global
  nbthread 2
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend tls
  bind 127.0.0.1:{tls_port} ssl crt {certificate} alpn http/1.1 ciphersuites {cipher}
  default_backend s3
backend s3
  server s3 127.0.0.1:{http_port}
"""

Move = Callable[[int, memoryview], None]
"""Moves the part with a number; called from many threads at once."""


def main() -> None:
    """Print one table for each wire and verb."""
    arguments = _arguments()
    installed = {name: CANDIDATES[name] for name in arguments.candidates if name in _ALWAYS or _is_installed(name)}
    content = memoryview(bytearray(os.urandom(MIB) * arguments.total_mib))
    target = memoryview(bytearray(content))  # touched, as the tensors of a load are
    print(f"{ssl.OPENSSL_VERSION}; Python {sys.version.split()[0]}; {arguments.cipher}; {arguments.threads} threads")
    with _servers(arguments.fasts3_binary, arguments.cipher) as wires:
        for wire_name in arguments.wire:
            wire = wires[wire_name]
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", wires["http"].port)) as connection:
                connection.request("PUT", "/bench/object", body=content)
                connection.getresponse().read()
            candidates = {name: make(wire) for name, make in installed.items()}
            for verb in arguments.verb:
                memory = content if verb == "up" else target
                samples = _turns(candidates, verb, memory, arguments, content)
                _print_table(wire_name, verb, samples)


def _turns(
    candidates: dict[str, Candidate], verb: str, memory: memoryview, arguments: argparse.Namespace, content: memoryview
) -> dict[str, list[tuple[float, float, float]]]:
    samples: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for repetition in range(arguments.repetitions + 1):  # the first warms up
        for name, candidate in candidates.items():
            if verb == "down":
                memory[:] = bytes(memory.nbytes)
            move = candidate.up if verb == "up" else candidate.down
            sample = _measured(move, memory, arguments.part_mib * MIB, arguments.threads)
            if memory != content:
                raise RuntimeError(f"{name} moved other bytes")
            if repetition:
                samples[name].append(sample)
    return samples


def _measured(move: Move, memory: memoryview, part_bytes: int, num_threads: int) -> tuple[float, float, float]:
    """User seconds, system seconds and wall seconds per GB."""
    numbers = iter(range(memory.nbytes // part_bytes))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for number in numbers:
                move(number, memory[number * part_bytes : (number + 1) * part_bytes])
        except BaseException as error:  # noqa: BLE001 (raised below)
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    before, begun_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_SELF)
    if failures:
        raise failures[0]
    gb = memory.nbytes / 1e9
    return (after.ru_utime - before.ru_utime) / gb, (after.ru_stime - before.ru_stime) / gb, wall_s / gb


def _print_table(wire_name: str, verb: str, samples: dict[str, list[tuple[float, float, float]]]) -> None:
    print(f"\n{wire_name}, {verb}: medians of {len(next(iter(samples.values())))} (range)")
    print("| candidate | CPU s/GB | user | system | GB/s |\n|---|---|---|---|---|")
    for name, rows in samples.items():
        cpu = [user_s + system_s for user_s, system_s, _ in rows]
        user_s, system_s, wall_s = (statistics.median(column) for column in zip(*rows, strict=True))
        cells = f"{statistics.median(cpu):.2f} ({min(cpu):.2f}-{max(cpu):.2f}) | {user_s:.2f} | {system_s:.2f}"
        print(f"| {name} | {cells} | {1 / wall_s:.2f} |", flush=True)


@contextlib.contextmanager
def _servers(binary: Path, cipher: str) -> Iterator[dict[str, Wire]]:
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificate = scratch / "certificate.pem"
        key = scratch / "certificate.pem.key"  # where haproxy looks for it
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        make = [
            "openssl",
            "req",
            "-x509",
            *curve,
            "-nodes",
            "-keyout",
            key,
            "-out",
            certificate,
            "-days",
            "2",
            *subject,
        ]
        subprocess.run(make, check=True, stderr=subprocess.DEVNULL, env=_SERVERS_ENVIRONMENT)
        http_port, tls_port = _free_port(), _free_port()
        configuration = scratch / "haproxy.cfg"
        ports = {"http_port": http_port, "tls_port": tls_port}
        configuration.write_text(_CONFIGURATION.format(**ports, certificate=certificate, cipher=cipher))
        for command in ([binary, str(http_port)], ["haproxy", "-db", "-f", configuration]):
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_SERVERS_ENVIRONMENT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        for port in (http_port, tls_port):
            _await(port)
        yield {
            "http": Wire(port=http_port, certificate=None),
            "tls": Wire(port=tls_port, certificate=certificate),
        }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _await(port: int) -> None:
    end_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:  # noqa: PERF203 (it waits anyway)
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)
        else:
            return


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasts3-binary", type=Path, required=True)
    parser.add_argument("--wire", nargs="+", choices=("http", "tls"), default=["http", "tls"])
    parser.add_argument("--verb", nargs="+", choices=("up", "down"), default=["up", "down"])
    parser.add_argument("--candidates", nargs="+", choices=sorted(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--cipher", default="TLS_AES_128_GCM_SHA256", help="what the terminator offers")
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--part-mib", type=int, default=32)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
