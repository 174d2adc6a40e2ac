"""Measure how long the threads of a process hold Python's lock (the GIL), and what it costs to hand it over.

A second process reads the word that says whether the lock is held, a million times a second. It never takes the lock,
so that no wake-up of a thread counts as held. For Linux, and a CPython that has the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cores import Cores, kept_off_the_loops_core, pin, threads_of_children

# CPython's `struct _gil_runtime_state`: the interval in microseconds, the last holder, and these.
_LOCKED_OFFSET, _SWITCHES_OFFSET = 16, 24
_RUNTIME_BYTES = 1 << 20
_NUM_READ_AT_ONCE = 1024
"""Linux takes no more places in a call."""
_PR_SET_PTRACER = 0x59616D61


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The lock in some time."""

    seconds: float
    """In which a thread held it."""
    num_hand_overs: int
    """The number of times that another thread than before took the lock, as the lock itself counts."""


def held_during(work: Callable[[], object]) -> Held:
    """Run `work` in this thread, and look at the lock of this process meanwhile.

    Raises:
        RuntimeError: This Python has no such lock, or the system lets no process look into another one.

    """
    lock = _find_lock()
    command = [sys.executable, "-m", "benchmarks.lock", str(os.getpid()), str(lock + _LOCKED_OFFSET)]
    switches = ctypes.c_ulong.from_address(lock + _SWITCHES_OFFSET)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdin is not None  # noqa: S101  # they are pipes
        assert sampler.stdout is not None  # noqa: S101
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, sampler.pid, 0, 0, 0)  # or it may not, as a child
        sampler.stdin.write("go\n")
        sampler.stdin.flush()
        if sampler.stdout.readline() != "ready\n":
            raise RuntimeError("another process may not read this one's memory: see ptrace(2)")
        with _undisturbed(sampler.pid):
            before, begun_s = switches.value, time.perf_counter()
            work()
            wall_s, num_hand_overs = time.perf_counter() - begun_s, switches.value - before
        sampler.stdin.close()
        share = float(sampler.stdout.read())
    return Held(seconds=share * wall_s, num_hand_overs=num_hand_overs)


def contended_take_s(num_takes: int = 100_000) -> float:
    """Seconds that a take of the lock costs more beside a second thread that wants it half of the time."""
    block = bytes(2048)  # the least that is hashed without the lock, in a microsecond

    def take() -> None:
        for _ in range(num_takes):
            hashlib.sha256(block)
            for _ in range(60):
                pass

    took_s = []
    for num_threads in (1, 2):
        threads = [threading.Thread(target=take) for _ in range(num_threads)]
        begun_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s.append((time.perf_counter() - begun_s) / num_takes / num_threads)
    return took_s[1] - took_s[0] / 2


@contextlib.contextmanager
def _undisturbed(sampler: int) -> Iterator[None]:
    """Keep this thread, those that it starts and the servers on cores without the sampler; real-time where allowed.

    Otherwise a thread that holds the lock may have to wait for its core, or for a server that the sampler interrupts.
    """
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    servers = [thread for thread in threads_of_children() if thread != sampler]
    all_cores, others = os.sched_getaffinity(0), Cores().others
    with kept_off_the_loops_core():
        for thread in servers if others else ():
            pin(thread, others)
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        try:
            yield
        finally:
            os.sched_setscheduler(0, policy, parameter)
            for thread in servers:
                pin(thread, all_cores)


def _find_lock() -> int:
    """Return the lock's address: it is in CPython's state, where the interval between its switches is."""
    begin = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    before, found = sys.getswitchinterval(), []
    try:
        for interval_us in (7919, 6007):
            sys.setswitchinterval(interval_us / 1e6)
            with Path("/proc/self/mem").open("rb", buffering=0) as memory:
                memory.seek(begin)
                state = memory.read(_RUNTIME_BYTES)
            wanted = round(sys.getswitchinterval() * 1e6)
            words = memoryview(state)[: len(state) // 8 * 8].cast("L")
            found.append({8 * number for number, word in enumerate(words) if word == wanted})
    finally:
        sys.setswitchinterval(before)
    offsets = found[0] & found[1]
    if len(offsets) != 1:
        raise RuntimeError(f"the GIL of Python {sys.version.split()[0]} is not where it is looked for")
    return begin + offsets.pop()


class _Place(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def _sample(pid: int, address: int) -> None:
    """Read the word until standard input ends, and print what was seen."""
    cores = Cores()
    if cores.loop is not None:
        os.sched_setaffinity(0, {cores.loop})
    read = ctypes.CDLL(None).process_vm_readv
    seen = (ctypes.c_ubyte * (4 * _NUM_READ_AT_ONCE))()
    into = ctypes.byref(_Place(ctypes.addressof(seen), len(seen)))
    places = (_Place * _NUM_READ_AT_ONCE)(*[_Place(address, 4) for _ in range(_NUM_READ_AT_ONCE)])
    sys.stdin.readline()
    if read(pid, into, 1, places, _NUM_READ_AT_ONCE, 0) != len(seen):
        return
    print("ready", flush=True)
    num_reads = num_held = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        read(pid, into, 1, places, _NUM_READ_AT_ONCE, 0)
        num_reads += _NUM_READ_AT_ONCE
        num_held += bytes(seen)[::4].count(1)
    print(num_held / max(1, num_reads))


if __name__ == "__main__":
    _sample(int(sys.argv[1]), int(sys.argv[2]))
