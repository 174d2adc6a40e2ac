"""Many writers and readers at once against one server, and the judgement of what they did."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import boto3
from tests.e2e.harness import run_ranks
from tests.resources import MIB
from tests.soak.clients import CALL_BOUND_S, OVERWRITTEN, PHASES, Done, Job, Shape, run_clients
from tests.soak.faults import wire_faults
from tests.soak.records import ONCE_SAVED, History, Record, now_s, records_of
from tests.soak.values import LARGE_BYTES, SMALL_BYTES, empty_state, identity_of

import cloudckpt
from cloudckpt.testing.servers import Server
from cloudckpt.testing.wire import Seen, Wire

_NUM_JUDGES = 4
_EARLIER = re.compile(r"an earlier background save to (\S+), whose handle nobody had asked,")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it."""

    shape: Shape
    seed: int
    seconds: float
    history: History
    done: Sequence[Done]
    wire_requests: Sequence[Seen]

    @property
    def acted(self) -> list[Seen]:
        return [request for request in self.wire_requests if request.action is not None]

    def summary(self) -> str:
        saves, loads = self.history.outcomes("save"), self.history.outcomes("load")
        kinds = Counter(type(request.action).__name__ for request in self.acted)
        shape = self.shape
        num_calls = sum(done.num_calls for done in self.done)
        num_in_clients = sum(done.num_faults for done in self.done)
        retries = sum(record.num_retries for record in self.history.records)
        warned = sum(done.num_warnings for done in self.done)
        longest_s = max(done.longest_call_s for done in self.done)
        lines = [
            f"seed {self.seed}, {shape.num_writers} writers and {shape.num_readers} readers, {self.seconds:.0f} s",
            f"saves: {_counts(saves)}",
            f"loads: {_counts(loads)}; lists: {sum(done.num_lists for done in self.done)}",
            f"retries: {retries}; warnings logged: {warned}; longest call: {longest_s:.1f} s",
            f"faults in the clients: {num_in_clients} in {num_calls} calls",
            f"faults on the wire: {len(self.acted)} in {len(self.wire_requests)} requests ({_counts(kinds)})",
        ]
        for number, done in enumerate(self.done):
            lines += [f"process {number} after {phase}: {done.held[phase]}" for phase in PHASES]
        return "\n".join(lines)


def run_load(server: Server, root: str, folder: Path, *, shape: Shape, seconds: float, seed: int) -> Outcome:
    """All of them, for so long. Every wait has a bound; who hangs fails it with all stacks."""
    context = multiprocessing.get_context("forkserver")
    starts = {
        (phase, number): context.Barrier(shape.num_processes) for phase in PHASES for number in range(shape.racing)
    }
    begun_s = now_s()
    with Wire(server.endpoint_url, *wire_faults(seed)) as wire:
        job = Job(
            root=root,
            storage_options={**server.storage_options, "endpoint_url": wire.url},
            shape=shape,
            phase_s=seconds / len(PHASES),
            seed=seed,
            folder=folder,
            starts=starts,
        )
        done = run_ranks(
            run_clients,
            job,
            world_size=shape.num_processes,
            timeout_s=seconds + (len(PHASES) + 1) * CALL_BOUND_S,
            process_group=False,
        )
        requests = wire.requests
    records = [record for path in sorted(folder.glob("records-*")) for record in records_of(path)]
    return Outcome(
        shape=shape,
        seed=seed,
        seconds=now_s() - begun_s,
        history=History(records),
        done=done,
        wire_requests=requests,
    )


def check_history(outcome: Outcome, root: str) -> None:
    """No load that found what it cannot have found; no second winner; no failure that no fault explains."""
    history = outcome.history
    overwritten = [f"{root}/{name}" for name in OVERWRITTEN]
    problems = history.problems(may_be_overwritten=overwritten)
    on_the_wire = [unquote(request.target) for request in outcome.acted]
    problems += [
        f"{record.what} of {record.uri} failed, and no fault was injected there: {record.text}"
        for record in history.records
        if record.outcome in ("failed", "unknown") and not _is_explained(record, on_the_wire)
    ]
    problems += [
        f"load of {record.uri} found it changed, and nobody overwrites it"
        for record in history.records
        if record.outcome == "changed" and not record.uri.startswith(tuple(overwritten))
    ]
    assert not problems, _shown(problems)


