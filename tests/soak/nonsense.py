"""Jobs that save, load, restore, retain and collect garbage while one answer in twenty is nonsense.

Each client keeps its own record of what the library told it. A client never sees the store without the proxy; the
judgement at the end never sees the proxy.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.kit.options import make_options
from tests.kit.wire import LOSE_ANSWER, Action, CutSomewhere, Reply, Wire, WireRule
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.options import KIB, MIB
from cloudckpt.testing.servers import Server

_TEXT_BYTES = 128
_BIAS_BYTES = 1000
SMALL_BYTES = 192 * 1024
LARGE_BYTES = 5 * 1024 * 1024 + 64 * 1024
"""More than one part of a multipart upload."""


class MixedError(AssertionError):
    """A load returned a state that was never saved."""


def state_of(identity: str, *, weights_bytes: int) -> dict[str, torch.Tensor]:
    """The state that `identity` stands for."""
    text = identity.encode()
    assert len(text) <= _TEXT_BYTES, identity
    return {
        "identity": torch.frombuffer(bytearray(text.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8),
        "weights": _derived(identity, "weights", weights_bytes),
        "bias": _derived(identity, "bias", _BIAS_BYTES),
    }


def empty_state(*, weights_bytes: int) -> dict[str, torch.Tensor]:
    """Return what to load one into."""
    sizes = {"identity": _TEXT_BYTES, "weights": weights_bytes, "bias": _BIAS_BYTES}
    return {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}


def identity_of(state: dict[str, torch.Tensor]) -> str:
    """Which save it is. Raises `MixedError` unless every byte is that save's."""
    identity = state["identity"].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    expected = state_of(identity, weights_bytes=state["weights"].numel())
    wrong = [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])]
    if wrong:
        raise MixedError(f"what was loaded calls itself {identity!r}, but {', '.join(wrong)} is not of it")
    return identity


def _derived(identity: str, name: str, size_bytes: int) -> torch.Tensor:
    digest = hashlib.shake_128(f"{identity} {name}".encode()).digest(size_bytes)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


