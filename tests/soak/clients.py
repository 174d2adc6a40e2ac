"""One process of the load: many threads that save and many that load, over a store that fails now and then."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

from tests.resources import Held, held, python_threads
from tests.soak.faults import client_faults
from tests.soak.records import Log, Record, now_s
from tests.soak.values import LARGE_BYTES, SMALL_BYTES, MixedError, empty_state, identity_of, state_of

import cloudckpt
from cloudckpt.options import KIB, MIB
from cloudckpt.testing.faults import Faults

CALL_BOUND_S = 120.0
"""Far more than any call may take: a store that fails now and then, on a machine that may be busy."""
NUM_IN_ROOT = 16
OVERWRITTEN = ("own", "contested")
PHASES = ("warm-up", "first half", "second half")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many clients of each kind a process has."""

    num_processes: int
    stepping: int
    """Save to a fresh URI each time."""
    overwriting: int
    """Save over and over to one URI of their own; every other one needs several parts."""
    racing: int
    """Save to one fresh URI, each with one rival in every other process, all at once: one may win."""
    contesting: int
    """Overwrite one URI, each with one rival in every other process."""
    loading: int

    @property
    def num_writers(self) -> int:
        return self.num_processes * (self.stepping + self.overwriting + self.racing + self.contesting)

    @property
    def num_readers(self) -> int:
        return self.num_processes * self.loading


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all processes are told."""

    root: str
    storage_options: Mapping[str, Any]
    shape: Shape
    phase_s: float
    seed: int
    folder: Path
    starts: Mapping[tuple[str, int], Barrier]
    """Of each phase and group of racers: where they wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a process reports."""

    held: Mapping[str, Held]
    """After each phase, when all its clients had ended."""
    thread_names: Mapping[str, Sequence[str]]
    num_calls: int
    num_faults: int
    num_warnings: int
    num_lists: int
    longest_call_s: float


class HangError(AssertionError):
    """A client did not come to an end."""


class _Counter(logging.Handler):
    """What cloudckpt warns of, counted and not shown."""

    num_warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_warnings += 1


@dataclass(slots=True, kw_only=True)
class _Clients:
    """What the clients of this process share."""

    job: Job
    process: int
    log: Log
    stop_s: float = 0.0
    phase: str = ""
    roots: dict[str, dict[str, float]] = field(default_factory=dict)
    """By root: the names of the checkpoints that this process knows to be there, and since when."""
    has_roots: threading.Event = field(default_factory=threading.Event)
    errors: list[str] = field(default_factory=list)
    num_lists: int = 0
    num_calls: int = 0
    num_faults: int = 0
    longest_call_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_over(self) -> bool:
        return now_s() >= self.stop_s or bool(self.errors)

    def options(self, faults: Faults, *, retries: int) -> cloudckpt.Options:
        return cloudckpt.Options(
            storage_options=self.job.storage_options,
            retries=retries,
            connections=2,
            part_bytes=5 * MIB,
            tile_bytes=64 * KIB,
            request_bytes=128 * KIB,
            wrap_store=faults,
        )

    def know(self, root: str, name: str | None, since_s: float) -> None:
        with self.lock:
            known = self.roots.setdefault(root, {})
            if name is not None:
                known.setdefault(name, since_s)
        self.has_roots.set()

    def count(self, faults: Faults, seconds: float) -> int:
        """One call that has ended, however; how many faults it met."""
        num_faults = sum(faults.num_injected.values())
        with self.lock:
            self.num_calls += sum(faults.num_calls.values())
            self.num_faults += num_faults
            self.longest_call_s = max(self.longest_call_s, seconds)
        return num_faults


def run_clients(job: Job) -> Done:
    """All clients of this process, phase after phase."""
    process = int(os.environ["RANK"])
    faulthandler.enable()
    counter = _Counter(level=logging.WARNING)
    logging.getLogger("cloudckpt").addHandler(counter)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # that its pool is full is no news with so many threads
    with warnings.catch_warnings(), Log(job.folder / f"records-{process}") as log:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        clients = _Clients(job=job, process=process, log=log)
        states, names = {}, {}
        for phase in PHASES:
            _run_phase(clients, phase)
            states[phase], names[phase] = held(), python_threads()
        return Done(
            held=states,
            thread_names=names,
            num_calls=clients.num_calls,
            num_faults=clients.num_faults,
            num_warnings=counter.num_warnings,
            num_lists=clients.num_lists,
            longest_call_s=clients.longest_call_s,
        )


def _run_phase(clients: _Clients, phase: str) -> None:
    shape = clients.job.shape
    clients.phase, clients.stop_s = phase, now_s() + clients.job.phase_s
    kinds: dict[str, tuple[int, Callable[[_Clients, int, random.Random], None]]] = {
        "step": (shape.stepping, _step),
        "own": (shape.overwriting, _overwrite),
        "race": (shape.racing, _race),
        "contested": (shape.contesting, _contest),
        "load": (shape.loading, _load),
    }
    threads = []
    for kind, (count, function) in kinds.items():
        for number in range(count):
            dice = random.Random(f"{clients.job.seed} {phase} {clients.process} {kind} {number}")
            name = f"{kind}-{number}"
            thread = threading.Thread(target=_guarded, args=(clients, function, number, dice), name=name, daemon=True)
            thread.start()
            threads.append(thread)
    deadline_s = clients.stop_s + CALL_BOUND_S
    for thread in threads:
        thread.join(max(deadline_s - now_s(), 0.0))
    hanging = [thread.name for thread in threads if thread.is_alive()]
    if hanging:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        raise HangError(f"{phase}: {', '.join(hanging)} did not end within {CALL_BOUND_S} s\n{_stacks(hanging)}")
    if clients.errors:
        raise AssertionError("\n".join(clients.errors))


def _stacks(names: Sequence[str]) -> str:
    frames = sys._current_frames()
    return "\n".join(
        f"--- {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.name in names and thread.ident in frames
    )


def _guarded(
    clients: _Clients, function: Callable[[_Clients, int, random.Random], None], number: int, dice: random.Random
) -> None:
    try:
        function(clients, number, dice)
    except BaseException:  # noqa: BLE001  # whatever it is, the process reports it
        clients.errors.append(traceback.format_exc())


def _step(clients: _Clients, number: int, dice: random.Random) -> None:
    """Fresh URIs. Every fifth save goes on in the background; every fourth client gives up at once."""
    retries = 0 if number % 4 == 3 else 4
    step = 0
    while not clients.is_over:
        root = f"{clients.job.root}/steps-{clients.phase[:1]}-{clients.process}-{number}-{step // NUM_IN_ROOT}"
        _save(clients, root, f"step-{step}", dice, retries=retries, in_background=step % 5 == 4)
        step += 1


def _overwrite(clients: _Clients, number: int, dice: random.Random) -> None:
    is_large = number % 2 == 1
    root = f"{clients.job.root}/{'own-large' if is_large else 'own'}"
    size_bytes = LARGE_BYTES if is_large else SMALL_BYTES
    while not clients.is_over:
        _save(clients, root, f"{clients.process}-{number}", dice, retries=4, overwrite=True, weights_bytes=size_bytes)


def _race(clients: _Clients, number: int, dice: random.Random) -> None:
    """With one rival of each other process, until one of them finds that the time is over."""
    start = clients.job.starts[clients.phase, number]
    rounds = 0
    try:
        while not clients.is_over:
            start.wait(CALL_BOUND_S)
            root = f"{clients.job.root}/race-{clients.phase[:1]}-{number}-{rounds // NUM_IN_ROOT}"
            _save(clients, root, f"round-{rounds}", dice, retries=4)
            rounds += 1
    except BrokenBarrierError:
        # A rival has ended, as it may a moment before the time is over here; or it has not come for too long.
        if clients.stop_s - now_s() > CALL_BOUND_S:
            raise
    finally:
        start.abort()


def _contest(clients: _Clients, number: int, dice: random.Random) -> None:
    while not clients.is_over:
        _save(clients, f"{clients.job.root}/contested", str(number), dice, retries=4, overwrite=True)


def _save(
    clients: _Clients,
    root: str,
    name: str,
    dice: random.Random,
    *,
    retries: int,
    overwrite: bool = False,
    in_background: bool = False,
    weights_bytes: int = SMALL_BYTES,
) -> None:
    uri = f"{root}/{name}"
    identity = f"{uri.removeprefix(clients.job.root)} by {clients.process}-{threading.current_thread().name} "
    identity += f"at {now_s():.6f}"
    state: dict[str, Any] = state_of(identity, weights_bytes=weights_bytes)
    faults = client_faults(dice.getrandbits(32))
    options = clients.options(faults, retries=retries)
    begun_s = now_s()
    text, num_retries = "", 0
    try:
        if in_background:
            handle = cloudckpt.async_save(state, uri, no_dist=True, overwrite=overwrite, options=options)
            saved = handle.result(CALL_BOUND_S)
        else:
            saved = cloudckpt.save(state, uri, no_dist=True, overwrite=overwrite, options=options)
    except cloudckpt.CommitUnknownError as error:
        outcome, text = "overtaken" if isinstance(error, cloudckpt.CheckpointExistsError) else "unknown", str(error)
    except cloudckpt.CheckpointExistsError as error:
        outcome, text = "refused", str(error)
    except cloudckpt.errors.StoreError as error:
        outcome, text = "failed", str(error)
    else:
        outcome = "confirmed"
        assert saved.report is not None
        num_retries = saved.report.num_retries
    ended_s = now_s()
    num_faults = clients.count(faults, ended_s - begun_s)
    clients.log.write(
        Record(
            what="save",
            uri=uri,
            begun_s=begun_s,
            ended_s=ended_s,
            identity=identity,
            outcome=outcome,
            text=text,
            num_retries=num_retries,
            num_faults=num_faults,
        )
    )
    clients.know(root, name if outcome == "confirmed" else None, ended_s)


def _load(clients: _Clients, number: int, dice: random.Random) -> None:
    """List a root, see that nothing is missing there, and load one of what there is, or the latest."""
    while not clients.is_over:
        with clients.lock:
            roots = list(clients.roots)
        if not roots:
            clients.has_roots.wait(max(clients.stop_s - now_s(), 0.0))
            continue
        uri = _listed(clients, dice.choice(roots), dice)
        if uri is not None:
            _load_one(clients, uri, dice)


def _listed(clients: _Clients, root: str, dice: random.Random) -> str | None:
    """One of what is listed, if anything is."""
    faults = client_faults(dice.getrandbits(32))
    options = clients.options(faults, retries=4)
    begun_s = now_s()
    with clients.lock:
        known = {name for name, since_s in clients.roots[root].items() if since_s < begun_s}
        clients.num_lists += 1
    outcome, text = "", ""
    listed: list[cloudckpt.types.CheckpointInfo] = []
    try:
        if dice.random() < 0.2:
            newest = cloudckpt.latest(root, options=options)
            listed = [newest] if newest is not None else []
            assert listed or not known, f"{root}: latest() finds nothing, and {sorted(known)} are there"
        else:
            listed = cloudckpt.list_checkpoints(root, options=options)
            missing = known - {info.name for info in listed}
            assert not missing, f"{root}: list_checkpoints() lacks {sorted(missing)}"
    except cloudckpt.errors.StoreError as error:
        outcome, text = "failed", str(error)
    num_faults = clients.count(faults, now_s() - begun_s)
    if outcome:
        clients.log.write(_record("list", root, begun_s, outcome=outcome, text=text, num_faults=num_faults))
    return dice.choice(listed).uri if listed else None


def _load_one(clients: _Clients, uri: str, dice: random.Random) -> None:
    faults = client_faults(dice.getrandbits(32))
    state = empty_state(weights_bytes=LARGE_BYTES if "/own-large/" in uri else SMALL_BYTES)
    begun_s = now_s()
    identity, text, num_retries = "", "", 0
    try:
        report = cloudckpt.load(state, uri, no_dist=True, options=clients.options(faults, retries=4))
    except cloudckpt.errors.CheckpointChangedError as error:
        outcome, text = "changed", str(error)
    except cloudckpt.errors.StoreError as error:
        outcome, text = "failed", str(error)
    else:
        outcome = "whole"
        num_retries = report.num_retries if report is not None else 0
    num_faults = clients.count(faults, now_s() - begun_s)
    record = _record("load", uri, begun_s, outcome=outcome, text=text, num_faults=num_faults)
    if outcome == "whole":
        try:
            identity = identity_of(state)
        except MixedError as error:
            raise AssertionError(f"{uri}: {error}") from error
    clients.log.write(dataclasses.replace(record, identity=identity, num_retries=num_retries))


def _record(what: str, uri: str, begun_s: float, *, outcome: str, text: str, num_faults: int) -> Record:
    return Record(
        what=what, uri=uri, begun_s=begun_s, ended_s=now_s(), outcome=outcome, text=text, num_faults=num_faults
    )
