"""The tables of the documentation that the code knows best. Run as a program, it writes them into the documents:

python tests/docs/tables.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloudckpt import events, options
from cloudckpt.doctor import environment
from cloudckpt.format.model import ITEMSIZE_BYTES, SAFETENSORS_TAG
from cloudckpt.telemetry import opentelemetry

ROOT = Path(__file__).resolve().parents[2]
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell for cell in line)} |" for line in lines)


def dtype_table() -> str:
    """Every dtype of the format with its size and safetensors tag; those of one size without a tag in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in sorted(ITEMSIZE_BYTES, key=lambda name: (-ITEMSIZE_BYTES[name], name not in SAFETENSORS_TAG, name)):
        tag = f"`{SAFETENSORS_TAG[name]}`" if name in SAFETENSORS_TAG else ""
        rows.setdefault((str(ITEMSIZE_BYTES[name]), tag), []).append(f"`{name}`")
    return table(("dtype", "bytes", "safetensors tag"), [(", ".join(names), *key) for key, names in rows.items()])


def options_table() -> str:
    """Every field of `Options`, with its default and its docstring."""
    return _fields_table(options.Options)


def advanced_options_table() -> str:
    """Every field of `AdvancedOptions`, with its default and its docstring."""
    return _fields_table(options.AdvancedOptions)


def _fields_table(kind: type[Any]) -> str:
    meanings = _field_docstrings(kind)
    rows = [(f"`{field.name}`", f"`{_default_of(field)}`", meanings[field.name]) for field in dataclasses.fields(kind)]
    return table(("option", "default", "meaning"), rows)


def records_table() -> str:
    """Every event that is written to the log, with its level."""
    levels = sorted({*events.LEVELS.values()})
    names = {level: ", ".join(f"`{name}`" for name, each in events.LEVELS.items() if each == level) for level in levels}
    return table(("level", "records"), [(logging.getLevelName(level), names[level]) for level in levels])


def metrics_table() -> str:
    """Every metric of OpenTelemetry's."""
    rows = [(f"`{name}`", kind, f"`{unit}`", what) for name, (kind, unit, what) in opentelemetry.METRICS.items()]
    return table(("metric", "kind", "unit", "meaning"), rows)


def services_table() -> str:
    """Every service, with what its documents promise."""
    rows = [tuple(row[column] for column in environment.SERVICE_COLUMNS) for row in environment.read_services()]
    return table(environment.SERVICE_COLUMNS, rows)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "dtypes": ("docs/format.md", dtype_table),
    "options": ("docs/options.md", options_table),
    "advanced_options": ("docs/options.md", advanced_options_table),
    "records": ("docs/telemetry.md", records_table),
    "services": ("docs/stores-seen.md", services_table),
    "metrics": ("docs/telemetry.md", metrics_table),
}
"""Each table's name in the document's comments, the document, and what makes the table."""


def marked(text: str, name: str) -> str:
    """Return what stands between the table's two comments."""
    match = re.search(rf"<!-- table: {name} -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    if match is None:
        raise LookupError(f"no comments '<!-- table: {name} -->' and '<!-- end -->'")
    return match[1]


def _field_docstrings(kind: type) -> dict[str, str]:
    body = next(iter(ast.parse(inspect.getsource(kind)).body))
    assert isinstance(body, ast.ClassDef)
    meanings: dict[str, str] = {}
    for node, following in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            words = " ".join(str(following.value.value).split())  # type: ignore[attr-defined]  # is_text saw to it
            meanings[node.target.id] = words.replace("``", "`").replace("|", "\\|")
    return meanings


def _default_of(field: dataclasses.Field[object]) -> str:
    if field.default is dataclasses.MISSING:
        return "AdvancedOptions()" if field.default_factory is options.AdvancedOptions else "{}"
    value = field.default
    if field.name.endswith("_bytes") and isinstance(value, int):
        unit_bytes, unit = next(one for one in _UNITS if value % one[0] == 0)
        return f"{value // unit_bytes} {unit}"
    return repr(value)


def main() -> None:
    """Write every table into its document."""
    for name, (document, render) in TABLES.items():
        path = ROOT / document
        text = path.read_text()
        path.write_text(text.replace(marked(text, name), render()))


if __name__ == "__main__":
    main()
