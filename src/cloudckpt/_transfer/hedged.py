"""A store in front of another one, which makes requests for parts and ranges again where they are stragglers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from cloudckpt._transfer.hedging import Hedger
from cloudckpt.errors import ObjectNotFoundError, StoreError, TransientStoreError
from cloudckpt.stores._body import num_bytes
from cloudckpt.stores.base import (
    Capabilities,
    FoundPart,
    ObjectInfo,
    Part,
    Store,
    Tried,
    UploadedPart,
    UploadInfo,
    Views,
    once,
)


class HedgedStore(Store):
    """Passes every call on to `inner`; parts and ranges by way of `hedger`.

    A part's bytes are the same both times, so that it does not matter which of the two requests the store carries out
    last; where the tokens differ all the same, completion asks which it was. A range is read into memory of its own
    the second time, and copied from there once the first has ended.
    """

    def __init__(self, inner: Store, hedger: Hedger) -> None:
        self._inner = inner
        self._hedger = hedger
        self.capabilities = inner.capabilities
        self.limits = inner.limits

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        def upload() -> UploadedPart:
            return self._inner.upload_part(key, upload_id, part, views, crc32c=crc32c)

        def again() -> Callable[[], UploadedPart]:
            uploaded = upload()
            return lambda: uploaded

        name = _name_of(key, upload_id, part)
        return self._hedger.call("upload", name, upload, num_bytes=part.size_bytes, held_bytes=0, second=again)

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        size_bytes = num_bytes(views)

        def again() -> Callable[[], None]:
            content = memoryview(bytearray(size_bytes))
            self._inner.read_into(key, offset_bytes, [content])
            return lambda: _copy(content, views)

        self._hedger.call(
            "download",
            ("download", key, offset_bytes + size_bytes),  # where it ends, wherever it was taken up again
            lambda: self._inner.read_into(key, offset_bytes, views),
            num_bytes=size_bytes,
            held_bytes=size_bytes,
            second=again,
        )

    def probe(self) -> Capabilities:
        return self._inner.probe()

    @property
    def uri(self) -> str:
        return self._inner.uri

    def url(self, key: str) -> str:
        return self._inner.url(key)

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        self._inner.put(key, views, crc32c=crc32c, if_absent=if_absent)

    def create_multipart(self, key: str) -> str:
        return self._inner.create_multipart(key)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        try:
            self._inner.complete_multipart(key, upload_id, parts)
        except StoreError as error:
            twice = [done for done in parts if self._hedger.was_hedged(_name_of(key, upload_id, done.part))]
            if not twice or isinstance(error, TransientStoreError | ObjectNotFoundError):
                raise
            # Where the key of the encryption is not ours, equal parts have different ETags, and a request that was
            # given up may have been carried out last.
            try:
                held = list(self._inner.list_parts(key, upload_id))
            except StoreError:  # it may not be permitted, and is not what has gone wrong
                raise error from None
            latest = [_as_held(done, held) if done in twice else done for done in parts]
            if latest == list(parts):
                raise
            self._inner.complete_multipart(key, upload_id, latest)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._inner.abort_multipart(key, upload_id)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        return self._inner.read(key, max_bytes=max_bytes)

    def head(self, key: str) -> ObjectInfo:
        return self._inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def list_directories(self) -> Iterator[str]:
        return self._inner.list_directories()

    def delete(self, keys: Iterable[str]) -> None:
        self._inner.delete(keys)

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        return self._inner.list_uploads(prefix)

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        return self._inner.list_parts(key, upload_id)

    def copy(self, source_key: str, target_key: str) -> None:
        self._inner.copy(source_key, target_key)

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        return self._inner.copy_from(source_url, target_key, tried=tried)


def _name_of(key: str, upload_id: str, part: Part) -> tuple[str, str, str, int]:
    return ("upload", key, upload_id, part.number)


def _as_held(done: UploadedPart, held: Sequence[FoundPart]) -> UploadedPart:
    """With the token that the store has for it now, if what it has is certainly the same."""
    for found in held:
        if (found.number, found.size_bytes, found.crc32c) == (done.part.number, done.part.size_bytes, done.crc32c):
            return dataclasses.replace(done, token=found.token)
    return done


def _copy(content: memoryview, views: Views) -> None:
    position = 0
    for view in views:
        view[:] = content[position : position + view.nbytes]
        position += view.nbytes
