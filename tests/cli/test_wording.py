"""Errors of the command line say what to type, not what to pass to a function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import typer.main
from tests.cli.conftest import Run, save

import cloudckpt
from cloudckpt.cli._app import app
from cloudckpt.cli._wording import PYTHON, as_typed

PACKAGE = Path(cloudckpt.__file__).parent
_ONLY_PYTHON = (
    *("_background", "_manager", "_process", "_share", "cli", "integrations", "manager.py", "newest.py"),
    *("preemption.py", "testing"),
)
"""Of these, no command is made; or they speak as a command does already."""
_NEVER_SAID = (" must be ", "belong to the reader", "(dry run; pass", "the process group was destroyed", "pipe_file(")
"""What a command checks before, says itself, or cannot come to."""


def _flags() -> set[str]:
    command = typer.main.get_command(app)
    commands = command.commands.values()  # type: ignore[attr-defined]  # it is a group
    return {name for one in commands for parameter in one.params for name in parameter.opts}


def _sentences(path: Path) -> list[str]:
    """What the module may say in an error: its texts, but for docstrings."""
    tree = ast.parse(path.read_text())
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    documented |= {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented | parts
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            texts.append("".join(str(piece) for piece in pieces))
    return [text for text in texts if " " in text]


def test_no_advice_is_for_python_alone() -> None:
    """If this fails, a new error tells whoever typed a command to pass an argument to a function."""
    left = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in _ONLY_PYTHON:
            continue
        for text in _sentences(path):
            said = as_typed(text, flags=_flags())
            if PYTHON.search(said) and not any(one in said for one in _NEVER_SAID):
                left.append(f"{path.relative_to(PACKAGE)}: {said}")
    assert not left


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with two checkpoints, and what is none."""
    monkeypatch.chdir(tmp_path)
    save("step-1")
    save("step-2")
    Path("torchs").write_bytes(b"no pickle, and nothing else")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["cp", "step-1", "step-2"], 6, "pass --overwrite"),
        (["export", "step-1", "out"], 2, "--skip-non-tensors, or --include 'model.*'"),
        (["export", "step-1", "out", "--skip-non-tensors", "--max-shard-size", "0"], 2, "--max-shard-size must"),
        (["import", "torchs", "new", "-f", "torch"], 2, "--unsafe-pickle"),
        (["show", "step-1", "--timeout", "0"], 2, "Error: --timeout must"),
        (["show", "nothing"], 3, "cloudckpt ls ROOT"),
        (["doctor", "step-1", "--deadline", "0"], 2, "Error: --deadline must"),
        (["diff", "step-1", "step-2", "--rtol", "-1"], 2, "Error: --rtol must"),
        (["ls", "step-1", "-o", "region=x"], 2, "no --storage-option"),
        (["ls", "s3:/bucket/run"], 2, "Write 's3://"),
        (["ls", "s3://user:secret@bucket/run"], 2, "--storage-option"),
    ],
)
def test_what_to_type_is_said(run: Run, in_a_folder: None, arguments: list[str], code: int, said: str) -> None:
    """If this fails, the way out that an error names is one that this command does not have."""
    ended = run(*arguments)
    assert (ended.code, said in ended.err) == (code, True), ended.err


def test_what_a_command_cannot_do_is_left_to_python() -> None:
    """If this fails, a command names an option that it does not have."""
    text = "If you trust who wrote it, pass allow_pickle=True"
    assert as_typed(text, flags=["--json"]) == text
    assert as_typed(text, flags=["--unsafe-pickle"]).endswith("pass --unsafe-pickle")
