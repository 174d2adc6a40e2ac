"""References to objects of other checkpoints, under every interleaving of a few actors.

Three checkpoints of one root: "a" holds data, "b" refers to it, and "c" is a save that refers to what b refers to.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import pytest
from tests.commit.actors import collector, counting_in, deleter, reader, siblings_of
from tests.commit.model import IDS, Actor, Check, Progress, Replayed, Result, World, run_alone
from tests.kit.clock import skip_waits
from tests.kit.options import make_options

from cloudckpt.commit.commit import OvertakenError, put_and_check_manifest, remove_superseded
from cloudckpt.commit.entries import manifest_key
from cloudckpt.commit.log import read_log
from cloudckpt.commit.references import claim_key, put_claims
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    StoreError,
)
from cloudckpt.format.codec import encode
from cloudckpt.format.model import REFERENCES_VERSION, Chunk, Manifest, StoredObject, StoredTensor
from cloudckpt.io.client import StoreClient
from cloudckpt.options import Options
from cloudckpt.pipeline.unchanged import BaseCheckpoint
from cloudckpt.uri import Location

IS_EXHAUSTIVE = "CLOUDCKPT_EXHAUSTIVE" in os.environ
pytestmark = pytest.mark.timeout(14_400 if IS_EXHAUSTIVE else 900)
NUM_SAMPLES = 300
ROOT = "abc"


@pytest.fixture(autouse=True)
def nothing_left_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time has no part in the protocol, nor have the ids that are drawn."""
    skip_waits(monkeypatch)
    monkeypatch.setattr("cloudckpt.commit.entries.secrets.token_hex", lambda _num_bytes: IDS.draw())


def attempt_of(name: str) -> str:
    """Return an id that looks as a real one does, so that gc knows what is under it."""
    return f"20260101T000000000Z-{name.encode().hex():0>12.12}"


def key_of(name: str, number: int = 0) -> str:
    return f"data/{attempt_of(name)}/0-{number}.safetensors"


def manifest_for(name: str, *, own: Sequence[int] = (0,), uses: Sequence[StoredObject] = ()) -> Manifest:
    """A tiny manifest of the save `name`, with objects of its own and of others, each with an empty tensor."""
    objects = [*(StoredObject(key=key_of(name, number), size=0, crc32c="") for number in own), *uses]
    return Manifest(
        format="cloudckpt",
        version=REFERENCES_VERSION if uses else (1, 0),
        attempt=attempt_of(name),
        created_at="",
        world_size=1,
        software={},
        tile_bytes=4096,
        objects=objects,
        tensors={
            f"t{index}": StoredTensor(
                dtype="int8", shape=(0,), chunks=[Chunk((0,), (0,), index, 0, 0)], xxh3_128s=["0" * 32]
            )
            for index in range(len(objects))
        },
        values={},
        is_referable=True,
    )


def used(name: str, folder: str, number: int = 0) -> StoredObject:
    """An object of the save `name` to `folder`, as another checkpoint names it."""
    return StoredObject(key=key_of(name, number), size=0, crc32c="", folder=folder)


def inside(folder: str, manifest: Manifest, *, number: int = 0) -> World:
    """A checkpoint that is there, with its claims on its own folder's siblings."""
    objects: dict[str, bytes] = {f"{folder}/{manifest_key(number)}": encode(manifest)}
    objects |= {f"{folder}/{key}": b"" for key in manifest.own_keys}
    of_others: dict[str, set[str]] = {}
    for stored in manifest.objects:
        if stored.folder:
            of_others.setdefault(stored.folder, set()).add(stored.key)

    def claim(store: Replayed, client: StoreClient) -> str:
        put_claims(siblings_of(client), of_others, attempt=manifest.attempt, folder=folder)
        return ""

    return tuple(sorted(run_alone(claim, tuple(sorted(objects.items())))))


def merged(*worlds: World) -> World:
    return tuple(sorted({key: body for world in worlds for key, body in world}.items()))


A = inside("a", manifest_for("A", own=(0, 1)))
B = inside("b", manifest_for("B", uses=[used("A", "a")]))
"""It uses one of the two objects of A."""


@dataclasses.dataclass
class PlaceOfSave:
    """The part of a `Context` that `BaseCheckpoint` needs."""

    client: StoreClient
    location: Location
    options: Options = dataclasses.field(default_factory=lambda: make_options(tile_bytes=4096))

    def client_at(self, folder: str) -> StoreClient:
        return siblings_of(self.client)(folder or self.location.name)


