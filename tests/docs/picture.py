"""The picture of the command line, docs/command-line.svg. Run as a program, it writes it:

python tests/docs/picture.py
"""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

import cloudckpt
from cloudckpt.options import Options
from cloudckpt.stores import open_store
from cloudckpt.testing import damage
from cloudckpt.testing.servers import clean_environment, moto_server

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "command-line.svg"
COMMANDS = (
    "cloudckpt ls s3://bucket/run --columns name,size,state",
    "cloudckpt cat s3://bucket/run/step-200 model.weight",
    "cloudckpt verify s3://bucket/run/step-300",
)
_COLUMNS, _CHARACTER, _LINE = 58, 8.4, 20


def render() -> str:
    """Draw a terminal with the commands and their output, from a run whose last step is damaged."""
    with moto_server() as server:
        server.create_bucket("bucket")
        options = Options(storage_options=server.storage_options)
        for step in (100, 200, 300):
            weight = torch.arange(1024.0 * 1024).view(1024, 1024) / step
            state = {"model": {"weight": weight, "bias": torch.ones(1024)}}
            cloudckpt.save(state, f"s3://bucket/run/step-{step}", no_dist=True, options=options)
        store = open_store("s3://bucket/run/step-300", options)
        damage.flip_bit(store, next(info.key for info in store.list("data/")), bit=8 * 3_000_000)
        environment = clean_environment() | server.environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
        lines = []
        for command in COMMANDS:
            words = [sys.executable, "-m", *shlex.split(command)]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
            output = re.sub(r"\d{8}T\d{9}Z-[0-9a-f]{12}", "…", done.stdout)
            printed = [piece for line in output.splitlines() for piece in textwrap.wrap(line, _COLUMNS) or [""]]
            lines += [f"$ {command}", *printed, ""]
    return _draw(lines[:-1])


def _draw(lines: list[str]) -> str:
    """Draw the lines, dark as terminals are, in an SVG that needs no font of its own."""
    width, height = round(_COLUMNS * _CHARACTER) + 32, len(lines) * _LINE + 28
    texts = []
    for number, line in enumerate(lines):
        if line:
            size = f'y="{30 + number * _LINE}" textLength="{len(line) * _CHARACTER:.1f}"'
            colour = ' fill="#8bd5a0"' if line.startswith("$ ") else ""
            texts.append(f'  <text x="16" {size}{colour} xml:space="preserve">{html.escape(line)}</text>')
    title = "  <title>A terminal that lists a run, looks at a tensor, and finds a damaged step.</title>"
    box = f'  <rect width="{width}" height="{height}" rx="8" fill="#1e2129" stroke="#455a64"/>'
    font = 'font-family="monospace" font-size="14" fill="#dde3e8"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="0 0 {width} {height}" {font}>'
    return "\n".join([head, title, box, *texts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(render())
