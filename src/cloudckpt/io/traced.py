"""A store in front of another one, which draws each call in the timeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from cloudckpt.errors import InterruptedReadError
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
from cloudckpt.telemetry.recorder import Recorder, now_ns

_T = TypeVar("_T")


class TracedStore(Store):
    """Passes every call on to `inner`, and records a span for it, with key, bytes, try and error."""

    def __init__(self, inner: Store, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self._last = threading.local()
        self.capabilities = inner.capabilities
        self.limits = inner.limits

    def _traced(
        self, name: str, key: str, action: Callable[[], _T], *, body_bytes: int | None = None, **more: object
    ) -> _T:
        recorder, moved_bytes = self._recorder, 0
        # What is tried again is tried in the same thread, with no other call in between.
        call = (name, key, *more.values())
        failed, num_failures = getattr(self._last, "failed", ((), 0))
        num_tries = num_failures + 1 if failed == call else 1
        begun_ns = now_ns()
        if body_bytes is not None:
            recorder.body_begins(body_bytes)
        try:
            result = action()
            moved_bytes = body_bytes or 0
            num_failures = 0
        except BaseException as error:
            num_failures = num_tries
            more["error"] = type(error).__name__
            if isinstance(error, InterruptedReadError):
                moved_bytes = error.received_bytes
            raise
        else:
            return result
        finally:
            self._last.failed = (call, num_failures)
            if body_bytes is not None:
                recorder.body_ends(body_bytes, moved_bytes=moved_bytes)
                more["bytes"] = moved_bytes
            recorder.span(name, begun_ns, key=key, **{"try": num_tries, **more})

    def _listed(self, name: str, key: str, found: Iterable[_T]) -> Iterator[_T]:
        """The first page is a span; what asks for later ones works on the earlier ones in between."""
        items = iter(found)
        for item in self._traced(name, key, lambda: [*_first(items)]):
            yield item
            yield from items

    def probe(self) -> Capabilities:
        return self._traced("probe", "", self._inner.probe)

    @property
    def uri(self) -> str:
        return self._inner.uri

    def url(self, key: str) -> str:
        return self._inner.url(key)

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        size_bytes = num_bytes(views)
        self._traced(
            "put", key, lambda: self._inner.put(key, views, crc32c=crc32c, if_absent=if_absent), body_bytes=size_bytes
        )

    def create_multipart(self, key: str) -> str:
        return self._traced("create_multipart", key, lambda: self._inner.create_multipart(key))

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        return self._traced(
            "upload_part",
            key,
            lambda: self._inner.upload_part(key, upload_id, part, views, crc32c=crc32c),
            body_bytes=part.size_bytes,
            part=part.number,
        )

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        self._traced("complete_multipart", key, lambda: self._inner.complete_multipart(key, upload_id, parts))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._traced("abort_multipart", key, lambda: self._inner.abort_multipart(key, upload_id))

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        self._traced(
            "read_into",
            key,
            lambda: self._inner.read_into(key, offset_bytes, views),
            body_bytes=num_bytes(views),
            offset=offset_bytes,
        )

    def read(self, key: str, *, max_bytes: int) -> bytes:
        return self._traced("read", key, lambda: self._inner.read(key, max_bytes=max_bytes))

    def head(self, key: str) -> ObjectInfo:
        return self._traced("head", key, lambda: self._inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._listed("list", prefix, self._inner.list(prefix))

    def list_directories(self) -> Iterator[str]:
        return self._listed("list_directories", "", self._inner.list_directories())

    def delete(self, keys: Iterable[str]) -> None:
        self._traced("delete", "", lambda: self._inner.delete(keys))

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        return self._listed("list_uploads", prefix, self._inner.list_uploads(prefix))

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        return self._listed("list_parts", key, self._inner.list_parts(key, upload_id))

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        return self._traced("copy_from", target_key, lambda: self._inner.copy_from(source_url, target_key, tried=tried))


def _first(items: Iterator[_T]) -> Iterator[_T]:
    for item in items:
        yield item
        return
