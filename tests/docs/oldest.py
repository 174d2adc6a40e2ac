"""The lowest version of each package that `pyproject.toml` allows, as constraints for pip:

python tests/docs/oldest.py
"""

from __future__ import annotations

import re
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def oldest() -> dict[str, str]:
    """Version by name, of the requirements alone that users install; by hand, for Python 3.10 reads no TOML."""
    text = PYPROJECT.read_text().partition("\nbench = ")[0]
    return dict(re.findall(r'"([A-Za-z0-9_-]+)(?:\[[a-z0-9,]+\])?>=([0-9.]+)"', text.partition("\ndependencies = ")[2]))


if __name__ == "__main__":
    for name, version in oldest().items():
        print(f"{name}=={version}")
