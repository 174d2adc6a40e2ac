"""Run a notebook and keep its outputs: ``python -m tests.examples.notebook NOTEBOOK [TARGET]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(source: Path, target: Path) -> None:
    """Run all cells of `source` in a new kernel, and write it to `target` with their outputs."""
    notebook = nbformat.read(source, as_version=4)
    NotebookClient(notebook, kernel_name="python3", timeout=200, record_timing=False).execute()
    notebook.metadata.language_info = {"name": "python"}  # without the versions of this kernel
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[-1]))
