"""One object in one request, out of the caller's memory, and what the service says it has taken."""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudckpt.errors import ChecksumRefusedError, ObjectExistsError, ObjectNotFoundError, StoreError
from cloudckpt.stores._body import crc32c_of, num_bytes
from cloudckpt.stores._http_body import ViewsBody
from cloudckpt.stores.gcs.client import CONTENT_TYPE

if TYPE_CHECKING:
    from cloudckpt.stores.base import Views
    from cloudckpt.stores.gcs.client import GCSClient
    from cloudckpt.stores.gcs.session import GCSSession

_ANSWERED = "name,generation,size,crc32c"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One generation of an object, as the service describes it."""

    name: str
    generation: int
    size_bytes: int
    crc32c: int


def insert(
    session: GCSSession,
    operation: str,
    name: str,
    views: Views,
    *,
    crc32c: int,
    storage_class: str | None,
    if_absent: bool = False,
) -> Stored:
    """Create the object `name`; no byte of a large view is copied.

    One request of the type ``multipart``, with the CRC32C among the metadata: GCS creates nothing where it differs.
    Raises `ChecksumRefusedError`, and leaves nothing, where what was stored is something else than was sent.
    """
    metadata = {"name": name, "crc32c": encoded(crc32c), "contentType": CONTENT_TYPE, "storageClass": storage_class}
    boundary = secrets.token_hex(16)
    head, tail = _frame(boundary, {field: value for field, value in metadata.items() if value is not None})

    def ask(client: GCSClient) -> Any:
        condition = {"ifGenerationMatch": "0"} if if_absent else {}
        key = {"kmsKeyName": client.config.kms_key_name} if client.config.kms_key_name else {}
        response = client.http.post(
            client.upload_url(session.bucket),
            params=client.query(uploadType="multipart", fields=_ANSWERED, **condition, **key),
            data=ViewsBody([memoryview(head), *views, memoryview(tail)]),  # anew for each try
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
            raise changed(session, operation, name, "GCS refused it, and nothing was written") from None
        raise
    stored = described(session, operation, "objects.insert", name, answer)
    if (stored.crc32c, stored.size_bytes) != (crc32c, num_bytes(views)):
        raise refused(session, operation, stored, crc32c=crc32c, size_bytes=num_bytes(views))
    return stored


def described(session: GCSSession, operation: str, api: str, name: str, answer: Any) -> Stored:
    """What `answer`, an object of the JSON API, says."""
    try:
        return Stored(
            name=name,
            generation=int(answer["generation"]),
            size_bytes=int(answer["size"]),
            crc32c=int.from_bytes(base64.b64decode(answer["crc32c"], validate=True), "big"),
        )
    except (LookupError, TypeError, ValueError):
        raise session.not_gcs(operation, api, name) from None


def refused(session: GCSSession, operation: str, stored: Stored, *, crc32c: int, size_bytes: int) -> StoreError:
    """Remove the generation that was just written, and no other; the error to raise for it."""
    removed = "it was removed again"
    try:
        remove_generation(session, operation, stored)
    except StoreError as error:
        removed = f"removing it failed too ({error}), so remove generation {stored.generation} by hand"
    return changed(
        session,
        operation,
        stored.name,
        f"GCS has {stored.size_bytes:,} bytes with the CRC32C {stored.crc32c:08x} in place of {size_bytes:,} with "
        f"{crc32c:08x}; {removed}",
    )


def changed(session: GCSSession, operation: str, name: str, what: str) -> StoreError:
    """The error for bytes that are not those whose checksum came with them."""
    return session.error(
        ChecksumRefusedError,
        operation,
        name,
        f"the bytes were damaged on their way, or in memory while they were being sent (a tensor modified during its "
        f"save?): {what}. Try again.",
    )


def remove_generation(session: GCSSession, operation: str, stored: Stored) -> None:
    """Remove one object if it is still this generation of it; anything newer belongs to somebody else."""

    def ask(client: GCSClient) -> None:
        bucket = client.bucket(session.bucket)
        bucket.delete_blob(stored.name, if_generation_match=stored.generation, **client.each_call)

    try:
        session.call(operation, "objects.delete", stored.name, ask)
    except (ObjectNotFoundError, ObjectExistsError):  # it is gone, or another generation lies there
        return


def check_answer(response: Any) -> None:
    """Raise for an answer that is neither an error (the client has raised for those) nor what was asked for."""
    from google.api_core.exceptions import from_http_status  # noqa: PLC0415

    if response.status_code not in (200, 206):
        response.close()
        raise from_http_status(response.status_code, "", response=response)  # type: ignore[no-untyped-call]


def encoded(crc32c: int) -> str:
    """As the JSON API writes it."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


def _frame(boundary: str, metadata: dict[str, str]) -> tuple[bytes, bytes]:
    """What stands before the object's bytes in the body, and what behind them (RFC 2387)."""
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(metadata)}\r\n"
        f"--{boundary}\r\nContent-Type: {CONTENT_TYPE}\r\n\r\n"
    )
    return head.encode(), f"\r\n--{boundary}--\r\n".encode()
