"""What holds for every command: how it is called, what it says of errors, and how it ends."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

import cloudckpt
from cloudckpt import types
from cloudckpt.cli._app import app

COMMANDS = [command.name for command in app.registered_commands]


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The real command, as a shell runs it."""
    return subprocess.run(
        [sys.executable, "-m", "cloudckpt", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
    )


def test_help_does_not_wait_for_torch() -> None:
    """If this fails, a user who asks how a command is called waits seconds for the answer."""
    script = """
import sys
from cloudckpt.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code, end
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "Usage" in done.stdout


def test_a_listing_does_not_wait_for_numpy(tmp_path: Path) -> None:
    """If this fails, ``ls`` takes nearly half as long again before it asks the store anything."""
    cloudckpt.save({"a": [1]}, f"{tmp_path}/step-1", no_dist=True)
    script = """
import sys
from cloudckpt.cli import main
try:
    main(["ls", sys.argv[1]])
except SystemExit as end:
    assert not end.code, end
print("numpy" in sys.modules)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "step-1" in done.stdout


@pytest.mark.parametrize("module", [cloudckpt, types], ids=["cloudckpt", "types"])
def test_what_is_lazy_is_what_type_checkers_see(module: ModuleType) -> None:
    """If this fails, a public name can be imported but has no type, or has a type and cannot be imported."""
    assert module.__file__
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    typed = {
        node.module: sorted(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert typed == {module: sorted(names.split()) for module, names in module._LAZY.items()}
    assert set(module.__all__) <= set(dir(module))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    """If this fails, a typing error of the user's, or hasattr, ends in something else than it does with any module."""
    assert not hasattr(cloudckpt, "no_such_name")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    """If this fails, `cloudckpt … --help` does not say what a command is for, or shows no example."""
    (command,) = (command for command in app.registered_commands if command.name == name)
    assert command.callback is not None
    text = command.callback.__doc__ or ""
    assert f"cloudckpt {name} " in text
    click_command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]  # it is a group
    assert all(getattr(parameter, "help", None) for parameter in click_command.params if parameter.name != "help")


def test_the_version_is_the_packages() -> None:
    """If this fails, a report of a bug names another version than the one that has it."""
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"cloudckpt {cloudckpt.__version__}\n")


def test_wrong_usage_exits_with_2() -> None:
    """If this fails, a script takes a typing error for an answer."""
    for arguments in (["no-such-command"], ["ls"], ["ls", "--no-such-option", "x"], ["ls", "s3:/x"]):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """If this fails, who installed cloudckpt without Typer gets a traceback, and not the command that helps."""
    script = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("typer", "rich"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Without())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("typer", "rich") else found(name, *rest)
from cloudckpt.cli import main
main(["ls", sys.argv[1]])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "The command line needs Typer and Rich: pip install 'cloudckpt[cli]'\n"
