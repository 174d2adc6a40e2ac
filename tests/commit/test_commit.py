"""Each answer that a commit can get, over the memory store; and what is tidied up afterwards."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from awscrt.checksums import crc32c
from tests.commit.actors import data_key_of, manifest_for
from tests.kit.clock import skip_waits
from tests.kit.wrapped import FaultyStore, permanent

from cloudckpt.commit.attempts import ATTEMPT, copy_suffix, data_key, data_prefix, new_attempt_id, parse_number
from cloudckpt.commit.commit import OvertakenError, put_and_check_manifest, remove_superseded
from cloudckpt.commit.entries import manifest_key
from cloudckpt.commit.log import list_entries, resolve
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointExistsError,
    CommitUnknownError,
    CredentialsError,
    InvalidManifestError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from cloudckpt.format.codec import encode
from cloudckpt.io.client import StoreClient
from cloudckpt.stores.base import Store
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.testing.faults import Faults, FlippedBits, Rule


@pytest.fixture
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    skip_waits(monkeypatch)
    return FaultyStore(MemoryStore(f"publish-{request.node.name}"))


def put(store: FaultyStore, key: str, body: bytes) -> None:
    store.inner.put(key, [memoryview(body)], crc32c=crc32c(body))


def put_commit(store: FaultyStore, number: int, attempt: str) -> None:
    put(store, manifest_key(number), encode(manifest_for(attempt)))
    put(store, data_key_of(attempt), b"data")


def commit(store: FaultyStore, attempt: str = "ours", *, number: int = 0, conditional: bool = True) -> None:
    put_and_check_manifest(client_of(store), manifest_for(attempt), number=number, conditional=conditional)


def client_of(store: Store) -> StoreClient:
    return StoreClient(store, retries=2, timeout_s=100)


def numbers_in(store: FaultyStore) -> list[int]:
    return [entry.number for entry in list_entries(client_of(store.inner))]


def what_counts(store: FaultyStore) -> tuple[int, str]:
    found = resolve(client_of(store.inner))
    return found.number, found.manifest.attempt


@pytest.mark.parametrize("how", ["damaged", "not found"])
def test_unreadable_entry_after_a_lost_answer_has_an_unknown_outcome(store: FaultyStore, how: str) -> None:
    """If this fails, a save removes the data of its own commit: what it replaced is hidden by a checkpoint without."""
    put_commit(store, 0, "old")
    store.fail("put", key_part="manifest.1", after=True)
    if how == "damaged":
        store.once_before("read", "manifest.1", lambda: put(store, manifest_key(1), b"{" * 500))
    else:
        gone = ObjectNotFoundError("no", key=manifest_key(1), operation="read")
        store.fail("read", key_part="manifest.1", error=lambda: gone, times=99)
    with pytest.raises(CommitUnknownError, match="Its data was kept"):
        commit(store, number=1)


def test_a_manifest_that_is_damaged_on_its_way_is_read_again() -> None:
    """If this fails, one flipped bit makes a good checkpoint look damaged, and a job go back to an older one."""
    faults = Faults(Rule(fault=FlippedBits(), operations={"read"}))
    inner = MemoryStore("damaged-on-its-way")
    put_and_check_manifest(client_of(inner), manifest_for("ours"), number=0, conditional=True)
    assert resolve(client_of(faults(inner))).manifest.attempt == "ours"
    assert faults.num_injected["FlippedBits"] == 1


@pytest.mark.parametrize("after", [False, True], ids=["refused", "refused after it arrived"])
def test_a_refusal_after_a_lost_answer_does_not_disprove_the_commit(store: FaultyStore, after: object) -> None:
    """If this fails, credentials that expire between two tries make a save remove the data of its own commit."""
    store.fail("put", after=bool(after))
    store.fail("put", error=lambda: AccessDeniedError("no", key="k", operation="put"), times=10)
    if after:
        commit(store)
        assert what_counts(store) == (0, "ours")
    else:
        with pytest.raises(CommitUnknownError, match="did not confirm"):
            commit(store)


@pytest.mark.parametrize("error", [AccessDeniedError, CredentialsError, BucketNotFoundError, StoreError])
def test_a_manifest_that_arrived_is_committed_although_the_answer_is_a_refusal(
    store: FaultyStore, error: type[StoreError]
) -> None:
    """If this fails, a proxy that refuses what it has passed on makes a save remove the data of its own commit."""

    def refusal() -> StoreError:
        refused = error("no", key="k", operation="put")
        refused.had_no_effect = True
        return refused

    store.fail("put", error=refusal, after=True)
    commit(store)
    assert what_counts(store) == (0, "ours")


@pytest.mark.parametrize("lost", [False, True], ids=["known", "after a lost answer"])
def test_a_put_that_surely_wrote_nothing_is_a_failure(store: FaultyStore, lost: object) -> None:
    """If this fails, a full disk looks like an unknown outcome; or what was sent before it was full is forgotten."""
    if lost:
        store.fail("put")

    def full() -> StoreError:
        error = StoreError("no space", key="k", operation="put")
        error.had_no_effect = True
        return error

    store.fail("put", error=full, times=10)
    with pytest.raises(CommitUnknownError if lost else StoreError) as caught:
        commit(store)
    assert isinstance(caught.value, CommitUnknownError) is bool(lost)


def test_the_second_of_two_commits_under_one_number_loses(store: FaultyStore) -> None:
    """If this fails, the second of two writers does not learn that it lost, or destroys the first one's commit."""
    put_commit(store, 0, "theirs")
    with pytest.raises(CheckpointExistsError, match=r"another one committed .* root of its own") as caught:
        commit(store)
    assert not isinstance(caught.value, CommitUnknownError)
    assert what_counts(store) == (0, "theirs")


