"""Define all options with their defaults."""

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

from cloudckpt._display import SHOWN_AS, with_short_repr
from cloudckpt._keywords import suggest_fields
from cloudckpt.errors import InvalidOptionError
from cloudckpt.uri import redact

if TYPE_CHECKING:
    from cloudckpt.events import Event
    from cloudckpt.stores.base import Store

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

DEFAULT_CONNECTIONS = 16
"""Number of requests of one rank in flight, if `Options.connections` is None and the rank's host has few ranks."""
CONNECTIONS_BESIDE_TRAINING = 2
"""Connections of a copy to the root that no call waits for. More connections slow a training loop by more than 3 %."""

_MAX_OVER_READ = 1000.0
_SAFE = ("endpoint_url", "region", "region_name", "profile", "profile_name", "project", "anonymous", "addressing_style")
"""Storage options whose values are no secrets."""


def _hide_secrets(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options, with ``***`` in place of each value that may be a secret."""
    values = ((str(name), value if name in _SAFE else "***") for name, value in storage_options.items())
    return {name: redact(value) if isinstance(value, str) else value for name, value in values}


@suggest_fields
@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class AdvancedOptions:
    """Options of saves and loads that few users change. Sizes are in bytes.

    Raises:
        InvalidOptionError: A value is invalid. The message lists every problem.

    Example::

        advanced = cloudckpt.AdvancedOptions(part_bytes=16 * 1024**2)
        options = cloudckpt.Options(advanced=advanced)

    """

    part_bytes: int = 64 * MIB
    """Maximum size of a part of an upload. Small saves use smaller parts, down to 16 MiB. Parts grow if an object would
    have more of them than the store allows. Larger parts need fewer requests, and repeat more bytes after a failure."""
    object_bytes: int = 4 * GIB
    """Approximate size of the objects that a rank packs its tensors into. A larger tensor gets an object of its own.
    A save to a path makes smaller ones, down to 64 MiB, two for each thread: threads that write to one file wait for
    each other."""
    tile_bytes: int = 1 * MIB
    """Number of bytes that share one CRC32C. A load reads and verifies whole tiles. Lower it if loads read small parts
    of tensors; the manifest then grows."""
    request_bytes: int = 64 * MIB
    """Maximum size of a ranged read. Longer ranges are read in parallel. Small loads use smaller reads, down to 8
    MiB."""
    max_gap_bytes: int = 256 * KIB
    """Maximum gap between two ranges that are read with one request. With 0, a load reads fewer bytes with more
    requests."""
    max_over_read: float = 0.05
    """Maximum number of bytes in larger gaps that are read to save requests, relative to the number of wanted bytes.
    With 0.0, a load reads fewer bytes with more requests."""
    wrap_store: Callable[[Store], Store] | None = None
    """Returns a store of yours in front of the store that the URI opens, for example to count or break calls in tests.
    Async saves by process pickle this function, and call it in that process."""

    def __post_init__(self) -> None:
        _check(self, _ADVANCED_TYPES, _ADVANCED_BOUNDS)


@suggest_fields
@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of saves and loads. Sizes are in bytes, times in seconds.

    Raises:
        InvalidOptionError: A value is invalid. The message lists every problem.

    Example::

        options = cloudckpt.Options(connections=32, timeout_s=120)
        cloudckpt.save("s3://bucket/run/step-100", model=model, options=options)

    """

    storage_options: Mapping[str, Any] = field(default_factory=dict, metadata={SHOWN_AS: _hide_secrets})
    """Options of the store's client: ``endpoint_url``, ``region``, ``profile``, … (see ``docs/stores.md``). Needed
    where the environment does not have them."""
    timeout_s: float = 60.0
    """Maximum time without progress of a request to the store, and without a sign of life of a rank that others wait
    for. Raise it if ranks arrive with a larger delay, or if the store pauses for longer."""
    retries: int = 5
    """Number of retries after a transient failure, within `timeout_s` of the last progress. Raise it on an unreliable
    line."""
    connections: int | None = None
    """Maximum number of requests of one rank in flight. None stands for 16. If a host has more than eight
    ranks (``LOCAL_WORLD_SIZE``), they share 128. For a path, None stands for the cores of the rank, from 2 to 8. The
    number is halved when the store asks to slow down, or requests time out or cannot be sent, and grows again after
    that. Ranks that have less than two cores each make fewer and larger requests. Raise it if the network has room and
    the CPU is idle. Lower it if a background save slows training down."""
    staging_bytes: int = 512 * MIB
    """Maximum memory that a save uses to copy tensors that cannot be sent in place (GPU, strided tensors). Lower it if
    memory is short. Raise it to 1 GiB for larger parts of GPU tensors."""
    read_bytes: int = 256 * MIB
    """Maximum memory that a load uses besides the tensors themselves. Lower it if memory is short."""
    verify: bool = True
    """Verify every byte that is read against the checksum of the save. With False, damaged bytes load without an
    error."""
    allow_lossy_casts: bool | Literal["rounding"] = False
    """If True, a load casts as torch's ``copy_``, also values that the dtype of the tensor cannot hold, such as 2.5 in
    an integer tensor. Otherwise, it raises `StateDictMismatchError` for these values. If floats of a checkpoint are
    rounded to another precision, it warns. Those of safetensors files are rounded only with ``"rounding"`` or True. Set
    it to ``"rounding"`` to load published weights into a smaller dtype, and to True to drop imaginary parts or
    fractions on purpose."""
    compare_replicas: Literal["sample", "whole", "never"] = "sample"
    """Comparison of entries that several ranks hold under one name. In the parameters and optimizer states of live
    objects, they must be equal. If other tensors differ, the lowest rank saves its own. ``"sample"`` compares tensors
    of up to 16 KiB whole, and samples of larger ones: at the beginning, middle and end, and of each 4 MiB.
    ``"whole"`` compares all bytes. ``"never"`` compares nothing, and the lowest rank saves all entries. Set it if ranks
    differ on purpose."""
    share_reads: Literal["always", "never"] = "never"
    """Reads that several ranks plan alike, as with DDP and HSDP. With ``"never"``, each rank makes all its reads.
    With ``"always"``, the ranks make equal parts of them, and send each other the bytes. Set it if the store or the
    line limits loads, and the ranks have a faster network between them. It takes more CPU, and requests of 2 MiB."""
    commit: Literal["conditional", "unconditional"] = "conditional"
    """``"unconditional"`` accepts a store without create-if-absent, and loses the protection against overwrites."""
    unchanged: Literal["send", "reference"] = "send"
    """Treatment of tensors that have not changed since an earlier checkpoint, such as those of frozen layers. With
    ``"reference"``, the new checkpoint refers to the stored tensors and does not send them again. `CheckpointManager`
    compares with the newest step, and `cloudckpt.save` with its ``base``. A save then keeps a hash of each tensor.
    ``"send"`` sends everything."""
    async_in_flight: Literal["wait", "raise"] = "wait"
    """Behavior of `async_save` while another save runs on any rank: wait for its end, or raise `SaveInFlightError` on
    all ranks. It must be equal on all ranks. ``"raise"`` is for jobs that skip a save rather than wait."""
    async_overlap: bool = False
    """If True, `async_save` returns before it has copied parameters and optimizer states. They must not change until
    `AsyncSave.staged` is done. If False, it returns after the copy. Set it on a GPU if the optimizer can wait for
    ``staged``."""
    resume: bool = False
    """For `cloudckpt.copy`, in its ``target_options``: if True, a copy continues a killed copy with this option, and
    sends only the missing parts. A copy that fails then removes nothing. A save refuses this option."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values of yours, stored in the manifest, such as the configuration of the run."""
    extensions: Sequence[Any] = ()
    """Transforms of the stored bytes, such as ``cloudckpt.Zstandard()``: torch's `StreamTransformExtension` objects. A
    save applies them in this order. A load undoes the transforms that the manifest names; it looks for unknown names
    here."""
    on_event: Callable[[Event], None] | None = None
    """Called with each event, in the thread that has done the work or in one that waits for that thread. It must
    return quickly. Saves by torch's process pickle this function, and call it in that process."""
    progress: bool = False
    """If True, rank 0 shows a bar of each save and load that the caller waits for in a terminal, which needs the extra
    ``cli``. A notebook shows one of background saves, too, and needs nothing. A log shows none."""
    advanced: AdvancedOptions = field(default_factory=AdvancedOptions)
    """Sizes of parts, objects and reads, and other options that few users change."""
    trace: str | os.PathLike[str] | None = None
    """Local file for a timeline that Perfetto and chrome://tracing open. The next save or load replaces it. ``{rank}``
    and ``{verb}`` are replaced; without ``{rank}``, rank 1 writes ``trace.1.json``, and so on. Set it to find the slow
    part of a save or load."""

    def __post_init__(self) -> None:
        _check(self, _TYPES, _BOUNDS)


_Rule: TypeAlias = tuple[str, Callable[[Any], bool], str]
"""Name of an option, check of its value, and description of a valid value."""


def _is_a(kind: type[Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _is_callable_or_none(value: object) -> bool:
    return value is None or callable(value)


def _is_json(value: object) -> bool:
    try:
        json.dumps(msgspec.to_builtins(value), allow_nan=False)  # msgspec would make null of NaN
    except (TypeError, ValueError, RecursionError, OverflowError):
        return False
    return True


def _is_path_or_none(value: object) -> bool:
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str))
    )


