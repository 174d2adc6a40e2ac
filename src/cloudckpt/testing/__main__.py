"""``python -m cloudckpt.testing s3://bucket/prefix``: check that a store does all that cloudckpt relies on.

Exit status: 0 if it does; 1 if it does not, or if something that was written there could not be removed; 2 if the
check could not be made (a wrong argument, no such bucket, no access, or an interruption).
"""
# ruff: noqa: T201
# (a command prints)

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from cloudckpt.errors import CloudckptError, StoreError
from cloudckpt.options import Options
from cloudckpt.stores.base import Capabilities, Store
from cloudckpt.stores.open import open_store
from cloudckpt.stores.storage_options import parse_assignments
from cloudckpt.uri import Location, parse_location

HOLDS, FAILS, NOT_CHECKED = 0, 1, 2
"""The exit statuses."""

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
    """Fresh, below the URI that the user gave."""
    options: Options
    num_rounds: int
    num_keys: int

    def open(self, name: str = "") -> Store:
        """Open the store at `name` below the root."""
        return open_store(self.root.child(name) if name else self.root, self.options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    chosen = _parser().parse_args(arguments)
    if importlib.util.find_spec("pytest") is None:
        print("The contract needs pytest: pip install 'cloudckpt[testing]'", file=sys.stderr)
        return NOT_CHECKED
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the objects are removed then, too
    try:
        target = CheckedStore(
            root=parse_location(chosen.uri).child(f"cloudckpt-contract-{uuid.uuid4().hex[:12]}"),
            options=Options(storage_options=parse_assignments(chosen.option, flag="--option")),
            num_rounds=chosen.rounds,
            num_keys=chosen.keys,
        )
        return _check(target, keyword=chosen.keyword, verbose=chosen.verbose)
    except CloudckptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return NOT_CHECKED
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return NOT_CHECKED


def _check(target: CheckedStore, *, keyword: str, verbose: bool) -> int:
    """Check the store, and return the exit status. Raises `StoreError` if the store cannot be reached."""
    store = target.open()
    next(store.list(), None)  # fails for a bucket that does not exist or denies access, before anything is written
    print(f"cloudckpt's contract for stores, under {target.root.uri}", flush=True)
    try:
        capabilities = store.probe()
        _print_capabilities(capabilities)
        status = _run_clauses(target, keyword=keyword, verbose=verbose)
    finally:
        left = remove_all(store)
        if target.root.scheme == "file":
            shutil.rmtree(target.root.path, ignore_errors=True)
        if left:
            print(f"✗ Could not be removed; remove it by hand, under {store.uri}:", *left, sep="\n    ", flush=True)
    return max(status, FAILS) if left or not capabilities.conditional_create else status


def remove_all(store: Store) -> list[str]:
    """Remove every object and every unfinished upload; return those that are left, or the error."""
    try:
        for upload in list(store.list_uploads()):
            store.abort_multipart(upload.key, upload.upload_id)
        store.delete([info.key for info in store.list()])
        left = [store.url(info.key) for info in store.list()]
        return left + [f"an unfinished upload to {store.url(upload.key)}" for upload in store.list_uploads()]
    except StoreError as error:
        return [str(error)]


def _print_capabilities(capabilities: Capabilities) -> None:
    if capabilities.conditional_create:
        print("✓ create-if-absent: the store has it")
    else:
        observed = f" ({capabilities.observed})" if capabilities.observed else ""
        print(f"✗ create-if-absent: the store does not keep it{observed}")
        print("    Of two saves to one place each would overwrite the other's. cloudckpt refuses to save here; use")
        print("    another store or a newer server, or accept it with Options(commit='unconditional').")
    print("✓ multipart uploads: the store has them" if capabilities.multipart else "○ multipart uploads: none")
    if capabilities.verifies_crc32c:
        print("✓ checksums: wrong ones are refused", flush=True)
    else:
        print("○ checksums: the store verifies none; damage in transit is found when it is read", flush=True)


def _run_clauses(target: CheckedStore, *, keyword: str, verbose: bool) -> int:
    """Run the clauses with pytest, without the user's plugins and settings, and return the exit status."""
    import pytest

    class Plugin:
        @pytest.fixture
        def target(self) -> CheckedStore:
            return target

    suite = Path(__file__).with_name("command_suite.py")
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
