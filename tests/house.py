"""Print how large the code base is, beside the bars that it should keep: ``make house``."""

from __future__ import annotations

import ast
import re
import socket
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cloudckpt"
_SUPPRESSION = re.compile(r"#\s*(?:noqa|type:\s*ignore)\b")
_SCHEMES = {f"{scheme}{end}" for scheme in ("s3", "gs", "file", "memory", "az") for end in ("", "://")}
_INDIRECT = re.compile(r"(?:Of|What|Whether|As|Where|Who|How|Until)\b")


def main() -> int:
    """Print the table. Returns 1 where a bar is missed, else 0."""
    put_frames, read_frames = count_frames()
    rooms, returns = walk_of_a_plan()
    protocol = [PACKAGE / "dcp" / "ranks" / name for name in ("rendezvous.py", "collectives.py")]
    test_lines = count_lines(ROOT / "tests")
    rows: list[tuple[str, int, str, int]] = [
        ("lines in src/", count_lines(ROOT / "src"), "≤", 33_000),
        ("modules", len(list(modules())), "≤", 150),
        ("modules with torch's checkpoint types outside dcp", len(list(importers_of_dcp())), "≤", 0),
        ("clients made apart, or beside a store in a signature", count_pairs(), "≤", 0),
        ("modules outside stores, uri, doctor that ask a scheme", len(list(scheme_deciders())), "≤", 0),
        ("modules in circles of imports", len(circular_modules()), "≤", 0),
        ("modules imported by exactly one other module", len(imported_once()), "≤", 40),
        ("lines of the ranks' protocol", count_lines_of(protocol), "≤", 500),
        ("frames of ours between save() and boto3", put_frames, "≤", 9),
        ("frames of ours between a ranged read and the socket", read_frames, "≤", 10),
        ("modules in the walk of a save's plan", rooms, "≤", 6),
        ("returns from another module in this walk", returns, "≤", 8),
        ("noqa and type: ignore in src/", count_suppressions(), "≤", 120),
        ("docstrings that begin with Of, What, …, tests' too", len(list(indirect_docstrings())), "≤", 40),
        ("lines of tests", test_lines, "≤", 36_000),
        ("harness among them, percent", round(100 - 100 * count_test_bodies() / test_lines), "≤", 55),
        ("tests whose name begins with what, who, of", len(list(riddles())), "≤", 0),
        ("private names of src that tests replace", len(list(private_patches())), "≤", 0),
        ("mutants in the table", count_mutants(), "≥", 40),
        ("names in cloudckpt.__all__", count_public_names(), "≤", 45),
    ]
    missed = 0
    for name, value, sign, bar in rows:
        is_kept = value <= bar if sign == "≤" else value >= bar
        missed += not is_kept
        print(f"{name:<55} {value:>7,}   {sign} {bar:>6,}   {'' if is_kept else 'missed'}".rstrip())
    print("The times of `make test` and `.ci/run`: .ci/run prints them. make mutants shows if each mutant is caught.")
    return 1 if missed else 0


def modules() -> Iterator[Path]:
    """Yield the package's modules."""
    return PACKAGE.rglob("*.py")


def count_lines(folder: Path) -> int:
    """Count the lines of all Python files below `folder`, empty ones too."""
    return count_lines_of(folder.rglob("*.py"))


def count_lines_of(paths: Iterable[Path]) -> int:
    """Count the lines of these files, empty ones too."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def count_suppressions() -> int:
    """Count the comments that silence ruff or mypy."""
    return sum(len(_SUPPRESSION.findall(path.read_text(encoding="utf-8"))) for path in modules())


def name_of(path: Path) -> str:
    """Return a module's dotted name."""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_by_module() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, wherever the statement stands."""
    known = {name_of(path) for path in modules()}
    imports: dict[str, set[str]] = {}
    for path in modules():
        found = imports[name_of(path)] = set()
        for node in _nodes(path):
            for imported in _imports(node):
                module = imported if imported in known else imported.rpartition(".")[0]
                if module in known and module != name_of(path):
                    found.add(module)
    return imports


def imported_once() -> list[str]:
    """Return the names of the modules that exactly one other module imports."""
    num_importers = Counter(module for found in imports_by_module().values() for module in found)
    return sorted(module for module, number in num_importers.items() if number == 1)


def circular_modules() -> set[str]:
    """Return the modules that import themselves by way of others, without the packages' ``__init__``."""
    packages = {name_of(path) for path in modules() if path.name == "__init__.py"}
    imports = {name: found - packages for name, found in imports_by_module().items() if name not in packages}
    circular = set()
    for name, found in imports.items():
        reached, ahead = set(), [*found]
        while ahead:
            if (module := ahead.pop()) not in reached:
                reached.add(module)
                ahead.extend(imports[module])
        if name in reached:
            circular.add(name)
    return circular


