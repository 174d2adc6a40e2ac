"""Publisher, rival, retention and reader, under every interleaving of their calls to the store.

The versions have no tensors: a state is a checksum, and a difference changes one state into another. All that reads and
removes versions is the real code.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence

import msgspec
import pytest
from tests.commit.actors import counting_in, data_key_of, manifest_for
from tests.commit.model import IDS, Actor, Check, Inside, Progress, Replayed, World, run_alone
from tests.kit.clock import skip_waits
from tests.kit.options import make_options

from cloudckpt.commit.commit import put_and_check_manifest
from cloudckpt.commit.log import read_log
from cloudckpt.errors import CheckpointChangedError, CheckpointExistsError, CloudckptError, ObjectNotFoundError
from cloudckpt.format.model import PUBLICATION_KEY
from cloudckpt.io.client import StoreClient
from cloudckpt.publication.versions import (
    FORMAT,
    Base,
    Publication,
    PublishedTensor,
    Succession,
    Version,
    VersionRetention,
    Versions,
    folder_of,
    parse_version,
)
from cloudckpt.stores.base import Store
from cloudckpt.uri import parse_location

ROOT = parse_location("memory://model/policy")
ANCHOR_EVERY = 2
IS_EXHAUSTIVE = "CLOUDCKPT_EXHAUSTIVE" in os.environ
NUM_SAMPLES = 200
pytestmark = pytest.mark.timeout(3_600 if IS_EXHAUSTIVE else 300)


@pytest.fixture(autouse=True)
def nothing_left_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time has no part in the protocol, nor have the ids that are drawn."""
    skip_waits(monkeypatch)
    monkeypatch.setattr("cloudckpt.commit.entries.secrets.token_hex", lambda _num_bytes: IDS.draw())


def versions_in(store: Replayed) -> Versions:
    """The versions of the model's store, as a publisher and a reader open them."""

    def wrap(opened: Store) -> Store:
        folder = opened.uri.removeprefix(ROOT.uri).strip("/")
        return Inside(store, folder) if folder else store

    return Versions(ROOT, make_options(connections=1, retries=2, wrap_store=wrap))


def attempt_of(name: str, number: int) -> str:
    return f"{name}{number}"


def next_publication(name: str, number: int, sent: Publication | None, follows: int) -> Publication:
    """Return the version that the publisher `name` publishes after `sent`."""
    base = None if sent is None else Base(sent.version, attempt_of(name, sent.version), sent.state_hash)
    is_anchor = sent is None or number - sent.anchor >= ANCHOR_EVERY
    return Publication(
        format=FORMAT,
        version=number,
        publisher=name,
        follows=follows,
        anchor=number if sent is None or is_anchor else sent.anchor,
        base=base,
        tensors={"t": PublishedTensor("int8", (1,), 10 * number + ord(name))},
    )


def publisher(name: str, *numbers: int, sent: Publication | None = None, keep_chains: int | None = None) -> Actor:
    """A publisher that has published `sent`, and then publishes versions of these numbers."""

    def act(store: Replayed, client: StoreClient) -> str:
        versions, last = versions_in(store), sent
        succession, retention = (
            Succession(versions, name),
            VersionRetention(versions, keep_chains, pinned=lambda _: False),
        )
        for number in numbers:
            try:
                publication = next_publication(name, number, last, succession.find_newest(last, number))
                commit(Inside(store, folder_of(number)), client, publication)
                succession.own.add(number)
                succession.find_newest(publication)
            except CheckpointExistsError:
                return f"{name} is told"
            last = publication
            with contextlib.suppress(CloudckptError):  # it is logged
                retention.run_after(publication)
        return f"{name} sent {msgspec.json.encode(last).decode()}"

    return act


def commit(place: Store, client: StoreClient, publication: Publication) -> None:
    """A save of a version."""
    mine, attempt = client.at(place), attempt_of(publication.publisher, publication.version)
    log = read_log(mine)
    if log.current_number is not None:
        raise CheckpointExistsError("exists", uri="")
    metadata = {PUBLICATION_KEY: msgspec.to_builtins(publication)}
    manifest = msgspec.structs.replace(manifest_for(attempt), metadata=metadata)
    place.put(data_key_of(attempt), [], crc32c=0)
    put_and_check_manifest(mine, manifest, number=log.highest_number + 1, conditional=True)


def reader(held: str = "") -> Actor:
    """A pull into a model of the state `held`."""

    def act(store: Replayed, client: StoreClient) -> str:
        versions, state = versions_in(store), held
        target = versions.find_newest(above=-1)
        if target is None:
            return "found nothing"
        try:
            for version in versions.find_chain(target, held=state):
                Inside(store, version.location.name).head(data_key_of(version.manifest.attempt))
                state = state_after(version, state)
        except (CheckpointChangedError, ObjectNotFoundError):
            return "told to start at the anchor"
        found = target.publication
        return f"read {found.version} of {found.publisher}" if state == found.state_hash else f"mixed {state}"

    return act


