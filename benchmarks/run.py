"""Save and load with cloudckpt and its rivals, in turn, against one server. See `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchkit import envs, server
from benchkit.fleet import Fleet, NotInstalledError
from benchkit.provenance import provenance
from benchkit.systems import SYSTEMS, Settings
from benchkit.table import MIB, Sample, ratios_table, results_table, verdicts
from benchkit.turns import Places, take_turns
from benchkit.worker import ROW_BYTES, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TOTAL_MIB = 2048
DEFAULT_TOTAL_MIB_ON_MOTO = 64


def main(argv: list[str] | None = None) -> int:
    """Return 0, or 1 where `--check-bars` was given and a bar was missed."""
    arguments = _arguments(argv)
    if arguments.setup_envs:
        for environment in envs.ENVIRONMENTS.values():
            _say(f"{environment.system}: {envs.set_up(environment, ROOT)}")
        return 0
    sizes = _Sizes.of(arguments)
    samples: list[Sample] = []
    versions: dict[str, dict[str, str]] = {}
    absent: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-logs-") as logs,
        _server(arguments, Path(logs)) as store,
        tempfile.TemporaryDirectory(prefix="benchmark-", dir=_local_parent(arguments)) as local,
    ):
        places = Places(server=store, local_directory=Path(local))
        for num_ranks in arguments.ranks:
            with contextlib.ExitStack() as stack:
                fleets = _start_fleets(
                    arguments,
                    sizes,
                    num_ranks,
                    store=store,
                    logs=Path(logs),
                    stack=stack,
                    versions=versions,
                    absent=absent,
                )
                samples += take_turns(
                    fleets,
                    num_ranks=num_ranks,
                    num_bytes=sizes.total_bytes,
                    repetitions=arguments.repetitions,
                    places=places,
                    progress=_say,
                )
        parameters = {
            **{name: value for name, value in vars(arguments).items() if name != "json"},
            "total_bytes": sizes.total_bytes,
            "server": store.name,
            "local_parent": str(_local_parent(arguments)),
        }
    return _report(arguments, parameters, samples, versions, absent)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    num_tensors: int
    tensor_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.num_tensors * self.tensor_bytes

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> _Sizes:
        total_mib = arguments.total_mib
        if total_mib is None:
            total_mib = DEFAULT_TOTAL_MIB_ON_MOTO if arguments.server == "moto" else DEFAULT_TOTAL_MIB
        # Whole rows on each rank, whatever the world sizes.
        unit = ROW_BYTES
        for num_ranks in arguments.ranks:
            unit *= num_ranks
        tensor_bytes = total_mib * MIB // arguments.num_tensors // unit * unit
        if tensor_bytes == 0:
            sys.exit(f"{arguments.num_tensors} tensors do not fit into {total_mib} MiB")
        return cls(num_tensors=arguments.num_tensors, tensor_bytes=tensor_bytes)


def _start_fleets(
    arguments: argparse.Namespace,
    sizes: _Sizes,
    num_ranks: int,
    *,
    store: server.Server,
    logs: Path,
    stack: contextlib.ExitStack,
    versions: dict[str, dict[str, str]],
    absent: dict[str, str],
) -> dict[str, Fleet]:
    """One fleet for each system that is installed; another is left out, or fatal where it was named."""
    settings = Settings(
        endpoint_url=store.endpoint_url,
        region=store.region,
        rival_threads=arguments.rival_threads,
        no_dist=num_ranks == 1,
        options=dict(arguments.option),
    )
    given = {"s3fs": arguments.python_s3fs, "s3torchconnector": arguments.python_s3torchconnector}
    fleets = {}
    for system in arguments.systems or list(SYSTEMS):
        rendezvous = logs / f"rendezvous-{system}-{num_ranks}"
        specs = [
            WorkerSpec(
                system=system,
                rank=rank,
                num_ranks=num_ranks,
                rendezvous_path=str(rendezvous),
                num_tensors=sizes.num_tensors,
                tensor_bytes=sizes.tensor_bytes,
                timeout_s=arguments.timeout_s,
                settings=settings,
            )
            for rank in range(num_ranks)
        ]
        python = envs.interpreter(system, given=given.get(system), root=ROOT)
        fleet = Fleet(python, specs, environment=store.environment, log_directory=logs)
        stack.callback(fleet.close)
        try:
            versions[system] = fleet.versions()
        except NotInstalledError as error:
            if arguments.systems:
                sys.exit(f"{system} is not installed for {python} ({error}); see --setup-envs")
            if system not in absent:
                _say(f"{system} is left out: {error}; see --setup-envs")
            absent[system] = str(error)
            continue
        fleets[system] = fleet
    return fleets


@contextlib.contextmanager
def _server(arguments: argparse.Namespace, logs: Path) -> Iterator[server.Server]:
    if arguments.server == "given":
        started = server.given(
            arguments.endpoint_url,
            bucket=arguments.bucket,
            prefix=f"cloudckpt-benchmark-{uuid.uuid4().hex[:12]}/",
            region=arguments.region,
        )
    elif arguments.server == "fasts3":
        binary = arguments.fasts3_binary or server.build_fasts3(arguments.fasts3_source, ROOT / "build" / "fasts3")
        started = server.fasts3(binary, log_directory=logs)
    else:
        started = server.moto(log_directory=logs)
    with started as running:
        yield running


def _local_parent(arguments: argparse.Namespace) -> Path:
    memory = Path("/dev/shm")  # noqa: S108  # a tmpfs, where the disk does not decide
    return arguments.local_dir or (memory if memory.is_dir() else Path(tempfile.gettempdir()))


def _report(
    arguments: argparse.Namespace,
    parameters: dict[str, Any],
    samples: list[Sample],
    versions: dict[str, dict[str, str]],
    absent: dict[str, str],
) -> int:
    labels = {name: system.label for name, system in SYSTEMS.items()}
    judged = verdicts(samples)
    about = provenance(ROOT)
    machine = about["machine"]
    print(
        f"{parameters['total_bytes'] / MIB:g} MiB of float32 in {arguments.num_tensors} tensors, server "
        f"{parameters['server']}, {arguments.repetitions} repetitions: median (range)\n"
        f"{machine['cpu_model']}, {machine['num_cores']} cores; commit {about['git_commit']}\n"
    )
    print(results_table(samples, labels), end="\n\n")
    if ratios := ratios_table(samples, labels):
        print(ratios, end="\n\n")
    for verdict in judged:
        print(f"{'met   ' if verdict.met else 'MISSED'}  {verdict.text}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        document = {
            **about,
            "parameters": parameters,
            "versions": versions,
            "absent": absent,
            "samples": [dataclasses.asdict(sample) for sample in samples],
            "verdicts": [dataclasses.asdict(verdict) for verdict in judged],
        }
        arguments.json.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return 1 if arguments.check_bars and not all(verdict.met for verdict in judged) else 0


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


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    for option, least in (("num_tensors", 1), ("repetitions", 1), ("rival_threads", 1)):
        if getattr(arguments, option) < least:
            parser.error(f"--{option.replace('_', '-')} must be at least {least}")
    if min(arguments.ranks) < 1:
        parser.error("--ranks must be at least 1")
    if arguments.server == "given" and arguments.bucket is None:
        parser.error("--server given needs --bucket")
    if arguments.server == "fasts3" and not (arguments.fasts3_binary or arguments.fasts3_source):
        parser.error("--server fasts3 needs --fasts3-binary or --fasts3-source")
    if arguments.server != "given" and (arguments.endpoint_url or arguments.bucket):
        parser.error("--endpoint-url and --bucket go with --server given")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--total-mib", type=int, help=f"{DEFAULT_TOTAL_MIB} by default, {DEFAULT_TOTAL_MIB_ON_MOTO} on moto")
    add("--num-tensors", type=int, default=64)
    add(
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 2],
        help="world sizes; the size is that of all ranks together",
    )
    add("--repetitions", type=int, default=5, help="counted ones; one more warms up")
    add("--systems", nargs="+", choices=list(SYSTEMS), help="all that are installed by default")
    add("--rival-threads", type=int, default=1, help="thread_count of the rivals' writers")
    add(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of cloudckpt.Options",
    )
    add("--server", choices=["moto", "fasts3", "given"], default="moto", help="given: see --endpoint-url")
    add("--fasts3-binary", type=Path, help="the server, built")
    add("--fasts3-source", type=Path, help="the server's cargo project, to be built")
    add("--endpoint-url", help="of a server that runs already; Amazon S3 where absent")
    add("--bucket", help="on that server")
    add("--region", default="us-east-1", help="on that server")
    add("--local-dir", type=Path, help="where paths are saved to; /dev/shm by default")
    add("--python-s3fs", metavar="PYTHON", help="interpreter with torch and s3fs")
    add("--python-s3torchconnector", metavar="PYTHON", help="interpreter with torch and s3torchconnector[dcp]")
    add(
        "--setup-envs",
        action="store_true",
        help="make environments for the rivals beside the repository, and stop",
    )
    add("--timeout-s", type=float, default=600, help="for one save or load")
    add("--json", type=Path, help="also write samples, versions and machine there")
    add("--check-bars", action="store_true", help="exit with 1 where a bar is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
