"""README and documents: every snippet runs, every link leads somewhere, every table is that of the code."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from tests.docs.markdown import anchors_of, links_of, snippets_of
from tests.docs.tables import ROOT, TABLES, marked
from tests.house import private_patches

import cloudckpt
from cloudckpt import errors, types
from cloudckpt.events import EventName
from cloudckpt.stores.gcs.session import PARSERS as GCS_PARSERS
from cloudckpt.stores.s3.session import ALIASES, PARSERS
from cloudckpt.testing.servers import S3Server, clean_environment

DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "terraform/**/*.md", "benchmarks/*.md") for path in ROOT.glob(pattern)
)


_NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
_WITH_PYTHON = [
    path
    for path in DOCUMENTS
    if any(snippet.language == "python" for snippet in snippets_of(path))
    and path.name not in {"frameworks.md", "quickstart.md"}  # `make frameworks` runs the one, a test below the other
    and path != ROOT / "README.md"  # likewise
]

_RUN = """
import subprocess, sys, warnings
import torch.distributed
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
for path in sys.argv[1:]:
    if path.endswith(".sh"):
        subprocess.run(["bash", "-eux", path], check=True)
    else:
        with open(path) as file:
            exec(compile(file.read(), path, "exec"), globals())
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


_ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""The variables that torchrun sets for a program on one GPU."""


def read(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("path", _WITH_PYTHON, ids=lambda path: path.name)
def test_python_snippets_run(path: Path, tmp_path: Path, s3_bucket: S3Server) -> None:
    """If this fails, what a user copies from the document does not work."""
    assert s3_bucket.endpoint_url
    files = []
    for number, snippet in enumerate(snippets_of(path)):
        if snippet.language == "python":
            files.append(tmp_path / f"snippet-{number}-line-{snippet.line}.py")
            files[-1].write_text(snippet.text)
    command = [sys.executable, "-c", _RUN, *map(str, files)]
    environment = {**os.environ, **_ONE_RANK}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_program_of_the_readme_starts_and_resumes_as_told(tmp_path: Path, s3_bucket: S3Server) -> None:
    """If this fails, the first program that a reader copies does not start without an account, or starts anew."""
    install, program, start, shown, for_ranks = (snippet.text for snippet in snippets_of(ROOT / "README.md"))
    assert install.startswith("pip ")
    on_ranks = program.replace("\noptimizer = ", f"\n{for_ranks}optimizer = ")
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    torchrun = "torchrun --nproc-per-node 2 train.py"
    assert torchrun in read("README.md")

    def run(text: str, command: str) -> str:
        (tmp_path / "train.py").write_text(text)
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=tmp_path,
            env={**(os.environ if "s3://" in text else clean_environment()), "PATH": path},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert "Warning" not in done.stderr
        return done.stdout

    first, *listed = run(program, start).splitlines()
    assert first == "begins with step 0"
    assert [_words_of(line) for line in listed] == [_words_of(line) for line in shown.splitlines()]
    assert _begins_of(run(on_ranks, torchrun)) == [301, 301]  # on another number of ranks
    assert s3_bucket.endpoint_url
    assert _begins_of(run(on_ranks.replace("runs/first", "s3://bucket/run"), torchrun)) == [0, 0]


def _begins_of(printed: str) -> list[int]:
    """Return the step that each rank begins with. Ranks share the output: one may print between a line and its end."""
    return [int(step) for step in re.findall(r"begins with step (\d+)", printed)]


def _words_of(line: str) -> list[str]:
    """Return the words of a line of `ls` that are the same in each run."""
    return [word for word in line.split() if not re.fullmatch(r"[\d.]+|s|min|[KM]iB|\*", word)]


def test_the_quickstart_runs(tmp_path: Path) -> None:
    """If this fails, a beginner's first attempt fails: by a snippet, a command, or the servers beside them."""
    pasted, files = [], []
    with ExitStack() as servers:
        for number, snippet in enumerate(snippets_of(ROOT / "docs" / "quickstart.md")):
            if snippet.text.startswith("cloudckpt dev-server"):
                command = [sys.executable, "-m", *snippet.text.split()]
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                server = servers.enter_context(subprocess.Popen(command, env=clean_environment(), **pipes))
                servers.callback(server.terminate)
                printed = itertools.takewhile(lambda line: not line.startswith("and then"), server.stdout)
                pasted += [line for line in printed if line.startswith("export ")]
            elif snippet.text.startswith("# train.py"):
                (tmp_path / "train.py").write_text(snippet.text)
            elif snippet.language != "text" and not re.match(
                "pip |python3 -m venv ", snippet.text
            ):  # `make package` installs
                files.append(tmp_path / f"{number}-line-{snippet.line}.{snippet.language}")
                files[-1].write_text(snippet.text)
        command = ["bash", "-euc", f'{"".join(pasted)}exec "$@"', "", sys.executable, "-c", _RUN, *map(str, files)]
        path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
        environment = {**clean_environment(), "PATH": path}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_recipe_is_the_example_that_is_tested() -> None:
    """If this fails, a reader copies another script than the one that a test interrupts."""
    recipe, *_ = snippets_of(ROOT / "docs" / "recipes.md")
    assert recipe.text == read("examples/single_gpu.py")


