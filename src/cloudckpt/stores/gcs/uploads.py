"""Uploads in parts: temporary objects beside the key, which the service composes (``docs/design/005-gcs-uploads.md``).

GCS has no multipart uploads of its own. An upload is a random id, and each of its parts an object whose name alone says
to which key it belongs, so that a store with any root finds it.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from awscrt.checksums import combine_crc32c

from cloudckpt.errors import (
    ChecksumRefusedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import UploadedPart, Views, crc32c_of, num_bytes
from cloudckpt.stores.gcs.session import CONTENT_TYPE, GCSClient, GCSSession, check_answer
from cloudckpt.stores.http_body import ViewsBody, decode_crc32c, encode_crc32c

MAX_SOURCES = 32  # https://cloud.google.com/storage/docs/composite-objects
TEMPORARY_CLASS = "STANDARD"
"""The class of temporary objects: the others charge for a month at least, and compose needs one class."""
_FACTS = "name,generation,size,crc32c"
"""The fields of an answer that describe an object."""
_COMPLETE = "complete_multipart"

_UPLOAD_ID = re.compile(r"[0-9a-f]{16}")
_SUFFIX = ".~part"
"""The end of every temporary name, by which a lifecycle rule can remove the remains of killed processes."""
_TEMPORARY = re.compile(r"(.+)\.~([0-9a-f]{16})-[0-9]-[0-9]{5}-[0-9a-f]{8}" + re.escape(_SUFFIX), re.DOTALL)
_PART = re.compile(r"0-([0-9]{5})-([0-9a-f]{8})" + re.escape(_SUFFIX))
_TOKEN = re.compile(r"([0-9a-f]{8})-([0-9]+)(?:@([0-9a-f]{16})@(.+))?", re.DOTALL)
MAX_NAME_BYTES = 1024  # https://cloud.google.com/storage/docs/objects#naming


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectGeneration:
    """One generation of an object, as the service describes it."""

    name: str
    generation: int
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """One upload of the object `name`."""

    name: str
    upload_id: str

    @property
    def prefix(self) -> str:
        """The beginning of the names of all temporary objects of the upload, and of no others."""
        return f"{self.name}.~{self.upload_id}-"

    def part_name(self, number: int, *, nonce: str, level: int = 0) -> str:
        """Return the name of part `number`; from `level` 1 on, of the `number`-th group of the level below."""
        return f"{self.prefix}{level}-{number:05d}-{nonce}{_SUFFIX}"

    def parse_part(self, name: str) -> tuple[int, str] | None:
        """Return number and nonce of the part with that name; None for another object."""
        match = _PART.fullmatch(name.removeprefix(self.prefix)) if name.startswith(self.prefix) else None
        return None if match is None else (int(match[1]), match[2])


def parse_temporary_name(name: str) -> Upload | None:
    """Return the upload that a temporary object belongs to; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return None if match is None else Upload(name=match[1], upload_id=match[2])


def new_upload_id() -> str:
    """Draw an id that no other upload has."""
    return secrets.token_hex(8)


def is_upload_id(text: str) -> bool:
    """Return True if `new_upload_id` could have drawn it."""
    return _UPLOAD_ID.fullmatch(text) is not None


def new_nonce() -> str:
    """Draw a text of one request alone: a request that was given up may still arrive, and must replace nothing."""
    return secrets.token_hex(4)


def make_token(nonce: str, generation: int, upload: Upload | None = None) -> str:
    """Return the text that finds a part again. It names the part's `upload` if another upload is to be completed."""
    plain = f"{nonce}-{generation}"
    return plain if upload is None else f"{plain}@{upload.upload_id}@{upload.name}"


