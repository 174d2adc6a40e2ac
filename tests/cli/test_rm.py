"""``cloudckpt rm``."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from tests.cli.conftest import Run, leave_unfinished, save
from tests.e2e.places import Place, S3Place
from tests.e2e.servers import FlakyS3

import cloudckpt


def test_it_deletes_what_it_is_told_to_and_nothing_else(place: Place, run: Run) -> None:
    """If this fails, a checkpoint that was not named is gone, or one that was is still there."""
    for step in (1, 2, 3):
        save(place.uri(f"step-{step}"))
    ended = run("rm", place.uri("step-1"), place.uri("step-3"), "--yes", "--json")
    assert ended.code == 0
    assert [one["deleted"] for one in ended.document] == [True, True]
    assert [one.name for one in cloudckpt.list_checkpoints(place.root)] == ["step-2"]
    assert run("verify", place.uri("step-2")).code == 0


def test_without_a_terminal_it_deletes_only_with_yes(place: Place, run: Run) -> None:
    """If this fails, a script that forgot --yes hangs at a question, or deletes unasked."""
    save(place.uri())
    before = place.contents()
    ended = run("rm", place.uri())
    assert (ended.code, ended.out) == (2, "")
    assert "--yes" in ended.err
    assert place.contents() == before


def test_a_dry_run_says_what_would_go(place: Place, run: Run) -> None:
    """If this fails, who looks before he deletes loses what he looked at, or is told less than would go."""
    save(place.uri())
    leave_unfinished(place, "checkpoint", attempt="20200101T000000000Z-0123456789ab")
    before = place.contents()
    ended = run("rm", place.uri(), "--dry-run")
    assert ended.code == 0
    assert "committed" in ended.out
    assert "garbage" in ended.out
    assert place.contents() == before
    (document,) = run("rm", place.uri(), "--dry-run", "--json").document
    assert document["deleted"] is False
    assert {one["state"] for one in document["found"]} == {"committed", "garbage"}


def test_what_is_not_there_is_an_error_before_anything_goes(place: Place, run: Run) -> None:
    """If this fails, a typing error in the second name costs the first checkpoint, or is taken for a success."""
    save(place.uri())
    before = place.contents()
    ended = run("rm", place.uri(), place.uri("nothing"), "--yes")
    assert ended.code == 3
    assert place.contents() == before


def test_a_folder_of_checkpoints_is_none(place: Place, run: Run) -> None:
    """If this fails, who names the folder loses all that lies in it, or is not told what to name."""
    for step in range(7):
        save(place.uri(f"step-{step}"), {"step": step})
    before = place.contents()
    ended = run("rm", place.root, "--yes")
    assert (ended.code, ended.out) == (3, "")
    assert "and 2 more" in ended.err
    assert place.contents() == before


def test_an_unfinished_save_is_left_to_gc(place: Place, run: Run) -> None:
    """If this fails, a save that is under way loses its data to who mistook it for a checkpoint."""
    leave_unfinished(place, "step-1", attempt="20200101T000000000Z-0123456789ab")
    before = place.contents()
    ended = run("rm", place.uri("step-1"), "--yes")
    assert (ended.code, "cloudckpt gc " in ended.err) == (3, True)
    assert place.contents() == before


@pytest.mark.parametrize("name", ["step-1", ""])
def test_a_checkpoint_of_torchs_own_is_none(local: Place, run: Run, name: str) -> None:
    """If this fails, what torch's writer saved is deleted, or its owner told that nothing lies there, or to call gc."""
    local.write("step-1/.metadata", b"a pickle, which nobody opens here")
    local.write("step-1/0000000000/__0_0.distcp", b"where s3torchconnector's prefix strategies put it")
    before = local.contents()
    ended = run("rm", local.uri(name) if name else local.root, "--yes")
    assert (ended.code, "torch's own writer" in ended.err) == (3, True), ended.err
    assert local.contents() == before


@pytest.mark.parametrize(("answer", "code", "num_left"), [("y\n", 0, 0), ("n\n", 1, 1), ("\n", 1, 1)])
def test_on_a_terminal_it_asks(tmp_path: Path, answer: str, code: int, num_left: int) -> None:
    """If this fails, a checkpoint goes although the user said no, or stays although he said yes."""
    uri = str(tmp_path / "checkpoint")
    save(uri)
    ours, its = pty.openpty()
    try:
        os.write(ours, answer.encode())
        done = subprocess.run(
            [sys.executable, "-m", "cloudckpt", "rm", uri],
            stdin=its,
            stderr=its,
            stdout=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    finally:
        os.close(its)
        os.close(ours)
    assert done.returncode == code
    assert len(cloudckpt.list_checkpoints(tmp_path)) == num_left


def test_what_is_gone_is_told_where_the_next_one_fails(s3: S3Place, s3_application: FlakyS3, run: Run) -> None:
    """If this fails, a script does not learn which of several checkpoints are gone when one could not be deleted."""
    save(s3.uri("step-1"))
    save(s3.uri("step-2"))

    def deny(method: str, url: str) -> Literal["deny"] | None:
        return "deny" if method != "GET" and "step-2" in url else None

    with s3_application.troubled(deny):
        ended = run("rm", s3.uri("step-1"), s3.uri("step-2"), "--yes", "--json")
    assert ended.code == 4
    assert [(one["uri"], one["deleted"]) for one in ended.document] == [
        (s3.uri("step-1"), True),
        (s3.uri("step-2"), False),
    ]
    assert [one.name for one in cloudckpt.list_checkpoints(s3.root)] == ["step-2"]
