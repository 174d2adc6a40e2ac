"""``NAME=VALUE``, as commands take storage options."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from cloudckpt.errors import InvalidOptionError

_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")


def values_of(assignments: Sequence[str], *, flag: str) -> dict[str, Any]:
    """By name: ``true``, ``false``, numbers and JSON are taken for such, all else for text. `flag` is for messages.

    Raises `InvalidOptionError`, which never shows a value: it may be a secret, whatever it is.
    """
    values = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator or not name:
            raise InvalidOptionError(f"A storage option is written NAME=VALUE, as in {flag} region=eu-west-1.")
        values[name] = _value(name, value, flag=flag)
    return values


def _value(name: str, text: str, *, flag: str) -> Any:
    """`text` as the value that it looks like."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _NUMBER.fullmatch(text) or text[:1] in ('"', "{", "["):
        try:
            return json.loads(text)
        except ValueError:
            raise InvalidOptionError(
                f"{flag} {name}=… looks like a number, a quoted text or JSON, and is not well-formed as such."
            ) from None
    return text
