"""Make texts for messages: lists of names, hints at similar names, and texts in bounds."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence

_MAX_NAMES = 5
_MAX_COMPARED_NAMES = 5000
_MAX_RANGES = 16  # of neighbouring ranks
_LONG_WORD = re.compile(r"\S{1001,}")
MAX_MESSAGE_CHARS = 4000
TOO_MANY_FILES = "This process may open no more files (ulimit -n). Raise that limit, or lower Options.connections."
"""The advice for EMFILE, of a file system as of a connection."""


def quote_names(names: Sequence[object]) -> str:
    """Quote the first few names for a message."""
    return join_first([repr(name) for name in names], _MAX_NAMES, separator=", ") if names else "none"


def name_all(noun: str, names: Sequence[object], max_names: int = _MAX_NAMES) -> str:
    """Name the first few of some things for a message, as in ``step 7``; ``steps 7, 8 and 3 more``."""
    return f"{noun}{'' if len(names) == 1 else 's'} {join_first([*map(str, names)], max_names, separator=', ')}"


def join_first(texts: Sequence[str], max_texts: int = 10, *, separator: str = "; ") -> str:
    """Join the first texts for a message, and say how many more there are."""
    more = f"{separator.rstrip(', ')} and {len(texts) - max_texts:,} more" if len(texts) > max_texts else ""
    return separator.join(texts[:max_texts]) + more


def find_near(name: object, names: Iterable[object], *, cutoff: float = 0.6) -> str:
    """Return the name among `names` for which `name` may be a slip; "" if none is similar."""
    return next(iter(difflib.get_close_matches(str(name), map(str, names), n=1, cutoff=cutoff)), "")


def find_near_entry(name: str, names: Iterable[str]) -> str:
    """Return the entry of a checkpoint, or a common prefix, for which `name` may be a slip; "" if none is similar.

    One of the two names may lack a part of the other, such as its prefix, or words may be misspelt.
    """
    names, depth = list(itertools.islice(names, _MAX_COMPARED_NAMES)), name.count(".") + 1
    pairs = ((entry, *sorted((entry, name), key=len)) for entry in names)
    at_an_end = (entry for entry, short, long in pairs if long.endswith(f".{short}") or long.startswith(f"{short}."))
    in_the_middle = (entry.partition(f".{name}.")[0] + f".{name}" for entry in names if f".{name}." in entry)
    prefixes = dict.fromkeys(".".join(entry.split(".")[:depth]) for entry in names)
    similar = [prefix for prefix in prefixes if _are_similar(name.split("."), prefix.split("."))]
    return next(itertools.chain(at_an_end, in_the_middle), "") or find_near(name, similar)


def _are_similar(words: Sequence[str], others: Sequence[str]) -> bool:
    # In a word of two letters, one letter is half of it. The number of a layer is not misspelt.
    cutoffs = (0.5 if word.isalpha() else 0.6 for word in words)
    pairs = zip(words, others, cutoffs, strict=False)
    return len(words) == len(others) and all(a == b or find_near(a, [b], cutoff=cutoff) for a, b, cutoff in pairs)


def did_you_mean(*near: str) -> str:
    """Return the hint at names from `find_near`, to follow the wrong ones in a message; "" if none was found."""
    suggestions = [name for name in near if name]
    return f" (did you mean {quote_names(suggestions)}?)" if suggestions else ""


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks for a message, as in ``ranks 0-3, 8``."""
    members = set(ranks)
    firsts = sorted(rank for rank in members if rank - 1 not in members)
    lasts = sorted(rank for rank in members if rank + 1 not in members)
    ranges = [str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]
    text = ", ".join(ranges[:_MAX_RANGES]) + (", …" if len(ranges) > _MAX_RANGES else "")
    return f"rank{'s' if len(members) > 1 else ''} {text}"


def limit_text(text: str) -> str:
    """Return `text` in bounds and without control characters.

    Messages name tensors, keys and extensions, which come from manifests that anybody may have written. Long words and
    long texts lose their middle: the beginning says what failed, the end what to do next.
    """
    return escape_control_characters(_cut(_LONG_WORD.sub(lambda word: _cut(word[0], 300), text), MAX_MESSAGE_CHARS))


def escape_control_characters(text: str) -> str:
    """Return `text` with control characters escaped, which a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def plain_line(text: str) -> str:
    """Return `text` as one line without control characters, so that a name cannot fake further lines."""
    return escape_control_characters(text).replace("\n", "\\n")


def install_advice(extra: str) -> str:
    """Return the sentence that says how to install the packages of an extra of cloudckpt."""
    return f"install cloudckpt with its extra {extra!r}, as pip install '.[{extra}]' does in a checkout"


def gc_advice(uri: str) -> str:
    """Return the advice for data that could not be removed: nothing removes it until somebody runs `gc`."""
    return f"Run `cloudckpt gc {uri}` after 24 h, or sooner with --older-than, to remove it"


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} … [{len(text) - 2 * half:,} characters] … {text[-half:]}"
