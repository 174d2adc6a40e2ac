"""A run's results as pictures and a page: ``python -m benchmarks.plot RESULTS.json --out DIRECTORY``.

``--publish docs/benchmarks`` puts there what the repository shows of a run: its JSON, headline.png and targets.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.results.bars import BARS_OF, verdicts
from benchmarks.results.model import MalformedResultsError, read
from benchmarks.results.report import bars_table, markdown, summary

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


def publish(results_path: Path, folder: Path) -> list[Path]:
    """Replace what `folder` shows of such a run: its JSON, headline.png where it has one, and targets.md.

    Raises:
        MalformedResultsError: The file is not what a run of a sweep with targets writes.
        ImportError: matplotlib is not installed.

    """
    from benchmarks.results.plots import headline_plot  # noqa: PLC0415  # it needs matplotlib

    results = read(results_path)
    if results.sweep not in BARS_OF:
        raise MalformedResultsError(f"{results_path}: only runs of {' and '.join(BARS_OF)} are published")
    contents = {f"{results.sweep}.json": results_path.read_bytes()}
    plot = headline_plot(results)
    if plot is not None:
        contents[f"{plot.name}.png"] = plot.png
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "targets.md").write_text(targets_page(folder), encoding="utf-8")
    return [folder / name for name in (*contents, "targets.md")]


def targets_page(folder: Path) -> str:
    """Return the page of the targets, as the runs in `folder` stand to them."""
    command = "`python -m benchmarks.plot RESULTS.json --publish docs/benchmarks`"
    about = f"{command} writes this page\nand the picture of the [results](README.md). A *stretch* is a harder target."
    page = ["# Targets of the project", about]
    for sweep in BARS_OF:
        path = folder / f"{sweep}.json"
        if path.exists():
            results = read(path)
            table = re.sub(r"-{4,}", "---", re.sub(" +", " ", markdown(bars_table(results))))
            page += [f"## `--sweep {sweep}`", summary(verdicts(results)), table]
    return "\n\n".join(page) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the files and return 0; 2 for results of no use, or without matplotlib."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("results", type=Path, help="what --results of python -m benchmarks has written")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="the folder for index.html and the PNG files")
    where.add_argument("--publish", type=Path, help="the folder with the published results of this sweep, to replace")
    parser.add_argument("--title", default=TITLE, help="of the page (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        written = (
            publish(arguments.results, arguments.publish)
            if arguments.publish is not None
            else draw(arguments.results, arguments.out, title=arguments.title)
        )
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