def _is_trace(value: str | os.PathLike[str] | None) -> bool:
    if value is None:
        return True
    name = os.fspath(value)
    is_local = not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", name)  # or a URI that went through a Path
    return is_local and name != "" and "\0" not in name and set(re.findall(r"\{\w*\}", name)) <= {"{rank}", "{verb}"}


def _are_extensions(value: object) -> bool:
    """Check by duck typing, because this module does not import torch."""
    methods = ("transform_to", "transform_from", "get_descriptor", "registry_name")
    return isinstance(value, (list, tuple)) and all(
        not isinstance(extension, type) and all(callable(getattr(extension, method, None)) for method in methods)
        for extension in value
    )


_ADVANCED_TYPES: tuple[_Rule, ...] = (
    *(
        (name, _is_a(numbers.Integral), "a whole number")
        for name in ("part_bytes", "object_bytes", "tile_bytes", "request_bytes", "max_gap_bytes")
    ),
    ("max_over_read", _is_a(numbers.Real), "a number"),
    ("wrap_store", _is_callable_or_none, "callable or None"),
)

_TYPES: tuple[_Rule, ...] = (
    ("storage_options", _is_a(Mapping), "a mapping"),
    ("timeout_s", _is_a(numbers.Real), "a number of seconds"),
    ("retries", _is_a(numbers.Integral), "a whole number"),
    *(
        (name, _is_a(numbers.Integral), "a whole number, such as 4 * 1024**3")
        for name in ("staging_bytes", "read_bytes")
    ),
    ("connections", lambda value: value is None or _is_a(numbers.Integral)(value), "a whole number or None"),
    *((name, _is_a(bool), "True or False") for name in ("verify", "async_overlap", "resume", "progress")),
    ("allow_lossy_casts", lambda value: _is_a(bool)(value) or value == "rounding", "True, False or 'rounding'"),
    ("metadata", _is_a(Mapping), "a mapping"),
    ("extensions", _are_extensions, "a list of StreamTransformExtension objects"),
    ("on_event", _is_callable_or_none, "callable or None"),
    ("advanced", _is_a(AdvancedOptions), "an AdvancedOptions"),
    ("trace", _is_path_or_none, "a path or None"),
)

