"""torch's checkpoint types stay within the packages that translate them."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.house import PACKAGE, importers_of_dcp, modules

TRANSLATORS = {"dcp", "background", "integrations", "_torch_compat.py"}
EXTENSIONS = "tensors/extensions.py"
"""The one module of the core that is about a protocol of torch's checkpoints: stream extensions."""


def _imported(path: Path, source: str) -> set[str]:
    """Return the names that a module imports from `source` or from below it."""
    return {
        alias.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(f"{source}.")
        for alias in node.names
    }


def test_core_modules_import_nothing_of_torchs_checkpoints() -> None:
    """If this fails, who saves or reads anything that is no plan of torch's has to fake torch's metadata again."""
    assert [str(path.relative_to(PACKAGE)) for path in importers_of_dcp()] == []


def test_core_modules_get_no_type_of_torchs_checkpoints_by_another_way() -> None:
    """If this fails, `_torch_compat` hides an import that the test above would find."""
    names = _imported(PACKAGE / "_torch_compat.py", "torch.distributed.checkpoint")
    assert {"_DistWrapper", "StreamTransformExtension"} <= names
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in modules()
        if path.relative_to(PACKAGE).parts[0] not in TRANSLATORS
        and _imported(path, "cloudckpt._torch_compat") & (names | {"DistWrapper"})
    }
    assert found == {EXTENSIONS}
