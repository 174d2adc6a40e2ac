"""All commands alike: usage, errors, exit codes, signals, and what an invocation imports."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer.main
from tests.cli.conftest import Run, save
from tests.house import modules
from tests.kit.places import S3Place
from tests.kit.wire import S3_ACCESS_DENIED, S3_SLOW_DOWN, Wire, WireRule

import cloudckpt
from cloudckpt import errors, types
from cloudckpt.cli._app import app
from cloudckpt.cli._console import _FLAGS, exit_code_of, message_of
from cloudckpt.errors import ALLOW_PICKLE_HINT, Hint, UnsafePickleError
from cloudckpt.testing.servers import clean_environment


def test_imports_are_few(tmp_path: Path) -> None:
    """If this fails, ``--help`` waits seconds for torch, or ``ls`` waits for numpy."""
    cloudckpt.save({"a": [1]}, f"{tmp_path}/step-1", no_dist=True)
    for arguments, absent in ((["--help"], "torch"), (["ls", str(tmp_path)], "numpy")):
        script = f"""
import atexit, sys
atexit.register(lambda: print({absent!r} in sys.modules))
from cloudckpt.cli import main
main(sys.argv[1:])
"""
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("module", [cloudckpt, types], ids=["cloudckpt", "types"])
def test_lazy_names_are_those_that_type_checkers_see(module: ModuleType) -> None:
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


def test_every_command_explains_itself() -> None:
    """If this fails, `cloudckpt … --help` does not say what a command is for, or shows no example."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    for registered in app.registered_commands:
        assert registered.callback is not None
        assert registered.name
        assert f"cloudckpt {registered.name} " in (registered.callback.__doc__ or "")
        parameters = commands[registered.name].params
        assert all(getattr(parameter, "help", None) for parameter in parameters if parameter.name != "help")


def test_a_missing_extra_is_named() -> None:
    """If this fails, who installed cloudckpt without Typer gets a traceback, and not the command that helps."""
    script = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("typer", "rich") else found(name, *rest)