def denied() -> AccessDeniedError:
    return AccessDeniedError("no", key="k", operation="put")


UNKNOWN: dict[str, dict[str, dict[str, Any]]] = {
    "all answers are lost": {"put": {"times": 10}},
    "a proxy refuses the put and each read": {
        "put": {"error": denied, "after": True, "times": 10},
        "read": {"error": denied, "times": 10},
    },
    "the key is taken by nothing": {"put": {"error": lambda: ObjectExistsError("it exists", key="k", operation="put")}},
    "the look at what counts fails": {"list": {"error": lambda: permanent("list")}},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_outcome_is_reported_as_unknown(store: FaultyStore, name: str) -> None:
    """If this fails, a commit that may be there, or yet appear, is told as failed, and its data is removed under it."""
    for operation, settings in UNKNOWN[name].items():
        store.fail(operation, **settings)
    with pytest.raises(CommitUnknownError, match="Its data was kept"):
        commit(store)


def test_a_commit_that_the_store_did_not_keep_is_no_success(store: FaultyStore) -> None:
    """If this fails, a store or a proxy that acknowledges the manifest and drops it makes a save say "committed"."""
    store.once_before("list", "manifest", lambda: store.inner.delete(["manifest.json"]))
    with pytest.raises(CommitUnknownError, match="neither lists it nor returns it"):
        commit(store)


def test_a_manifest_below_a_higher_number_is_not_current(store: FaultyStore) -> None:
    """If this fails, a slow save succeeds under a number that an overwrite has freed, and nobody will ever see it."""
    put_commit(store, 1, "theirs")
    with pytest.raises(OvertakenError, match=r"put manifest\.json, .* committed .*manifest\.1\.json") as caught:
        commit(store)
    # Both: the checkpoint exists, and this save's data must stay.
    assert isinstance(caught.value, CheckpointExistsError)
    assert isinstance(caught.value, CommitUnknownError)
    assert what_counts(store) == (1, "theirs")


def test_without_the_condition_the_last_put_is_current(store: FaultyStore) -> None:
    """If this fails, commit="unconditional" still needs what the store cannot do."""
    put_commit(store, 0, "theirs")
    commit(store, conditional=False)
    assert what_counts(store) == (0, "ours")


def test_replaced_entries_are_removed_lowest_first(store: FaultyStore) -> None:
    """If this fails, an interrupted clean-up makes an older checkpoint count again, or bytes are never freed."""
    for number, attempt in enumerate(["a", "b", "c"]):
        put_commit(store, number, attempt)
    put(store, "data/unrelated/0-0.safetensors", b"another save, under way")
    remove_superseded(client_of(store), manifest_for("c"), number=2, on_removing=lambda key: None)
    deleted = [call.key for call in store.calls if call.operation == "delete"]
    assert deleted == ["manifest.json", "manifest.1.json", data_key_of("a"), data_key_of("b")]
    left = {info.key for info in store.inner.list()}
    assert left == {"manifest.2.json", data_key_of("c"), "data/unrelated/0-0.safetensors"}


def test_shared_data_is_kept(store: FaultyStore) -> None:
    """If this fails, a save that reuses objects of the one before loses them in its clean-up."""
    put_commit(store, 0, "a")
    put(store, manifest_key(1), encode(manifest_for("a")))
    remove_superseded(client_of(store), manifest_for("a"), number=1, on_removing=lambda key: None)
    assert {info.key for info in store.inner.list()} == {"manifest.1.json", data_key_of("a")}


def test_a_broken_older_manifest_does_not_stop_the_clean_up(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, one damaged manifest makes every later overwrite fail, or stays for ever."""
    put(store, "manifest.json", b"{}" + b" " * 200)
    put_commit(store, 1, "b")
    put_commit(store, 2, "c")
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        remove_superseded(client_of(store), manifest_for("c"), number=2, on_removing=lambda key: None)
    assert {info.key for info in store.inner.list()} == {"manifest.2.json", data_key_of("c")}
    assert "cannot tell which data belongs to" in caplog.text


@pytest.mark.parametrize("operation", ["list", "read", "delete"])
def test_a_failed_clean_up_is_logged_and_not_raised(
    store: FaultyStore, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    """If this fails, a save that is committed is reported as failed."""
    put_commit(store, 0, "a")
    put_commit(store, 1, "b")
    store.fail(operation, error=lambda: permanent(operation))
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        remove_superseded(client_of(store), manifest_for("b"), number=1, on_removing=lambda key: None)
    assert "Run `cloudckpt gc " in caplog.text
    assert what_counts(store) == (1, "b")


@pytest.mark.parametrize("numbers", [[], [0], [0, 2]])
def test_a_clean_up_that_comes_too_late_does_nothing(store: FaultyStore, numbers: list[int]) -> None:
    """If this fails, a slow overwriter removes what was saved after its own checkpoint was overwritten or deleted."""
    for number in numbers:
        put_commit(store, number, f"later{number}")
    remove_superseded(client_of(store), manifest_for("b"), number=1, on_removing=lambda key: None)
    assert "delete" not in {call.operation for call in store.calls}
    assert numbers_in(store) == numbers


def test_the_manifest_with_the_highest_number_is_current(store: FaultyStore) -> None:
    """If this fails, a load finds a checkpoint that was replaced."""
    for number, attempt in [(0, "a"), (9, "b"), (10, "c"), (2, "d")]:
        put_commit(store, number, attempt)
    for foreign in ["manifest.01.json", "manifest.-1.json", "manifest.json.tmp", "manifest.11.json.bak", "manifestx"]:
        put(store, foreign, b"{}")
    put(store, "manifest.99.json/x", b"{}")
    assert numbers_in(store) == [0, 2, 9, 10]
    assert what_counts(store) == (10, "c")


def test_a_damaged_manifest_is_not_passed_over(store: FaultyStore) -> None:
    """If this fails, a load silently takes an older checkpoint than the one that was asked for."""
    put_commit(store, 0, "a")
    put(store, "manifest.1.json", encode(manifest_for("b"))[:-5])
    with pytest.raises(InvalidManifestError, match=r"manifest\.1\.json is truncated"):
        resolve(client_of(store))


@pytest.mark.parametrize("number", [None, 0, 7, 10**18 - 1])
def test_drawn_attempt_ids_are_recognized(number):
    """Garbage collection would take a running save's data for somebody else's, or leave its own for ever."""
    suffix = "" if number is None else copy_suffix(number, 32 * "f")
    drawn = [new_attempt_id(suffix) for _ in range(200)]
    assert len(set(drawn)) == len(drawn)
    assert all(ATTEMPT.fullmatch(attempt) for attempt in drawn)
    assert {parse_number(attempt) for attempt in drawn} == {number}


def test_the_keys_of_one_rank_begin_like_no_others():
    """Rank 1 would look at what rank 10 wrote."""
    assert data_key("a", 1, 2) == "data/a/1-2.safetensors"
    assert data_key("a", 1, 2).startswith(data_prefix("a", 1))
    assert not data_key("a", 10, 2).startswith(data_prefix("a", 1))
