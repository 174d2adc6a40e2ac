"""Parts made one object by the service: as a tree, since a call takes no more than 32 of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from awscrt.checksums import combine_crc32c

from cloudckpt.errors import ObjectNotFoundError, StoreError
from cloudckpt.stores.gcs import naming
from cloudckpt.stores.gcs.deleting import delete_in_any_order
from cloudckpt.stores.gcs.listing import names
from cloudckpt.stores.gcs.uploading import Stored, described, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cloudckpt.stores.gcs.client import GCSClient
    from cloudckpt.stores.gcs.session import GCSSession

T = TypeVar("T")

MOST_SOURCES = 32  # https://cloud.google.com/storage/docs/composite-objects
TEMPORARY_CLASS = "STANDARD"
"""Of temporary objects, whatever the object's own: all others charge for a month at least, and compose wants one."""

_OPERATION = "complete_multipart"


def compose_parts(session: GCSSession, name: str, upload_id: str, pieces: Sequence[Stored]) -> None:
    """Make `pieces`, in their order, the object `name`.

    A repetition finds parts gone that an earlier try has removed, and is content where the object lies there. Raises
    `ObjectNotFoundError` where it does not, and `ChecksumRefusedError` where GCS has made another object of them.
    """
    if not pieces:
        raise session.error(StoreError, _OPERATION, name, "an upload has one part at least. Put the object instead.")
    try:
        _compose_tree(session, name, upload_id, list(pieces))
    except ObjectNotFoundError:
        if not is_composed(session, name, pieces):
            raise


def is_composed(session: GCSSession, name: str, pieces: Sequence[Stored]) -> bool:
    """Whether the object that `pieces` add up to lies at `name`."""
    try:
        answer = head(session, _OPERATION, name, _facts)
    except ObjectNotFoundError:
        return False
    found, whole = described(session, _OPERATION, "objects.get", name, answer), _expected(name, pieces)
    return (found.crc32c, found.size_bytes) == (whole.crc32c, whole.size_bytes)


def remove_temporaries(session: GCSSession, operation: str, name: str, upload_id: str) -> None:
    """Remove every part of the upload, and all that was made of them on the way."""
    found = list(names(session, operation, prefix=naming.prefix_of(name, upload_id)))
    delete_in_any_order(session, operation, found)


def _compose_tree(session: GCSSession, name: str, upload_id: str, pieces: list[Stored]) -> None:
    level, of_try = 0, naming.new_try()
    while len(pieces) > MOST_SOURCES:
        level += 1
        groups = [pieces[start : start + MOST_SOURCES] for start in range(0, len(pieces), MOST_SOURCES)]
        pieces = [
            _compose(
                session, naming.part_name(name, upload_id, number, of_try=of_try, level=level), group, is_temporary=True
            )
            for number, group in enumerate(groups, start=1)
        ]
    _compose(session, name, pieces, is_temporary=False)


def _compose(session: GCSSession, name: str, sources: Sequence[Stored], *, is_temporary: bool) -> Stored:
    """Compose exactly the generations in `sources`; raises `ChecksumRefusedError` where the result is another."""

    def ask(client: GCSClient) -> Any:
        bucket = client.bucket(session.bucket)
        target = client.blob(session.bucket, name)
        if is_temporary:
            target.storage_class = TEMPORARY_CLASS
        target.compose(
            [bucket.blob(source.name, generation=source.generation) for source in sources], **client.each_call
        )
        return _facts(target)

    expected = _expected(name, sources)
    answer = session.call(_OPERATION, "objects.compose", name, ask)
    stored = described(session, _OPERATION, "objects.compose", name, answer)
    if (stored.crc32c, stored.size_bytes) != (expected.crc32c, expected.size_bytes):
        raise refused(session, _OPERATION, stored, crc32c=expected.crc32c, size_bytes=expected.size_bytes)
    return stored


def _expected(name: str, sources: Sequence[Stored]) -> Stored:
    """What `sources` add up to."""
    crc32c = size_bytes = 0
    for source in sources:
        crc32c = combine_crc32c(crc32c, source.crc32c, source.size_bytes)
        size_bytes += source.size_bytes
    return Stored(name=name, generation=0, size_bytes=size_bytes, crc32c=crc32c)


def head(session: GCSSession, operation: str, name: str, read: Callable[[Any], T]) -> T:
    """What `read` takes from the library's object for `name`, with its metadata."""

    def ask(client: GCSClient) -> T:
        blob = client.bucket(session.bucket).blob(name)
        blob.reload(**client.each_call)
        return read(blob)

    return session.call(operation, "objects.get", name, ask)


def _facts(blob: Any) -> dict[str, Any]:
    return {"generation": blob.generation, "size": blob.size, "crc32c": blob.crc32c}
