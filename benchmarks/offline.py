"""Measure on a machine with a GPU and many cores that has no network, within minutes.

On a machine with a network, collect what the other one needs, for its Python::

    python -m benchmarks.offline prepare DIRECTORY --python 3.12 --fasts3-binary PATH

Carry the checkout and the directory over. There, a Python with a torch for its GPU runs everything::

    python3 -m benchmarks.offline run DIRECTORY --results results.json

`run` installs from the wheels of the directory alone, into a virtual environment inside it. It runs the GPU's tests,
then `benchmarks.gpu`, the sweep `cores`, `benchmarks.transport` for Python's lock, and the sweep `ranks`. Each has a
limit of time, and all together end within ten minutes. The results are written after each, so an interrupted run
keeps those that are complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("awscrt", "boto3", "botocore", "fsspec", "jmespath", "msgspec", "s3transfer", "typing-extensions", "xxhash"),
    *("hypothesis", "pytest", "pytest-timeout", "safetensors", "sortedcontainers", "tenacity"),
    *("rich", "markdown-it-py", "mdurl"),
    *("python-dateutil", "six", "urllib3", "iniconfig", "packaging", "pluggy", "pygments", "s3torchconnectorclient"),
)
"""Packages of the benchmarks and the GPU's tests, without torch and numpy, which are the machine's own."""
FROM_SOURCE = ("s3torchconnector",)
"""Pure Python of which PyPI has no wheel."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
_PROGRAMS = ("haproxy", "openssl")
_OF_EVERY_LINUX = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libresolv.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command that writes its own JSON document, or none."""

    name: str
    arguments: Sequence[str]
    limit_s: float
    writes_results: bool = True


def steps(binaries: Path) -> tuple[Step, ...]:
    """Return the steps of `run`, in their order."""
    fasts3 = ("--fasts3-binary", str(binaries / "fasts3"))
    lock = (*fasts3, "--threads", "16", "--total-mib", "512", "--candidates", "bare", "cloudckpt", "--repetitions", "1")
    return (
        Step(name="tests", arguments=("-m", "pytest", "tests/gpu", "-m", "gpu"), limit_s=150, writes_results=False),
        Step(name="gpu", arguments=("-m", "benchmarks.gpu", "--repetitions", "3"), limit_s=200),
        Step(name="cores", arguments=("-m", "benchmarks", "--sweep", "cores", *fasts3), limit_s=170),
        Step(name="lock", arguments=("-m", "benchmarks.transport", *lock), limit_s=40, writes_results=False),
        Step(name="ranks", arguments=("-m", "benchmarks", "--sweep", "ranks", *fasts3), limit_s=170),
    )


def prepare(directory: Path, *, python: str, fasts3_binary: Path) -> None:
    """Fill `directory` with wheels for `python` (as in ``3.12``), and with the programs of the TLS sweeps."""
    wheels, binaries = directory / "wheels", directory / "bin"
    wheels.mkdir(parents=True, exist_ok=True)
    binaries.mkdir(exist_ok=True)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    platforms = [argument for platform in _PLATFORMS for argument in ("--platform", platform)]
    target = ("--no-deps", "--only-binary=:all:", "--python-version", python, *platforms)
    constraints = ("--constraint", ROOT / "constraints.txt")
    subprocess.run([*pip, "download", "--dest", wheels, *target, *constraints, *PACKAGES], check=True)
    subprocess.run([*pip, "wheel", "--wheel-dir", wheels, "--no-deps", *FROM_SOURCE], check=True)
    shutil.copy2(fasts3_binary, binaries / "fasts3")
    from tests.integration.servers.packages import from_debian  # noqa: PLC0415  # needs packages that `run` installs

    for program in _PROGRAMS:
        _copy_with_libraries(Path(from_debian(program, program)), binaries)


def run(directory: Path, results: Path, *, limit_s: float) -> int:
    """Run all steps that fit into `limit_s`; return 0 if each of them ended with 0."""
    deadline_s = time.monotonic() + limit_s
    python = _install(directory)
    environment = {
        **os.environ,
        "PATH": f"{directory / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    document: dict[str, Any] = {"provenance": provenance(ROOT), "nvidia_smi": _nvidia_smi(), "steps": {}}
    for step in steps(directory / "bin"):
        left_s = min(step.limit_s, deadline_s - time.monotonic())
        document["steps"][step.name] = _run_step(step, python, environment, directory, limit_s=left_s)
        results.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(step["status"] != 0 for step in document["steps"].values()))


def _run_step(
    step: Step, python: Path, environment: Mapping[str, str], directory: Path, *, limit_s: float
) -> dict[str, Any]:
    """Its exit status (None if no time was left for it), seconds, and results or the end of its output."""
    if limit_s <= 0:
        return {"status": None, "seconds": 0.0}
    print(f"== {step.name}: at most {limit_s:.0f} s", flush=True)
    written = directory / f"{step.name}.json"
    written.unlink(missing_ok=True)
    command = [python, *step.arguments, *(("--results", written) if step.writes_results else ())]
    started_s = time.monotonic()
    # `timeout` sends SIGTERM, after which a sweep still writes its finished cells.
    process = subprocess.run(
        ["timeout", "--kill-after", "20", f"{limit_s:.0f}", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(process.stdout, flush=True)
    outcome: dict[str, Any] = {"status": process.returncode, "seconds": round(time.monotonic() - started_s, 1)}
    if written.is_file():
        outcome["results"] = json.loads(written.read_text())
        written.unlink()
    else:
        outcome["output"] = process.stdout[-4000:]
    return outcome


def _install(directory: Path) -> Path:
    """Make an environment that sees the machine's own torch, and return its interpreter."""
    environment = directory / "venv"
    venv.create(environment, with_pip=True, system_site_packages=True, clear=True)
    python = environment / "bin" / "python"
    # `venv` shows the packages of the base interpreter, but not those of a virtual environment that runs this.
    # The workers of a sweep import the package from there, too: they get no PYTHONPATH.
    parents = [ROOT / "src", *(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))]
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    Path(found.stdout.strip(), "machine.pth").write_text("".join(f"{path}\n" for path in parents))
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    wheels = sorted((directory / "wheels").glob("*.whl"))
    subprocess.run([*pip, *wheels], check=True)
    return python


