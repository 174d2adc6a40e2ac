"""``python -m cloudckpt.testing s3://bucket/prefix``: hold a store to everything that cloudckpt relies on.

Exit status: 0 if it keeps all of it; 1 if it does not, or if something that was written there could not be removed;
2 if it could not be asked (a wrong argument, no such bucket, no access, or an interruption).
"""
# ruff: noqa: T201
# (a command prints)

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

from cloudckpt.errors import CloudckptError
from cloudckpt.stores.storage_options import parse_assignments

_DESCRIPTION = """\
Holds a store to everything that cloudckpt relies on: atomic creates, invisible uploads, exact ranges, listings that
are up to date, and errors that say what happened. Everything is written under a fresh prefix below URI, and removed
again. The whole takes a few thousand requests, most of them tiny; --keys and --rounds make it cheaper.
"""
_EPILOG = """\
exit status: 0 if the store keeps all of it; 1 if it does not, or if something could not be removed; 2 if it could not
be asked. Broken connections are tried on an endpoint_url that begins with http:// alone, and what a refusal looks like
with --denied alone.
"""


def main(arguments: Sequence[str] | None = None, *, out: TextIO | None = None) -> int:
    """Run the command and return its exit status."""
    chosen = _parser().parse_args(arguments)
    out = out or sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # ✓ and ✗ where the terminal cannot show them
    if importlib.util.find_spec("pytest") is None:
        print("The contract needs pytest: pip install 'cloudckpt[testing]'", file=sys.stderr)
        return 2
    from cloudckpt.testing.command import COULD_NOT_ASK, Target, check

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was written is removed then, too
    try:
        target = Target.of(
            chosen.uri,
            storage_options=parse_assignments(chosen.option, flag="--option"),
            denied_options=parse_assignments(chosen.denied, flag="--denied") if chosen.denied else None,
            timeout_s=chosen.timeout,
            num_rounds=chosen.rounds,
            num_keys=chosen.keys,
            longest_key_bytes=chosen.longest_key,
        )
        return check(target, keyword=chosen.keyword, verbose=chosen.verbose, out=out)
    except CloudckptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return COULD_NOT_ASK
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return COULD_NOT_ASK


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
        "credentials come from where they always do (environment, profile, role)",
    )
    parser.add_argument(
        "--denied",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a storage option that makes the credentials bad ones (profile=read-only), to see what refusals look like",
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
    parser.add_argument(
        "--longest-key",
        type=_positive,
        default=1024,
        metavar="BYTES",
        help="length of the longest key that is tried, from the bucket on (default: 1024, the limit of S3 and GCS; "
        "Ceph takes uploads in parts up to about 900)",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="Options.timeout_s (default: 60)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show where a clause failed, line by line")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
