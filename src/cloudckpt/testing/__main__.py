"""``python -m cloudckpt.testing s3://bucket/prefix``: check that a store does all that cloudckpt relies on.

Exit status: 0 if it does; 1 if it does not, or if something that was written there could not be removed; 2 if the
check could not be made (a wrong argument, no such bucket, no access, or an interruption).
"""
# ruff: noqa: T201
# (a command prints)

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from cloudckpt._messages import install_advice
from cloudckpt.doctor import examine
from cloudckpt.doctor.environment import removing_directories
from cloudckpt.errors import CloudckptError, StoreError, UnsupportedOperationError
from cloudckpt.io.client import open_client
from cloudckpt.options import Options
from cloudckpt.stores.storage_options import parse_assignments
from cloudckpt.uri import Location, parse_location

HOLDS, FAILS, NOT_CHECKED = 0, 1, 2
"""The exit statuses."""
_NUM_REMOVALS = 5
_DOCTOR_S = 3600.0  # as long as the clauses take on a slow store: the verdict must rest on answers, not on a deadline

_DESCRIPTION = """\
Checks that a store does all that cloudckpt relies on: atomic creates, invisible uploads, exact ranges, listings that
are up to date, and errors that say what happened. Everything is written under a fresh prefix below URI, and removed
again. The whole takes a few thousand requests, most of them tiny; --keys and --rounds make it cheaper.
"""
_EPILOG = """\
exit status: 0 if the store does all of it; 1 if it does not, or if something could not be removed; 2 if the check could
not be made.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStore:
    """The store to check, and the extent of the check."""

    root: Location
    """A fresh folder below the user's URI."""
    options: Options
    num_rounds: int
    num_keys: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    chosen = _parser().parse_args(arguments)
    if importlib.util.find_spec("pytest") is None:
        print(f"The contract needs pytest: {install_advice('testing')}", file=sys.stderr)
        return NOT_CHECKED
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the objects are removed then, too
    status = NOT_CHECKED
    try:
        options = Options(storage_options=parse_assignments(chosen.option, flag="--option"))
        report = examine(chosen.uri, deadline_s=_DOCTOR_S, options=options)
        print(report, flush=True)
        if any(report[name].outcome != "passed" for name in ("list", "put")):  # no such bucket, no access, no answer
            return NOT_CHECKED
        with _scratch_location(chosen.uri, options) as root:
            print(f"cloudckpt's contract for stores, under {root.uri}", flush=True)
            target = CheckedStore(root=root, options=options, num_rounds=chosen.rounds, num_keys=chosen.keys)
            status = _run_clauses(target, keyword=chosen.keyword, verbose=chosen.verbose)
    except CloudckptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return NOT_CHECKED if status == NOT_CHECKED else FAILS
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return NOT_CHECKED
    is_kept = report.is_healthy and report["create-if-absent"].outcome == "passed"  # else clauses are skipped
    return status if is_kept else max(status, FAILS)


@contextlib.contextmanager
def _scratch_location(uri: str, options: Options) -> Iterator[Location]:
    """Yield a new location below `uri`, and remove everything there on exit.

    Raises `StoreError` before anything is written, if objects there cannot be listed or removed.
    """
    location = parse_location(uri).child(f"cloudckpt-contract-{uuid.uuid4().hex[:12]}")
    with removing_directories(location):
        _remove_all(location, options)  # nothing exists there yet: this checks if removal is permitted
        try:
            yield location
        finally:
            try:
                _remove_all(location, options)
            except BaseException:
                print(f"Not everything was removed: remove what is left under {location.uri}")
                raise


def _remove_all(location: Location, options: Options) -> None:
    client = open_client(location, options)
    for _ in range(_NUM_REMOVALS):  # requests of an interrupted save may still arrive
        if location.local_path is not None:  # the stores below have left their empty folders
            shutil.rmtree(location.local_path, ignore_errors=True)
        with contextlib.suppress(UnsupportedOperationError):
            for upload in client.list_uploads():
                client.abort_multipart(upload.key, upload.upload_id)
        keys = [info.key for info in client.list()]
        client.delete(keys or ["nothing"])
        if not keys:
            return
    raise StoreError(
        f"{location.uri}: objects are still listed after they were removed", key=location.uri, operation="list"
    )


def _run_clauses(target: CheckedStore, *, keyword: str, verbose: bool) -> int:
    """Run the clauses with pytest, without the user's plugins and settings, and return the exit status."""
    import pytest

    class Plugin:
        @pytest.fixture
        def target(self) -> CheckedStore:
            return target

    suite = Path(__file__).with_name("contract.py")
    with mock.patch.dict(os.environ):
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            os.environ.pop(name, None)
        status = pytest.main(
            [
                str(suite),
                *("-c", os.devnull, "--rootdir", str(suite.parent), "--noconftest", "-p", "no:cacheprovider"),
                *("-v", "-rs", "--no-header", f"--tb={'long' if verbose else 'short'}", "-k", keyword),
            ],
            plugins=[Plugin()],
        )
    return {pytest.ExitCode.OK: HOLDS, pytest.ExitCode.TESTS_FAILED: FAILS}.get(pytest.ExitCode(status), NOT_CHECKED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cloudckpt.testing", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("uri", metavar="URI", help="s3://bucket/prefix, gs://bucket/prefix, a path, …")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a storage option, as Options(storage_options=…) takes it: region=eu-west-1, endpoint_url=http://…; "
        'true, false and numbers are taken for such, "17" in quotes for text. Keep secrets out of the command line: '
        "credentials come from the environment, a profile or a role, as always",
    )
    parser.add_argument("-k", dest="keyword", default="", metavar="EXPRESSION", help="only these clauses, as pytest -k")
    parser.add_argument("--rounds", type=_positive, default=5, metavar="N", help="rounds of each race (default: 5)")
    parser.add_argument(
        "--keys",
        type=_positive,
        default=1005,
        metavar="N",
        help="objects in each test of long listings (default: 1005, more than a page of S3's)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the whole traceback of a failure")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
