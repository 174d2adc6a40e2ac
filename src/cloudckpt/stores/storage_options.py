"""Parse ``storage_options``. No value of a secret is ever shown."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from cloudckpt._messages import did_you_mean, find_near
from cloudckpt.errors import InvalidOptionError

_MAX_S = 1_000_000_000
"""The longest wait that a socket takes."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
PARSER = "parser"
"""The key of a field's metadata that has the parser of its option."""
Parser: TypeAlias = Callable[[Any], Any]
"""Turns an option's value into the value of a field of the configuration, or into None for no setting.

Raises `TypeError` or `ValueError`, which says what is wrong with the value.
"""


def parse_assignments(assignments: Sequence[str], *, flag: str) -> dict[str, Any]:
    """Parse texts of the form ``NAME=VALUE``. ``true``, ``false``, numbers and JSON become values of their types.

    Raises `InvalidOptionError`, which names `flag` and never shows a value: it may be a secret.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator or not name:
            raise InvalidOptionError(f"A storage option is written NAME=VALUE, as in {flag} region=eu-west-1.")
        values[name] = value
        if value.lower() in ("true", "false"):
            values[name] = value.lower() == "true"
        elif _NUMBER.fullmatch(value) or value[:1] in ('"', "{", "["):
            try:
                values[name] = json.loads(value)
            except ValueError:
                raise InvalidOptionError(
                    f"{flag} {name}=… looks like a number, a quoted text or JSON, and is not well-formed as such."
                ) from None
    return values


def option(parser: Parser, *, is_secret: bool = False) -> Any:
    """Declare a field of a configuration that a storage option sets, by default to None. A secret is in no ``repr``."""
    return field(default=None, repr=not is_secret, metadata={PARSER: parser})


def list_parsers(config: type[Any]) -> dict[str, Parser]:
    """Return the parser of each field of `config` that a storage option sets."""
    return {field.name: field.metadata[PARSER] for field in fields(config)}


def parse(
    storage_options: Mapping[str, Any],
    parsers: Mapping[str, Parser],
    *,
    aliases: Mapping[str, str],
    find_contradictions: Callable[[Mapping[str, Any]], list[str]],
    store: str,
) -> dict[str, Any]:
    """Return the fields that `storage_options` set. ``None`` counts as left out.

    `aliases` are other names of options. An alias that `parsers` has, too, is another form of the field.
    Raises `InvalidOptionError` with every problem at once.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    for option, value in storage_options.items():
        name = aliases.get(option, option)
        read = parsers.get(option) or parsers.get(name)
        if read is None:
            hint = did_you_mean(find_near(option, [*parsers, *aliases]))
            problems.append(f"{str(option)!r} is not known{hint}; known are {', '.join(sorted(parsers))}")
            continue
        try:
            parsed = None if value is None else read(value)
        except (TypeError, ValueError) as error:
            problems.append(f"{option} {error}")
            continue
        if parsed is not None and values.setdefault(name, parsed) != parsed:
            problems.append(f"{option} contradicts another option for the same thing")
    problems += find_contradictions(values)
    if problems:
        raise InvalidOptionError(f"Storage options for {store}: " + "; ".join(problems))
    return values


def parse_text(value: Any) -> str:
    """Return a text that may go into a header."""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a non-empty string")
    # A line break would make the HTTP library print the whole header, signature and token included.
    if any(character.isspace() or not character.isprintable() for character in value):
        raise ValueError("holds white space or control characters (its value is not shown)")
    return value


def parse_path(described: str, value: Any) -> str:
    """Return a path. `described` says what is at the path."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"must be the path of {described}")
    return value


def parse_seconds(value: Any) -> float:
    """Return a positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_S:
        raise ValueError(f"must be a positive number of seconds, at most {_MAX_S:,}, not {value!r:.50}")
    return float(value)


def parse_flag(value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"must be True or False, not {value!r}")
    return value


def parse_choice(choices: Sequence[str], value: Any) -> str:
    """Return one of `choices`."""
    if value not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def parse_endpoint(instead_of_credentials: str, value: Any) -> str:
    """Return ``http://`` or ``https://`` and a host. The error names the options for credentials."""
    if not isinstance(value, str):
        raise TypeError("must be a string")
    _, separator, after_scheme = value.partition("://")
    if "@" in (after_scheme.partition("/")[0] if separator else value):
        raise ValueError(f"must not hold credentials; pass {instead_of_credentials}")
    shown = re.sub(r"(?s).*@", "***@", value)  # a "/" in a password ends the host's part of a URL
    parts = urlsplit(value)
    is_odd = any(character.isspace() or not character.isprintable() for character in value)
    if parts.scheme not in ("http", "https") or not parts.hostname or is_odd or "?" in value or "#" in value:
        raise ValueError(f"must look like https://host or http://host:port, not {shown!r}")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"has a port that is no port: {shown!r}") from None
    return value


def is_loopback(host: str) -> bool:
    """Return True if `host` is this machine, so that no other machine can listen."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
