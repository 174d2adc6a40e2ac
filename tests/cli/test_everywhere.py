"""Each command on each kind of store. ``--places rgw`` tries all of them on a Ceph RADOS Gateway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import OLD_ATTEMPT, Run, leave_unfinished, save, state_of
from tests.kit.hosts import hosts_of
from tests.kit.places import Place

import cloudckpt
from cloudckpt.cli._app import app
from cloudckpt.manager.drain import FAST_KEY, make_record
from cloudckpt.uri import parse_location

Expected = tuple[list[str], Callable[[Place], bool], str]
"""Arguments, what then holds at the place, and what is printed."""


def _still_there(place: Place) -> bool:
    return [one.name for one in cloudckpt.list_checkpoints(place.root)] == ["step-1", "step-2"]


def _whole(name: str) -> Callable[[Place], bool]:
    return lambda place: cloudckpt.verify(place.uri(name)).num_bytes > 0


def _commands(place: Place, folder: Path) -> dict[str, Expected]:
    one, two = place.uri("step-1"), place.uri("step-2")
    return {
        "ls": ([place.root], _still_there, "step-2"),
        "latest": ([place.root], _still_there, f"{two}\n"),
        "watch": ([place.root, "--until-step", "2"], _still_there, "step-1  committed"),
        "du": ([place.root], _still_there, "(all)"),
        "plot": ([place.root, "--name", "size"], _still_there, "size ("),
        "report": ([place.root, "-o", str(folder.with_suffix(".html"))], _still_there, "exported.html"),
        "cat": ([one, "model.w"], _still_there, "mean     1.0"),
        "show": ([one, "--values"], _still_there, "bfloat16"),
        "diff": ([one, one], _still_there, "0 differences"),
        "verify": ([one], _still_there, "is whole"),
        "rm": ([one, "--yes"], _without("step-1/data"), "step-1: committed"),
        "gc": ([place.root, "--older-than", "0s", "--yes"], _without(OLD_ATTEMPT), "2 objects"),
        "doctor": ([place.root], _still_there, "create-if-absent works"),
        "drain": ([str(folder.with_name("fast")), place.root], _whole("step-3"), f"{place.uri('step-3')}: copied"),
        "cp": ([one, place.uri("step-3")], _whole("step-3"), "1 object"),
        "export": ([two, place.uri("out"), "--skip-non-tensors"], _with("out/model.safetensors"), "2 tensors"),
        "import": ([str(folder), place.uri("step-3")], _whole("step-3"), "2 tensors"),
        "merge": (
            [one, two, place.uri("mean"), "--include", "model.w"],
            _whole("mean"),
            "the mean of 1 tensor of 2 checkpoints",
        ),
    }


def _with(key: str) -> Callable[[Place], bool]:
    return lambda place: key in place.contents()


def _without(part: str) -> Callable[[Place], bool]:
    return lambda place: not any(part in key for key in place.contents())


COMMANDS = [one.name for one in app.registered_commands if one.name not in ("timeline", "dev-server")]
"""The commands that go to a store."""


@pytest.mark.every_store
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_works_on_this_store(place: Place, name: str, run: Run, tmp_path: Path) -> None:
    """If this fails, a command is unusable on this kind of store; or a new one is tried out on none (a KeyError)."""
    for number in (1, 2):
        save(place.uri(f"step-{number}"))
    leave_unfinished(place, "step-2", attempt=OLD_ATTEMPT)
    folder = tmp_path / "exported"
    if name == "import":
        cloudckpt.export_checkpoint(place.uri("step-1"), folder, skip_non_tensors=True)
    if name == "drain":
        record = make_record(parse_location(place.root), is_owed=True, may_overwrite=False)
        options = cloudckpt.Options(metadata={"step": 3, FAST_KEY: record})
        cloudckpt.save(state_of(3.0), tmp_path / "fast/step-3", no_dist=True, options=options)
    arguments, holds, printed = _commands(place, folder)[name]
    ended = run(name, *arguments)
    assert ended.code == 0, ended.err
    assert printed in ended.out
    assert holds(place)
    assert place.num_unfinished_uploads() == 0
    state = state_of(0.0)
    cloudckpt.load(state, place.uri("step-2"), no_dist=True)
    assert state["model"]["w"][0, 0] == 1.0


@pytest.mark.every_store
def test_drains_of_two_hosts_complete_a_step_on_this_store(place: Place, run: Run, tmp_path: Path) -> None:
    """If this fails, hosts with a drive each cannot bring a step to this kind of store, or leave reports there."""
    hosts = hosts_of(tmp_path, place.root)
    assert run("drain", str(hosts[0]), place.root).code == 1
    again = run("drain", str(hosts[0]), place.root)
    assert (again.code, "no other host has sent them" in again.err) == (1, True)
    assert run("drain", str(hosts[1]), place.root).code == 0
    report = cloudckpt.verify(place.uri("step-5"))
    assert sum("/data/" in key for key in place.contents()) == report.num_objects


@pytest.mark.parametrize("name", COMMANDS)
def test_the_timeout_is_that_of_the_command_line(
    local: Place, name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, `--timeout` is accepted and passed over, and a command waits for a minute all the same."""
    for step in ("step-1", "step-2"):
        save(local.uri(step))
    made: list[cloudckpt.Options] = []

    def make(**settings: Any) -> cloudckpt.Options:
        made.append(cloudckpt.Options(**settings))
        return made[-1]

    monkeypatch.setattr("cloudckpt.options.Options", make)
    arguments, _, _ = _commands(local, tmp_path)[name]
    run(name, *arguments, "--timeout", "7.5")
    assert {options.timeout_s for options in made} == {7.5}
