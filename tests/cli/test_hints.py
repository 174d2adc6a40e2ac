"""Errors of the command line name its flags, not arguments of functions."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main
from tests.cli.conftest import Run, save

from cloudckpt.cli._app import app
from cloudckpt.cli._errors import _FLAGS, message_of
from cloudckpt.errors import ALLOW_PICKLE_HINT, OVERWRITE_HINT, CheckpointExistsError, UnsafePickleError


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with two checkpoints and a file that is none."""
    monkeypatch.chdir(tmp_path)
    save("step-1")
    save("step-2")
    Path("torchs").write_bytes(b"no pickle, and nothing else")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["cp", "step-1", "step-2"], 6, "pass --overwrite to"),
        (["export", "step-1", "out"], 2, "Leave them out with --skip-non-tensors, "),
        (["export", "step-1", "out", "--max-shard-size", "0"], 2, "--max-shard-size"),
        (["import", "torchs", "new", "-f", "torch"], 2, "pass --unsafe-pickle."),
        (["show", "step-1", "--timeout", "0"], 2, "--timeout"),
        (["show", "nothing"], 3, "cloudckpt ls ROOT"),
        (["doctor", "step-1", "--deadline", "0"], 2, "--deadline"),
        (["diff", "step-1", "step-2", "--rtol", "-1"], 2, "--rtol"),
        (["ls", "step-1", "-o", "region=x"], 2, "no storage options"),
        (["ls", "s3:/bucket/run"], 2, "'s3://"),
        (["ls", "s3://user:secret@bucket/run"], 2, "storage options"),
    ],
)
def test_errors_name_flags(run: Run, in_a_folder: None, arguments: list[str], code: int, said: str) -> None:
    """If this fails, the way out that an error names is one that this command does not have."""
    ended = run(*arguments)
    assert (ended.code, said in ended.err) == (code, True), ended.err


def test_a_command_without_the_flag_leaves_the_hint_in_python() -> None:
    """If this fails, a command names a flag that it does not have."""
    error = UnsafePickleError("it is a pickle", uri="s3://bucket/run", hint=ALLOW_PICKLE_HINT)
    assert message_of(error, flags=["--json"]).endswith("pass allow_pickle=True.")
    assert message_of(error, flags=["--unsafe-pickle"]).endswith("pass --unsafe-pickle.")


def test_every_flag_of_a_hint_exists() -> None:
    """If this fails, an error's advice names a flag that was renamed."""
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]  # it is a group
    assert set(_FLAGS.values()) <= {name for each in commands for parameter in each.params for name in parameter.opts}


def test_one_line_of_an_error_with_a_hint() -> None:
    """If this fails, the library's own text lacks the advice, or has it twice."""
    error = CheckpointExistsError("it is there.", uri="s3://bucket/run", hint=OVERWRITE_HINT)
    assert str(error) == "it is there. Choose another URI, or pass overwrite=True to replace the checkpoint."
    assert error.message == "it is there."