def parse_token(session: GCSSession, upload: Upload, done: UploadedPart) -> ObjectGeneration:
    """Return the temporary object of a part. Raises `ObjectNotFoundError` if its token is not of this store."""
    match = _TOKEN.fullmatch(done.token)
    if match is None or done.crc32c is None:
        problem = f"part {done.part.number} of the multipart upload is of another store. Upload the object anew."
        raise session.error(ObjectNotFoundError, _COMPLETE, upload.name, problem)
    if match[4]:
        upload = Upload(upload_id=match[3], name=match[4])
    return ObjectGeneration(
        name=upload.part_name(done.part.number, nonce=match[1]),
        generation=int(match[2]),
        size_bytes=done.part.size_bytes,
        crc32c=done.crc32c,
    )


def insert(
    session: GCSSession,
    operation: str,
    name: str,
    views: Views,
    *,
    crc32c: int,
    storage_class: str | None,
    if_absent: bool = False,
) -> ObjectGeneration:
    """Create the object `name`. No byte of a large view is copied.

    Makes one request of the type ``multipart``, with the CRC32C among the metadata: GCS creates nothing if it differs.
    Raises `ChecksumRefusedError`, and leaves nothing, if other bytes were stored than were sent.
    """
    metadata = {"name": name, "crc32c": encode_crc32c(crc32c), "contentType": CONTENT_TYPE}
    if storage_class is not None:
        metadata["storageClass"] = storage_class
    boundary = secrets.token_hex(16)
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(metadata)}\r\n"
        f"--{boundary}\r\nContent-Type: {CONTENT_TYPE}\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()  # RFC 2387

    def ask(client: GCSClient) -> Any:
        condition = {"ifGenerationMatch": "0"} if if_absent else {}
        key = {"kmsKeyName": client.config.kms_key_name} if client.config.kms_key_name else {}
        response = client.http.post(
            f"{client.endpoint_url}/upload/storage/v1/b/{quote(session.bucket, safe='')}/o",
            params=client.query(uploadType="multipart", fields=_FACTS, **condition, **key),
            data=ViewsBody([memoryview(head), *views, memoryview(tail)]),  # a new one for each try
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            timeout=client.timeout_s,
            allow_redirects=False,
        )
        check_answer(response)
        return response.json()

    try:
        answer = session.call(operation, "objects.insert", name, ask)
    except StoreError as error:
        # GCS has no reason of its own for a wrong checksum, only words.
        if type(error) is StoreError and crc32c_of(views) != crc32c:
            raise _changed_error(session, operation, name, "GCS refused it, and nothing was written") from None
        raise
    stored = describe(session, operation, "objects.insert", name, answer)
    _check_stored(session, operation, stored, crc32c=crc32c, size_bytes=num_bytes(views))
    return stored


def compose_parts(session: GCSSession, upload: Upload, parts: Sequence[ObjectGeneration]) -> None:
    """Compose `parts`, in their order, into the object of the upload: as a tree, since a call takes at most 32.

    A repetition finds parts gone that an earlier try has removed, and succeeds if the object exists. Raises
    `ObjectNotFoundError` if it does not, and `ChecksumRefusedError` if GCS has made another object of them.
    """
    if not parts:
        problem = "an upload has at least one part. Put the object instead."
        raise session.error(StoreError, _COMPLETE, upload.name, problem)
    level, nonce, pieces = 0, new_nonce(), list(parts)
    try:
        while len(pieces) > MAX_SOURCES:
            level += 1
            groups = [pieces[start : start + MAX_SOURCES] for start in range(0, len(pieces), MAX_SOURCES)]
            names = [upload.part_name(number, nonce=nonce, level=level) for number in range(1, len(groups) + 1)]
            pieces = [
                _compose(session, name, group, is_temporary=True) for name, group in zip(names, groups, strict=True)
            ]
        _compose(session, upload.name, pieces, is_temporary=False)
    except (ObjectNotFoundError, TransientStoreError):  # servers that are not Google's answer 500 to a missing source
        if not _is_composed(session, upload.name, parts):
            raise


