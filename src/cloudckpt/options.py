"""Everything that can be tuned, with its default, once."""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from cloudckpt.errors import InvalidOptionError

if TYPE_CHECKING:
    from cloudckpt.report import Event
    from cloudckpt.stores.base import Store

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

DEFAULT_CONNECTIONS = 16
"""Requests in flight of one rank, if `Options.connections` is None and the rank's host has few ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to save and load. Sizes are in bytes, times in seconds.

    Raises `InvalidOptionError`, with every problem at once, where a value cannot work.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the store's own client takes: ``endpoint_url``, ``region``, ``profile``, … (see ``docs/stores.md``)."""
    timeout_s: float = 60.0
    """The longest that anything waits without progress."""
    retries: int = 5
    """How often a call that failed in passing is tried again, within `timeout_s` of its last progress."""
    connections: int | None = None
    """Most requests in flight at once, per rank. None: 16, or fewer where a host has more than eight ranks
    (``LOCAL_WORLD_SIZE``), which share 128; for a path, as many as the rank has cores, from 2 to 8. While the store
    asks to slow down, or requests time out, there are fewer."""
    part_bytes: int = 64 * MIB
    """Largest part of an upload; smaller saves have smaller ones, down to 16 MiB. Grows by itself where an object would
    need too many."""
    object_bytes: int = 4 * GIB
    """A rank's tensors are packed into objects of about this size; a larger tensor gets one of its own."""
    tile_bytes: int = 1 * MIB
    """One CRC32C is kept for each so many bytes; the smallest unit that a load verifies and so reads."""
    staging_bytes: int = 512 * MIB
    """Most memory that a save uses for copies of what cannot be sent from where it lies (GPU, strided tensors)."""
    read_bytes: int = 256 * MIB
    """Most memory that a load uses besides the tensors themselves."""
    request_bytes: int = 64 * MIB
    """Largest ranged read; longer runs are split into parallel ones, and smaller loads into smaller ones, down to
    8 MiB."""
    max_gap_bytes: int = 512 * KIB
    """Two wanted ranges that lie no further apart are read as one, since a request would cost more than the gap."""
    max_over_read: float = 0.1
    """Larger gaps are read where that saves requests, while they come to no more than this share of what is wanted."""
    share_reads: Literal["auto", "always", "never"] = "auto"
    """When one rank reads bytes that several ranks of its machine load, and passes them on in shared memory:
    ``"auto"`` if four or more ranks want the same 16 MiB or more, from other than local files; ``"always"`` if two or
    more ranks want the same; or ``"never"``."""
    verify: bool = True
    """Check every byte that is read against the checksum recorded at save."""
    commit: Literal["conditional", "unconditional"] = "conditional"
    """``"unconditional"`` accepts a store that cannot create-if-absent, and with it lost overwrite protection."""
    async_mode: Literal["thread", "process"] = "thread"
    """Where the work of an async save is done: in threads of this process, or, where training needs the interpreter to
    itself, in a process of its own, which reads the copy in shared memory; plans are still made here."""
    async_in_flight: Literal["wait", "raise"] = "wait"
    """What `async_save` does while another one runs: wait for its end, or raise `SaveInFlightError` at once: on
    all ranks, where it still runs on any of them. All have to have the same here."""
    async_overlap: bool = False
    """Whether `async_save` returns at once, while it still copies: then nothing of the state dict may change before
    `AsyncSave.staged` is done. Otherwise it returns when everything is copied."""
    resume: bool = False
    """Take up what a save with this option that was killed left here: of what is still the same, only the parts that
    are missing are sent. A save that fails then removes nothing."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's own JSON values, kept in the manifest."""
    extensions: Sequence[Any] = ()
    """Transforms of what is stored, such as ``cloudckpt.Zstandard()``: torch's `StreamTransformExtension` objects. A
    save applies them in this order; a load undoes what the manifest names, by these where it does not know them."""
    on_event: Callable[[Event], None] | None = None
    """Called at each step, always in this process, and by the thread that made the step or one that waits for it. Must
    be quick."""
    trace: str | os.PathLike[str] | None = None
    """A local file for a timeline, which Perfetto and chrome://tracing open; the next save or load replaces it.
    ``{rank}`` and ``{verb}`` are filled in; without ``{rank}``, rank 1 writes ``trace.1.json``, and so on."""
    wrap_store: Callable[[Store], Store] | None = None
    """Puts a store of yours in front of the one that the URI opens, to count, slow down or break calls. Picklable for
    async saves by process, in which it is called there."""

    def __post_init__(self) -> None:
        # A value of the wrong type cannot be compared with a bound, so types come first.
        problems = _wrong(self, _TYPES)
        if not problems:
            problems = _wrong(self, _BOUNDS)
        if problems:
            raise InvalidOptionError("Options: " + "; ".join(problems))
        for name in _WHOLE_NUMBERS:  # of numpy, say, which are no int where it matters
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                object.__setattr__(self, name, int(value))


_Rule: TypeAlias = tuple[str, Callable[[Options], bool], str]
"""An option's name, whether it is good, and what it must be."""


