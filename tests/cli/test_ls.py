"""``cloudckpt ls``, and `list_checkpoints(all=True)`, which it shows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Run, leave_unfinished, save, state_of
from tests.e2e.places import Place
from tests.in_memory import Memory
from tests.wrapped import permanent

import cloudckpt
from cloudckpt.commit.attempts import new_attempt_id
from cloudckpt.commit.fences import encode_fence, new_fence
from cloudckpt.stores.base import Store
from cloudckpt.testing.wrapping import WrappedStore


def test_each_state_is_told(place: Place, run: Run) -> None:
    """If this fails, a user takes for a checkpoint what is none, or misses one, or garbage."""
    save(place.uri("step-1"), options=cloudckpt.Options(metadata={"loss": 0.5}))
    save(place.uri("step-2"))
    save(place.uri("step-2"), state_of(2.0), overwrite=True)
    leave_unfinished(place, "step-3", attempt=new_attempt_id())
    leave_unfinished(place, "step-1", attempt="20200101T000000000Z-0123456789ab")
    (manifest,) = (key for key in place.manifest_keys() if key.startswith("step-1/"))
    save(place.uri("step-4"))
    place.write("step-4/manifest.json", place.read(manifest)[:-300])
    place.write("other/notes.txt", b"not a checkpoint")
    ended = run("ls", place.root, "--json")
    assert ended.code == 0
    found = {(one["name"], one["state"]): one for one in ended.document}
    assert found.keys() == {
        ("step-1", "committed"),
        ("step-1", "garbage"),
        ("step-2", "committed"),
        ("step-3", "in progress"),
        ("step-4", "damaged"),
    }
    committed = found["step-1", "committed"]
    assert (committed["world_size"], committed["num_tensors"], committed["metadata"]) == (1, 2, {"loss": 0.5})
    assert committed["num_bytes"] == sum(
        len(place.read(key)) for key in place.data_keys() if key.startswith("step-1/") and "20200101" not in key
    )
    assert found["step-2", "committed"]["num_overwrites"] == 1
    unfinished = found["step-3", "in progress"]
    assert (unfinished["num_bytes"], unfinished["num_objects"], unfinished["world_size"]) == (1500, 2, 2)
    assert "truncated" in found["step-4", "damaged"]["problem"]
    table = run("ls", place.root, "--long")
    assert table.code == 0
    lines = table.out.splitlines()
    assert lines[0].split()[:5] == ["NAME", "AGE", "SIZE", "RANKS", "STATE"]
    assert sum("committed" in line for line in lines) == 2
    assert '{"loss": 0.5}' in table.out
    assert run("ls", place.root, "--alive-within", "0s").out.count("garbage") == 2


def test_a_name_with_digits_of_another_kind_is_a_name(tmp_path: Path, run: Run) -> None:
    """If this fails, one folder with a superscript in its name keeps all others from being listed, and from loading."""
    for name in ("²", "step-1²", "step-٣"):
        save(f"{tmp_path}/{name}")
    assert {one["name"] for one in run("ls", str(tmp_path), "--json").document} == {"²", "step-1²", "step-٣"}
    assert {one.name for one in cloudckpt.list_checkpoints(tmp_path)} == {"²", "step-1²", "step-٣"}


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
@pytest.mark.parametrize("command", ["ls", "show", "verify", "gc"])
def test_a_path_that_leads_nowhere_is_wrong_usage(tmp_path: Path, run: Run, command: str, name: str) -> None:
    """If this fails, a script takes a typing error for trouble with the disk, or a user is told to remove the file."""
    (tmp_path / "file").write_text("no folder")
    ended = run(command, f"{tmp_path}/{name}")
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert "remove" not in ended.err


def test_where_nothing_lies_there_is_nothing_to_list(place: Place, run: Run) -> None:
    """If this fails, a script before the first save stops with an error."""
    ended = run("ls", place.uri("nothing"))
    assert (ended.code, ended.out) == (0, "")
    assert "No checkpoint" in ended.err
    assert run("ls", place.uri("nothing"), "--json").document == []
    assert run("ls", place.uri("nothing"), "--quiet").err == ""


def test_requests_are_few_and_known(memory: Memory) -> None:
    """If this fails, listing a run of a thousand steps takes requests by the number of objects, or more than told."""
    num_checkpoints = 20
    for step in range(num_checkpoints):
        save(memory.uri(f"step-{step}"))
    for store in memory.stores.values():
        store.calls.clear()
    found = cloudckpt.list_checkpoints(memory.root, all=True)
    assert [one.name for one in found] == [f"step-{step}" for step in range(num_checkpoints)]
    counts = {
        operation: sum(store.count(operation) for store in memory.stores.values())
        for operation in ("list_directories", "list_uploads", "list", "read", "head", "read_into", "put", "delete")
    }
    assert counts == {
        "list_directories": 2,  # one listing may lack a folder
        "list_uploads": 2,
        "list": 2 * num_checkpoints + 2,
        "read": num_checkpoints,
        "head": 0,
        "read_into": 0,
        "put": 0,
        "delete": 0,
    }


def test_what_ranks_saved_on_their_own_is_one_checkpoint(place: Place, run: Run) -> None:
    """If this fails, a checkpoint that was saved without collectives looks like none, or like several."""
    save(place.uri("step-1/rank-0"))
    save(place.uri("step-1/rank-1"))
    (one,) = run("ls", place.root, "--json").document
    assert (one["name"], one["state"], one["world_size"]) == ("step-1", "committed", 2)
    assert one["num_bytes"] == sum(len(place.read(key)) for key in place.data_keys())


def test_a_save_that_began_before_the_commit_is_over(place: Place) -> None:
    """If this fails, what a lost race has left looks as though something were still being saved."""
    attempt = new_attempt_id()
    save(place.uri("step-1"))
    leave_unfinished(place, "step-1", attempt=attempt)
    states = sorted(one.state for one in cloudckpt.list_checkpoints(place.root, all=True))
    assert states == ["committed", "garbage"]


@pytest.mark.parametrize("text", ["1 fortnight", "-3h", "h", "nan"])
def test_a_time_that_is_none_is_refused(text: str, run: Run, tmp_path: object) -> None:
    """If this fails, a typing error decides what counts as garbage."""
    assert run("ls", str(tmp_path), f"--alive-within={text}").code == 2


@pytest.mark.parametrize("name", ["step-1", ""])
def test_torchs_own_checkpoint_with_folders_is_seen_whole(local: Place, run: Run, name: str) -> None:
    """If this fails, what s3torchconnector saved with a prefix strategy is not seen, or said to be next to nothing."""
    local.write("step-1/.metadata", b"a pickle, which nobody opens here")
    local.write("step-1/0000000000/__0_0.distcp", b"x" * 1000)
    (one,) = run("ls", local.uri(name) if name else local.root, "--json").document
    assert (one["name"], one["state"], one["num_bytes"], one["num_objects"]) == ("step-1", "torch", 1033, 2)
    local.write("step-1/older/.metadata", b"of another checkpoint")
    local.write("step-1/older/0000000000/__0_0.distcp", b"x" * 1000)
    assert run("ls", local.root, "--json").document == [one]


def test_uploads_that_may_not_be_listed_hide_nothing_else(memory: Memory) -> None:
    """If this fails, a reader's role that lacks one permission sees no checkpoint at all."""
    save(memory.uri("step-1"))
    root = memory.open(memory.root.removeprefix("memory://"), "")
    root.fail("list_uploads", error=lambda: permanent("list_uploads"), times=100)
    assert [one.state for one in cloudckpt.list_checkpoints(memory.root, all=True)] == ["committed"]


