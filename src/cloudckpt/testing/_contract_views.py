"""Clauses about memory that is not as the protocol wants it: one byte an item, one item behind the other."""
# ruff: noqa: S101
# (these are tests)

from __future__ import annotations

import pytest

from cloudckpt.stores.base import Store
from cloudckpt.testing._contract_base import Clauses
from cloudckpt.testing._contract_tools import bodies_of, content, crc, keys, parts_of, put

_BODY = bytes(range(1, 241))


def _odd_views(memory: bytearray) -> dict[str, memoryview]:
    whole = memoryview(memory)
    return {
        "every second byte": whole[::2],
        "backwards": whole[::-1],
        "integers": whole.cast("I"),
        "two dimensions": whole.cast("B", [len(memory) // 8, 8]),
    }


_ODD = list(_odd_views(bytearray(16)))


class ViewClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`. Whoever breaks the protocol's rule gets an error or the right bytes,
    and never others.
    """

    @pytest.mark.parametrize("shape", _ODD)
    def test_odd_memory_is_put_right_or_not_at_all(self, store: Store, shape: str) -> None:
        """A tensor's memory taken for contiguous that is not would be saved as other numbers."""
        view = _odd_views(bytearray(_BODY))[shape]
        try:
            store.put("a", [view], crc32c=crc(view.tobytes()))
        except Exception:  # noqa: BLE001  # which one is not promised
            assert keys(store) == []
        else:
            assert content(store, "a") == view.tobytes()

    @pytest.mark.parametrize("shape", _ODD)
    def test_odd_memory_is_filled_right_or_not_at_all(self, store: Store, shape: str) -> None:
        """A tensor's memory taken for contiguous that is not would be loaded as other numbers."""
        put(store, "a", _BODY)
        memory = bytearray(b"\xee" * len(_BODY))
        view = _odd_views(memory)[shape]
        try:
            store.read_into("a", 0, [view])
        except Exception:  # noqa: BLE001  # which one is not promised
            outside = memory[1::2] if shape == "every second byte" else b""
        else:
            assert view.tobytes() == _BODY[: view.nbytes]
            outside = memory[1::2] if shape == "every second byte" else b""
        assert not outside.strip(b"\xee")

    def test_memory_that_cannot_be_written_stays_as_it_is(self, store: Store) -> None:
        """Immutable bytes are shared all over a program."""
        put(store, "a", _BODY)
        target = bytes(len(_BODY))
        with pytest.raises(Exception):  # noqa: B017, PT011  # which one is not promised
            store.read_into("a", 0, [memoryview(target)])
        assert target == bytes(len(_BODY))

    def test_memory_of_parts_may_be_reused(self, store: Store) -> None:
        """Parts are sent from a ring of buffers that is filled anew as soon as the call returns."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 2)
        buffer = bytearray(bodies[0])
        upload_id = store.create_multipart("a")
        uploaded = []
        for part, body in zip(parts_of(bodies), bodies, strict=True):
            buffer[: len(body)] = body
            view = memoryview(buffer)[: len(body)]
            uploaded.append(store.upload_part("a", upload_id, part, [view], crc32c=crc(body)))
        buffer[:] = bytes(len(buffer))
        store.complete_multipart("a", upload_id, uploaded)
        assert content(store, "a") == b"".join(bodies)
