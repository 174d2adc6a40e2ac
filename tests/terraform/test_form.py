"""How the modules are written: formatted, every variable typed, described and guarded, every module explained.

What only the providers' plugins can tell (whether a resource has such an argument) is not tried here: `terraform
validate` needs them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.terraform.evaluated import MODULES_DIR, TERRAFORM, TERRAFORM_DIR, run

MODULES = sorted(path for path in MODULES_DIR.iterdir() if path.is_dir())
ENVIRONMENTS = sorted(path for path in (TERRAFORM_DIR / "envs").iterdir() if path.is_dir())
_SELF_EVIDENT = ("bool", "map(string)", "map(list(string))")


def blocks(path: Path, kind: str) -> dict[str, str]:
    """The file's blocks of one kind, by name. What is formatted begins and ends them in the first column."""
    text = path.read_text() if path.exists() else ""
    return dict(re.findall(rf'^{kind} "([^"]+)" {{\n(.*?)^}}$', text, re.DOTALL | re.MULTILINE))


@pytest.mark.skipif(TERRAFORM is None, reason="needs terraform or tofu")
def test_it_is_formatted(tmp_path: Path) -> None:
    """If this fails, run `terraform fmt -recursive terraform`."""
    done = run(tmp_path, "fmt", "-check", "-recursive", "-diff", str(TERRAFORM_DIR))
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_something_to_look_at() -> None:
    """If this fails, the tests here look at nothing, and pass."""
    assert len(MODULES) == 6
    assert len(ENVIRONMENTS) == 2
    assert all(blocks(path / "variables.tf", "variable") for path in [*MODULES, *ENVIRONMENTS])
    assert all(blocks(path / "outputs.tf", "output") for path in [*MODULES, *ENVIRONMENTS])


@pytest.mark.parametrize("directory", [*MODULES, *ENVIRONMENTS], ids=lambda path: path.name)
def test_every_variable_says_what_it_is(directory: Path) -> None:
    """If this fails, a user has to read the code to know what to pass, or null reaches where it makes no sense."""
    for name, body in blocks(directory / "variables.tf", "variable").items():
        assert re.search(r'^  description\s+= ".+\."$', body, re.MULTILINE), name
        assert re.search(r"^  type\s+= ", body, re.MULTILINE), name
        assert re.search(r"^  nullable\s+= false$|^  default\s+= null$", body, re.MULTILINE), name
    for name, body in blocks(directory / "outputs.tf", "output").items():
        assert re.search(r'^  description\s+= ".+\."$', body, re.MULTILINE), name


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_every_variable_that_can_be_wrong_is_guarded(module: Path) -> None:
    """If this fails, a wrong value gets as far as the cloud."""
    for name, body in blocks(module / "variables.tf", "variable").items():
        kind = re.search(r"^  type\s+= (.+)$", body, re.MULTILINE)
        assert kind is not None
        assert kind[1] in _SELF_EVIDENT or "  validation {" in body, name


@pytest.mark.parametrize("directory", [*MODULES, *ENVIRONMENTS], ids=lambda path: path.name)
def test_every_variable_is_used_and_every_one_that_is_used_is_there(directory: Path) -> None:
    """If this fails, a setting does nothing, or the module cannot be loaded."""
    text = "\n".join(path.read_text() for path in directory.glob("*.tf"))
    used = set(re.findall(r"\bvar\.([a-z0-9_]+)", text))
    guards = re.findall(r"^  validation {\n.*?^  }$", text, re.DOTALL | re.MULTILINE)
    outside = set(re.findall(r"\bvar\.([a-z0-9_]+)", _without(text, guards)))
    declared = set(blocks(directory / "variables.tf", "variable"))
    assert used <= declared
    assert outside == declared


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda path: path.name)
def test_the_examples_pass_what_the_modules_take(environment: Path) -> None:
    """If this fails, the examples cannot be applied."""
    for body in blocks(environment / "main.tf", "module").values():
        source = re.search(r'^  source = "(.+)"$', body, re.MULTILINE)
        assert source is not None
        module = (environment / source[1]).resolve()
        variables = blocks(module / "variables.tf", "variable")
        passed = set(re.findall(r"^  ([a-z_]+)\s+= ", body, re.MULTILINE)) - {"source"}
        required = {name for name, text in variables.items() if not re.search(r"^  default", text, re.MULTILINE)}
        assert required <= passed <= set(variables)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_versions_are_bounded_and_the_readme_is_whole(module: Path) -> None:
    """If this fails, a new major version of a provider breaks users, or a variable is told of nowhere."""
    assert re.search(r'version = ">= [0-9.]+, < [0-9.]+"', (module / "versions.tf").read_text())
    readme = (module / "README.md").read_text()
    for name in blocks(module / "variables.tf", "variable"):
        assert f"| `{name}` |" in readme, name
    for name in blocks(module / "outputs.tf", "output"):
        assert f"`{name}`" in readme, name


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_there_is_no_secret_in_it(module: Path) -> None:
    """If this fails, credentials lie in a state file, or in a machine's user data."""
    for path in module.rglob("*.tf*"):
        assert not re.search(r"AKIA|secret_access_key|private_key|password|aws_iam_access_key", path.read_text()), path


def _without(text: str, parts: list[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text
