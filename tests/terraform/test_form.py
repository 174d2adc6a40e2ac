"""How the modules are written: formatted, every variable typed, described and guarded, every module explained.

What only the providers' plugins can tell (whether a resource has such an argument) is not tried here: `terraform
validate` needs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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


@pytest.mark.parametrize(
    "path", sorted(TERRAFORM_DIR.rglob("*.tf")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_it_is_laid_out_as_terraform_would(path: Path) -> None:
    """If this fails, `terraform fmt -check` fails, which is not on every machine."""
    text = path.read_text()
    assert text.endswith("}\n")
    assert "\t" not in text
    assert "\n\n\n" not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert not [line for line in text.splitlines() if (len(line) - len(line.lstrip())) % 2]
    for lines in _neighbours(text):
        assert len({line.index("=") for line in lines}) == 1, "\n".join(lines)


def _neighbours(text: str) -> Iterator[list[str]]:
    """Each run of lines, one under another and alike indented, that give a name a value of that line alone."""
    run_of: list[str] = []
    for line in [*text.splitlines(), ""]:
        found = re.match(r"( *)[\w-]+ += [^=]*?([^\[({])$", line)
        if found is None or (run_of and not re.match(found[1] + r"\S", run_of[-1])):
            yield from [run_of] if run_of else []
            run_of = []
        if found is not None:
            run_of.append(line)


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
        passed = set(re.findall(r"^  ([a-z_]+)\s+= ", body, re.MULTILINE)) - {"source"}
        required = {name for name, text in variables.items() if not re.search(r"^  default", text, re.MULTILINE)}
        assert required <= passed <= set(variables)
    files = [path, path.with_name("outputs.tf")] if path.name == "main.tf" else [path]
    text = "\n".join(file.read_text() for file in files)
    cloud = "gcs" if "gcs" in path.parent.name or "gcp" in path.parent.name else "s3"
    named = {"bucket": MODULES_DIR / f"{cloud}-bucket", "roles": MODULES_DIR / f"{cloud}-roles"}
    named |= {name: _called(body) for name, body in called.items()}
    for name, output in re.findall(r"\bmodule\.([a-z_]+)\.([a-z_]+)", text):
        assert output in blocks(named[name] / "outputs.tf", "output"), f"{name}.{output}"


def _called(body: str) -> Path:
    """The module of a block."""
    source = re.search(r'^  source = ".*/modules/(.+)"$', body, re.MULTILINE)
    assert source is not None
    return MODULES_DIR / source[1]


@pytest.mark.parametrize(
    "readme", [TERRAFORM_DIR / "README.md", TERRAFORM_DIR.parent / "README.md"], ids=["own", "top"]
)
def test_what_the_readmes_say_to_pass_and_to_ask_for_is_there(readme: Path) -> None:
    """If this fails, a user who does as the README says is told that there is no such variable, or no such output."""
    text = readme.read_text()
    aws = TERRAFORM_DIR / "envs" / "aws"
    assert set(re.findall(r"-var '?([a-z_]+)=", text)) <= set(blocks(aws / "variables.tf", "variable"))
    assert set(re.findall(r"terraform output (?:-raw )?([a-z_]+)", text)) <= set(blocks(aws / "outputs.tf", "output"))


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