def _of_type(name: str, kind: type[Any], what: str) -> _Rule:
    def is_good(options: Options) -> bool:
        value = getattr(options, name)
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))

    return name, is_good, what


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _callable_or_none(name: str) -> _Rule:
    def is_good(options: Options) -> bool:
        value = getattr(options, name)
        return value is None or callable(value)

    return name, is_good, "callable or None"


def _is_json(value: object) -> bool:
    try:
        json.dumps(msgspec.to_builtins(value), allow_nan=False)  # msgspec would make null of NaN
    except (TypeError, ValueError, RecursionError, OverflowError):
        return False
    return True


def _is_path(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str))


def _is_trace(name: str) -> bool:
    is_local = not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", name)  # also what a Path leaves of a URI
    return is_local and name != "" and "\0" not in name and set(re.findall(r"\{\w*\}", name)) <= {"{rank}", "{verb}"}


def _are_extensions(value: object) -> bool:
    """By what they can do: torch's class is not known here."""
    parts = ("transform_to", "transform_from", "get_descriptor", "registry_name")
    return isinstance(value, (list, tuple)) and all(
        not isinstance(one, type) and all(callable(getattr(one, part, None)) for part in parts) for one in value
    )


_WHOLE_NUMBERS = (
    "retries",
    "connections",
    "part_bytes",
    "object_bytes",
    "tile_bytes",
    "staging_bytes",
    "read_bytes",
    "request_bytes",
    "max_gap_bytes",
)
_MOST_OVER_READ = 1000.0

_TYPES: tuple[_Rule, ...] = (
    _of_type("storage_options", Mapping, "a mapping"),
    _of_type("timeout_s", numbers.Real, "a number of seconds"),
    *(_of_type(name, numbers.Integral, "a whole number") for name in _WHOLE_NUMBERS if name != "connections"),
    (
        "connections",
        lambda options: options.connections is None or _is_whole(options.connections),
        "a whole number or None",
    ),
    _of_type("max_over_read", numbers.Real, "a number"),
    _of_type("verify", bool, "True or False"),
    _of_type("async_overlap", bool, "True or False"),
    _of_type("resume", bool, "True or False"),
    _of_type("metadata", Mapping, "a mapping"),
    ("extensions", lambda options: _are_extensions(options.extensions), "a list of StreamTransformExtension objects"),
    _callable_or_none("on_event"),
    ("trace", lambda options: options.trace is None or _is_path(options.trace), "a path or None"),
    _callable_or_none("wrap_store"),
)

_BOUNDS: tuple[_Rule, ...] = (
    ("timeout_s", lambda options: 0 < options.timeout_s < math.inf, "positive and finite"),
    ("retries", lambda options: options.retries >= 0, "at least 0"),
    ("connections", lambda options: options.connections is None or options.connections >= 1, "at least 1"),
    ("part_bytes", lambda options: options.part_bytes >= options.tile_bytes, "at least tile_bytes"),
    ("object_bytes", lambda options: options.object_bytes >= 1, "positive"),
    (
        "tile_bytes",
        lambda options: 4 * KIB <= options.tile_bytes <= GIB and options.tile_bytes % 64 == 0,
        "a multiple of 64, from 4096 to 1 GiB",
    ),
    ("staging_bytes", lambda options: options.staging_bytes >= options.part_bytes, "at least part_bytes"),
    ("request_bytes", lambda options: options.request_bytes >= options.tile_bytes, "at least tile_bytes"),
    ("read_bytes", lambda options: options.read_bytes >= options.request_bytes, "at least request_bytes"),
    ("share_reads", lambda options: options.share_reads in ("auto", "always", "never"), "'auto', 'always' or 'never'"),
    ("async_mode", lambda options: options.async_mode in ("thread", "process"), "'thread' or 'process'"),
    ("async_in_flight", lambda options: options.async_in_flight in ("wait", "raise"), "'wait' or 'raise'"),
    ("max_gap_bytes", lambda options: options.max_gap_bytes >= 0, "at least 0"),
    ("max_over_read", lambda options: 0 <= options.max_over_read <= _MOST_OVER_READ, "from 0 to 1000"),
    ("commit", lambda options: options.commit in ("conditional", "unconditional"), "'conditional' or 'unconditional'"),
    (
        "trace",
        lambda options: options.trace is None or _is_trace(os.fspath(options.trace)),
        "a local file, with no other placeholders than {rank} and {verb}",
    ),
    (
        "metadata",
        lambda options: _is_json(options.metadata),
        "what JSON can hold (no NaN, no objects)",
    ),
)


def _wrong(options: Options, rules: Iterable[_Rule]) -> list[str]:
    return [
        f"{name} must be {what}, not {_shown(options, name)}" for name, is_good, what in rules if not is_good(options)
    ]


def _shown(options: Options, name: str) -> str:
    value = getattr(options, name)
    # Storage options can hold secrets, whatever they are.
    return f"a {type(value).__name__}" if name == "storage_options" else reprlib.repr(value)