@pytest.mark.parametrize("path", DOCUMENTS, ids=_NAMES)
def test_links_lead_somewhere(path: Path) -> None:
    """If this fails, a reader of the documents ends at a page that is not there."""
    broken = []
    for link in links_of(path):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        if not found.exists() or (anchor and anchor not in anchors_of(found)):
            broken.append(link)
    assert broken == []


def test_paths_of_modules_exist() -> None:
    """If this fails, a document names a module that was renamed or removed; `test_links_lead_somewhere` sees links."""
    package = ROOT / "src" / "cloudckpt"
    folders = "|".join(path.name for path in package.iterdir() if path.is_dir())
    named = re.compile(rf"`((?:src/cloudckpt|tests|{folders})/[\w/]+\.py)\b[^`\n]*`")
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in named.findall(path.read_text())
        if not (ROOT / name).is_file() and not (package / name).is_file()
    ]
    assert gone == []


def test_guarantees_name_tests_that_exist() -> None:
    """If this fails, a guarantee is said to be shown by a test that was renamed or removed."""
    path = ROOT / "docs" / "guarantees.md"
    named = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", path.read_text())
    assert len(named) >= 9
    missing = []
    for name, link in named:
        tree = ast.parse((path.parent / link).read_text())
        if name not in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{link}::{name}")
    assert missing == []


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_code(name: str) -> None:
    """If this fails, a table tells of dtypes or options that are not there: run tests/docs/tables.py."""
    document, render = TABLES[name]
    assert marked(read(document), name) == render()


def test_every_event_is_documented() -> None:
    """If this fails, a subscriber waits for an event that does not come, or meets one that is nowhere explained."""
    documented = re.findall(r"^\| `([\w.]+)`", marked(read("docs/telemetry.md"), "events"), re.MULTILINE)
    assert documented == list(get_args(EventName))


def test_every_s3_option_is_documented() -> None:
    """If this fails, a storage option can only be found by reading the code, or is documented and gone."""
    text = read("docs/stores.md")
    assert re.findall(r"^\| `(\w+)`", marked(text, "s3"), re.MULTILINE) == sorted(PARSERS)
    after = text.partition("boto3's own names work too:")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", after)) == set(ALIASES)


def test_every_gcs_option_is_documented() -> None:
    """If this fails, a storage option can only be found by reading the code, or is documented and gone."""
    assert re.findall(r"^\| `(\w+)`", marked(read("docs/stores.md"), "gcs"), re.MULTILINE) == sorted(GCS_PARSERS)


