"""Which entries are converted, and what they are called afterwards. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence

from cloudckpt.errors import InvalidOptionError, UnsupportedValueError

_MAX_SHOWN = 5


def chosen_names(
    fqns: Iterable[str], *, include: Sequence[str], strip_prefix: str = "", add_prefix: str = "", uri: str
) -> dict[str, str]:
    """The entries that match any of the patterns `include` (all, where there are none), each with its new name.

    `strip_prefix` goes from the names that begin with it. Raises `InvalidOptionError` for a pattern or a prefix that
    fits no entry, and `UnsupportedValueError` where two entries would have one name.
    """
    known = list(fqns)
    for pattern in include:
        if not fnmatch.filter(known, pattern) and pattern not in known:
            raise InvalidOptionError(f"no entry of {uri} matches include={pattern!r}. It has {shown(sorted(known))}")
    kept = [fqn for fqn in known if not include or any(matches(fqn, pattern) for pattern in include)]
    if strip_prefix and not any(fqn.startswith(strip_prefix) for fqn in kept):
        raise InvalidOptionError(
            f"nothing that is taken of {uri} begins with strip_prefix={strip_prefix!r}. There are {shown(sorted(kept))}"
        )
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for fqn in kept:
        name = add_prefix + fqn.removeprefix(strip_prefix)
        if not name:
            raise UnsupportedValueError(
                f"nothing is left of the name {fqn!r} of {uri} without {strip_prefix!r}", uri=uri
            )
        if name in taken:
            raise UnsupportedValueError(
                f"{taken[name]!r} and {fqn!r} of {uri} would both be called {name!r}. Choose among them with include",
                uri=uri,
            )
        taken[name] = fqn
        names[fqn] = name
    return names


def checked_ties(ties: Mapping[str, str], fqns: Collection[str], *, uri: str) -> Mapping[str, str]:
    """`ties`, if each gives an entry that is there a name that no other has; else raises `InvalidOptionError`."""
    for name, kept in ties.items():
        if kept not in fqns:
            raise InvalidOptionError(
                f"no tensor of {uri} is called {kept!r}, as tie says. It has {shown(sorted(fqns))}"
            )
        if name in fqns:
            raise InvalidOptionError(f"{name!r} is in {uri} already, and needs no tie")
    return ties


def matches(fqn: str, pattern: str) -> bool:
    """Whether the pattern, as of file names, fits the whole name; a name fits itself, whatever it contains."""
    return fqn == pattern or fnmatch.fnmatchcase(fqn, pattern)


def patterns_of(include: str | Sequence[str]) -> tuple[str, ...]:
    """One pattern, or several."""
    patterns = (include,) if isinstance(include, str) else tuple(include)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise InvalidOptionError(f"include must be patterns such as 'model.*', not {include!r}")
    return patterns


def shown(names: Sequence[str]) -> str:
    """Some of them, for a message."""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(repr(name) for name in names[:_MAX_SHOWN]) + more if names else "none"
