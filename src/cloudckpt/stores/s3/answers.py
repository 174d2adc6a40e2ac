"""Whether an answer is S3's own, which it has to be before it is believed.

botocore takes any XML for what it asked for, and any body for an object: a web page is an empty listing to it, and a
404 from a load balancer a missing object. The checks here are no stricter than the stores are different: Amazon S3,
Ceph's gateway, MiniStack, moto and rclone pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cloudckpt.stores._http_errors import ForeignAnswerError, foreign_words, is_xml_error
from cloudckpt.stores._http_rules import SAID_BY_ANYONE

_OK, _NO_CONTENT, _PARTIAL = 200, 204, 206
_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_REDIRECTIONS = (301, 307)
"""To the bucket's region. S3 sends nobody elsewhere otherwise, as a proxy does to whoever has to sign in."""
_ROOTS: Mapping[str, tuple[str, ...]] = {
    "CompleteMultipartUpload": ("CompleteMultipartUpload",),
    "CopyObject": ("CopyObject",),
    "CreateMultipartUpload": ("InitiateMultipartUpload",),
    "DeleteObjects": ("DeleteResult", "DeleteObjects"),
    "ListMultipartUploads": ("ListMultipartUploads",),
    "ListObjectsV2": ("ListBucket", "ListObjects"),
    "ListParts": ("ListParts",),
    "UploadPartCopy": ("CopyPart", "UploadPartCopy"),
}
"""How the name of the root of each document begins: moto and rclone end some of them in their own way."""
_WITHOUT_DOCUMENT = frozenset(
    {"AbortMultipartUpload", "DeleteObject", "GetObject", "HeadObject", "PutObject", "UploadPart"}
)
_ROOT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<[?!][^>]*>\s*)*<(?:[\w.-]+:)?([\w.-]+)")


def refuse_foreign(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Raise `ForeignAnswerError` for an answer that is not S3's. A handler of botocore's event ``before-parse``."""
    status, headers, body = (response_dict[name] for name in ("status_code", "headers", "body"))
    if operation_model.name not in _ROOTS and operation_model.name not in _WITHOUT_DOCUMENT:
        return  # a request of botocore's own, or of whoever asks about the bucket
    if _is_own(operation_model.name, status, headers, body):
        return
    if not isinstance(body, bytes):
        body.close()
    raise ForeignAnswerError(foreign_words("S3's", status, headers.get("content-type"), body))


def _is_own(api: str, status: int, headers: Mapping[str, str], body: Any) -> bool:
    if status >= _SERVER_ERROR or status in _REDIRECTIONS or status in SAID_BY_ANYONE:
        return True  # an error that says nothing of any object
    if status >= _CLIENT_ERROR:
        # An answer to HEAD has no body: whoever makes the request has to make another one, which is answered with one.
        return api == "HeadObject" or is_xml_error(body)
    return _is_own_success(api, status, headers, body)


def _is_own_success(api: str, status: int, headers: Mapping[str, str], body: Any) -> bool:
    if api in ("GetObject", "HeadObject"):
        is_page = headers.get("content-type", "").startswith("text/html") and "x-amz-request-id" not in headers
        proof = "content-range" if status == _PARTIAL else "etag"
        return status in (_OK, _PARTIAL) and proof in headers and not is_page
    if api in ("PutObject", "UploadPart"):
        return status == _OK and "etag" in headers
    if api in ("AbortMultipartUpload", "DeleteObject"):
        return status == _NO_CONTENT or (status == _OK and not body.strip())
    root = _ROOT.match(body)
    return status == _OK and root is not None and root[1].decode().startswith(_ROOTS[api])