from cloudckpt.cli import main
main(["ls", "x"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "The command line needs Typer and Rich: install cloudckpt with its extra 'cli', as pip install '.[cli]' does "
        "in a checkout\n"
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with two checkpoints and a file that is none."""
    tmp_path = tmp_path / "folder"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    save("step-1")
    save("step-2")
    Path("torchs").write_bytes(b"no pickle, and nothing else")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["no-such-command"], 2, "no-such-command"),
        (["ls"], 2, "ROOT"),
        (["ls", "--no-such-option", "x"], 2, "--no-such-option"),
        (["cp", "step-1", "step-2"], 6, "pass --overwrite to"),
        (["export", "step-1", "out"], 2, "To leave them out, pass --skip-non-tensors; "),
        (["export", "step-1", "out", "--max-shard-size", "0"], 2, "--max-shard-size"),
        (["import", "torchs", "new", "-f", "torch"], 2, "pass --unsafe-pickle"),
        (["show", "step-1", "--timeout", "0"], 2, "--timeout"),
        (["latest", "step-1"], 3, "cloudckpt ls"),
        (["export", "step-1", "out", "--include", "model", "--strip-prefix", "mod"], 2, "the prefix 'mod.'"),
        (["export", "step-1", "m.SafeTensors", "--include", "model", "--max-shard-size", "1kB"], 2, "Name a folder"),
        (["import", "step-1", "new", "--add-prefix", "."], 2, "a name such as"),
        (["import", "step-1", "new", "-f", "dcp", "--unsafe-pickle"], 3, "has no .metadata"),
        (["ls", ".", "--columns", "name,date"], 2, "committed_at"),
        (["watch", ".", "--interval", "0s"], 2, "between 1s and 1h"),
        (["show", "nothing"], 3, " has the checkpoints step-1, step-2"),
        (["doctor", "step-1", "--deadline", "0"], 2, "--deadline"),
        (["dev-server", "--bucket", "runs", "--bucket", "y"], 2, "a name has 3 to 63"),
        (["dev-server", "--bucket", "runs/1"], 2, "a name has 3 to 63"),
        (["doctor", "s3://bucket/run", "-o", "no_such_option=1"], 2, "no_such_option"),
        (["diff", "step-1", "step-2", "--rtol", "-1"], 2, "--rtol"),
        (["diff", "step-1", "step-2", "--rtol", "nan"], 2, "rtol"),
        (["diff", "step-1", "nothing"], 3, "nothing"),
        (["export", "step-1", "out", "--max-shard-size", "much"], 2, "--max-shard-size"),
        (["ls", "step-1", "-o", "region=x"], 2, "no storage options"),
        (["ls", ".", "--alive-within", "1 fortnight"], 2, "--alive-within"),
        (["ls", "s3:/bucket/run"], 2, "'s3://"),
        (["ls", "s3://user:secret@bucket/run"], 2, "storage options"),
        (["ls", "torchs"], 2, "torchs"),
        (["ls", "typo"], 3, " has the checkpoints step-1, step-2"),
        (["ls", "../fodler"], 3, " either (did you mean 'folder'?): check the URI"),
        (["ls", "../nothing"], 3, " either, which has the folder folder: check the URI"),
        (["show", "typo/step-1"], 3, "/typo either: check the URI"),
        (["latest", "typo"], 3, "There is nothing at "),
        (["plot", "typo"], 3, " has the checkpoints step-1, step-2"),
        (["plot", ".", "val_loss"], 2, "(val_loss): --name PATTERN chooses what is shown"),
        (["best", "."], 2, "No such command 'best'. Did you mean 'cloudckpt ls ROOT --metrics'?"),
        (["lst", "."], 2, "No such command 'lst'. Did you mean 'ls'"),
        (["ls", "bucket/run"], 3, "To name a bucket, write s3://bucket/run or gs://bucket/run"),
        (["ls", "foo://bucket"], 2, "unknown scheme 'foo'. Known"),
        (["gc", "torchs/below"], 2, "torchs"),
        (["show", "x" * 300], 2, "too long"),
    ],
)
def test_errors_have_their_codes_and_name_flags(
    run: Run, folder: Path, arguments: list[str], code: int, message: str
) -> None:
    """If this fails, a script takes a typing error for an answer, or an error names a way out that does not exist."""
    before = sorted(folder.rglob("*"))
    ended = run(*arguments)
    assert (ended.code, ended.out, message in ended.err) == (code, "", True), ended.err
    assert ended.err.splitlines()[-1].startswith("Error: ")
    assert sorted(folder.rglob("*")) == before


def test_flags_of_all_commands_count_before_and_after_the_name(run: Run, folder: Path) -> None:
    """If this fails, a command that wants one of the two places has to be guessed."""
    for command in (["-q", "verify", "step-1"], ["verify", "step-1", "-q"]):
        assert (run(*command).code, run(*command).err) == (0, "")
    assert "Read in" in run("verify", "step-1").err
    assert "may stand before it" in run("--help").out
    early = run("-q", "--timeout", "8", "-o", "no=such", "--json", "ls", "step-1")
    assert (early.code, early.err) == (2, run("ls", "step-1", "-o", "no=such").err)
    for command in (["--timeout=8", "--json", "ls", "."], ["--sort", "name", "-v", "ls", ".", "--json"]):
        assert [one["name"] for one in run(*command).document] == ["step-1", "step-2"], command
    assert "No such option: --speed" in run("--speed", "8", "ls", ".").err
    assert run("--timeout", "8").code == run("--timeout", "8", "nothing").code == 2


def test_hints_name_flags_that_the_command_has() -> None:
    """If this fails, a command names a flag that it does not have, or one that was renamed."""
    error = UnsafePickleError("it is a pickle", uri="s3://bucket/run", hint=ALLOW_PICKLE_HINT)
    assert message_of(error, flags=["--json"]).endswith("pass allow_pickle=True")
    assert message_of(error, flags=["--unsafe-pickle"]).endswith("pass --unsafe-pickle")
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]  # it is a group
    assert set(_FLAGS.values()) <= {name for each in commands for parameter in each.params for name in parameter.opts}


def test_hints_print_their_argument() -> None:
    """If this fails, who prints the hint of an error sees a template with braces."""
    calls = [
        node
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "Hint"
        and all(isinstance(each.value, ast.Constant) for each in node.keywords)
    ]
    assert calls
    for call in calls:
        hint = Hint(**{each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg})
        for text in (str(hint), repr(hint), hint.as_flags({hint.option: "--flag"})):
            assert not re.search("[{}]", text)
        assert f"{hint.option.rpartition('.')[2]}={hint.value}" in str(hint)


def test_advice_says_once_how_to_pass_its_option() -> None:
    """If this fails, a message says "pass call cloudckpt.enable(…)", which is no English and no code."""
    advices = {
        node.value
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "{option}" in node.value
    }
    assert len(advices) > 8
    for advice in advices:
        for via in ("", "enable", "reader", "writer", "manager"):
            for option, value in (("strict", "False"), ("rename", "{}"), ("Options.timeout_s", "9")):
                text = Hint(advice=advice, option=option, value=value).as_python(via)
                assert not re.search(r"\b(pass|call|give|with|use|and) (pass|call|give) ", text), text


def test_a_denied_request_is_told_from_what_is_missing(s3: S3Place, run: Run) -> None:
    """If this fails, a lacking permission or a store that is busy looks like a missing checkpoint."""
    assert run("ls", "s3://there-is-no-such-bucket/run").code == 3
    save(s3.uri())
    endpoint_url = os.environ["AWS_ENDPOINT_URL_S3"]
    with Wire(endpoint_url, WireRule(action=S3_ACCESS_DENIED, times=None)) as wire:
        for command in (["ls", s3.root], ["show", s3.uri()], ["verify", s3.uri()], ["rm", s3.uri(), "--yes"]):
            ended = run(*command, "--storage-option", f"endpoint_url={wire.url}")
            assert (ended.code, ended.out, f"{s3.root}" in ended.err) == (4, "", True), command
            assert not re.search(r"/(manifest|data)\b", ended.err)  # the user named no such key
    with Wire(endpoint_url, WireRule(action=S3_SLOW_DOWN, times=None)) as wire:
        assert run("show", s3.uri(), "--timeout", "1", "--storage-option", f"endpoint_url={wire.url}").code == 5


def test_ctrl_c_ends_a_command_that_waits_for_a_store() -> None:
    """If this fails, Ctrl-C does nothing while a store does not answer, or ends in a traceback."""
    credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = clean_environment() | credentials
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    with socket.create_server(("127.0.0.1", 0)) as server:  # it never answers
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "cloudckpt", "show", "s3://bucket/run", "--endpoint-url", address]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
            try:
                server.settimeout(120)
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(120)
                    assert connection.recv(1)
                    running.send_signal(signal.SIGINT)
                    _, output = running.communicate(timeout=60)
            finally:
                running.kill()
    assert (running.returncode, output) == (130, "Interrupted.\n")


_DROPS = """
import os, sys, weakref
from cloudckpt.cli import main
from cloudckpt.stores.local import LocalStore
class Referent:
    pass
def read_forever(_reference=None):
    os.write(1, b"-")
    sys.stdin.read()
def never_answer(store):
    referent = Referent()
    reference = weakref.ref(referent, read_forever)
    del referent  # Python drops an exception that the callback raises
    read_forever()
LocalStore.list_directories = never_answer
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGINT, 130, "Interrupted.\n"), (signal.SIGTERM, 143, "")]
)
def test_a_signal_that_arrives_in_a_callback_ends_a_command(
    tmp_path: Path, number: int, code: int, message: str
) -> None:
    """If this fails, Python drops one Ctrl-C or SIGTERM of many, and the command waits on."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _DROPS, "ls", str(tmp_path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_environment()) as running:
        try:
            assert running.stdout
            assert running.stdout.read(1) == "-"
            running.send_signal(number)
            assert running.stdout.read(1) == "-"  # the callback has ended, and the command has gone on
            assert running.wait(60) == code
            assert running.stderr
            assert running.stderr.read() == message
        finally:
            running.kill()


_SLOW = """
import sys
from cloudckpt.cli import main
from cloudckpt.stores.local import LocalStore
list_directories = LocalStore.list_directories
def answer_late(store):
    sys.stdin.readline()
    return list_directories(store)