def importers_of_dcp() -> Iterator[Path]:
    """Yield the modules that import torch.distributed.checkpoint where the core speaks of objects and blocks."""
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        if parts[0] not in {"dcp", "background", "integrations", "_torch_compat.py"} and any(
            imported.startswith("torch.distributed.checkpoint") for node in _nodes(path) for imported in _imports(node)
        ):
            yield path


def count_pairs() -> int:
    """Count the functions that take a store beside its client, and the clients that are made outside `io/client.py`."""
    count = 0
    for path in modules():
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.args, *node.args.kwonlyargs]
                found = {ast.unparse(one.annotation).split(" |")[0] for one in arguments if one.annotation is not None}
                count += {"Store", "StoreClient"} <= found
            is_made = isinstance(node, ast.Call) and ast.unparse(node.func) == "StoreClient"
            count += is_made and path != PACKAGE / "io" / "client.py"
    return count


def scheme_deciders() -> Iterator[Path]:
    """Yield the modules that ask for a URI's scheme and are not of the stores, the URIs or the doctor."""
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        if parts[0] not in {"stores", "doctor", "uri.py"} and any(_asks_scheme(node) for node in _nodes(path)):
            yield path


def _asks_scheme(node: ast.AST) -> bool:
    """Return True for a comparison, a look-up or a call of ``startswith`` with a scheme, of a variable or a literal."""
    if isinstance(node, ast.Compare):
        is_search = any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops)
        asked = [node.left, *(each for one in node.comparators for each in (ast.walk(one) if is_search else [one]))]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        asked = [*node.args, *node.keywords] if node.func.attr in {"startswith", "removeprefix", "get"} else []
    elif isinstance(node, ast.Subscript):
        asked = [node.slice]
    elif isinstance(node, ast.Set):
        asked = node.elts
    else:
        return False
    return any(map(_is_scheme, asked))