# A bound takes the options, because some bounds depend on another option.
_ADVANCED_BOUNDS: tuple[_Rule, ...] = (
    ("part_bytes", lambda options: options.part_bytes >= options.tile_bytes, "at least tile_bytes"),
    ("object_bytes", lambda options: options.object_bytes >= 1, "positive"),
    (
        "tile_bytes",
        lambda options: 4 * KIB <= options.tile_bytes <= GIB and options.tile_bytes % 64 == 0,
        "a multiple of 64, from 4096 to 1 GiB",
    ),
    ("request_bytes", lambda options: options.request_bytes >= options.tile_bytes, "at least tile_bytes"),
    ("max_gap_bytes", lambda options: options.max_gap_bytes >= 0, "at least 0"),
    ("max_over_read", lambda options: 0 <= options.max_over_read <= _MAX_OVER_READ, "from 0 to 1000"),
)

_BOUNDS: tuple[_Rule, ...] = (
    ("timeout_s", lambda options: 0 < options.timeout_s < math.inf, "positive and finite"),
    ("retries", lambda options: options.retries >= 0, "at least 0"),
    ("connections", lambda options: options.connections is None or options.connections >= 1, "at least 1"),
    ("staging_bytes", lambda options: options.staging_bytes >= options.advanced.part_bytes, "at least part_bytes"),
    ("read_bytes", lambda options: options.read_bytes >= options.advanced.request_bytes, "at least request_bytes"),
    ("async_in_flight", lambda options: options.async_in_flight in ("wait", "raise"), "'wait' or 'raise'"),
    (
        "compare_replicas",
        lambda options: options.compare_replicas in ("sample", "whole", "never"),
        "'sample', 'whole' or 'never'",
    ),
    ("share_reads", lambda options: options.share_reads in ("always", "never"), "'always' or 'never'"),
    ("commit", lambda options: options.commit in ("conditional", "unconditional"), "'conditional' or 'unconditional'"),
    ("unchanged", lambda options: options.unchanged in ("send", "reference"), "'send' or 'reference'"),
    (
        "unchanged",
        lambda options: options.unchanged == "send" or (options.commit == "conditional" and not options.extensions),
        "'send' ('reference' needs commit='conditional' and no extensions)",
    ),
    (
        "trace",
        lambda options: _is_trace(options.trace),
        "a local file, with no other placeholders than {rank} and {verb}",
    ),
    ("metadata", lambda options: _is_json(options.metadata), "what JSON can hold (no NaN, no objects)"),
)