def borrower(folder: str, name: str, *, source: str, own: Sequence[int] = ()) -> Actor:
    """A save to `folder` that refers to the first object of folder a that the checkpoint in `source` has."""

    def save(store: Replayed, client: StoreClient) -> str:
        siblings = siblings_of(client)
        mine, attempt = siblings(folder), attempt_of(name)
        number = read_log(mine).highest_number + 1
        context: Any = PlaceOfSave(client, Location(scheme="memory", authority="model", path=f"run/{folder}"))
        try:
            base = BaseCheckpoint(context, source, attempt=attempt)
        except (CheckpointNotFoundError, CheckpointChangedError):
            return f"{name} found no source"
        known = base.known_chunks([("t0", (0,)), ("t1", (0,))])
        usable = sorted(stored.key for stored in known.objects.values() if stored.folder == "a")
        if not usable:
            base.drop_claims()
            return f"{name} found nothing to use"
        uses = [StoredObject(key=usable[0], size=0, crc32c="", folder="a")]
        manifest = manifest_for(name, own=own, uses=uses)
        own_keys = [f"{folder}/{written}" for written in sorted(manifest.own_keys)]
        try:
            for written in own_keys:
                store.put(written, [], crc32c=0)
            base.keep_claims(manifest)
            put_and_check_manifest(mine, manifest, number=number, conditional=True)
        except CommitUnknownError as error:
            return f"{name} {'overtaken' if isinstance(error, OvertakenError) else 'unknown'}"
        except (CheckpointExistsError, StoreError) as error:
            base.drop_claims()
            store.delete(own_keys)
            return f"{name} {'lost' if isinstance(error, CheckpointExistsError) else 'failed'}"
        if number:
            remove_superseded(mine, manifest, number=number, on_removing=lambda _: None)
        return f"{name} committed"

    def act(store: Replayed, client: StoreClient) -> str:
        try:
            return save(store, client)
        except StoreError:
            return f"{name} failed"

    return act


def overwriter(folder: str, name: str) -> Actor:
    """A save that overwrites what is in `folder` with data of its own."""

    def act(store: Replayed, client: StoreClient) -> str:
        mine, manifest = siblings_of(client)(folder), manifest_for(name)
        number = read_log(mine).highest_number + 1
        try:
            store.put(f"{folder}/{key_of(name)}", [], crc32c=0)
            put_and_check_manifest(mine, manifest, number=number, conditional=True)
        except CommitUnknownError:
            return f"{name} unknown"
        except (CheckpointExistsError, StoreError):
            store.delete([f"{folder}/{key_of(name)}"])
            return f"{name} lost"
        if number:
            remove_superseded(mine, manifest, number=number, on_removing=lambda _: None)
        return f"{name} committed"

    return act


@functools.lru_cache(maxsize=1 << 16)
def counting_at(world: World, folder: str) -> Manifest | None:
    here = tuple((key.removeprefix(f"{folder}/"), body) for key, body in world if key.startswith(f"{folder}/"))
    found = counting_in(here)
    return None if found is None else found[1]


@functools.lru_cache(maxsize=1 << 16)
def check_whole(world: World) -> None:
    """No manifest that a reader takes names an object that is missing."""
    keys = {key for key, _ in world}
    for folder in ROOT:
        manifest = counting_at(world, folder)
        for stored in manifest.objects if manifest is not None else ():
            where = f"{stored.folder or folder}/{stored.key}"
            assert where in keys, f"the checkpoint in {folder} lost {where}"


@functools.lru_cache(maxsize=1 << 12)
def check_collected(world: World) -> None:
    """gc beside nobody leaves what checkpoints need, and nothing else."""
    for _ in range(4):
        world = run_alone(collector(*ROOT), world)
    check_whole(world)
    needed: set[str] = set()
    for folder in ROOT:
        manifest = counting_at(world, folder)
        for stored in manifest.objects if manifest is not None else ():
            needed.add(f"{stored.folder or folder}/{stored.key}")
            if manifest is not None and stored.folder:
                needed.add(f"{stored.folder}/{claim_key(manifest.attempt, folder)}")
    kept = {key for key, _ in world if "/manifest" not in key}
    assert kept == needed, f"gc kept {sorted(kept - needed)} and lost {sorted(needed - kept)}"
    # The last trace of a deletion goes with its age.
    assert all(sum(key.startswith(f"{folder}/manifest") for key, _ in world) <= 2 for folder in ROOT)