SHARE = 0.05
_HTML = (("Content-Type", "text/html"),)
_XML = (("Content-Type", "application/xml"),)
_OTHER_LISTING = (
    b'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>another</Name>'
    b"<Prefix></Prefix><KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)


def _error(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>nonsense</Message></Error>'.encode()


_NONSENSE: tuple[Action, ...] = (
    Reply(status=404, body=_error("NoSuchKey"), headers=_XML),
    Reply(status=404, body=b"<html>no such page</html>", headers=_HTML),
    Reply(status=404),
    Reply(status=416, body=_error("InvalidRange"), headers=_XML),
    Reply(status=204),
    Reply(status=200),
    Reply(status=200, body=b"<html>please sign in</html>", headers=_HTML),
    Reply(status=206, body=b"<html>please sign in</html>", headers=_HTML),
    Reply(status=200, body=b'{"status": "ok"}', headers=(("Content-Type", "application/json"),)),
    Reply(status=200, body=_OTHER_LISTING, headers=_XML),
    Reply(status=302, headers=(("Location", "/sign-in"),)),
    Reply(status=400, body=b"<html>bad request</html>", headers=_HTML),
    Reply(status=403, body=b"<html>blocked</html>", headers=_HTML),
    Reply(status=502, body=b"<html>bad gateway</html>", headers=_HTML),
    LOSE_ANSWER,
    CutSomewhere(),
)


def nonsense(seed: int) -> list[WireRule]:
    """Rules that together replace or break `SHARE` of all answers."""
    share = SHARE / len(_NONSENSE)
    return [
        WireRule(action=action, times=None, probability=share, seed=seed + number)
        for number, action in enumerate(_NONSENSE)
    ]


@dataclass(slots=True)
class Record:
    """Saves at one URI, as the library reported them: every identity tried, and the one reported as committed."""

    tried: list[str] = field(default_factory=list)
    committed: str | None = None


@dataclass(slots=True)
class Crowd:
    """Clients under one root, and what they were told."""

    root: str
    storage_options: Mapping[str, Any]
    stop_s: float
    seed: int
    saves: dict[str, Record] = field(default_factory=dict)
    """By URI, without what is overwritten on purpose."""
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    race: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.stop_s or bool(self.problems)

    def options(self) -> cloudckpt.Options:
        return make_options(
            storage_options=self.storage_options, connections=2, part_bytes=5 * MIB, tile_bytes=64 * KIB, timeout_s=60
        )

    def count(self, outcome: str) -> None:
        with self.lock:
            self.outcomes[outcome] += 1

    def count_reason(self, error: BaseException) -> None:
        cause = error
        for failure in getattr(error, "failures", {}).values():
            cause = failure[0]
        with self.lock:
            self.reasons[f"{type(cause).__name__}: {' '.join(str(cause).split())[-150:]}"] += 1

    def run(self) -> None:
        """Run all clients until the time is over. `problems` has what none of them may meet."""
        clients: dict[str, Callable[[Crowd, str, random.Random], None]] = {
            "trainer-sync": _train,
            "trainer-async": _train,
            "stepper": _save_and_load,
            "overwriter": _overwrite,
            "racer-1": _race,
            "racer-2": _race,
            "collector": _collect,
        }
        logging.getLogger("cloudckpt").setLevel(logging.ERROR)
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        threads = [
            threading.Thread(target=self._guard, args=(client, name), name=name, daemon=True)
            for name, client in clients.items()
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(self.stop_s - time.monotonic(), 0) + 300)
        self.ended.set()
        self.problems += [f"{thread.name} hangs" for thread in threads if thread.is_alive()]

    def _guard(self, client: Callable[[Crowd, str, random.Random], None], name: str) -> None:
        try:
            client(self, name, random.Random(f"{self.seed} {name}"))
        except BaseException:  # noqa: BLE001  # the judge reports whatever it is
            self.problems.append(f"{name}: {traceback.format_exc()}")

    @contextlib.contextmanager
    def allow_failure(self, what: str) -> Iterator[None]:
        """Allow a call to fail aloud, but not to claim absence or damage."""
        try:
            yield
            self.count(f"{what} ok")
        except (CheckpointException, cloudckpt.CloudckptError) as error:
            if isinstance(error, (cloudckpt.CheckpointNotFoundError, cloudckpt.CorruptCheckpointError)):
                self.problems.append(f"{what}: {type(error).__name__}: {error}")
            self.count(f"{what} failed")
            self.count_reason(error)

    def save(self, uri: str, identity: str, call: Callable[[dict[str, Any]], object]) -> bool:
        """Make one save and record its outcome. True where it was reported as committed."""
        record = self.saves.setdefault(uri, Record())
        record.tried.append(identity)
        try:
            call(state_of(identity, weights_bytes=SMALL_BYTES))
        except cloudckpt.CommitUnknownError:
            self.count("save unknown")
        except cloudckpt.CheckpointExistsError:
            self.count("save refused")
            if len(record.tried) == 1:
                self.problems.append(f"{uri}: the first save there was refused")
        except (CheckpointException, cloudckpt.CloudckptError):
            self.count("save failed")
        else:
            self.count("save ok")
            if record.committed is not None:
                self.problems.append(f"{uri} was committed twice without being asked to")
            record.committed = identity
            return True
        return False

    def check_loaded(self, uri: str, state: dict[str, Any]) -> None:
        """Note a problem unless `state` is the save that was reported at `uri`, or one whose end is unknown."""
        try:
            identity, record = identity_of(state), self.saves[uri]
        except MixedError as error:
            self.problems.append(f"{uri}: {error}")
            return
        if identity != record.committed and (record.committed is not None or identity not in record.tried):
            self.problems.append(f"{uri} holds {identity!r}, not {record}")


def _train(crowd: Crowd, name: str, dice: random.Random) -> None:
    """Live many lives of one job: restore, save some steps, end. Retention removes what is superseded."""
    root, last, life = f"{crowd.root}/{name}", -1, 0
    while not crowd.is_over:
        life += 1
        manager = cloudckpt.CheckpointManager(
            root, keep_last=3, keep_every=10, async_=name == "trainer-async", no_dist=True, options=crowd.options()
        )
        state = empty_state(weights_bytes=SMALL_BYTES)
        restored = None
        with crowd.allow_failure("restore"):
            restored = manager.restore(state)
            if restored is None and last >= 0:
                crowd.problems.append(f"{root}: a fresh start, though step {last} is committed")
        if restored is None and last >= 0:
            continue
        if restored is not None:
            if restored.step < last or restored.skipped:
                crowd.problems.append(f"{root}: restored {restored.step} after {last}, skipped {restored.skipped}")
            crowd.check_loaded(restored.uri, state)
            last = restored.step
        for _ in range(dice.randint(2, 6)):
            step = last + 1
            uri = manager.uri_of(step)
            if crowd.save(uri, f"{name} step {step} life {life} {dice.random()}", _waited(manager, step)):
                last = step
            elif crowd.is_over:
                break
            else:
                break  # as a job that crashes: what happened to the step is for the next life's restore to find out
        with crowd.allow_failure("close"), contextlib.suppress(TimeoutError):  # slow retention is no loss
            manager.close(120)


def _waited(manager: cloudckpt.CheckpointManager, step: int) -> Callable[[dict[str, Any]], object]:
    def call(state: dict[str, Any]) -> None:
        answer = manager.save(step, state)
        if isinstance(answer, cloudckpt.AsyncSave):
            answer.result(300)

    return call


def _saver(crowd: Crowd, uri: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: cloudckpt.save(state, uri, no_dist=True, options=crowd.options())


def _save_and_load(crowd: Crowd, name: str, dice: random.Random) -> None:
    """Save to fresh URIs; load, list, verify and look for the latest of what was saved."""
    root, committed, number = f"{crowd.root}/{name}", list[str](), 0
    while not crowd.is_over:
        uri, number = f"{root}/{number:05}", number + 1
        identity = f"{name} {number} {dice.random()}"
        if crowd.save(uri, identity, _saver(crowd, uri)):
            committed.append(uri)
        if not committed:
            continue
        one = dice.choice(committed)
        state = empty_state(weights_bytes=SMALL_BYTES)
        with crowd.allow_failure("load"):
            cloudckpt.load(state, one, no_dist=True, options=crowd.options())
            crowd.check_loaded(one, state)
        with crowd.allow_failure("list"):
            missing = set(committed) - {info.uri for info in cloudckpt.list_checkpoints(root, options=crowd.options())}
            if missing:
                crowd.problems.append(f"list_checkpoints({root}) lacks {sorted(missing)[:5]}")
        with crowd.allow_failure("latest"):
            newest = cloudckpt.latest(root, options=crowd.options())
            if newest is None or newest.uri < committed[-1]:
                crowd.problems.append(f"latest({root}) is {newest}, not {committed[-1]}")
        with crowd.allow_failure("load_latest"):
            state = empty_state(weights_bytes=SMALL_BYTES)
            report = cloudckpt.load_latest(state, root, no_dist=True, options=crowd.options())
            if report.skipped or report.uri < committed[-1]:
                crowd.problems.append(f"load_latest({root}): {report.uri}, skipped {report.skipped}")
        with crowd.allow_failure("verify"):
            cloudckpt.verify(dice.choice(committed), options=crowd.options())
        if number % 300 == 0:  # listings of a root grow with it
            root, committed = f"{crowd.root}/{name}-{number}", []


def _overwrite(crowd: Crowd, name: str, dice: random.Random) -> None:
    """Replace one checkpoint again and again, and load it after each time."""
    uri, tried, committed = f"{crowd.root}/{name}/one", list[str](), -1
    while not crowd.is_over:
        tried.append(f"{name} {len(tried)} {dice.random()}")
        try:
            state = state_of(tried[-1], weights_bytes=SMALL_BYTES)
            cloudckpt.save(state, uri, overwrite=True, no_dist=True, options=crowd.options())
            committed = len(tried) - 1
            crowd.count("overwrite ok")
        except (CheckpointException, cloudckpt.CloudckptError):
            crowd.count("overwrite failed")
        if committed < 0:
            continue
        state = empty_state(weights_bytes=SMALL_BYTES)
        with crowd.allow_failure("load overwritten"):
            cloudckpt.load(state, uri, no_dist=True, options=crowd.options())
            if identity_of(state) not in tried[committed:]:
                crowd.problems.append(f"{uri} holds {identity_of(state)!r}, older than {tried[committed]!r}")


def _race(crowd: Crowd, name: str, dice: random.Random) -> None:
    """Save to fresh URIs, each together with the other racer: at most one save may be reported as committed."""
    number = 0
    with contextlib.suppress(threading.BrokenBarrierError):
        while not crowd.is_over:
            crowd.race.wait(300)
            uri, number = f"{crowd.root}/racers/{number:05}", number + 1
            crowd.save(uri, f"{name} {number} {dice.random()}", _saver(crowd, uri))
    crowd.race.abort()


def _collect(crowd: Crowd, name: str, dice: random.Random) -> None:
    """Collect garbage of everybody, with an age that no running save reaches."""
    while not crowd.is_over:
        for root in ("trainer-sync", "trainer-async", "stepper", "overwriter", "racers"):
            with crowd.allow_failure("gc"):
                cloudckpt.gc(f"{crowd.root}/{root}", older_than=600, dry_run=False, quiet=True, options=crowd.options())
        crowd.ended.wait(min(5, max(crowd.stop_s - time.monotonic(), 0)))  # the pause of a cron job


def check_nonsense(server: Server, root: str, *, seconds: float, seed: int) -> None:
    """Run a crowd behind the proxy, then judge what is committed, without the proxy."""
    with Wire(server.endpoint_url, *nonsense(seed)) as wire:
        crowd = Crowd(
            root=root,
            storage_options={**server.storage_options, "endpoint_url": wire.url},
            stop_s=time.monotonic() + seconds,
            seed=seed,
        )
        crowd.run()
        acted = Counter(
            f"{action.status}" if isinstance(action := request.action, Reply) else type(action).__name__
            for request in wire.requests
            if request.action is not None
        )
        num_requests = len(wire.requests)
    print(f"seed {seed}, {seconds:.0f} s: {acted.total()} of {num_requests} answers were nonsense: {dict(acted)}")
    print(dict(sorted(crowd.outcomes.items())))
    print(
        "the most frequent failures:",
        *(f"{count} times: {reason}" for reason, count in crowd.reasons.most_common(8)),
        sep="\n",
    )
    assert not crowd.problems, "\n".join(crowd.problems[:20])
    options = cloudckpt.Options(storage_options=server.storage_options, connections=2)
    num_loaded = 0
    for name in sorted({uri.removeprefix(f"{root}/").partition("/")[0] for uri in crowd.saves}):
        found = {info.uri for info in cloudckpt.list_checkpoints(f"{root}/{name}", options=options)}
        here = {uri: record for uri, record in crowd.saves.items() if uri.startswith(f"{root}/{name}/")}
        committed = [uri for uri, record in here.items() if record.committed]
        if name.startswith("trainer"):  # what its retention keeps
            steps = sorted(committed, key=lambda uri: int(uri.rpartition("-")[2]))
            committed = [uri for uri in steps if uri in steps[-1:] or int(uri.rpartition("-")[2]) % 10 == 0]
        assert set(committed) <= found, f"lost: {sorted(set(committed) - found)}"
        for uri in sorted(found):
            state = empty_state(weights_bytes=SMALL_BYTES)
            cloudckpt.load(state, uri, no_dist=True, options=options)
            crowd.check_loaded(uri, state)
            num_loaded += 1
    assert not crowd.problems, "\n".join(crowd.problems[:20])
    print(f"{num_loaded} checkpoints that are committed were loaded, each as it was saved")
