"""The private names of torch that cloudckpt uses, on the installed torch and on one that lacks them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import _torch_compat
from cloudckpt._torch_compat import PRIVATE_NAMES, PrivateName
from cloudckpt.errors import CloudckptError

PACKAGE = Path(cloudckpt.__file__).parent


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: f"{private.module}.{private.name}")
def test_the_installed_torch_has_each_private_name(private: PrivateName) -> None:
    """If this fails, torch has dropped a private name: `PrivateName.without` says what no longer works."""
    assert _torch_compat.find(private.module, private.name) is not None, private.without


def test_no_other_module_imports_a_private_name() -> None:
    """If this fails, a change of torch can break code that nobody finds in the list of its private names."""
    found = [
        f"{path.relative_to(PACKAGE)}: {node.module}.{alias.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_torch_compat.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
        for alias in node.names
        if "._" in (node.module or "") or alias.name.startswith("_")
    ]
    assert not found


def test_each_fallback_does_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, cloudckpt does something else with a torch that lacks a private name."""
    for name in ("_foreach_copy", "_is_traceable_wrapper", "_create_chunk_list", "_validate_global_plan"):
        monkeypatch.setattr(_torch_compat, name, None)
    monkeypatch.setattr(_torch_compat, "find", lambda *_: None)
    targets = [torch.zeros(2), torch.zeros(3)]
    _torch_compat.copy_each(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [target.tolist() for target in targets] == [[1, 1], [2, 2, 2]]
    assert not _torch_compat.is_wrapper_subclass(torch.ones(1))
    assert not _torch_compat.is_wrapper_subclass(torch.nn.Parameter(torch.ones(1)))
    assert _torch_compat.chunks_wanted_by(torch.ones(2)) is None
    assert _torch_compat.validate_global_plan([], dcp.Metadata({})) == []


def test_a_torch_that_cannot_be_extended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, `enable` ends in an AttributeError about a name that no user knows."""
    monkeypatch.setattr(_torch_compat, "find", lambda *_: None)
    with pytest.raises(CloudckptError, match="has changed how it finds a storage"):
        cloudckpt.enable()
