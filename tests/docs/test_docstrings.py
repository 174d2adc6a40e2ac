"""Docstrings, documents and messages: their examples run, and their sentences are short and plain."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.docs.tables import ROOT
from tests.house import indirect_docstrings, modules

import cloudckpt
from cloudckpt import errors, telemetry, types
from cloudckpt.testing import contract, damage, faults, servers
from cloudckpt.testing.servers import S3Server

_MADE_FOR_USERS = {"AsyncSave", "Event", "LoadReport", "Preemption", "SaveReport"}
"""Classes that users get, and do not make."""
_INTERNAL = {"begin", "begin_call", "discard", "end", "end_call", "flush_trace", "set_background_state", "stop_sharing"}
"""Methods that other parts of the package call."""
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises):\n((?:    .*\n|\n)*)", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example::\n\n((?: {4}.*\n|\n)+)", re.MULTILINE)


def _public(*modules: Any) -> dict[str, Any]:
    found = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)}


def _text(value: object) -> str:
    return inspect.cleandoc(getattr(value, "__doc__", "") or "") + "\n"


PUBLIC = _public(cloudckpt, types, errors, telemetry)
EXAMPLES = {
    f"{name}.{part}".removesuffix("."): inspect.cleandoc("\n" + found[1])
    for name, value in {**PUBLIC, **_public(servers)}.items()
    for part, one in {"": value, **(vars(value) if inspect.isclass(value) else {})}.items()
    if part != "__doc__" and (found := _EXAMPLE.search(_text(one)))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, s3_bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, what an IDE shows for a name does not work."""
    monkeypatch.chdir(tmp_path)
    s3_bucket.create_bucket("archive")
    model = torch.nn.Sequential(OrderedDict(body=torch.nn.Linear(8, 8), head=torch.nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    save_file({name: tensor.detach() for name, tensor in model.state_dict().items()}, "model.safetensors")
    if not re.search(r"save\(", EXAMPLES[name]):  # an example that saves begins with an empty bucket
        for step in (100, 200):
            uri = f"s3://bucket/run/step-{step}"
            cloudckpt.save(uri, model=model, optimizer=optimizer, extra={"epoch": step})
    names = {"model": model, "optimizer": optimizer, "state_dict": {"model": model.state_dict()}, "dcp": dcp}
    modules = {**vars(servers), "cloudckpt": cloudckpt, "train_on": lambda: None}
    exec(EXAMPLES[name], {**modules, **names})  # noqa: S102  # our own text
    cloudckpt.close()


def test_docstrings_are_complete() -> None:
    """If this fails, a user does not learn from an IDE or the reference what an argument, field or result means."""
    problems = [f"{name} has no example" for name in _public(cloudckpt) if _needs_example(name)]
    for name, value in {**_public(contract, damage, faults, servers), **PUBLIC}.items():
        node = ast.parse(inspect.getsource(value)).body[0]
        problems += _problems_in(name, node)
        for part in node.body if isinstance(node, ast.ClassDef) and name in PUBLIC else []:
            if isinstance(part, ast.FunctionDef) and not _is_hidden(value, part.name):
                problems += _problems_in(f"{name}.{part.name}", part)
    text = (ROOT / "docs/frameworks.md").read_text()  # whose snippets `make frameworks` runs
    for path in sorted((ROOT / "src/cloudckpt/integrations").glob("[a-z]*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                problems += _problems_in(f"{path.stem}.{node.name}", node)
                example = "".join(_EXAMPLE.findall((ast.get_docstring(node) or "") + "\n"))
                lines = inspect.cleandoc("\n" + example).splitlines()
                problems += [f"{node.name}: {line} is not in frameworks.md" for line in lines if line not in text]
    assert problems == []


def _needs_example(name: str) -> bool:
    return name not in EXAMPLES and name not in _MADE_FOR_USERS and name not in errors.__all__


def _is_hidden(value: type, method: str) -> bool:
    of_torch = (base for base in value.__mro__ if base.__module__.startswith("torch."))
    return method.startswith("_") or method in _INTERNAL or any(method in vars(base) for base in of_torch)


def _problems_in(name: str, node: ast.AST) -> Iterator[str]:
    """Yield each way in which the docstring of a class or function is not complete."""
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef))
    text = ast.get_docstring(node) or ""
    bodies = dict(_SECTION.findall(text + "\n"))
    entries = {head: re.findall(r"^ {4}[*]{0,2}(\w+): ", body, re.MULTILINE) for head, body in bodies.items()}
    if not text:
        yield f"{name} has no docstring"
    for error in entries.get("Raises", []):
        if error != "CheckpointException" and not any(hasattr(module, error) for module in (errors, builtins)):
            yield f"{name}: {error} does not exist"
    if isinstance(node, ast.ClassDef):
        fields = zip(node.body, [*node.body[1:], node], strict=True) if node.decorator_list else ()
        for field, after in fields:
            is_public = isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_")
            if is_public and not isinstance(after, ast.Expr):
                yield f"{name}: {ast.unparse(field)} has no docstring"
        makers = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        if name in _MADE_FOR_USERS or name in errors.__all__ or not makers:
            return
        function = makers[0]
    else:
        function = node
    given = function.args
    in_order = [*given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    arguments = [one.arg for one in in_order if one and one.arg not in ("self", "cls") and one.arg[0] != "_"]
    if arguments != entries.get("Args", []):
        yield f"{name}: Args are {entries.get('Args', [])} instead of {arguments}"
    decorators = [ast.unparse(one) for one in function.decorator_list]
    is_value = function is not node or "property" in decorators or function.returns is None
    has_result = {"Returns", "Yields"} & bodies.keys() or (not arguments and text.startswith("Return"))
    if not is_value and ast.unparse(function.returns or node) not in ("None", "Never") and not has_result:
        yield f"{name}: Returns is missing"


DOCS = ROOT / "docs"
PAGES = sorted(
    path for folder in ("", "docs/**/", "terraform/**/", "benchmarks/**/") for path in ROOT.glob(f"{folder}*.md")
)

_NO_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|(?<=\])\([^)]*\)", re.DOTALL | re.MULTILINE)
_NO_SENTENCE = re.compile(r"^[|#].*?$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n|^\s*[-*] |^\s*\d+\. ", re.MULTILINE)
_WORD = re.compile(r"[\w'\u2019-]+")
_INDIRECT = {"what", "whether", "whoever"}
_LATE_SUBJECT = re.compile(r"(?:What|Whether|Whoever|Of)\b")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sentences_are_short_and_direct(path: Path) -> None:
    """If this fails, a page has become hard to read: shorten its sentences, and make the actor their subject."""
    text = re.sub(r"`[^`]*`", "code", _NO_PROSE.sub("", path.read_text()))
    paragraphs = [" ".join(paragraph.split()) for paragraph in _PARAGRAPH.split(_NO_SENTENCE.sub("", text))]
    sentences = [one for part in paragraphs for one in re.split(r"(?<=[.!?])[\s)*_]+", part) if re.search(r"\w", one)]
    assert len(_WORD.findall(" ".join(sentences))) < 18 * len(sentences), "too long sentences"
    assert [one for one in sentences if _LATE_SUBJECT.match(one.lstrip('*_("'))] == []
    words = _WORD.findall(text.lower())
    assert sum(word in _INDIRECT for word in words) <= max(1, 0.012 * len(words)), "too many of what, whether, whoever"


def test_the_readme_is_short() -> None:
    """If this fails, the README has become more than one page."""
    assert len((ROOT / "README.md").read_text().split()) <= 600


def test_docstrings_and_messages_begin_with_their_subject() -> None:
    """If this fails, an error, a log record, a help text or a docstring has to be read twice."""
    assert [text for text in texts() if _LATE_SUBJECT.match(text.strip())] == list(indirect_docstrings()) == []


def texts() -> Iterator[str]:
    """Yield every constant text of the package, benchmarks and examples: docstrings, messages, their parts, help."""
    for path in (*modules(), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
