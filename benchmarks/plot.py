"""A run's results as pictures and a page: ``python -m benchmarks.plot RESULTS.json --out DIRECTORY``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.results.model import MalformedResultsError, read

TITLE = "cloudckpt: benchmarks"


def draw(results_path: Path, out: Path, *, title: str = TITLE) -> list[Path]:
    """Write the page and the pictures into the folder `out`, and return their paths.

    Raises:
        MalformedResultsError: The file is not what a run writes.
        ImportError: matplotlib is not installed.

    """
    from benchmarks.results.page import page  # noqa: PLC0415  # they need matplotlib
    from benchmarks.results.plots import plots  # noqa: PLC0415

    results = read(results_path)
    drawn = plots(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "index.html").write_text(page(results, drawn, title=title), encoding="utf-8")
    for plot in drawn:
        (out / f"{plot.name}.png").write_bytes(plot.png)
    return [out / "index.html", *(out / f"{plot.name}.png" for plot in drawn)]


def main(argv: list[str] | None = None) -> int:
    """Write the files and return 0; 2 for results of no use, or without matplotlib."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("results", type=Path, help="what --results of python -m benchmarks has written")
    parser.add_argument("--out", type=Path, required=True, help="the folder for index.html and the PNG files")
    parser.add_argument("--title", default=TITLE, help="of the page (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        written = draw(arguments.results, arguments.out, title=arguments.title)
    except ImportError as error:
        print(f"{error}: pip install -e '.[bench]'", file=sys.stderr)
        return 2
    except MalformedResultsError as error:
        print(error, file=sys.stderr)
        return 2
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
