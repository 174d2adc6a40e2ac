"""The form of the modules: formatted, every variable typed, described and guarded, every module explained.

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


def blocks(path: Path, kind: str) -> dict[str, str]:
    """The file's blocks of one kind, by name. What is formatted begins and ends them in the first column."""
    text = path.read_text() if path.exists() else ""
    return dict(re.findall(rf'^{kind} "([^"]+)" {{\n(.*?)^}}$', text, re.DOTALL | re.MULTILINE))


@pytest.mark.skipif(TERRAFORM is None, reason="needs terraform or tofu")
def test_terraform_files_are_formatted(tmp_path: Path) -> None:
    """If this fails, run `terraform fmt -recursive terraform`."""
    done = run(tmp_path, "fmt", "-check", "-recursive", "-diff", str(TERRAFORM_DIR))
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.parametrize(
    "path",
    [*(path / "main.tf" for path in ENVIRONMENTS), *(path / "README.md" for path in MODULES)],
    ids=lambda path: path.parent.name,
)
def test_the_examples_pass_what_the_modules_take(path: Path) -> None:
    """If this fails, the examples cannot be applied."""
    called = blocks(path, "module")
    assert called
    for body in called.values():
        variables = blocks(_called(body) / "variables.tf", "variable")
        passed = set(re.findall(r"^  ([a-z_]+)\s+= ", body, re.MULTILINE)) - {"source", "count"}
        required = {name for name, text in variables.items() if not re.search(r"^  default", text, re.MULTILINE)}
        assert required <= passed <= set(variables)
    files = [path, path.with_name("outputs.tf")] if path.name == "main.tf" else [path]
    text = "\n".join(file.read_text() for file in files)
    cloud = "gcs" if "gcs" in path.parent.name or "gcp" in path.parent.name else "s3"
    named = {"bucket": MODULES_DIR / f"{cloud}-bucket", "roles": MODULES_DIR / f"{cloud}-roles"}
    named |= {"container": MODULES_DIR / "azure-container"}
    named |= {name: _called(body) for name, body in called.items()}
    for name, output in re.findall(r"\bmodule\.([a-z_]+)\.([a-z_]+)", text):
        assert output in blocks(named[name] / "outputs.tf", "output"), f"{name}.{output}"


@pytest.mark.parametrize("directory", MODULES, ids=lambda path: path.name)
def test_a_readme_lists_the_variables(directory: Path) -> None:
    """If this fails, a user reads of a setting that does not exist, or does not read of one that does."""
    text = (directory / "README.md").read_text()
    variables = blocks(directory / "variables.tf", "variable")
    rows = dict(re.findall(r"^\| `([a-z0-9_]+)` \| .+? \| (.+) \|$", text, re.MULTILINE))
    assert list(rows) == list(variables)
    assert all(f'"{rows[name]}"' in body.replace('\\"', '"') for name, body in variables.items())


def _called(body: str) -> Path:
    """The module of a block."""
    source = re.search(r'^  source = ".*/modules/(.+)"$', body, re.MULTILINE)
    assert source is not None
    return MODULES_DIR / source[1]


def _without(text: str, parts: list[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text
