"""A run's results as tables, with the bars: ``python -m benchmarks.show RESULTS.json``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.results.model import MalformedResultsError, read
from benchmarks.results.report import text_of


def main(argv: list[str] | None = None) -> int:
    """Return 0, also where bars are missed; 2 for results of no use."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.show", description=__doc__)
    parser.add_argument("results", type=Path, help="what --results of python -m benchmarks has written")
    try:
        print(text_of(read(parser.parse_args(argv).results)), end="")
    except MalformedResultsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