def _check(options: Any, types: Iterable[_Rule], bounds: Iterable[_Rule]) -> None:
    problems = {name: valid for name, is_valid, valid in types if not is_valid(getattr(options, name))}
    is_typed = not problems
    for name, is_valid, valid in bounds:
        try:
            is_within = name in problems or is_valid(options)
        except (TypeError, ValueError, AttributeError):
            if is_typed:
                raise
            continue  # the bound depends on another option, whose type is wrong
        if not is_within:
            problems[name] = valid
    if problems:
        raise InvalidOptionError(
            "; ".join(f"{name} must be {valid}, not {_format_value(options, name)}" for name, valid in problems.items())
        )
    for name, _, _ in types:
        value = getattr(options, name)
        if _is_a(numbers.Integral)(value):  # numpy's integers are not int
            object.__setattr__(options, name, int(value))


def require_options(options: Options | None) -> Options:
    """Return `options`, or the defaults for None. Raises `InvalidOptionError` for any other value."""
    if not isinstance(options, (Options, type(None))):  # type checkers see it; a notebook does not
        raise InvalidOptionError(
            f"options must be a cloudckpt.Options, not {type(options).__name__}: Options(retries=3)"
        )
    return options or Options()


def _format_value(options: Any, name: str) -> str:
    value = getattr(options, name)
    # Any storage option may hold a secret.
    return f"a {type(value).__name__}" if name == "storage_options" else reprlib.repr(value)
