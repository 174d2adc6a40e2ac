"""Run all checks of a place: contact, credentials, permissions, promises of the store, settings of the bucket."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from cloudckpt._display import count, rate, seconds, size
from cloudckpt._messages import gc_advice, plain_line
from cloudckpt._workers import call_together
from cloudckpt.doctor import environment
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    InvalidOptionError,
    StoreError,
    ThrottledError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.io.client import open_client
from cloudckpt.options import CONNECTIONS_BESIDE_TRAINING, GIB, MIB, Options
from cloudckpt.stores import open_store, options_at
from cloudckpt.stores.probe import CHECKS, CheckFailed, Scratch
from cloudckpt.uri import Location, parse_location

if TYPE_CHECKING:
    from cloudckpt.stores.base import Store

Outcome = Literal["passed", "failed", "skipped"]

_MARKS = {"passed": "✓", "failed": "✗", "skipped": "–"}  # noqa: RUF001  # a dash as wide as the other marks
_NOT_ASKED = "not asked: "
_MAX_TIMEOUT_S = 30.0
"""A client waits a third of it for an answer, and a check has one try."""
_MAX_SHOWN_NAMES = 5
_MEASURED_OBJECT_BYTES = 16 * MIB
_OBJECTS_PER_CONNECTION = 4
_BEGIN_NONE_AFTER_S = 3.0
_T = TypeVar("_T")
_LOST_WITHOUT = {
    "put": "Without it nothing can be saved.",
    "get": "Without it nothing can be loaded, and a save cannot verify its commit.",
    "range reads": "Loads read ranges.",
    "head": "Overwrites and copies ask for sizes.",
    "delete": "Failed saves leave what they wrote, overwrites what they replaced, old steps stay whatever keep_last "
    "says, and gc has no effect.",
    "listings": "Checkpoints are found by listings.",
    "create-if-absent": "A save refuses to begin without it.",
    "checksums": "It is not known if damaged bytes are refused.",
    "parts": "Objects that are larger than a part cannot be saved.",
    "abort": "The store bills the parts of failed saves until a lifecycle rule removes them.",
    "unfinished uploads": "gc cannot find what killed saves leave, and a copy that resumes sends everything again.",
}
"""The consequence of each check's failure."""
_WITHOUT_FAST = "A manager sends each save to the root instead, with a warning."
_ABSENT_FAST = "If a run has saved there, check the path, and that the drive is mounted."
_OPTIONAL = ("checksums", "unfinished uploads", "head", "delete", "abort")
_NEED_GET = ("range reads", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check. If a check that `matters` failed, saves or loads may fail, too."""

    name: str
    """Short, and the same in every release."""
    outcome: Outcome
    found: str
    """The observation, or why there is none."""
    advice: str = ""
    """The consequence of a failure, and what to do about it."""
    matters: bool = True
    """False if a failure costs only money, time or comfort."""

    @property
    def mark(self) -> str:
        """A sign for tables."""
        return "!" if self.outcome == "failed" and not self.matters else _MARKS[self.outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The results of all checks, in order. ``str()`` returns a table, the advice and a verdict."""

    uri: str
    read_only: bool
    checks: tuple[Check, ...]
    service: Mapping[str, str] | None = None
    """The row of ``docs/stores-seen.md`` that applies, by column; None if the service is unknown."""

    @property
    def is_healthy(self) -> bool:
        """True unless a check failed that matters."""
        return not any(check.matters for check in self.failures)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed, including those that do not matter."""
        return tuple(check for check in self.checks if check.outcome == "failed")

    def __getitem__(self, name: str) -> Check:
        """Return the check of that name. Raises `KeyError` if there is none for this kind of store."""
        return {check.name: check for check in self.checks}[name]

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        not_asked: dict[str, list[str]] = {}
        lines = []
        for check in self.checks:
            if check.found.startswith(_NOT_ASKED):
                not_asked.setdefault(check.found, []).append(check.name)
            else:
                lines.append(f"{check.mark}  {check.name:<{width}}  {check.found}")
        lines += [f"{_MARKS['skipped']}  {why}: {', '.join(names)}" for why, names in not_asked.items()]
        for check in self.failures:
            note = "" if check.matters else " (saves and loads work all the same)"
            lines += ["", f"{check.mark} {check.name}{note}", f"  {check.advice or check.found}"]
        if self.service is not None:
            lines += ["", "The documents of this service promise (docs/stores-seen.md):"]
            lines += [f"  {column}: {text}" for column, text in self.service.items()]
        verdict = "Saves or loads will fail: see the checks that are marked ✗."
        if not self.failures:
            verdict = "All is well."
        elif self.is_healthy:
            verdict = "Saves and loads will work. What is marked ! costs money, time or comfort."
        scope = "This looked at the store, not at checkpoints: see cloudckpt ls and cloudckpt verify."
        return "\n".join(map(plain_line, [*lines, "", verdict, scope]))


def examine(
    uri: str | os.PathLike[str],
    *,
    read_only: bool = False,
    deadline_s: float = 60.0,
    fast: str | os.PathLike[str] | None = None,
    num_bytes: int = GIB,
    options: Options | None = None,
) -> DoctorReport:
    """Find out if saves to `uri` and loads from it will work: credentials, permissions, promises of the store.

    Writes objects below `uri` whose names `gc` knows as garbage (``.cloudckpt-probe-…``), and removes all of them
    before it returns or raises. A failed check is part of the result, not an exception.

    Args:
        uri: The folder of the checkpoints.
        read_only: Write nothing, and check only the needs of loads.
        deadline_s: Skip the checks that would begin later. A single wait is at most 10 seconds for an answer and 20
            for a connection, or less if ``options.timeout_s`` is less.
        fast: The fast place of a `CheckpointManager` in front of `uri`. Its speed is measured, too, and that of a copy
            from there, unless `read_only`.
        num_bytes: Size of the checkpoints, for the times of a save to `fast` and of a copy.
        options: The options of the saves and loads.

    Raises:
        InvalidURIError: `uri` names no place.
        InvalidOptionError: An option has a value that cannot work.
        MissingDependencyError: The package of the store is not installed.

    """
    options = options or Options()
    if not 0 < deadline_s < float("inf"):
        raise InvalidOptionError(f"deadline_s must be positive and finite, not {deadline_s!r}")
    location = parse_location(uri)
    bounded = dataclasses.replace(options, timeout_s=min(options.timeout_s, _MAX_TIMEOUT_S))
    store = open_store(location, bounded)
    # A wrapper of the user's has no session, and not the store's settings.
    unwrapped = dataclasses.replace(bounded, advanced=dataclasses.replace(options.advanced, wrap_store=None))
    plain = store if options.advanced.wrap_store is None else open_store(location, unwrapped)
    checklist = _Checklist(deadline_s)
    _check_contact(checklist, location, store, plain, timeout_s=bounded.timeout_s / 3)
    if read_only:
        checklist.run("get", functools.partial(_read_any_object, store), advice=_LOST_WITHOUT["get"])
    else:
        leftovers: list[str] = []
        with environment.removing_directories(location):
            scratch = Scratch(store)
            try:
                _check_promises(checklist, scratch)
                if fast is not None:
                    leftovers += _check_fast(
                        checklist, parse_location(fast), location, scratch, bounded, num_bytes=num_bytes
                    )
            finally:
                leftovers += scratch.clean_up()
        if leftovers:
            checklist.add(
                "left behind",
                "failed",
                f"{len(leftovers)} of the doctor's own objects could not be removed",
                f"Remove {', '.join(leftovers[:_MAX_SHOWN_NAMES])}. {gc_advice(location.uri)}",
                matters=False,
            )
    _check_settings(checklist, location, plain, read_only=read_only)
    service = _find_service(checklist, location, plain, timeout_s=bounded.timeout_s / 6)
    return DoctorReport(uri=location.uri, read_only=read_only, checks=tuple(checklist.checks), service=service)


class _Checklist:
    """Runs checks and keeps the results. Skips the rest when contact is lost or time is up."""

    def __init__(self, deadline_s: float) -> None:
        self.checks: list[Check] = []
        self.skip_reason = ""
        """The reason why all further checks are skipped, if they are."""
        self._until = time.monotonic() + deadline_s
        self._deadline_s = deadline_s

    def has(self, name: str, outcome: Outcome) -> bool:
        return any(check.name == name and check.outcome == outcome for check in self.checks)

    def add(self, name: str, outcome: Outcome, found: str, advice: str = "", *, matters: bool = True) -> None:
        self.checks.append(Check(name=name, outcome=outcome, found=found, advice=advice, matters=matters))

    def run(
        self, name: str, check: Callable[[], str | None], *, subject: str = "", advice: str = "", matters: bool = True
    ) -> None:
        """Run one check. `subject` begins the sentence about a failure."""
        if not self.skip_reason and time.monotonic() > self._until:
            self.skip_reason = f"not asked: {self._deadline_s:g} s were over"
        if self.skip_reason:
            self.add(name, "skipped", self.skip_reason, matters=matters)
            return
        try:
            found = check()
        except CheckFailed as failure:
            self.add(name, "failed", f"{subject}{failure.observed}", failure.advice, matters=matters)
        except UnsupportedOperationError as error:
            self.add(name, "skipped", str(error), matters=matters)
        except AccessDeniedError as error:
            self.add(name, "failed", "the store denies it", f"{error} {advice}".rstrip(), matters=matters)
        except StoreError as error:
            self.add(name, "failed", str(error), advice or str(error), matters=matters)
        else:
            if found is None:
                self.add(name, "skipped", "unknown", matters=matters)
            else:
                self.add(name, "passed", found, matters=matters)


def _check_contact(checklist: _Checklist, location: Location, store: Store, plain: Any, *, timeout_s: float) -> None:
    """Check that the store answers, accepts the credentials, and has the bucket."""
    error = _list_error(store)
    if location.local_path is not None:
        checklist.add("place", "passed", f"{location.local_path}, a folder on this machine")
    if location.scheme in ("s3", "gs"):
        _check_endpoint(checklist, plain, error, timeout_s=timeout_s)
        _check_credentials(checklist, location, plain, error)
        if isinstance(error, BucketNotFoundError):
            checklist.add("bucket", "failed", f"{location.authority} does not exist", str(error))
            checklist.skip_reason = "not asked: there is no such bucket"
        elif error is None:
            checklist.add("bucket", "passed", f"{location.authority} exists")
        else:
            checklist.add("bucket", "skipped", checklist.skip_reason or "unknown")
    checklist.run(
        "list",
        functools.partial(_raise_or_allow, error),
        advice="Without it no checkpoint is found, and none can be saved.",
    )


def _check_endpoint(checklist: _Checklist, plain: Any, error: StoreError | None, *, timeout_s: float) -> None:
    try:
        endpoint = str(plain.session.endpoint_url("examine"))
    except StoreError as unusable:
        checklist.add("endpoint", "skipped", str(unusable))
        return
    if isinstance(error, ThrottledError):
        checklist.add("endpoint", "failed", f"{endpoint} throttles requests", str(error))
        checklist.skip_reason = "not asked: the store throttles requests"
    elif isinstance(error, TransientStoreError):
        checklist.add("endpoint", "failed", f"no answer of a store from {endpoint}", str(error))
        checklist.skip_reason = "not asked: no store answers"
    elif isinstance(error, CredentialsError) and environment.request_headers(endpoint, timeout_s=timeout_s) is None:
        checklist.add("endpoint", "skipped", "unknown: without credentials no request is sent")
    else:
        checklist.add("endpoint", "passed", f"{endpoint} answers")
    checklist.run("clock", functools.partial(environment.check_clock, endpoint, timeout_s=timeout_s / 2))


def _check_credentials(checklist: _Checklist, location: Location, plain: Any, error: StoreError | None) -> None:
    if isinstance(error, CredentialsError) and not checklist.skip_reason:
        checklist.skip_reason = "not asked: no credentials that the store accepts"
        if checklist.has("clock", "failed"):  # a store refuses requests with a wrong time
            checklist.add("credentials", "skipped", "unknown: the clock is off")
        else:
            checklist.add("credentials", "failed", "none that the store accepts", str(error))
    elif location.scheme == "s3":
        checklist.run("credentials", functools.partial(environment.check_s3_credentials, plain))
    else:
        checklist.run("credentials", functools.partial(environment.check_gcs_credentials, plain))
    if location.scheme == "s3":
        checklist.run("region", functools.partial(environment.check_s3_region, plain), matters=False)


def _list_error(store: Store) -> StoreError | None:
    try:
        next(iter(store.list()), None)
    except StoreError as error:
        return error
    return None


def _raise_or_allow(error: StoreError | None) -> str:
    if error is not None:
        raise error
    return "allowed"


def _read_any_object(store: Store) -> str | None:
    info = next((info for info in store.list() if info.size_bytes), None)
    if info is None:
        return None
    store.read_into(info.key, 0, [memoryview(bytearray(1))])
    return f"{store.url(info.key)} can be read"


def _check_promises(checklist: _Checklist, scratch: Scratch) -> None:
    """Run the checks of `stores.probe`, two of which a save makes, too."""
    for name, check in CHECKS.items():
        matters = name not in _OPTIONAL
        if name != "put" and not checklist.skip_reason and not checklist.has("put", "passed"):
            checklist.add(name, "skipped", "not asked: nothing can be put", matters=matters)
        elif name in _NEED_GET and not checklist.skip_reason and not checklist.has("get", "passed"):
            checklist.add(name, "skipped", "not asked: nothing can be read", matters=matters)
        else:
            run = functools.partial(check, scratch)
            checklist.run(name, run, subject="the store ", advice=_LOST_WITHOUT[name], matters=matters)


def _check_fast(
    checklist: _Checklist, fast: Location, root: Location, at_root: Scratch, options: Options, *, num_bytes: int
) -> list[str]:
    """Measure a fast place, and the root as the target of its copies. Return what could not be removed."""
    client = open_client(fast, options_at(fast, root, options))
    scratch, threads = Scratch(client.store), client.hedger.configured_connections
    read_s = 0.0
    leftovers: list[str] = []

    def save() -> str:
        nonlocal read_s
        free_bytes = client.store.free_bytes()
        if free_bytes is not None and free_bytes < num_bytes:
            raise CheckFailed(f"{size(free_bytes)} are free, and a save takes {size(num_bytes)}", _WITHOUT_FAST)
        with environment.removing_directories(fast):
            try:
                written, read = _measure(scratch, connections=threads)
            finally:
                leftovers.extend(scratch.clean_up())
        read_s = num_bytes / read
        return _describe_speed("save", written, f"{threads} threads", num_bytes, num_bytes / written)

    def drain(connections: int) -> str:
        written, _ = _measure(at_root, connections=connections)
        took_s = max(num_bytes / written, read_s)  # a copy reads and writes at once
        return _describe_speed("copy", written, count(connections, "connection"), num_bytes, took_s)

    if fast.local_path is not None and not Path(fast.local_path).exists():
        found = f"{fast.local_path} does not exist. The first save makes it"
        checklist.add("fast place", "failed", found, _ABSENT_FAST, matters=False)
    checklist.run("fast save", save, advice=_WITHOUT_FAST, matters=False)
    connections = open_client(root, options).hedger.configured_connections
    checklist.run("drain", functools.partial(drain, connections), matters=False)
    connections = min(connections, CONNECTIONS_BESIDE_TRAINING)
    checklist.run("drain beside training", functools.partial(drain, connections), matters=False)
    return leftovers


def _measure(scratch: Scratch, *, connections: int) -> tuple[float, float]:
    """Write at most 64 MiB with each connection, and read them back. The caller removes the objects.

    Raises `CheckFailed` if other bytes are read, and `StoreError`.

    Returns:
        The rates of the writes and of the reads, over all connections, in bytes a second.

    """
    content = os.urandom(_MEASURED_OBJECT_BYTES)

    def write(_: int) -> list[str]:
        ends_at_s = time.monotonic() + _BEGIN_NONE_AFTER_S
        keys: list[str] = []
        while len(keys) < _OBJECTS_PER_CONNECTION and (not keys or time.monotonic() < ends_at_s):
            keys.append(scratch.new_key())
            scratch.put(keys[-1], content)
        return keys

    def read(number: int) -> None:
        buffer = bytearray(_MEASURED_OBJECT_BYTES)
        for key in keys[number]:
            scratch.store.read_into(key, 0, [memoryview(buffer)])
            if buffer != content:
                raise CheckFailed("returns other bytes than were written", "Use another place, or replace the drive.")

    keys, write_s = _run_together(write, connections)
    _, read_s = _run_together(read, connections)
    num_bytes = sum(map(len, keys)) * _MEASURED_OBJECT_BYTES
    return num_bytes / write_s, num_bytes / read_s


def _run_together(work: Callable[[int], _T], num_threads: int) -> tuple[list[_T], float]:
    """Call `work` with each number in a thread of its own. Return the results, and the seconds of all calls."""
    begun_s = time.monotonic()
    calls = [functools.partial(work, number) for number in range(num_threads)]
    return call_together(*calls, num_threads=num_threads), time.monotonic() - begun_s


def _describe_speed(verb: str, bytes_per_s: float, means: str, num_bytes: int, took_s: float) -> str:
    return f"{rate(bytes_per_s)} by {means}: a {verb} of {size(num_bytes)} takes {seconds(took_s)}"


def _check_settings(checklist: _Checklist, location: Location, plain: Any, *, read_only: bool) -> None:
    """Check the settings of the bucket, if they may be read."""
    if location.scheme == "s3":
        checklist.run("lifecycle", functools.partial(environment.check_s3_lifecycle, plain), matters=False)
        checklist.run("versioning", functools.partial(environment.check_s3_versioning, plain), matters=False)
    elif location.scheme == "gs":
        kind = functools.partial(environment.check_gcs_location_type, plain)
        checklist.run("location type", kind, matters=not read_only)
        bucket = None if checklist.skip_reason else environment.read_gcs_bucket(plain)
        checks = {"lifecycle": environment.check_gcs_lifecycle, "versioning": environment.check_gcs_versioning}
        for name, check in checks.items():
            checklist.run(name, functools.partial(_check_if_read, check, bucket), matters=False)
    elif location.scheme == "file" and not read_only:  # loads need no space
        checklist.run("free space", functools.partial(environment.check_free_space, location.path))


def _find_service(
    checklist: _Checklist, location: Location, plain: Any, *, timeout_s: float
) -> Mapping[str, str] | None:
    if location.scheme not in ("s3", "gs"):
        return environment.find_service(location.scheme)
    try:
        endpoint = str(plain.session.endpoint_url("examine"))
    except StoreError:
        return None
    headers = None if checklist.skip_reason else environment.request_headers(endpoint, timeout_s=timeout_s)
    server = " ".join(headers.get(name, "") for name in ("Server", "x-amz-request-id")) if headers else ""
    scheme = "gs-zonal" if checklist.has("location type", "failed") else location.scheme
    return environment.find_service(scheme, host=urlsplit(endpoint).hostname or "", server=server)


def _check_if_read(check: Callable[[Any], str], bucket: Any) -> str | None:
    return None if bucket is None else check(bucket)