def state_after(version: Version, state: str) -> str:
    """Return what the model holds once a version was read into it."""
    published = version.publication
    if not published.is_based_on(state):  # the whole tensors are read
        return published.state_hash if published.is_anchor else "half"
    is_base = published.base is not None and published.base.state == state
    return published.state_hash if is_base else "a difference was added to another base"


@functools.lru_cache(maxsize=1 << 16)
def committed_in(world: World) -> dict[int, Publication]:
    """The versions that a reader finds."""
    found = {}
    for folder in sorted({key.partition("/")[0] for key, _ in world}):
        here = tuple((key.removeprefix(f"{folder}/"), body) for key, body in world if key.startswith(f"{folder}/"))
        counting = counting_in(here)
        if counting is not None:
            version = parse_version(counting[1], ROOT.child(folder))
            found[version.publication.version] = version.publication
            assert data_key_of(version.manifest.attempt) in dict(here), f"{folder} has lost its data"
    return found


@functools.lru_cache(maxsize=1 << 16)
def check_chains(world: World) -> None:
    """Check that each version of a lone publisher has its base."""
    committed = committed_in(world)
    if len({published.publisher for published in committed.values()}) == 1:
        for number, published in committed.items():
            base = published.base
            is_readable = published.is_anchor or (base is not None and base.version in committed)
            assert is_readable, f"version {number} has lost its base"


@functools.lru_cache(maxsize=1 << 12)
def check_end(world: World, outcomes: tuple[str, ...]) -> None:
    """Check that all publishers but one end at their next version, and that a reader finds a version then."""
    told = [outcome for outcome in outcomes if outcome.endswith("is told")]
    num_publishers = len(told) + sum(" sent " in outcome for outcome in outcomes)
    number = max(committed_in(world)) + 10
    for outcome in outcomes:
        if " sent " in outcome:
            name, _, document = outcome.partition(" sent ")
            number += 1
            sent = msgspec.json.decode(document, type=Publication)
            ended: list[str] = []
            world = run_alone(noting(publisher(name, number, sent=sent), ended), world)
            told += [outcome for outcome in ended if outcome.endswith("is told")]
    assert len(told) == num_publishers - 1, f"{len(told)} publishers were told"
    found: list[str] = []
    run_alone(noting(reader(), found), world)
    assert found[0].startswith("read "), f"a new reader {found[0]}"


def noting(actor: Actor, outcomes: list[str]) -> Actor:
    def act(store: Replayed, client: StoreClient) -> str:
        outcomes.append(actor(store, client))
        return ""

    return act


def inspect(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
    check_chains(world)
    outcomes = tuple(progress.outcome or "" for progress in after)
    for outcome in outcomes:
        assert not outcome.startswith("mixed"), f"a reader has {outcome}"
    if all(progress.call is None for progress in after):
        check_end(world, outcomes)


FIRST = next_publication("A", 0, None, -1)


def check_of(*actors: Actor, published: int) -> Check:
    """Return the check of these actors, after publisher A has published so many versions."""
    return Check(actors, inspect, world=run_alone(publisher("A", *range(published)), ()))


def outcomes_of(check: Check) -> set[str]:
    """Check all schedules."""
    result = check.run()
    print(f"{result.num_schedules} schedules in {result.num_states} states")  # shown by pytest -s
    return {outcome for outcomes in result.outcomes for outcome in outcomes if " sent " not in outcome}


def test_a_reader_beside_a_publisher_and_its_retention() -> None:
    """If this fails, retention takes from a version what a reader of it needs, at some moment."""
    sent = next_publication("A", 1, FIRST, 0)
    check = check_of(publisher("A", 2, sent=sent, keep_chains=1), reader(), published=2)
    assert outcomes_of(check) >= {"read 1 of A", "read 2 of A", "told to start at the anchor"}


def test_two_publishers_and_the_retention_of_one() -> None:
    """If this fails, two publishers go on beside each other, or both end."""
    check = check_of(publisher("A", 1, sent=FIRST), publisher("B", 2, keep_chains=1), published=1)
    assert outcomes_of(check) == {"A is told", "B is told"}


def test_a_reader_beside_two_publishers_and_retention() -> None:
    """If this fails, some order of calls gives a reader a mixture, or damage, while one publisher replaces another."""
    rival = publisher("B", 2, keep_chains=1)
    check = check_of(publisher("A", 1, sent=FIRST), rival, reader(FIRST.state_hash), published=1)
    if IS_EXHAUSTIVE:
        all_ends = {"read 0 of A", "read 1 of A", "read 2 of B", "A is told", "told to start at the anchor"}
        assert outcomes_of(check) >= all_ends
    else:
        check.sample(NUM_SAMPLES, seed=1)
