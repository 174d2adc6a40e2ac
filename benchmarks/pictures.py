"""The pictures of fast places and of weights in docs/benchmarks, drawn from the results beside them.

``python -m benchmarks.pictures`` draws them again after a benchmark has written its results to docs/benchmarks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it needs matplotlib
    from benchmarks.results.plots import Plot

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
_LABEL = "seconds, less is better"
_Groups = Mapping[str, Mapping[str, Sequence[float]]]


def places(folder: Path) -> _Groups:
    """Return the seconds of a fast place: `fast-place.json` holds GB/s of 1 GiB."""
    rates = _read(folder, "fast-place")["gb_per_s"]
    seconds = {name: [(1 << 30) / 1e9 / rate for rate in values] for name, values in rates.items()}
    return {
        "Resume from 1 GiB after a crash": {
            "cloudckpt, fast place": seconds["restore from the fast place"],
            "cloudckpt, bucket": seconds["restore from the bucket"],
        },
        "A save blocks training": {
            "cloudckpt, fast place": seconds["save with a fast place, until training goes on"],
            "one plain copy": seconds["plain copy"],
        },
    }


def weights(folder: Path) -> _Groups:
    """Return the seconds of loads of safetensors files, merges and published versions."""
    (one_rank,) = [
        cell for cell in _read(folder, "pretrained")["cells"] if (cell["wire"], cell["ranks"]) == ("http", 1)
    ]
    loads = {system: [wall_s for wall_s, _ in turns] for system, turns in one_rank["samples"].items()}
    merges = {
        system: [turn["wall_s"] for turn in turns] for system, turns in _read(folder, "merges")["samples"].items()
    }
    versions = {figure["formula"]: figure["values"] for figure in _read(folder, "publication")["figures"]}
    return {
        "A model from safetensors files, one rank": {
            "cloudckpt": loads["cloudckpt"],
            "boto3, safe_open": loads["download"],
            "Run:ai's streamer": loads["runai"],
            "s3fs": loads["fsspec"],
        },
        "The mean of three models": {
            "cloudckpt.merge": merges["merge"],
            "reads and a save": merges["by-hand"],
            "boto3, torch.save": merges["torch"],
        },
        "The next version at a rollout worker": {
            "cloudckpt.pull": versions["seconds to pull"],
            "a whole load": versions["seconds to load whole"],
        },
    }


def draw(folder: Path = FOLDER) -> list[Plot]:
    """Return the pictures, each for light and dark pages."""
    from benchmarks.results.plots import groups_plot  # noqa: PLC0415  # it needs matplotlib

    of_name = {"places": places(folder), "weights": weights(folder)}
    return [
        groups_plot(name, groups, _LABEL, is_dark=is_dark)
        for name, groups in of_name.items()
        for is_dark in (False, True)
    ]


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def main() -> int:
    """Write the pictures, print what each shows, and return 0; 2 without matplotlib."""
    try:
        drawn = draw()
    except ImportError as error:
        print(f"{error}: pip install -e '.[bench]'", file=sys.stderr)
        return 2
    for plot in drawn:
        (FOLDER / f"{plot.name}.png").write_bytes(plot.png)
        print(f"{plot.name}.png: {plot.about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