class _Overtaken(WrappedStore):
    """Where something happens once, before the first call of a kind is answered, or after."""

    def __init__(self, inner: Store, calls: list[str], happens: Callable[[], None]) -> None:
        super().__init__(inner)
        self._calls, self._happens = calls, happens

    def list_directories(self) -> Iterator[str]:
        found = [*super().list_directories()]
        self._come_to("list")
        yield from found

    def read(self, key: str, *, max_bytes: int) -> bytes:
        self._come_to("read")
        return super().read(key, max_bytes=max_bytes)

    def _come_to(self, call: str) -> None:
        if call in self._calls:
            self._calls.remove(call)
            self._happens()


def _states_after(root: str, call: str, happens: Callable[[], None]) -> list[tuple[str, str]]:
    calls = [call]
    options = cloudckpt.Options(wrap_store=lambda inner: _Overtaken(inner, calls, happens))
    found = cloudckpt.list_checkpoints(root, options=options, all=True)
    assert not calls
    return [(one.name, one.state) for one in found]


def test_a_checkpoint_that_is_superseded_meanwhile_does_not_leave_an_empty_list(tmp_path: Path) -> None:
    """If this fails, a run of which there always was a checkpoint has none for whoever looks at the wrong moment."""
    save(f"{tmp_path}/step-1")

    def go_on() -> None:
        save(f"{tmp_path}/step-2")
        cloudckpt.delete(tmp_path / "step-1")

    assert _states_after(str(tmp_path), "list", go_on) == [("step-2", "committed")]


def test_a_checkpoint_that_is_overwritten_meanwhile_is_committed(tmp_path: Path) -> None:
    """If this fails, a checkpoint that could be loaded all the time is shown as unfinished, and ``rm`` finds none."""
    save(f"{tmp_path}/step-1")
    overwrite = functools.partial(save, f"{tmp_path}/step-1", overwrite=True)
    assert _states_after(str(tmp_path), "read", overwrite) == [("step-1", "committed")]


def test_a_manifest_that_somebody_removed_by_hand_is_damage(tmp_path: Path) -> None:
    """If this fails, the listing waits for what will not come back, or calls it a save that goes on."""
    save(f"{tmp_path}/step-1")
    (tmp_path / "step-1" / "manifest.1.json").write_bytes(encode_fence(new_fence(keeps=0)))
    assert [one.state for one in cloudckpt.list_checkpoints(tmp_path, all=True)] == ["committed"]
    (tmp_path / "step-1" / "manifest.json").unlink()
    (found,) = cloudckpt.list_checkpoints(tmp_path, all=True)
    assert (found.state, "by other means" in found.problem) == ("damaged", True)