def _is_scheme(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in _SCHEMES
    return str(getattr(node, "id", "") or getattr(node, "attr", "")).endswith("scheme")


def _tests() -> Iterator[ast.FunctionDef]:
    for path in (ROOT / "tests").rglob("*.py"):
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node


def count_test_bodies() -> int:
    """Count the lines within test functions. All other lines below tests/ are harness."""
    return sum((test.end_lineno or test.lineno) - test.lineno + 1 for test in _tests())


def riddles() -> Iterator[str]:
    """Yield the tests whose name puts off its subject."""
    return (test.name for test in _tests() if re.match(r"test_(?:what|who(?:ever|m|se)?|of)_", test.name))


def private_patches() -> Iterator[str]:
    """Yield the places where a test replaces a private name of the package."""
    for path in (ROOT / "tests").rglob("*.py"):
        nodes = [*_nodes(path)]
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        ours = {
            alias.asname or alias.name.partition(".")[0]
            for node in imports
            for alias, imported in zip(node.names, _imports(node), strict=False)
            if imported.startswith("cloudckpt")
        }
        for node in nodes:
            for name in _replaced(node):
                if name.partition(".")[0] in ours | {"cloudckpt"} and re.search(r"\._[A-Za-z]\w*$", name):
                    yield f"{path.relative_to(ROOT)}: {name}"


def _replaced(node: ast.AST) -> list[str]:
    """Return the dotted names that a statement or a call replaces or empties."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        return [ast.unparse(target) for target in targets if isinstance(target, ast.Attribute | ast.Subscript)]
    if not isinstance(node, ast.Call):
        return []
    function, texts = ast.unparse(node.func), [ast.unparse(one).strip("\"'") for one in node.args[:2]]
    if function.endswith(("setattr", "delattr", "patch.object")):
        return texts[:1] if isinstance(node.args[0], ast.Constant) else [".".join(texts)]
    if function.endswith(("setitem", "delitem", "patch", "patch.dict")):
        return texts[:1]
    return [function.rpartition(".")[0]] if function.endswith((".clear", ".update", ".add", ".pop")) else []


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def indirect_docstrings() -> Iterator[str]:
    """Yield each docstring that begins with a word that puts off its subject; those below names count too."""
    folders = (ROOT / name for name in ("src", "tests", "benchmarks", "examples"))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in _nodes(path):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else []:
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if is_text and isinstance(text := statement.value.value, str) and _INDIRECT.match(text.strip()):
                    yield text


def count_mutants() -> int:
    """Count the deliberate defects that the tests are held to."""
    from tests.mutants.table import MUTANTS  # noqa: PLC0415  # the table is of this checkout alone

    return len(MUTANTS)


def count_public_names() -> int:
    """Count the names that ``from cloudckpt import *`` gives."""
    import cloudckpt  # noqa: PLC0415  # imports torch

    return len(cloudckpt.__all__)


def count_frames() -> tuple[int, int]:
    """Count the package's frames above boto3 in a save, and above the socket in a load, on an embedded S3 server.

    The frames of the thread that makes the request count; for a put, those of the caller that waits for it as well.
    """
    import botocore.client  # noqa: PLC0415  # as above
    import torch  # noqa: PLC0415

    import cloudckpt  # noqa: PLC0415
    from cloudckpt.testing.servers import moto_server  # noqa: PLC0415

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
    state = {"weights": torch.arange(1 << 20, dtype=torch.float32)}
    with moto_server() as server:
        server.create_bucket("frames")
        uri = "s3://frames/step-1"
        options = cloudckpt.Options(storage_options=server.storage_options)
        put = _deepest(
            botocore.client.BaseClient,
            "_make_api_call",
            lambda: cloudckpt.save(state, uri, no_dist=True, options=options),
            is_counted=lambda arguments: arguments[1] == "PutObject" and "/data/" in arguments[2]["Key"],
            with_caller=True,
        )
        read = _deepest(
            socket.socket,
            "recv_into",
            lambda: cloudckpt.load(state, uri, no_dist=True, options=options),
            is_counted=lambda _: threading.current_thread().name.startswith("cloudckpt-read"),
            with_caller=False,
        )
    return put, read


def walk_of_a_plan() -> tuple[int, int]:
    """Follow a save's plan from `write_data` to the upload, by the items, tensors and bodies that functions are handed.

    Returns the number of modules besides that of the writer, and of the functions there that are handed any of them.
    """
    import torch  # noqa: PLC0415  # as above
    from torch.distributed.checkpoint.planner import WriteItem  # noqa: PLC0415

    import cloudckpt  # noqa: PLC0415
    from cloudckpt.format.safetensors import HeaderEntry  # noqa: PLC0415
    from cloudckpt.tensors.data_objects import PieceBody, SaveItems, StagedItem  # noqa: PLC0415

    carriers = (torch.Tensor, WriteItem, HeaderEntry, SaveItems, StagedItem, PieceBody, GeneratorType)
    handed: set[tuple[str, str]] = set()

    def carries(value: object) -> bool:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return isinstance(value, carriers) or any(map(carries, parts))

    def follow(frame: FrameType, event: str, _: object) -> None:
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(PACKAGE)):
            caller = caller.f_back
        callee, inside = frame.f_code.co_filename, "" if caller is None else caller.f_code.co_filename
        is_visit = event == "call" and callee.startswith(str(PACKAGE)) and inside != callee and "/io/" not in inside
        if is_visit and any(map(carries, frame.f_locals.values())):  # arguments, and what a generator has
            handed.add((callee, frame.f_code.co_name))

    class Followed(cloudckpt.ObjectStoreWriter):
        def write_data(self, *arguments: Any) -> Any:
            sys.setprofile(follow)
            try:
                return super().write_data(*arguments)
            finally:
                sys.setprofile(None)

    writer = Followed("memory://walk/of-a-plan")
    cloudckpt.save({"weights": torch.arange(100.0)}, storage_writer=writer, no_dist=True)
    rooms = {module for module, _ in handed} - {str(PACKAGE / "dcp" / "storage_writer.py")}
    return len(rooms), sum(module in rooms for module, _ in handed)


def _deepest(
    kind: type,
    method: str,
    call: Callable[[], object],
    *,
    is_counted: Callable[[tuple[Any, ...]], bool],
    with_caller: bool,
) -> int:
    """Return the most frames of the package that were on the stacks when `kind.method` was called within `call`."""
    original, counts = getattr(kind, method), [0]

    def counting(*arguments: Any, **keywords: Any) -> Any:
        if is_counted(arguments):
            stacks = sys._current_frames()  # Python's only way to another thread's stack
            threads = {threading.get_ident(), *([threading.main_thread().ident or 0] if with_caller else [])}
            counts.append(sum(_count_of_package(stacks[ident]) for ident in threads))
        return original(*arguments, **keywords)

    setattr(kind, method, counting)
    try:
        call()
    finally:
        setattr(kind, method, original)
    return max(counts)


def _count_of_package(frame: Any) -> int:
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(str(PACKAGE))
        frame = frame.f_back
    return count


if __name__ == "__main__":
    sys.exit(main())
