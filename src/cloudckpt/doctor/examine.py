"""One examination: contact first, then each permission and promise, then speed; and away with all that was written."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cloudckpt._uri import Location, parse_location
from cloudckpt.doctor import around, speed, trials
from cloudckpt.doctor.directories import unmade_afterwards
from cloudckpt.doctor.model import Check, Examination
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    InvalidOptionError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.options import Options
from cloudckpt.stores.open import open_store

if TYPE_CHECKING:
    from cloudckpt.stores.base import Store

_LONGEST_WAIT_S = 10.0
_WRITING = {
    "put": "Without it nothing can be saved.",
    "get": "Without it nothing can be loaded, and a save cannot make sure of its commit.",
    "range reads": "Loads read ranges alone.",
    "head": "Overwrites and copies ask for sizes.",
    "delete": "Failed saves leave what they wrote, overwrites what they replaced, and gc can do nothing.",
    "listings": "Checkpoints are found by listings.",
    "create-if-absent": "A save refuses to begin without it.",
    "checksums": "Whether damaged bytes are refused is not known.",
    "parts": "Objects that are larger than a part cannot be saved.",
    "abort": "What a failed save sent is paid for until a lifecycle rule removes it.",
    "unfinished uploads": "gc cannot find what killed saves leave, and Options(resume=True) sends everything again.",
}
_COMFORT = {"checksums", "unfinished uploads", "head"}
_TRIALS: dict[str, Callable[[trials.Scratch], str]] = {
    "put": trials.put,
    "get": trials.get,
    "range reads": trials.range_of,
    "head": trials.head,
    "delete": trials.delete,
    "listings": trials.listed,
    "create-if-absent": trials.condition,
    "checksums": trials.checksum,
    "parts": trials.multipart,
    "abort": trials.abort,
    "unfinished uploads": trials.uploads,
}
_NEED_GET = {"range reads", "head"}


def examine(
    uri: str | os.PathLike[str],
    *,
    read_only: bool = False,
    measure: bool = True,
    deadline_s: float = 60.0,
    options: Options | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> Examination:
    """Try out whether saves to `uri`, and loads from it, will work: credentials, permissions, promises, speed.

    It writes below `uri` alone, under names that `gc` knows as garbage (``.cloudckpt-probe-…``), and removes all of it
    before it returns or raises. With `read_only` it writes nothing, for whoever only loads; without `measure` it does
    not measure. Each wait is bounded by the smaller of ``options.timeout_s`` and ten seconds, and nothing is begun once
    `deadline_s` are over. What fails is in the result; `on_check` is told of each check as soon as it is done. Raises
    `InvalidURIError`, `InvalidOptionError` and `MissingDependencyError`.
    """
    options = options or Options()
    if not 0 < deadline_s < float("inf"):
        raise InvalidOptionError(f"deadline_s must be positive and finite, not {deadline_s!r}")
    location = parse_location(uri)
    bounded = dataclasses.replace(options, timeout_s=min(options.timeout_s, _LONGEST_WAIT_S))
    store = open_store(location, bounded)
    # What lies around the objects is not the business of whoever wraps them.
    plain = store if options.wrap_store is None else open_store(location, dataclasses.replace(bounded, wrap_store=None))
    examiner = _Examiner(deadline_s=deadline_s, on_check=on_check)
    _contact(examiner, location, store, plain, timeout_s=bounded.timeout_s)
    if read_only:
        examiner.run("get", lambda: _read_something(store), advice=_WRITING["get"])
    else:
        with unmade_afterwards(location):
            scratch = trials.Scratch(store)
            try:
                _try_out(examiner, scratch, measure=measure)
            finally:
                left = scratch.clean_up()
        examiner.left(left)
    _settings(examiner, location, plain)
    return Examination(uri=location.uri, read_only=read_only, checks=tuple(examiner.checks))


class _Examiner:
    """Runs checks until contact is lost or time is up."""

    def __init__(self, *, deadline_s: float, on_check: Callable[[Check], None] | None) -> None:
        self.checks: list[Check] = []
        self.lost = ""
        """Why nothing more can be asked."""
        self._until = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._on_check = on_check

    def has_passed(self, name: str) -> bool:
        """Whether that check was made, and well."""
        return any(check.name == name and check.outcome == "passed" for check in self.checks)

    def failures(self) -> list[Check]:
        """Those so far."""
        return [check for check in self.checks if check.outcome == "failed"]

    def add(self, check: Check) -> None:
        """What was found."""
        self.checks.append(check)
        if self._on_check is not None:
            self._on_check(check)

    def skip(self, name: str, why: str, *, matters: bool = True) -> None:
        """Nothing was asked."""
        self.add(Check(name=name, outcome="skipped", found=why, matters=matters))

    def run(self, name: str, ask: Callable[[], str | None], *, advice: str = "", matters: bool = True) -> None:
        """One check. `ask` returns what it found, ``None`` where it could not be told, or raises."""
        if not self.lost and time.monotonic() > self._until:
            self.lost = f"not asked: {self._deadline_s:g} s were over"
        if self.lost:
            self.skip(name, self.lost, matters=matters)
            return
        try:
            found = ask()
        except trials.Refusal as refusal:
            self._fail(name, refusal.found, refusal.advice, matters=matters)
        except UnsupportedOperationError as error:
            self.skip(name, str(error), matters=matters)
        except AccessDeniedError as error:
            self._fail(name, "denied", f"{error} {advice}".rstrip(), matters=matters)
        except StoreError as error:
            self._fail(name, str(error), advice or str(error), matters=matters)
        else:
            if found is None:
                self.skip(name, "could not be told", matters=matters)
            else:
                self.add(Check(name=name, outcome="passed", found=found, matters=matters))

    def left(self, addresses: list[str]) -> None:
        """What could not be removed again."""
        if addresses:
            self._fail(
                "left behind",
                f"{len(addresses)} of the examination's own objects could not be removed",
                f"Remove them, or let gc do it: {', '.join(addresses[:5])}",
                matters=False,
            )

    def _fail(self, name: str, found: str, advice: str, *, matters: bool) -> None:
        self.add(Check(name=name, outcome="failed", found=found, advice=advice, matters=matters))


def _contact(examiner: _Examiner, location: Location, store: Store, plain: Any, *, timeout_s: float) -> None:
    """Whether the store answers, whom it takes this for, and whether the bucket is there."""
    error = _first_answer(store)
    if location.scheme in ("s3", "gs"):
        _reach(examiner, plain, error, timeout_s=timeout_s)
        _be_known(examiner, location, plain, error)
        _find_bucket(examiner, location, error)
    elif location.scheme == "file":
        examiner.run("user", around.user)
    _list(examiner, error)


def _reach(examiner: _Examiner, plain: Any, error: Exception | None, *, timeout_s: float) -> None:
    try:
        endpoint = str(plain.session.endpoint_url("examine"))
    except StoreError as unusable:
        error = endpoint = None
        examiner.add(Check(name="endpoint", outcome="skipped", found=str(unusable)))
    if isinstance(error, TransientStoreError):
        examiner.add(Check(name="endpoint", outcome="failed", found=type(error).__name__, advice=str(error)))
        examiner.lost = "not asked: the store does not answer"
    elif endpoint is not None and isinstance(error, CredentialsError) and not around.answers(endpoint, timeout_s):
        examiner.skip("endpoint", "could not be told: without credentials nothing is asked")
    elif endpoint is not None:
        examiner.add(Check(name="endpoint", outcome="passed", found=f"{endpoint} answers"))
    if endpoint is not None:
        examiner.run("clock", lambda: around.clock(endpoint, timeout_s=timeout_s / 2))


def _be_known(examiner: _Examiner, location: Location, plain: Any, error: Exception | None) -> None:
    if isinstance(error, CredentialsError) and not examiner.lost:
        examiner.lost = "not asked: the store does not accept the credentials"
        if any(check.name == "clock" for check in examiner.failures()):  # that is why
            examiner.skip("credentials", "could not be told: the clock is off")
        else:
            examiner.add(Check(name="credentials", outcome="failed", found="not accepted", advice=str(error)))
    elif location.scheme == "s3":
        examiner.run("credentials", lambda: around.s3_credentials(plain))
    else:
        examiner.run("credentials", lambda: around.gcs_credentials(plain))
    if location.scheme == "s3":
        examiner.run("region", lambda: around.s3_region(plain), matters=False)


def _find_bucket(examiner: _Examiner, location: Location, error: Exception | None) -> None:
    if isinstance(error, BucketNotFoundError):
        examiner.add(Check(name="bucket", outcome="failed", found="does not exist", advice=str(error)))
        examiner.lost = "not asked: there is no such bucket"
    elif error is None:
        examiner.add(Check(name="bucket", outcome="passed", found=f"{location.authority} exists"))
    else:
        examiner.skip("bucket", examiner.lost or "could not be told")


def _list(examiner: _Examiner, error: Exception | None) -> None:
    def again() -> str:
        if error is not None:
            raise error
        return "allowed"

    examiner.run("list", again, advice="Without it no checkpoint is found, and none can be saved.")


def _first_answer(store: Store) -> StoreError | None:
    try:
        next(iter(store.list()), None)
    except StoreError as error:
        return error
    return None


def _read_something(store: Store) -> str | None:
    """Of what lies there, since nothing may be put."""
    found = next((info for info in store.list() if info.size_bytes), None)
    if found is None:
        return None
    store.read_into(found.key, 0, [memoryview(bytearray(1))])
    return f"{store.url(found.key)} can be read"


def _try_out(examiner: _Examiner, scratch: trials.Scratch, *, measure: bool) -> None:
    for name, trial in _TRIALS.items():
        matters = name not in _COMFORT
        if name != "put" and not examiner.lost and not examiner.has_passed("put"):
            examiner.skip(name, "not asked: nothing can be put", matters=matters)
        elif name in _NEED_GET and not examiner.lost and not examiner.has_passed("get"):
            examiner.skip(name, "not asked: nothing can be read", matters=matters)
        else:
            examiner.run(name, lambda trial=trial: trial(scratch), advice=_WRITING[name], matters=matters)  # type: ignore[misc]  # mypy cannot see the default
    if not measure:
        return
    for name, measured in (("latency", speed.latency), ("throughput", speed.throughput)):
        if not examiner.lost and not (examiner.has_passed("put") and examiner.has_passed("get")):
            examiner.skip(name, "not measured: it takes puts and gets", matters=False)
        else:
            examiner.run(name, lambda measured=measured: measured(scratch), matters=False)  # type: ignore[misc]  # as above


def _settings(examiner: _Examiner, location: Location, plain: Any) -> None:
    """What is set on the bucket, where that may be read."""
    if location.scheme == "s3":
        examiner.run("lifecycle", lambda: around.s3_lifecycle(plain), matters=False)
        examiner.run("versioning", lambda: around.s3_versioning(plain), matters=False)
    elif location.scheme == "gs":
        bucket = None if examiner.lost else around.gcs_bucket(plain)
        examiner.run("lifecycle", lambda: around.gcs_lifecycle(bucket) if bucket else None, matters=False)
        examiner.run("versioning", lambda: around.gcs_versioning(bucket) if bucket else None, matters=False)
    elif location.scheme == "file":
        examiner.run("free space", lambda: around.free_space(location.path))
