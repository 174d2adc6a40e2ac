"""Publish a run in the repository: ``python -m benchmarks.publish RESULTS.json``.

Replaces, of a run of `bars` or `background`: its JSON in docs/benchmarks, the targets there, the picture of the README,
and the figures of the documents that are about the picture.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.results.bars import BARS_OF, LARGE, LOCAL, SMALL, TLS, verdicts
from benchmarks.results.model import (
    MalformedResultsError,
    Place,
    Quantity,
    Results,
    Row,
    Spread,
    cpu_s_per_gb,
    gb_per_s,
    read,
)
from benchmarks.results.report import NOTHING, bars_table, markdown, summary

DOCS = Path(__file__).resolve().parent.parent / "docs"
_ROWS: tuple[tuple[str, str, Place], ...] = (
    ("**cloudckpt, S3**", "cloudckpt", LARGE),
    ("s3torchconnector", "s3torchconnector", LARGE),
    ("torch's `FsspecWriter` + s3fs", "s3fs", LARGE),
    ("bare sockets, no checks", "limit", LARGE),
    ("**cloudckpt, S3 over TLS**", "cloudckpt", TLS),
    ("s3torchconnector over TLS", "s3torchconnector", TLS),
    ("**cloudckpt, S3, 20,000 tensors of 64 KiB**", "cloudckpt", SMALL),
    ("**cloudckpt, a path in memory**", "cloudckpt-path", LOCAL),
    ("torch's `FileSystemWriter`, same path", "filesystem", LOCAL),
)
_PICTURED = {
    "cloudckpt": "cloudckpt",
    "s3torchconnector": "s3torchconnector",
    "s3fs": "torch's FsspecWriter with s3fs",
}
"""Names of systems in descriptions of the picture, which have the speeds at the first place."""


def publish(results_path: Path, docs: Path = DOCS) -> list[Path]:
    """Replace what `docs` and the README beside it show of such a run, and return the paths of what was written.

    Raises:
        MalformedResultsError: The file is not what a run of a sweep with targets writes.
        ImportError: matplotlib is not installed.

    """
    from benchmarks.results.plots import headline_plot  # noqa: PLC0415  # it needs matplotlib

    results = read(results_path)
    if results.sweep not in BARS_OF:
        raise MalformedResultsError(f"{results_path}: only runs of {' and '.join(BARS_OF)} are published")
    folder = docs / "benchmarks"
    contents = {folder / f"{results.sweep}.json": results_path.read_bytes()}
    plots = [headline_plot(results, is_dark=is_dark) for is_dark in (False, True)]
    drawn = {folder / f"{plot.name}.png": plot.png for plot in plots if plot is not None}
    if drawn:
        contents |= drawn
        for path in (folder / "README.md", docs / "index.md", docs.parent / "README.md"):
            contents[path] = with_figures(path.read_text(encoding="utf-8"), results).encode()
    for path, content in contents.items():
        path.write_bytes(content)
    (folder / "targets.md").write_text(targets_page(folder), encoding="utf-8")
    return [*contents, folder / "targets.md"]


def with_figures(text: str, results: Results) -> str:
    """Return a document with the figures of this run: the rows of its table, and those that describe the picture."""
    for title, system, place in _ROWS:
        save, load = (results.row(system, verb, place) for verb in ("save", "load"))
        if save is not None and load is not None:
            speeds = [_median(row, gb_per_s) for row in (save, load)]
            cpu_s = " / ".join(_median(row, cpu_s_per_gb) for row in (save, load))
            peaks = " / ".join(NOTHING if row.peak_mib is None else f"{row.peak_mib:.0f}" for row in (save, load))
            line = f"| {' | '.join((title, *speeds, cpu_s, peaks))} |"
            text = re.sub(rf"^\| {re.escape(title)} \|.*$", line, text, count=1, flags=re.MULTILINE)
            if place == LARGE and system in _PICTURED:
                speed = r"\d+\.\d+"
                described = rf"({re.escape(_PICTURED[system])}\s){speed}(\sand\s){speed}"
                text = re.sub(described, rf"\g<1>{speeds[0]}\g<2>{speeds[1]}", text)
    return text


def _median(row: Row, quantity: Quantity) -> str:
    return f"{Spread.of(list(row.by_repetition(quantity).values())).median:.2f}"


def targets_page(folder: Path) -> str:
    """Return the page of the targets, as the runs in `folder` stand to them."""
    about = "`python -m benchmarks.publish RESULTS.json` writes this page, and the picture and first table of the"
    page = ["# Targets of the project", f"{about}\n[results](README.md). A *stretch* is a harder target."]
    for sweep in BARS_OF:
        path = folder / f"{sweep}.json"
        if path.exists():
            results = read(path)
            table = re.sub(r"-{4,}", "---", re.sub(" +", " ", markdown(bars_table(results))))
            page += [f"## `--sweep {sweep}`", summary(verdicts(results)), table]
    return "\n\n".join(page) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the files and return 0; 2 for results of no use, or without matplotlib."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    parser.add_argument("results", type=Path, help="what --results of python -m benchmarks has written")
    try:
        print(*publish(parser.parse_args(argv).results), sep="\n")
    except (ImportError, MalformedResultsError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
