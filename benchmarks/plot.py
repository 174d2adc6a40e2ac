"""A run's results as pictures and a page: ``python -m benchmarks.plot RESULTS.json --out docs/benchmarks``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.results.model import MalformedResultsError, read


def main(argv: list[str] | None = None) -> int:
    """Write the files and return 0; 2 for results of no use, or without matplotlib."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("results", type=Path, help="what --results of python -m benchmarks has written")
    parser.add_argument("--out", type=Path, required=True, help="the folder for index.html and the PNG files")
    parser.add_argument("--title", default="cloudckpt: benchmarks", help="of the page (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        from benchmarks.results.page import page  # noqa: PLC0415  # they need matplotlib
        from benchmarks.results.plots import plots  # noqa: PLC0415
    except ImportError as error:
        print(f"{error}: pip install 'cloudckpt[bench]'", file=sys.stderr)
        return 2
    try:
        results = read(arguments.results)
    except MalformedResultsError as error:
        print(error, file=sys.stderr)
        return 2
    drawn = plots(results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for plot in drawn:
        (arguments.out / f"{plot.name}.png").write_bytes(plot.png)
    (arguments.out / "index.html").write_text(page(results, drawn, title=arguments.title), encoding="utf-8")
    for name in ("index.html", *(f"{plot.name}.png" for plot in drawn)):
        print(arguments.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
