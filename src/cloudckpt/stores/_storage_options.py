"""Checks of ``storage_options`` that stores with clients of their own share. No value of a secret is ever shown."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from cloudckpt.errors import InvalidOptionError

_MOST_S = 1_000_000_000
"""Longer waits than this no socket takes."""
Parser: TypeAlias = Callable[[Any], dict[str, Any]]
"""From an option's value to fields of the configuration; `TypeError` or `ValueError` says what is wrong with it."""


def parse(
    storage_options: Mapping[str, Any],
    parsers: Mapping[str, Parser],
    *,
    aliases: Mapping[str, str],
    contradictions: Callable[[Mapping[str, Any]], list[str]],
    store: str,
) -> dict[str, Any]:
    """The fields that `storage_options` ask for. ``None`` is as good as left out.

    Raises `InvalidOptionError` with every problem at once.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    for given, value in storage_options.items():
        read = parsers.get(aliases.get(given, given))
        if read is None:
            problems.append(_unknown(str(given), parsers, aliases))
            continue
        if value is None:
            continue
        try:
            parsed = read(value)
        except (TypeError, ValueError) as error:
            problems.append(f"{given} {error}")
            continue
        for field_name, field_value in parsed.items():
            if values.setdefault(field_name, field_value) != field_value:
                problems.append(f"{given} contradicts another option for the same thing")
    problems += contradictions(values)
    if problems:
        raise InvalidOptionError(f"storage_options for {store}: " + "; ".join(problems))
    return values


def _unknown(name: str, parsers: Collection[str], aliases: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, [*parsers, *aliases], n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"{name!r} is not known{hint}; known are {', '.join(sorted(parsers))}"


def text(name: str) -> Parser:
    """A word that may go into a header."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, str) or not value:
            raise ValueError("must be a non-empty string")
        # A line break would make the HTTP library print the whole header, signature and token included.
        if any(character.isspace() or not character.isprintable() for character in value):
            raise ValueError("holds white space or control characters (its value is not shown)")
        return {name: value}

    return read


def seconds(name: str) -> Parser:
    """A positive number of seconds."""

    def read(value: Any) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_S:
            raise ValueError(f"must be a positive number of seconds, at most {_MOST_S:,}, not {value!r:.50}")
        return {name: float(value)}

    return read


def flag(name: str) -> Parser:
    """True or False."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, bool):
            raise TypeError(f"must be True or False, not {value!r}")
        return {name: value}

    return read


def choice(name: str, choices: tuple[str, ...]) -> Parser:
    """One of `choices`."""

    def read(value: Any) -> dict[str, Any]:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}")
        return {name: value}

    return read


def endpoint(instead_of_credentials: str) -> Parser:
    """``http://`` or ``https://`` and a host. Credentials belong where `instead_of_credentials` says."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            raise TypeError("must be a string")
        parts = urlsplit(value)
        if parts.username is not None or parts.password is not None:
            raise ValueError(f"must not hold credentials; pass {instead_of_credentials}")
        odd = any(character.isspace() or not character.isprintable() for character in value)
        if parts.scheme not in ("http", "https") or not parts.hostname or odd or "?" in value or "#" in value:
            raise ValueError(f"must look like https://host or http://host:port, not {value!r}")
        try:
            _ = parts.port
        except ValueError:
            raise ValueError(f"has a port that is no port: {value!r}") from None
        return {"endpoint_url": value}

    return read


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, so that nobody listens on the way."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