def _is_composed(session: GCSSession, name: str, parts: Sequence[ObjectGeneration]) -> bool:
    """Return True if the object that `parts` add up to exists at `name`."""
    try:
        answer = session.call(
            _COMPLETE, "objects.get", name, lambda client: facts_of(client.load(session.bucket, name))
        )
    except ObjectNotFoundError:
        return False
    stored = describe(session, _COMPLETE, "objects.get", name, answer)
    return (stored.crc32c, stored.size_bytes) == _add_up(parts)


def _compose(
    session: GCSSession, name: str, sources: Sequence[ObjectGeneration], *, is_temporary: bool
) -> ObjectGeneration:
    """Compose exactly the generations in `sources`."""

    def ask(client: GCSClient) -> Any:
        bucket = client.bucket(session.bucket)
        target = client.blob(session.bucket, name)
        if is_temporary:
            target.storage_class = TEMPORARY_CLASS
        blobs = [bucket.blob(source.name, generation=source.generation) for source in sources]
        target.compose(blobs, **client.each_call)
        return facts_of(target)

    answer = session.call(_COMPLETE, "objects.compose", name, ask)
    stored = describe(session, _COMPLETE, "objects.compose", name, answer)
    crc32c, size_bytes = _add_up(sources)
    _check_stored(session, _COMPLETE, stored, crc32c=crc32c, size_bytes=size_bytes)
    return stored


def _add_up(sources: Sequence[ObjectGeneration]) -> tuple[int, int]:
    crc32c = size_bytes = 0
    for source in sources:
        crc32c = combine_crc32c(crc32c, source.crc32c, source.size_bytes)
        size_bytes += source.size_bytes
    return crc32c, size_bytes


def facts_of(blob: Any) -> dict[str, Any]:
    """Return the fields of the library's object that describe it."""
    return {"generation": blob.generation, "size": blob.size, "crc32c": blob.crc32c}


def describe(session: GCSSession, operation: str, api: str, name: str, answer: Any) -> ObjectGeneration:
    """Parse `answer`, an object of the JSON API."""
    try:
        crc32c = decode_crc32c(answer["crc32c"])
        generation, size_bytes = int(answer["generation"]), int(answer["size"])
    except (LookupError, TypeError, ValueError):
        raise session.foreign_answer(operation, api, name) from None
    if crc32c is None:
        raise session.foreign_answer(operation, api, name)
    return ObjectGeneration(name=name, generation=generation, size_bytes=size_bytes, crc32c=crc32c)


def remove(session: GCSSession, operation: str, name: str, *, generation: int | None = None) -> None:
    """Remove one object, if it exists; or only one generation of it, since a newer one is another writer's."""

    def ask(client: GCSClient) -> None:
        bucket = client.bucket(session.bucket)
        bucket.delete_blob(name, if_generation_match=generation, **client.each_call)

    is_gone = (ObjectNotFoundError,) if generation is None else (ObjectNotFoundError, ObjectExistsError)
    with contextlib.suppress(*is_gone):
        session.call(operation, "objects.delete", name, ask)


def _check_stored(
    session: GCSSession, operation: str, stored: ObjectGeneration, *, crc32c: int, size_bytes: int
) -> None:
    """Raise `ChecksumRefusedError` for other bytes, and remove the generation that was just written, and no other."""
    if (stored.crc32c, stored.size_bytes) == (crc32c, size_bytes):
        return
    removed = "it was removed again"
    try:
        remove(session, operation, stored.name, generation=stored.generation)
    except StoreError as error:
        removed = f"removing it failed too ({error}), so remove generation {stored.generation} by hand"
    raise _changed_error(
        session,
        operation,
        stored.name,
        f"GCS has {stored.size_bytes:,} bytes with the CRC32C {stored.crc32c:08x} in place of {size_bytes:,} with "
        f"{crc32c:08x}; {removed}",
    )


def _changed_error(session: GCSSession, operation: str, name: str, problem: str) -> StoreError:
    return session.error(
        ChecksumRefusedError,
        operation,
        name,
        f"the bytes were damaged on their way, or in memory while they were being sent (a tensor modified during its "
        f"save?): {problem}. Try again.",
    )