LocalStore.list_directories = answer_late
main(sys.argv[1:])
"""


@pytest.mark.parametrize("option", ["", "--json", "-q", "-v", "in a notebook"])
def test_a_spinner_shows_that_a_slow_store_is_asked(tmp_path: Path, option: str) -> None:
    """If this fails, a command looks dead while it waits, or a program that reads its output gets a spinner."""
    save(f"{tmp_path}/step-1")
    ours, terminal = os.openpty()
    command = [sys.executable, "-c", _SLOW, "ls", str(tmp_path), *([option] if option.startswith("-") else [])]
    environment = _environment(**({"JPY_PARENT_PID": "1"} if option == "in a notebook" else {}))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=terminal, text=True, env=environment) as running:
        os.close(terminal)
        try:
            seen = b""
            while not option and b"cloudckpt ls" not in seen:  # the store does not answer before it is there
                seen += os.read(ours, 1000)
            out, _ = running.communicate("\n" * 10, timeout=120)
            with contextlib.suppress(OSError):  # as a terminal without a writer ends
                while more := os.read(ours, 1000):
                    seen += more
        finally:
            running.kill()
            os.close(ours)
    assert (running.returncode, "step-1" in out, "\x1b" in out) == (0, True, False)
    assert (b"\x1b" in seen) is (not option)
    assert option or seen.rstrip().endswith(b"\x1b[2K")  # it has gone


def test_a_server_for_trials_prints_exports_that_work() -> None:
    """If this fails, who has no bucket cannot try the command that runs a store, or gets one of two buckets alone."""
    command = [sys.executable, "-m", "cloudckpt"]
    buckets = ["--bucket", "first", "--bucket", "second"]
    with subprocess.Popen([*command, "dev-server", "s3", *buckets], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline() for _ in range(5)]
            exports = dict(line.removeprefix("export ").strip().split("=", 1) for line in lines)
            environment = clean_environment() | exports
            program = (
                "import cloudckpt, torch\n"
                "for name in ('first', 'second'):\n"
                "    cloudckpt.save({'weight': torch.zeros(2)}, f's3://{name}/run')"
            )
            subprocess.run([sys.executable, "-c", program], env=environment, timeout=120, check=True)
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()


_CLEANING = """
import os, signal, sys, threading
from cloudckpt.cli import _console
_console.handle_signals()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(100)
finally:
    print("cleaning", flush=True)
    threading.Event().wait()