def check_store(outcome: Outcome, server: Server, root: str) -> str:
    """Every confirmed checkpoint is there, whole, and the one it has to be; nothing else is to be seen; and what gc
    leaves are these, object by object. Returns what gc says.
    """
    history = outcome.history
    options = cloudckpt.Options(storage_options=server.storage_options, connections=4)
    roots = sorted({uri.rpartition("/")[0] for uri in history.saves})
    confirmed, perhaps = history.uris("confirmed"), history.uris(*ONCE_SAVED)

    def listed(one: str) -> list[str]:
        return [info.uri for info in cloudckpt.list_checkpoints(one, options=options)]

    def looked_at(uri: str) -> str | None:
        state = empty_state(weights_bytes=LARGE_BYTES if "/own-large/" in uri else SMALL_BYTES)
        try:
            cloudckpt.load(state, uri, no_dist=True, options=options)
            return history.wrong_at_the_end(uri, identity_of(state))
        except (cloudckpt.CloudckptError, AssertionError) as error:
            return f"{uri}: {error}"

    with ThreadPoolExecutor(_NUM_JUDGES) as pool:
        visible = {uri for uris in pool.map(listed, roots) for uri in uris}
        problems = [f"{uri} was confirmed and is lost" for uri in sorted(confirmed - visible)]
        problems += [f"{uri} is visible, and its save failed" for uri in sorted(visible - perhaps)]
        garbage = cloudckpt.gc(root, older_than=0.0, dry_run=False, options=options)
        kept = {uri for uris in pool.map(listed, roots) for uri in uris}
        problems += [f"{uri} is gone after gc, or only then there" for uri in sorted(visible ^ kept)]
        problems += [problem for problem in pool.map(looked_at, sorted(visible)) if problem is not None]
    problems += _left_over(server, root, visible)
    assert not problems, _shown(problems)
    return f"{len(visible)} checkpoints, each whole; {str(garbage).splitlines()[-1]}"


def _left_over(server: Server, root: str, visible: set[str]) -> list[str]:
    """What lies there beside one manifest for each checkpoint, its objects, and fences: seen without cloudckpt."""
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    with closing(boto3.client("s3", endpoint_url=server.endpoint_url)) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        keys = {entry["Key"] for page in pages for entry in page.get("Contents", [])}
        uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        entries = {
            key: json.loads(client.get_object(Bucket=bucket, Key=key)["Body"].read())
            for key in keys
            if key.rpartition("/")[2].startswith("manifest")
        }
    # gc itself lays fences, which stay until they are old.
    manifests = {key: document for key, document in entries.items() if document["format"] == "cloudckpt"}
    expected = set(entries)
    for key, document in manifests.items():
        expected |= {f"{key.rpartition('/')[0]}/{stored['key']}" for stored in document["objects"]}
    problems = [f"{key} is left over" for key in sorted(keys - expected)]
    problems += [f"{key} is missing" for key in sorted(expected - keys)]
    problems += [f"an upload of {upload['Key']} is left over" for upload in uploads]
    folders = sorted(f"s3://{bucket}/{key.rpartition('/')[0]}" for key in manifests)
    if folders != sorted(visible):
        problems.append(f"{len(folders)} manifests for {len(visible)} checkpoints")
    return problems


def check_resources(outcome: Outcome, *, most_growth_bytes: int, most_sockets: int) -> None:
    """After the warm-up no process needs more than then: no thread, no descriptor, and memory to within a bound.

    Sockets are those that the clients' pools keep for the next call, of which there are never more than the pools take.
    """
    problems = []
    first, last = PHASES[0], PHASES[-1]
    for number, done in enumerate(outcome.done):
        before, after = done.held[first], done.held[last]
        growth_bytes = after.rss_bytes - before.rss_bytes
        if growth_bytes > most_growth_bytes:
            problems.append(f"process {number} grew by {growth_bytes / MIB:.1f} MiB")
        if after.num_other_files != before.num_other_files or after.num_sockets > most_sockets:
            problems.append(f"process {number} left descriptors open: {before}; then {after}")
        if done.thread_names[first] != done.thread_names[last] or after.num_threads > before.num_threads:
            problems.append(f"process {number} left threads: {done.thread_names[first]}; {done.thread_names[last]}")
    assert not problems, _shown(problems)


def _is_explained(record: Record, on_the_wire: Sequence[str]) -> bool:
    # Another thread's background save may have failed before that thread came to ask the handle.
    uri = earlier[1] if (earlier := _EARLIER.search(record.text)) else record.uri
    path = uri.partition("://")[2].partition("/")[2]  # without the bucket, for listings name the prefix alone
    return record.num_faults > 0 or any(path in target for target in on_the_wire)


def _counts(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _shown(problems: Sequence[str]) -> str:
    return "\n".join([f"{len(problems)} problems", *problems[:20]])
