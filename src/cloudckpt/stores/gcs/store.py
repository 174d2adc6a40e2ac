"""Google Cloud Storage as a `Store`."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from cloudckpt.errors import ObjectNotFoundError, StoreError, TransientStoreError, UnsupportedOperationError
from cloudckpt.options import GIB
from cloudckpt.stores import _probe as probing
from cloudckpt.stores._body import check_key, in_order
from cloudckpt.stores.base import Capabilities, FoundPart, Limits, ObjectInfo, Store, UploadedPart, UploadInfo, once
from cloudckpt.stores.gcs import composing, naming
from cloudckpt.stores.gcs.client import ClientKey, is_googles, require_gcs
from cloudckpt.stores.gcs.config import parse_storage_options
from cloudckpt.stores.gcs.copying import copy_object
from cloudckpt.stores.gcs.deleting import delete_objects
from cloudckpt.stores.gcs.listing import directories, info_of, objects, parts, uploads
from cloudckpt.stores.gcs.reading import read_object, read_range
from cloudckpt.stores.gcs.session import GCSSession
from cloudckpt.stores.gcs.uploading import Stored, described, insert, remove_generation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cloudckpt.stores.base import Part, Tried, Views

_CAPABILITIES = Capabilities(conditional_create=True, multipart=True, verifies_crc32c=True, listed_parts="any_upload")
_MOST_BYTES = 5 * 1024 * GIB  # https://cloud.google.com/storage/quotas
_LIMITS = Limits(
    min_part_bytes=1,
    max_part_bytes=_MOST_BYTES,
    max_parts=composing.MOST_SOURCES**3,
    max_put_bytes=_MOST_BYTES,
)

_log = logging.getLogger("cloudckpt")
_ended = naming.Ended()


class GCSStore(Store):
    """Objects under ``gs://bucket/prefix``.

    Every request is made once, with no retries of the library's own. Credentials come from `storage_options` or, as
    ever with Google, from the application-default credentials; they are in no message and no ``repr``. `timeout_s`
    bounds each wait without progress. A store may be pickled, and used after a fork: the client is made anew there.

    The parts of an upload are temporary objects beside its key (``docs/design/005-gcs-uploads.md``), which no listing
    shows and no key may be called like.
    """

    capabilities = _CAPABILITIES
    limits = _LIMITS

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        storage_options: Mapping[str, Any],
        timeout_s: float,
        connections: int,
    ) -> None:
        require_gcs()
        config = parse_storage_options(storage_options)
        self._session = GCSSession(bucket, ClientKey(config=config, timeout_s=timeout_s, connections=connections))
        prefix = prefix.strip("/")
        self._root = f"{prefix}/" if prefix else ""

    def __repr__(self) -> str:
        return f"GCSStore({self.uri!r})"

    @property
    def uri(self) -> str:
        """The root, without a trailing slash and without credentials."""
        return f"gs://{self._session.bucket}/{self._root}".rstrip("/")

    @property
    def session(self) -> GCSSession:
        """For questions that are about the bucket, not about objects."""
        return self._session

    def probe(self) -> Capabilities:
        """As declared where the endpoint is Google's own; any other is tried out, once per process and bucket."""
        endpoint = self._session.endpoint_url("probe")
        if is_googles(endpoint):
            return self.capabilities
        return probing.probe(self, endpoint=endpoint, bucket=self._session.bucket, condition="ifGenerationMatch=0")

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        """One request, with ``ifGenerationMatch=0`` where `if_absent`."""
        if if_absent:
            endpoint = self._session.endpoint_url("put")
            probing.refuse_where_ignored(self, key, endpoint=endpoint, bucket=self._session.bucket)
        name, storage_class = self._name(key, "put"), self._session.storage_class
        insert(self._session, "put", name, views, crc32c=crc32c, storage_class=storage_class, if_absent=if_absent)

    def create_multipart(self, key: str) -> str:
        """A random id; nothing is sent."""
        name = self._name(key, "create_multipart")
        if not naming.leaves_room(name):
            what = "the key is too long for an upload in parts, whose names are longer. Use a shorter prefix or key."
            raise self._session.error(UnsupportedOperationError, "create_multipart", name, what)
        return naming.new_upload_id()

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        """A temporary object beside the key."""
        name = self._name(key, "upload_part")
        self._check_goes_on(name, upload_id, "upload_part", has_ended=upload_id in _ended)
        of_try = naming.new_try()
        stored = insert(
            self._session,
            "upload_part",
            naming.part_name(name, upload_id, part.number, of_try=of_try),
            views,
            crc32c=crc32c,
            storage_class=composing.TEMPORARY_CLASS,
        )
        if upload_id in _ended:  # meanwhile
            remove_generation(self._session, "upload_part", stored)
            self._check_goes_on(name, upload_id, "upload_part", has_ended=True)
        return UploadedPart(part=part, token=_token(of_try, stored.generation), crc32c=crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        """Composed by the service, of exactly the generations in `parts`; then the temporary objects go."""
        name = self._name(key, "complete_multipart")
        ordered = in_order(self, key, list(parts))
        pieces = [piece for done in ordered if (piece := _piece(name, upload_id, done)) is not None]
        unknown = len(pieces) < len(ordered)
        self._check_goes_on(name, upload_id, "complete_multipart", has_ended=unknown or _ended.aborted(upload_id))
        # A repetition, because removing the parts failed, must not compose what is left of them.
        if upload_id not in _ended or not composing.is_composed(self._session, name, pieces):
            composing.compose_parts(self._session, name, upload_id, pieces)
            _ended.add(upload_id, aborted=False)
        try:
            composing.remove_temporaries(self._session, "complete_multipart", name, upload_id)
        except TransientStoreError:
            raise  # a repetition goes on from here
        except StoreError as error:
            # No right to delete, or a retention policy: the object is whole, and no repetition would change that.
            _log.warning("%s is complete, but its parts stay and are paid for: %s", self.url(key), error)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Every temporary object of the upload is removed."""
        name = self._name(key, "abort_multipart")
        if naming.is_upload_id(upload_id):  # no other has ever begun
            _ended.add(upload_id, aborted=True)
            composing.remove_temporaries(self._session, "abort_multipart", name, upload_id)

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        """One ranged download, read into `views` without a copy."""
        read_range(self._session, self._name(key, "read_into"), offset_bytes, views)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """One download."""
        return read_object(self._session, self._name(key, "read"), max_bytes=max_bytes)

    def head(self, key: str) -> ObjectInfo:
        """The object's metadata."""
        blob = composing.head(self._session, "head", self._name(key, "head"), lambda blob: blob)
        return dataclasses.replace(info_of(self._session, "head", "objects.get", blob), key=key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Page by page; without what is temporary."""
        for info in objects(self._session, "list", prefix=self._root + prefix):
            # Some tools mark directories by empty objects.
            if info.key != self._root and naming.parse(info.key) is None:
                yield dataclasses.replace(info, key=info.key[len(self._root) :])

    def list_directories(self) -> Iterator[str]:
        """Page by page, and one look into each directory."""
        return directories(self._session, "list_directories", root=self._root)

    def delete(self, keys: Iterable[str]) -> None:
        """One request for each key, in order; a hundred at once for rows of siblings, in any order."""
        delete_objects(self._session, "delete", (self._name(key, "delete") for key in keys))

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        """What has at least one part; before its first, an upload leaves no trace."""
        return uploads(self._session, "list_uploads", root=self._root, prefix=prefix)

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        """Page by page. A part is an object, so that any upload can be completed with it: none is ever replaced."""
        name = self._name(key, "list_parts")
        self._check_goes_on(name, upload_id, "list_parts", has_ended=upload_id in _ended)
        upload = naming.Temporary(name=name, upload_id=upload_id)
        for number, of_try, blob in parts(self._session, "list_parts", name=name, upload_id=upload_id):
            facts = {"generation": blob.generation, "size": blob.size, "crc32c": blob.crc32c}
            stored = described(self._session, "list_parts", "objects.list", blob.name, facts)
            yield FoundPart(
                number=number,
                size_bytes=stored.size_bytes,
                token=_token(of_try, stored.generation, upload),
                crc32c=stored.crc32c,
                md5=None,
            )

    def copy(self, source_key: str, target_key: str) -> None:
        """Rewritten by the service, in as many calls as it wants."""
        copy_object(self._session, self._name(source_key, "copy"), self._name(target_key, "copy"))

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        """Rewritten by the service, which knows the CRC32C of every object."""
        target = self._name(target_key, "copy_from")
        bucket, _, source = source_url.removeprefix("gs://").partition("/")
        return copy_object(self._session, source, target, bucket=bucket, operation="copy_from", tried=tried)

    def _name(self, key: str, operation: str) -> str:
        check_key(self, key, operation)
        if naming.parse(self._root + key) is not None:
            what = (
                "temporary objects of uploads are called like that. Choose another key; abort_multipart removes them."
            )
            raise self._session.error(StoreError, operation, self._root + key, what)
        return self._root + key

    def _check_goes_on(self, name: str, upload_id: str, operation: str, *, has_ended: bool) -> None:
        if has_ended or not naming.is_upload_id(upload_id):
            what = f"the multipart upload {upload_id} is gone: it was completed or aborted. Upload the object anew."
            raise self._session.error(ObjectNotFoundError, operation, name, what)


def _token(of_try: str, generation: int, upload: naming.Temporary | None = None) -> str:
    return naming.token_of(naming.Token(of_try=of_try, generation=generation, upload=upload))


def _piece(name: str, upload_id: str, done: UploadedPart) -> Stored | None:
    """The temporary object that `done` is about; ``None`` for a token that is none of this store's."""
    token = naming.parse_token(done.token)
    if token is None:
        return None
    upload = token.upload or naming.Temporary(name=name, upload_id=upload_id)
    return Stored(
        name=naming.part_name(upload.name, upload.upload_id, done.part.number, of_try=token.of_try),
        generation=token.generation,
        size_bytes=done.part.size_bytes,
        crc32c=done.crc32c,
    )
