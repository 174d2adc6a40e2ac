"""Damage at rest: that it is what it says, and nothing else."""

from __future__ import annotations

import pytest

from cloudckpt.errors import ObjectNotFoundError
from cloudckpt.stores._body import crc32c_of
from cloudckpt.stores.base import Store
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.testing import damage


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: object) -> Store:
    made = MemoryStore(f"damage-{request.node.name}") if request.param == "memory" else LocalStore(tmp_path)
    for key, body in {"a": b"abcd", "b/c": b"01234567"}.items():
        damage.overwrite(made, key, body)
    return made


def contents(store: Store) -> dict[str, bytes]:
    return {info.key: store.read(info.key, max_bytes=100) for info in store.list()}


def test_a_single_bit_of_a_single_object(store: Store) -> None:
    """If this fails, a test of every bit tries some of them twice and others never."""
    seen = set()
    for bit in range(32):
        damage.flip_bit(store, "a", bit=bit)
        seen.add(contents(store)["a"])
        damage.flip_bit(store, "a", bit=bit)
    whole = int.from_bytes(b"abcd", "little")
    assert seen == {(whole ^ 1 << bit).to_bytes(4, "little") for bit in range(32)}
    assert contents(store) == {"a": b"abcd", "b/c": b"01234567"}


def test_truncated_removed_swapped(store: Store) -> None:
    """If this fails, a reader is shown to notice damage that was never done."""
    damage.truncate(store, "b/c", size_bytes=3)
    assert contents(store) == {"a": b"abcd", "b/c": b"012"}
    damage.swap(store, "a", "b/c")
    assert contents(store) == {"a": b"012", "b/c": b"abcd"}
    damage.truncate(store, "a", size_bytes=0)
    damage.remove(store, "b/c")
    assert contents(store) == {"a": b""}


def test_damage_that_would_be_none_is_refused(store: Store) -> None:
    """If this fails, a test damages nothing and sees that nothing is noticed."""
    with pytest.raises(ValueError, match="4 bytes"):
        damage.truncate(store, "a", size_bytes=4)
    with pytest.raises(ObjectNotFoundError):
        damage.remove(store, "nothing")
    with pytest.raises(IndexError):
        damage.flip_bit(store, "a", bit=32)
    assert contents(store)["a"] == b"abcd"


def test_an_object_is_put_with_the_checksum_that_it_has(store: Store) -> None:
    """If this fails, a store that looks at checksums refuses to be damaged."""
    damage.overwrite(store, "new", b"")
    assert contents(store)["new"] == b""
    assert crc32c_of([]) == 0