def inspect(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
    check_whole(world)
    for progress in after:
        fate = (progress.outcome or "").rpartition(" ")[2]
        assert fate != "corrupt", f"a reader found a checkpoint corrupt: {progress.outcome}"
    if all(progress.call is None for progress in after):
        check_collected(world)


def checked(actors: Sequence[Actor], world: World, *, num_kills: int = 0, num_faults: int = 0) -> Result | None:
    """Check all schedules of two actors, and some of more."""
    check = Check(actors, inspect, world=world, num_kills=num_kills, num_faults=num_faults)
    if len(actors) <= 2 or IS_EXHAUSTIVE:
        result = check.run()
        print(f"{result.num_schedules} schedules in {result.num_states} states")  # shown by pytest -s
        return result
    check.sample(NUM_SAMPLES, seed=1)
    return None


OF_A = borrower("c", "C", source="a")
OF_B = borrower("c", "C", source="b")
BESIDE = {
    "deleter of the holder": (A, OF_A, deleter("a")),
    "gc of the holder": (A, OF_A, collector("a")),
    "gc of all": (A, OF_A, collector("a", "c")),
    "overwriter of the holder": (A, OF_A, overwriter("a", "D")),
    "reader of the holder": (A, OF_A, reader("a")),
    "deleter of the source": (merged(A, B), OF_B, deleter("b")),
    "deleter of the source's holder": (merged(A, B), OF_B, deleter("a")),
    "gc of the source's holder": (merged(A, B), OF_B, collector("a")),
    "overwriter of the source": (merged(A, B), OF_B, overwriter("b", "D")),
    "overwriter of the source's holder": (merged(A, B), OF_B, overwriter("a", "D")),
    "another that refers": (A, OF_A, borrower("c", "D", source="a")),
    "gc of its own place": (A, borrower("c", "C", source="a", own=(0,)), collector("c")),
    "deleter of its own place": (merged(A, inside("c", manifest_for("D"))), OF_A, deleter("c")),
    "overwriter of its own place": (merged(A, B), borrower("b", "C", source="a", own=(0,)), overwriter("b", "D")),
}


@pytest.mark.parametrize(("world", "save", "other"), BESIDE.values(), ids=BESIDE)
def test_a_reference_is_whole_beside_one_other(world: World, save: Actor, other: Actor) -> None:
    """If this fails, a checkpoint refers to data that something else removes, or gc keeps what nothing needs."""
    result = checked([save, other], world, num_faults=int(IS_EXHAUSTIVE), num_kills=1)
    assert result is not None
    assert any(outcomes[0] == "C committed" for outcomes in result.outcomes)


HELD = run_alone(deleter("a"), merged(A, B))
"""The checkpoint in a was deleted, and its data stays for the one in b."""
AMONG = {
    "deleters of source and holder": (merged(A, B), [OF_B, deleter("b"), deleter("a")]),
    "deleter and gc of the holder": (merged(A, B), [OF_B, deleter("a"), collector("a")]),
    "overwriter and gc of the holder": (A, [OF_A, overwriter("a", "D"), collector("a")]),
    "deleter of the source and gc": (HELD, [OF_B, deleter("b"), collector("a")]),
    "overwriter of the source and gc": (HELD, [OF_B, overwriter("b", "D"), collector("a")]),
    "overwriter of the source and gc of all": (HELD, [OF_B, overwriter("b", "D"), collector("a", "b", "c")]),
    "two gcs": (HELD, [OF_B, collector("a"), collector("a")]),
    "deleter of the source and a reader": (HELD, [OF_B, deleter("b"), reader("c")]),
    "another at its place and gc": (HELD, [OF_B, borrower("c", "D", source="b"), collector("a", "c")]),
    "new save to the holder and gc": (HELD, [OF_B, overwriter("a", "D"), collector("a")]),
    "deleter, overwriter and gc": (merged(A, B), [OF_B, deleter("b"), overwriter("a", "D"), collector("a")]),
}


@pytest.mark.parametrize(("world", "actors"), AMONG.values(), ids=AMONG)
@pytest.mark.slow
def test_a_reference_is_whole_beside_several(world: World, actors: list[Actor]) -> None:
    """If this fails, a save refers to data of a source that two others remove together."""
    # Who stands still for ever is in every state that is looked at; a death adds what gc finds in the end.
    checked(actors, world, num_kills=int(not IS_EXHAUSTIVE))


def test_gc_sees_the_claim_of_a_save_whose_source_ends() -> None:
    """If this fails, gc takes the last known claim for spent, and removes what another save has claimed meanwhile."""
    Check([OF_B, deleter("b"), collector("a")], inspect, world=HELD).run()


@pytest.mark.parametrize("step", ["put_claims", "is_current"])
def test_the_model_finds_a_save_that_leaves_out_a_step(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the model passes saves that put no claim, or never look at their source again."""
    monkeypatch.setattr(f"cloudckpt.pipeline.unchanged.{step}", lambda *_args, **_settings: True)
    with pytest.raises(AssertionError, match="the checkpoint in c lost a/data/"):
        checked([OF_A, deleter("a")], A)