def test_the_picture_of_the_architecture_is_that_of_the_linter() -> None:
    """If this fails, docs/architecture.md draws an architecture that nothing enforces, or leaves out a part."""
    picture = read("docs/architecture.md").split("```")[1].removeprefix("text")
    left = "\n".join(line[:28] if "/  " in line else line for line in picture.splitlines())
    drawn = {
        name.removesuffix("/").removesuffix(".py"): at for at, name in enumerate(re.findall(r"\w+(?:/|\.py)", left))
    }
    parts = {path.stem for path in (ROOT / "src" / "cloudckpt").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert drawn.keys() == parts - {"__main__", "__pycache__"}
    contract = re.search(r"layers = \[(.*?)\]", read("pyproject.toml"), re.DOTALL)
    assert contract is not None
    layers = [re.findall(r"\w+", line) for line in contract[1].splitlines() if line.strip()]
    assert {"__init__", *(name for layer in layers for name in layer)} == drawn.keys()
    for upper, lower in itertools.pairwise(layers):
        assert max(drawn[name] for name in upper) < min(drawn[name] for name in lower), (upper, lower)


DOCS = ROOT / "docs"


def test_the_reference_has_every_public_name() -> None:
    """If this fails, a public name can be used, and is documented nowhere."""
    pages = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    named = re.findall(r"^::: cloudckpt\.(?:types\.)?([\w.]+)$", pages, re.MULTILINE)
    assert len(named) == len(set(named))
    parts = {name for name in named if name.startswith(("integrations.", "testing."))}
    public = {*cloudckpt.__all__, *types.__all__, "errors"} - {*errors.__all__, "__version__", "types"}
    assert set(named) - parts == public
    modules = {path.stem for path in (ROOT / "src/cloudckpt/integrations").glob("[a-z]*.py")}
    assert {name.split(".")[1] for name in parts if name.startswith("integrations.")} == modules


def test_every_error_has_its_paragraph() -> None:
    """If this fails, whoever meets an error looks in vain for what to do about it."""
    text = (DOCS / "troubleshooting.md").read_text()
    sections = dict(re.findall(r"^### `(\w+)`\n\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE))
    assert sections.keys() == set(errors.__all__)
    bases = {"CloudckptError", "StoreError", "CheckpointError"}
    for name, section in sections.items():
        assert name in bases or ("**Cause:**" in section and "**Remedy:**" in section), name


def test_dark_page_sets_every_color_of_the_light_one() -> None:
    """If this fails, a part of the site has the ink of the light page on a dark ground, and cannot be read."""
    css = (ROOT / "docs/site.css").read_text()
    blocks = (
        css.partition(f'[data-md-color-scheme="{name}"] {{')[2].partition("}")[0] for name in ("default", "slate")
    )
    light, dark = (set(re.findall(r"^  (--[\w-]+):", block, re.MULTILINE)) for block in blocks)
    assert light - dark == set()


def test_the_navigation_has_every_document() -> None:
    """If this fails, a document is on the site, and nobody finds it there."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    documents = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = set(re.findall(r"- (?:\w+: )?(\S+\.md)$", navigation, re.MULTILINE))
    assert {name for name in documents if not re.match(r"design/\d", name)} <= listed


MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def jobs(workflow: str = "ci") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / f".github/workflows/{workflow}.yml").read_text())["jobs"]
    return found


def test_ci_and_the_workflow_run_the_same_targets() -> None:
    """If this fails, a change that one of them lets through is refused by the other."""
    text = re.sub(r"\"[^\"]*\"", "", (ROOT / ".ci/run").read_text())  # values of variables
    lines = re.findall(r"^run (.+)$", text, re.MULTILINE)
    own = {word for line in lines for word in line.split() if not word.startswith("-") and "=" not in word}
    assert own <= TARGETS
    of_workflow = {target for job in jobs().values() for target in job["strategy"]["matrix"]["target"]}
    # What lanes install by themselves, and the tests of `make test` once more, for which one machine has no time.
    assert own - {"servers", "frameworks-installed", "pythons-installed"} == of_workflow - {"coverage"}


def test_contributing_names_every_make_target() -> None:
    """If this fails, `make help` leaves out a lane, or a contributor reads of one that is not there."""
    helped = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    assert TARGETS - helped == {"format", "types", "imports", "frameworks-installed", "pythons-installed"} - helped
    shown = set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    assert {"test", "lint", "help"} <= shown <= helped
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == TARGETS


def test_no_test_replaces_a_private_name() -> None:
    """If this fails, a change of the inside of a module breaks a test that is about something else."""
    assert [*private_patches()] == []