"""


def test_a_second_signal_ends_it_at_once() -> None:
    """If this fails, who presses Ctrl-C twice has to wait all the same, or is not told that something may be left."""
    command = [sys.executable, "-c", _CLEANING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "cleaning\n"
            running.send_signal(signal.SIGINT)
            _, output = running.communicate(timeout=120)
        finally:
            running.kill()
    assert running.returncode == 130, output
    assert output == "Interrupted again: ended without cleaning up. Run `cloudckpt gc URI` to remove what is left.\n"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.AccessDeniedError, 4),
        (errors.BucketNotFoundError, 3),
        (errors.CheckpointChangedError, 5),
        (errors.CheckpointExistsError, 6),
        (errors.CheckpointNotFoundError, 3),
        (errors.CorruptCheckpointError, 1),
        (errors.CredentialsError, 4),
        (errors.GarbageLeftError, 1),
        (errors.InvalidOptionError, 2),
        (errors.MissingDependencyError, 2),
        (errors.ThrottledError, 5),
        (errors.UnsupportedFormatError, 7),
        (errors.StoreError, 70),
        (ZeroDivisionError, 70),
        (typer.Abort, None),
    ],
)
def test_an_error_has_its_exit_code(kind: type[BaseException], code: int | None) -> None:
    """If this fails, a script takes an error for another one, or gets a traceback."""
    assert exit_code_of(kind.__new__(kind, "it is so")) == code


_COMMAND = [sys.executable, "-m", "cloudckpt"]


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return kept | {"TERM": "xterm-256color"} | more


@pytest.fixture
def strange_folder(tmp_path: Path) -> str:
    """Two checkpoints with names of which not all terminals have the characters."""
    save(f"{tmp_path}/run/schritt 1 ☃")
    save(f"{tmp_path}/run/步骤-2")
    return f"{tmp_path}/run"


def test_a_character_that_an_encoding_lacks_is_no_error(strange_folder: str) -> None:
    """If this fails, who works in another locale cannot list a run in which one name has a strange character."""
    for arguments, lines in (
        (["ls", strange_folder], (b"schritt 1 \\u2603", b"\\u6b65\\u9aa4-2")),
        (["doctor", strange_folder], (b"\n\\u2713  create-if-absent ",)),
    ):
        done = subprocess.run(
            [*_COMMAND, *arguments],
            capture_output=True,
            timeout=200,
            env=_environment(PYTHONIOENCODING="latin-1"),
            check=True,
        )
        assert all(line in done.stdout for line in lines)


def test_closed_output_ends_quietly(strange_folder: str) -> None:
    """If this fails, ``ls | head`` ends in a traceback, or in the exit code of an answer."""
    ours, its = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run(
            [*_COMMAND, "ls", strange_folder],
            stdout=its,
            stderr=subprocess.PIPE,
            timeout=200,
            env=_environment(),
            check=False,
        )
    finally:
        os.close(its)
    assert (done.returncode, done.stderr) == (141, b"")
