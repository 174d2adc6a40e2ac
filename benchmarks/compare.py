"""Two runs' results side by side: ``python -m benchmarks.compare BEFORE.json AFTER.json``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.results.comparison import compared, comparison_text
from benchmarks.results.model import MalformedResultsError, read


def main(argv: list[str] | None = None) -> int:
    """Return 0, also where something became worse: whether it is noise, a person decides; 2 for files of no use."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args(argv)
    try:
        comparison = compared(read(arguments.before), read(arguments.after))
    except MalformedResultsError as error:
        print(error, file=sys.stderr)
        return 2
    print(comparison_text(comparison), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
