"""What can be done to a request, and the answers that the big services give when they refuse one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cloudckpt.testing._wire_http import Headers

Moment: TypeAlias = Literal["request", "answer"]
"""Before the store gets any of the request, or once it has answered, before the client gets any of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request that came over the wire."""

    method: str
    target: str
    """Path and query, as they were sent."""
    headers: Headers
    """Names in lower case; those that hold credentials are left out."""
    action: Action | None = None
    """What was done to it; ``None`` where it was passed on."""

    def header(self, name: str) -> str | None:
        """The first value of the header `name`."""
        return next((value for known, value in self.headers if known == name.lower()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The wire answers in place of the store, which never hears of the request."""

    status: int
    body: bytes = b""
    headers: Headers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseAnswer:
    """The store gets the request whole and answers it; then the connection is reset, before any of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """The connection is reset after so many bytes of the request's body; the store never gets all of the request."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAnswer:
    """The connection ends after so many bytes of the answer's body, at the latest before its last byte.

    With `reset`, it is not closed in good order, and the client's system may drop what has arrived already. An answer
    without a body is lost whole.
    """

    after_bytes: int = 0
    reset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRequest:
    """After so many bytes of the body nothing moves any more; the store never gets all of the request."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallAnswer:
    """The store gets the request whole. After so many bytes of the answer's body nothing moves any more; with
    ``None``, not even the answer's first line comes.
    """

    after_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Calls `function` in the connection's own thread, and passes the exchange on when it has returned.

    At the moment ``"request"``, before the store gets any of the request: to kill the server, say. At the moment
    ``"answer"``, when the store has carried the request out and its answer has come whole, and before the client gets
    any of it: to kill the client between a commit and its confirmation.
    """

    function: Callable[[Seen], None]
    moment: Moment = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Holds the exchange back for so many seconds."""

    delay_s: float
    moment: Moment = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Passes the bodies of the exchange on no faster than so many bytes in a second; ``None``: as fast as it can."""

    request_bytes_per_s: float | None = None
    answer_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSomewhere:
    """The connection breaks at a place that is drawn with the rule's seed: in the request, before the answer, or in it.

    What was drawn is the `action` in the log: a `CutRequest`, `LoseAnswer` or `CutAnswer`.
    """

    longest_answer_bytes: int = 1 << 20
    """An answer is cut within so many bytes."""


Action: TypeAlias = (
    Reply | LoseAnswer | CutRequest | CutAnswer | StallRequest | StallAnswer | Tell | Delay | Throttle | CutSomewhere
)


def _s3_error(status: int, code: str, message: str) -> Reply:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Reply(status=status, body=body.encode(), headers=(("Content-Type", "application/xml"),))


def _gcs_error(status: int, reason: str, message: str) -> Reply:
    errors = [{"domain": "global", "reason": reason, "message": message}]
    body = json.dumps({"error": {"code": status, "message": message, "errors": errors}})
    return Reply(status=status, body=body.encode(), headers=(("Content-Type", "application/json; charset=UTF-8"),))


# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
S3_SLOW_DOWN = _s3_error(503, "SlowDown", "Please reduce your request rate.")
S3_INTERNAL_ERROR = _s3_error(500, "InternalError", "We encountered an internal error. Please try again.")
S3_ACCESS_DENIED = _s3_error(403, "AccessDenied", "Access Denied")
# https://docs.cloud.google.com/storage/docs/json_api/v1/status-codes
GCS_TOO_MANY_REQUESTS = _gcs_error(429, "rateLimitExceeded", "The rate of requests is too high.")
GCS_UNAVAILABLE = _gcs_error(503, "backendError", "Backend Error")
GCS_FORBIDDEN = _gcs_error(403, "forbidden", "The caller does not have storage access to the object.")
