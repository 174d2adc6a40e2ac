"""The command line: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from benchmarks import envs, plot, servers
from benchmarks.places import Given, Places
from benchmarks.progress import Progress, plan_text
from benchmarks.provenance import provenance
from benchmarks.results.report import text
from benchmarks.runner import NOT_INSTALLED, Row, Run
from benchmarks.sweeps import SWEEPS, Sweep, Verb
from benchmarks.systems import SYSTEM_NAMES

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
INTERRUPTED_STATUS = 130
HEADLINE = "headline"
WITHOUT_CARGO = "short"
NO_CARGO = f"""\
cargo is not installed, which builds the S3 server that is faster than the clients.
Install it (Debian: `sudo apt-get install cargo`; other systems: https://rustup.rs), and run this again.
Without it, cells on that server are left out, and {WITHOUT_CARGO!r} on moto's slow server replaces {HEADLINE!r}.
"""


def main(argv: list[str] | None = None) -> int:
    """Return 0; 1 where a system failed that is installed; 130 after an interrupt, when results are written too."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    sweep, given = _sweep(parser, arguments)
    if arguments.list:
        print(_listing(sweep))
        return 0
    cargo = None
    if arguments.fasts3_binary is None and any(cell.server == "fasts3" for cell in sweep.cells):
        cargo = servers.find_cargo()
        if cargo is None:
            _say(NO_CARGO)
            if sweep.name == HEADLINE:
                arguments.sweep = WITHOUT_CARGO
                sweep, given = _sweep(parser, arguments)
    _say(plan_text(sweep))
    if cargo is not None:
        _say("Building the S3 server in build/fasts3")
        try:
            arguments.fasts3_binary = servers.build_fasts3(cargo, ROOT / "build" / "fasts3")
        except subprocess.CalledProcessError:
            parser.error("cargo cannot build benchmarks/fasts3, and says why above")
    pythons = _pythons(arguments, sweep)
    results_path = arguments.results or ROOT / "results" / f"{sweep.name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    rows: list[Row] = []
    versions: dict[str, dict[str, str]] = {}
    about = provenance(ROOT)
    was_interrupted = False
    # A scheduler ends a job that takes too long so; what was measured is to be kept then, too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _measure(arguments, sweep, given, pythons=pythons, rows=rows, versions=versions)
    except KeyboardInterrupt:
        was_interrupted = True
        _say("interrupted: what was measured until here follows")
    finally:
        signal.signal(signal.SIGTERM, before)
        document = {
            "schema": SCHEMA,
            "provenance": {**about, "versions": versions},
            "sweep": sweep.name,
            "parameters": _parameters(arguments, sweep),
            "cells": [row.to_json() for row in rows],
        }
        results_path.parent.mkdir(parents=True, exist_ok=True)
        results_path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(text(document))
    print(results_path)
    try:
        print(*plot.draw(results_path, results_path.with_suffix("")), sep="\n")
    except ImportError as error:
        _say(f"no pictures: {error}")
    if was_interrupted:
        return INTERRUPTED_STATUS
    failed = [row for row in rows if row.failed is not None and not row.failed.startswith(NOT_INSTALLED)]
    return 1 if failed else 0


def _measure(
    arguments: argparse.Namespace,
    sweep: Sweep,
    given: Given | None,
    *,
    pythons: Mapping[str, str],
    rows: list[Row],
    versions: dict[str, dict[str, str]],
) -> None:
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-logs-")))
        local_parent = _local_parent(arguments)
        places = Places(stack, fasts3_binary=arguments.fasts3_binary, given=given, local_parent=local_parent)
        has_tls = any(cell.wire == "tls" for cell in sweep.cells)
        run = Run(
            places=places,
            environment=servers.environment(places.certificates.ca_bundle if has_tls else None)
            if given is None
            else dict(os.environ),
            pythons=pythons,
            options=dict(arguments.option),
            timeout_s=arguments.timeout_s,
            logs=logs,
            progress=stack.enter_context(Progress(sweep)),
            rows=rows,
            versions=versions,
        )
        run.measure(sweep)


def _sweep(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[Sweep, Given | None]:
    """Return the sweep, and the store of the user to measure it on."""
    if arguments.repetitions is not None and arguments.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    if arguments.uri is not None and arguments.bucket is not None:
        parser.error("--uri and --bucket say the same; give one of them")
    if arguments.endpoint_url is not None and arguments.uri is None and arguments.bucket is None:
        parser.error("--endpoint-url needs --bucket, or --uri s3://…")
    sweep = SWEEPS[arguments.sweep]
    given = None
    uri = arguments.uri or (f"s3://{arguments.bucket}" if arguments.bucket else None)
    if uri is not None and "://" not in uri:
        arguments.local_dir = Path(uri)
        sweep = replace(sweep, cells=tuple(cell for cell in sweep.cells if cell.server == "path"))
    elif uri is not None:
        given = Given(uri=uri, endpoint_url=arguments.endpoint_url, region=arguments.region)
        sweep = sweep.on_given()
    sweep = sweep.chosen(cells=arguments.cells, verbs=arguments.verbs, systems=arguments.systems)
    if arguments.repetitions is not None:
        sweep = replace(sweep, repetitions=arguments.repetitions)
    if not sweep.cells:
        parser.error(f"no cell of {sweep.name} is left; --list shows them")
    return sweep, given


def _pythons(arguments: argparse.Namespace, sweep: Sweep) -> dict[str, str]:
    """The interpreters of the rivals that are not installed here: those given, or of environments made for them."""
    given = {"s3fs": arguments.python_s3fs, "s3torchconnector": arguments.python_s3torchconnector}
    pythons = {}
    for system in dict.fromkeys(system for cell in sweep.cells for system in cell.systems):
        environment = envs.environment_of(system)
        if environment is None:
            continue
        if given[environment.system] is not None:
            pythons[system] = given[environment.system]
        elif not envs.is_installed_here(environment):
            if not envs.is_set_up(environment, ROOT):
                _say(f"Installing {environment.system} in {environment.directory(ROOT).name}")
            try:
                pythons[system] = str(envs.set_up(environment, ROOT))
            except (OSError, subprocess.CalledProcessError) as error:
                _say(f"{environment.system} cannot be installed: {error}")
    return pythons


def _listing(sweep: Sweep) -> str:
    lines = [f"{one.name}: {one.about}" for one in SWEEPS.values()]
    return "\n".join([*lines, "", plan_text(sweep)])


def _local_parent(arguments: argparse.Namespace) -> Path:
    memory = Path("/dev/shm")  # noqa: S108  # a tmpfs, where the disk does not decide
    return arguments.local_dir or (memory if memory.is_dir() else Path(tempfile.gettempdir()))


def _parameters(arguments: argparse.Namespace, sweep: Sweep) -> dict[str, Any]:
    # No paths, addresses or names of buckets, and of the options nothing that may hold a secret.
    kept = ("sweep", "cells", "verbs", "systems", "timeout_s")
    given = {name: value for name, value in vars(arguments).items() if name in kept}
    options = {name: value for name, value in arguments.option if name != "storage_options"}
    return {**given, "repetitions": sweep.repetitions, "option": sorted(options.items())}


def _say(text: str) -> None:
    """Progress goes to standard error, so that the output is the table alone."""
    print(text, file=sys.stderr, flush=True)


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Save and load with cloudckpt and its rivals, in turn. See benchmarks/README.md.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sweep", choices=list(SWEEPS), default=HEADLINE, help="what to measure")
    add("--list", action="store_true", help="show the sweeps and the cells chosen, and stop")
    add("--cells", nargs="+", default=[], metavar="PATTERN", help="only those whose path, as --list has it, holds one")
    add("--verbs", nargs="+", default=[], choices=get_args(Verb), help="only these")
    add("--systems", nargs="+", default=[], choices=SYSTEM_NAMES, help="only these")
    add("--repetitions", type=int, help="counted ones, after a warm-up; the sweep's own where absent")
    results = "write samples, versions, machine and parameters there, as JSON; results/SWEEP-TIME.json where absent"
    add("--results", type=Path, metavar="FILE", help=results)
    add("--uri", help="a store to measure on: s3://bucket/prefix, gs://bucket/prefix, or a path")
    add("--endpoint-url", help="of the S3-compatible server that has it; Amazon S3 where absent")
    add("--bucket", help="on that server: short for --uri s3://BUCKET")
    add("--region", help="of that server")
    binary = "the S3 server of benchmarks/fasts3 ($FASTS3); built with cargo where absent"
    add("--fasts3-binary", type=Path, default=_from_environment("FASTS3"), help=binary)
    add("--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help="of cloudckpt.Options")
    add("--local-dir", type=Path, help="where paths are saved to; /dev/shm by default")
    add("--python-s3fs", metavar="PYTHON", help="interpreter with torch and s3fs")
    add("--python-s3torchconnector", metavar="PYTHON", help="interpreter with torch and s3torchconnector[dcp]")
    add("--timeout-s", type=float, default=600, help="for one save or load")
    return parser


def _from_environment(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None
