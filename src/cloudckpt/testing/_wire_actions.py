"""What can be done to a request, and the answers that the big services give when they refuse one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cloudckpt.testing._wire_http import Headers


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
    """Calls `function` before the request is passed on, in the connection's own thread: to kill the server, say."""

    function: Callable[[Seen], None]


Action: TypeAlias = Reply | LoseAnswer | CutRequest | CutAnswer | StallRequest | StallAnswer | Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which requests something is done to, and what.

    A rule counts every request that it matches. Of those it lets the first `skip` pass, acts on the next `times`
    (``None``: all of them), and lets the rest pass.
    """

    action: Action
    method: str | None = None
    """``None``: any."""
    path: str = ""
    """A regular expression, searched for in path and query as they are sent (percent-encoded)."""
    header: str | None = None
    """A header that the request must have, whatever its value."""
    skip: int = 0
    times: int | None = 1

    def matches(self, request: Seen) -> bool:
        """Whether the request counts."""
        return (
            self.method in (None, request.method)
            and re.search(self.path, request.target) is not None
            and (self.header is None or request.header(self.header) is not None)
        )

    def acts_on(self, num_before: int) -> bool:
        """Whether something is done to a match before which `num_before` others came."""
        return self.skip <= num_before and (self.times is None or num_before < self.skip + self.times)


@dataclass(slots=True, kw_only=True)
class CountedRule:
    rule: Rule
    num_matched: int = 0

    def is_due(self, request: Seen) -> bool:
        """Whether the rule acts on `request`, which is counted."""
        if not self.rule.matches(request):
            return False
        self.num_matched += 1
        return self.rule.acts_on(self.num_matched - 1)


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