def _copy_with_libraries(program: Path, binaries: Path) -> None:
    """Copy `program` and the shared libraries that another Linux may lack, behind a script that finds them."""
    libraries = binaries / "lib"
    libraries.mkdir(exist_ok=True)
    shutil.copy2(program.resolve(), libraries / program.name)
    listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name, _, where = line.strip().partition(" => ")
        if where.startswith("/") and not name.startswith(_OF_EVERY_LINUX):
            shutil.copy2(Path(where.split()[0]).resolve(), libraries / name)
    script = binaries / program.name
    script.write_text(
        f'#!/bin/sh\nhere=$(cd "$(dirname "$0")/lib" && pwd)\nLD_LIBRARY_PATH=$here exec "$here/{program.name}" "$@"\n'
    )
    script.chmod(0o755)


def _nvidia_smi() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    return subprocess.run([program, "-L"], capture_output=True, text=True, check=False).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1 if a step of `run` failed or ran out of time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offline", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    prepare_parser = commands.add_parser("prepare", help="collect wheels and programs, on a machine with a network")
    run_parser = commands.add_parser("run", help="test and measure, on the machine without one")
    for one in (prepare_parser, run_parser):
        one.add_argument("directory", type=Path, help="of the wheels and programs")
    prepare_parser.add_argument("--python", default="3.12", help="the other machine's (default: %(default)s)")
    prepare_parser.add_argument("--fasts3-binary", type=Path, required=True, help="the server")
    run_parser.add_argument("--results", type=Path, required=True, help="write everything there as JSON")
    run_parser.add_argument("--limit-s", type=float, default=600, help="for all steps (default: %(default)s)")
    arguments = parser.parse_args(argv)
    directory = arguments.directory.resolve()
    if arguments.command == "prepare":
        prepare(directory, python=arguments.python, fasts3_binary=arguments.fasts3_binary)
        return 0
    return run(directory, arguments.results.resolve(), limit_s=arguments.limit_s)


if __name__ == "__main__":
    sys.exit(main())
