"""``cloudckpt rm``, ``gc``, ``drain``, ``verify``, ``doctor`` and ``dev-server``."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import shlex
import time
from collections.abc import Iterable
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloudckpt._display import count, rate, size
from cloudckpt.cli._console import NO, WRONG_USAGE, Console, advising_all, age, describe_report
from cloudckpt.cli._options import CommonOptions, parse_duration, parse_size
from cloudckpt.cli.ls import document_of

if TYPE_CHECKING:
    from cloudckpt.events import Event
    from cloudckpt.inspect.catalog import CheckpointInfo
    from cloudckpt.manager.steps import StepInfo
    from cloudckpt.options import Options
    from cloudckpt.removal import GarbageReport

_DAY: Any = "24h"  # Typer parses it
_POLL_S = 0.2
_MEMBERS = ("root", "dry_run", "num_objects", "num_uploads", "num_bytes", "locations", "skipped", "failed")
_CHECKPOINTS = ("committed", "damaged", "newer")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Remove without a question.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be removed.")]


def rm(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="The checkpoints; with --keep-last, the run.")],
    *,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Delete all steps of the run at URI but the N that were committed last."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also delete a step of a fast place whose root lacks the copy it is owed.")
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    common: CommonOptions,
) -> None:
    """Delete checkpoints, and the remains of saves beside them. Asks first; without a terminal, --yes is needed.

    Example: cloudckpt rm s3://bucket/run/step-100
    """
    console = common.console
    if not (yes or dry_run or console.is_interactive):
        console.warn(
            "Error: there is no terminal to ask on: pass --yes to delete, or --dry-run to see what would be deleted."
        )
        raise typer.Exit(WRONG_USAGE)
    options = common.options()
    roots = uris
    if keep_last is not None:
        uris = _find_all_superseded(roots, keep_last, common)
        if not uris:
            console.say("There is nothing to delete.")
    to_delete = {uri: _find_checkpoint(uri, options) for uri in dict.fromkeys(uris)}
    if not common.as_json:
        intent = "would be deleted" if dry_run else "is to be deleted"
        _announce(itertools.chain.from_iterable(to_delete.values()), intent, common)
    # Those that --keep-last finds are not owed.
    is_owed = keep_last is None and _warn_of_owed(itertools.chain.from_iterable(to_delete.values()), common)
    if is_owed and not (force or dry_run):
        console.warn("Nothing was deleted: pass --force to delete what is owed, too.")
        raise typer.Exit(NO)
    if to_delete and not (yes or dry_run or console.confirm(f"Delete {count(len(to_delete), 'checkpoint')} for good?")):
        console.say("Nothing was deleted.")
        raise typer.Exit(NO)
    documents: list[dict[str, Any]] = [
        {"uri": uri, "deleted": False, "found": [document_of(info) for info in infos]}
        for uri, infos in to_delete.items()
    ]
    try:
        if not dry_run:
            _delete_all(documents, roots, keep_last, common)
    finally:
        if common.as_json:  # a script learns what is gone, whatever ends this
            console.document(documents)
    if not (dry_run or all(document["deleted"] for document in documents)):
        raise typer.Exit(NO)


def _announce(to_delete: Iterable[CheckpointInfo], intent: str, common: CommonOptions) -> None:
    for info in to_delete:
        objects = f"{size(info.num_bytes or 0)} in {count(info.num_objects or 0, 'object')}"
        common.console.line(f"{info.uri}: {info.state}, {age(info.committed_at)} old, {objects}: {intent}")


def _warn_of_owed(to_delete: Iterable[CheckpointInfo], common: CommonOptions) -> bool:
    """Warn of the steps of a fast place whose root lacks the copy that it is owed. Returns True if there are some."""
    from cloudckpt.manager.drain import explain_owed

    is_owed = False
    for info in to_delete:
        if reason := explain_owed(info.uri, info.metadata, info.committed_at, common.options()):
            common.console.warn(f"{info.uri}: {reason}")
            is_owed = True
    return is_owed


def _delete_all(
    documents: list[dict[str, Any]], roots: list[str], keep_last: int | None, common: CommonOptions
) -> None:
    """Delete checkpoints. A job may have saved since the question was asked, even to a superseded step."""
    still = None if keep_last is None else _find_all_superseded(roots, keep_last, common, quiet=True)
    for document in documents:
        has_changed = still is not None and document["uri"] not in still
        _delete(document, common, is_superseded=still is not None, has_changed=has_changed)


def _delete(document: dict[str, Any], common: CommonOptions, *, is_superseded: bool, has_changed: bool) -> None:
    """Delete one checkpoint, and note it in its document. A superseded step stays if another save writes there."""
    from cloudckpt.manager.retention import remove_step
    from cloudckpt.removal import delete

    uri, left = document["uri"], None
    if has_changed:
        left = "the run has changed meanwhile"
    elif is_superseded:
        left = remove_step(uri, common.options())
    else:
        delete(uri, options=common.options())
    document["deleted"] = left is None
    if left is not None:
        common.console.warn(f"{uri}: left alone: {left}")
    elif not common.as_json:
        common.console.line(f"Deleted {uri}.")


def _find_all_superseded(roots: list[str], keep_last: int, common: CommonOptions, *, quiet: bool = False) -> list[str]:
    return [step for root in roots for step in _find_superseded(root, keep_last, common, quiet=quiet)]


def _find_superseded(root: str, keep_last: int, common: CommonOptions, *, quiet: bool) -> list[str]:
    """Return the steps that a manager with this ``keep_last`` would remove, oldest first. Warn of those that stay.

    A step whose data objects are not listed stays, and does not count as one of the last: it cannot be loaded.
    """
    from cloudckpt.errors import CheckpointNotFoundError
    from cloudckpt.inspect.verification import find_unlisted
    from cloudckpt.manager.drain import explain_owed, root_of
    from cloudckpt.manager.policies import RetentionPolicy, find_superseded
    from cloudckpt.manager.steps import Steps, raise_if_denied
    from cloudckpt.uri import parse_location

    location = parse_location(root)
    options = common.options()
    folders = Steps(location, options).list_folders(with_metadata=True)
    raise_if_denied(folders)  # it may be one of the last
    by_run: dict[str, list[StepInfo]] = {}  # a fast place may hold the steps of several
    for folder in folders:
        if folder.info is not None:
            by_run.setdefault(root_of(folder.metadata), []).append(folder.info)
    if not by_run:
        raise CheckpointNotFoundError(
            f"no step of a run is committed directly under {location.uri}: name the folder of step-0, step-1, …",
            uri=location.uri,
        )
    left = {folder.uri: folder.problem for folder in folders if folder.problem}
    policy = RetentionPolicy(keep_last=keep_last, keep_every=None, keep_best=None)
    superseded: list[str] = []
    for infos in by_run.values():
        to_delete, looked = find_superseded(infos, policy, damaged=left), set[str]()
        while kept := {info.uri for info in infos} - {info.uri for info in to_delete} - left.keys() - looked:
            left |= {uri: problem for uri in sorted(kept) if (problem := find_unlisted(uri, options=options))}
            to_delete, looked = find_superseded(infos, policy, damaged=left), looked | kept
        superseded += [info.uri for info in to_delete]
    infos_of = {
        folder.uri: (folder.metadata, folder.info.committed_at) for folder in folders if folder.info is not None
    }
    owed = {uri: reason for uri in superseded if (reason := explain_owed(uri, *infos_of[uri], options))}
    for uri, reason in ({} if quiet else left | owed).items():
        common.console.warn(f"{uri}: left alone: {reason}")
    return [uri for uri in superseded if uri not in owed]


def _find_checkpoint(uri: str, options: Options) -> list[CheckpointInfo]:
    """Return everything that a deletion of `uri` removes. Raises `CheckpointNotFoundError`."""
    from cloudckpt._messages import gc_advice, join_first
    from cloudckpt.errors import AccessDeniedError, CheckpointNotFoundError
    from cloudckpt.inspect.catalog import list_checkpoints
    from cloudckpt.uri import parse_location

    location = parse_location(uri)
    everything = list_checkpoints(uri, all=True, options=options)
    infos = [info for info in everything if info.uri == location.uri]
    for info in infos:
        if info.state == "denied":
            raise AccessDeniedError(info.problem, key=info.uri, operation="list")
    if any(info.state in _CHECKPOINTS for info in infos):
        return infos
    names = [info.name for info in everything if info.state in _CHECKPOINTS]
    if names:
        shown = join_first(names, 5, separator=", ")
        advice = f"It is a folder of {shown}: name each checkpoint by its URI"
    elif any(info.state == "torch" for info in everything):
        advice = "It is a checkpoint of torch's own writer, which cloudckpt does not delete: use another tool"
    elif everything:
        advice = f"Failed saves left data there. {gc_advice(uri)}"
    else:
        advice = "Nothing is there: check the URI"
    raise CheckpointNotFoundError(f"no checkpoint is committed at {location.uri}. {advice}", uri=location.uri)


def gc(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A checkpoint, a folder of them, or anything above.")],
    *,
    older_than: Annotated[
        timedelta,
        typer.Option(
            parser=parse_duration,
            metavar="TIME",
            help="Keep what belongs to a save with a sign of life in this time: longer than any save takes. 24h, 2d; "
            "a number without a unit is seconds.",
        ),
    ] = _DAY,
    yes: Yes = False,
    dry_run: DryRun = False,
    common: CommonOptions,
) -> None:
    """Find the remains of saves that died, failed or were overwritten, and delete them: with --yes, or if you agree.

    Example: cloudckpt gc s3://bucket/run --older-than 2d
    """
    console = common.console
    options = common.options()
    removes = yes and not dry_run
    report = _collect(root, older_than, options, dry_run=not removes)
    _print_report(console, report)
    if not removes and report.locations:
        if console.is_interactive and not dry_run and not common.as_json and console.confirm("Remove it?"):
            report = _collect(root, older_than, options, dry_run=False)
            _print_report(console, report)
        else:
            console.say("Nothing was removed: pass --yes to remove it.")
    if report.failed:
        raise typer.Exit(NO)


def drain(
    fast: Annotated[str, typer.Argument(metavar="FAST", help="The fast place of a run.")],
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of all steps, as the run names it.")],
    *,
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline", min=0.1, metavar="SECONDS", help="Send nothing more after this time.", show_default=False
        ),
    ] = math.inf,
    common: CommonOptions,
) -> None:
    """Copy the steps that ROOT is owed from a fast place, newest first; exit with 1 if any is still missing.

    Example: cloudckpt drain /nvme/run s3://bucket/run --deadline 25
    """
    from cloudckpt.manager.drain import drain as drain_to_root

    console = common.console
    report = drain_to_root(fast, root, deadline_s=deadline, options=common.options())
    if common.as_json:
        console.document(dataclasses.asdict(report))
    else:
        for uri in report.drained:
            console.line(f"{uri}: copied")
        for item in report.failed:
            console.warn(f"{item.uri}: failed: {item.reason}")
        console.say(f"{root} is owed {count(len(report.failed), 'step')}.")
    if report.failed:
        raise typer.Exit(NO)


def _collect(root: str, older_than: timedelta, options: Options, *, dry_run: bool) -> GarbageReport:
    from cloudckpt.errors import GarbageLeftError
    from cloudckpt.removal import gc as collect

    try:
        return collect(root, older_than=older_than, dry_run=dry_run, quiet=True, options=options)
    except GarbageLeftError as error:
        if error.report is None:
            raise
        report: GarbageReport = error.report
        return report


def _print_report(console: Console, report: GarbageReport) -> None:
    from cloudckpt.removal import lines_of

    if console.as_json:
        console.document({name: getattr(report, name) for name in _MEMBERS})
        return
    for item in report.failed:
        console.warn(f"{item.uri}: failed: {item.reason}")
    for line in lines_of(report):
        console.line(line)


def verify(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The checkpoint; with --all, the folder of some.")],
    *,
    every: Annotated[
        bool, typer.Option("--all", help="Verify each checkpoint in the folder URI, oldest first, a line for each.")
    ] = False,
    common: CommonOptions,
) -> None:
    """Read every byte of a checkpoint and compare it with what was saved; exit with 1 if anything is damaged.

    Example: cloudckpt verify s3://bucket/run/step-100
    """
    console = common.console
    documents: list[dict[str, Any]] = []
    for checkpoint_uri in _find_all(uri, common) if every else [uri]:
        with advising_all(uri, common.options()):
            documents.append(_verify(checkpoint_uri, common, is_alone=not every))
        if not common.as_json:
            _print_verdict(console, documents[-1], is_alone=not every)
    if common.as_json:
        console.document(documents if every else documents[0])
    num_whole = sum(document["is_whole"] is True for document in documents)
    if every:
        console.say(f"{num_whole:,} of {count(len(documents), 'checkpoint')} verified as whole.")
    if num_whole < len(documents):
        raise typer.Exit(NO)


def _find_all(root: str, common: CommonOptions) -> list[str]:
    from cloudckpt.errors import CheckpointNotFoundError
    from cloudckpt.inspect.catalog import list_checkpoints
    from cloudckpt.uri import parse_location

    infos = list_checkpoints(root, all=True, options=common.options())
    uri = parse_location(root).uri
    uris = [info.uri for info in infos if info.state in (*_CHECKPOINTS, "denied")]  # the latter are last, and raise
    if not uris:
        raise CheckpointNotFoundError(f"no checkpoint is committed at {uri} or directly under it", uri=uri)
    return uris


def _verify(uri: str, common: CommonOptions, *, is_alone: bool) -> dict[str, Any]:
    """Return the document of ``--json``. Trouble with one of several checkpoints does not end the command."""
    from cloudckpt.errors import CheckpointError, CloudckptError, CorruptCheckpointError
    from cloudckpt.inspect.verification import verify as verify_checkpoint

    console = common.console
    with console.progress("verifying") as show_progress:
        done_bytes = total_bytes = 0

        def on_event(event: Event) -> None:
            nonlocal done_bytes, total_bytes
            if event.name == "verify.planned":
                total_bytes += event.num_bytes
            elif event.name == "verify.range_read":
                done_bytes += event.num_bytes
            show_progress(done_bytes, total_bytes)

        options = common.options(on_event=on_event)
        try:
            report = verify_checkpoint(uri, options=options)
        except CorruptCheckpointError as error:
            from cloudckpt.manager.drain import explain_damage

            verdict = {"uri": uri, "is_whole": False, "problems": error.problems}
            with contextlib.suppress(CloudckptError):
                if note := explain_damage(uri, len(error.problems), options):
                    verdict["note"] = note
            return verdict
        except CheckpointError as error:
            if is_alone:
                raise
            return {"uri": uri, "is_whole": None, "problems": [str(error)]}
    return {"uri": report.uri, "is_whole": True, "problems": [], **describe_report(report, report.verify_s)}


def _print_verdict(console: Console, verdict: dict[str, Any], *, is_alone: bool) -> None:
    uri, problems = verdict["uri"], verdict["problems"]
    if verdict["is_whole"]:
        console.line(
            f"{uri} is whole: {size(verdict['num_bytes'])} in {count(verdict['num_objects'], 'object')}, "
            f"{count(verdict['num_tensors'], 'tensor')} and {count(verdict['num_values'], 'value')}"
        )
        if is_alone:
            console.say(
                f"Read in {verdict['seconds']:.1f} s, {rate(verdict['num_bytes'] / (verdict['seconds'] or 1))}."
            )
    elif is_alone:
        for problem in problems:
            console.line(problem)
        words = f"{uri} is damaged: {count(len(problems), 'problem')}. Load an older checkpoint"
        console.say(f"{verdict.get('note', words)}.")
    else:
        more = f" (and {count(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
        words = "could not be verified" if verdict["is_whole"] is None else "is damaged"
        console.line(f"{uri} {words}: {problems[0]}{more}")


def doctor(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The folder of the checkpoints.")],
    *,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing, and check only what loads need.", show_default=False)
    ] = False,
    deadline: Annotated[
        float, typer.Option("--deadline", min=0.1, metavar="SECONDS", help="Begin no check after this time.")
    ] = 60.0,
    fast: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Also measure this fast place of a run, and a copy from there to URI."),
    ] = None,
    num_bytes: Annotated[
        int | None,
        typer.Option(
            "--size",
            parser=parse_size,
            metavar="SIZE",
            help="Size of a checkpoint, with --fast; that of the newest without it.",
        ),
    ] = None,
    common: CommonOptions,
) -> None:
    """Find out if saves to URI will work: credentials, clock, bucket, permissions, promises of the store.

    It writes below URI alone, and removes that again. Exits with 1 if an important check failed.

    Example: cloudckpt doctor s3://bucket/run
    """
    from cloudckpt.doctor import examine
    from cloudckpt.options import GIB

    console = common.console
    if not common.as_json:
        console.say(f"Examining {uri} …")
    options = common.options()
    if fast is not None and num_bytes is None:
        num_bytes = _find_size_of_newest(uri, options) or GIB
    report = examine(
        uri, read_only=read_only, deadline_s=deadline, fast=fast, num_bytes=num_bytes or GIB, options=options
    )
    if common.as_json:
        document = {"uri": report.uri, "is_healthy": report.is_healthy, "checks": report.checks}
        console.document({**document, "service": report.service})
    else:
        for line in str(report).split("\n"):
            console.line(line)
    if not report.is_healthy:
        raise typer.Exit(NO)


def _find_size_of_newest(root: str, options: Options) -> int | None:
    """Return the size of the newest checkpoint under `root`; None if there is none, or it cannot be known."""
    from cloudckpt.errors import CheckpointError
    from cloudckpt.inspect.catalog import list_checkpoints

    try:
        infos = list_checkpoints(root, all=True, options=options)
    except CheckpointError:  # the examination finds out why
        return None
    return next((info.num_bytes for info in reversed(infos) if info.state == "committed"), None)


class _ServerKind(str, Enum):
    s3 = "s3"
    gcs = "gcs"


_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_SERVER_FUNCTIONS = {_ServerKind.s3: "moto_server", _ServerKind.gcs: "fake_gcs_server"}
"""The function of `cloudckpt.testing.servers` that starts each kind of server."""


def dev_server(
    kind: Annotated[_ServerKind, typer.Argument(help="The service whose API the server speaks.")] = _ServerKind.s3,
    *,
    bucket: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A bucket that is made, 'bucket' by default; may be given several times."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 is a free one.")] = 0,
) -> None:
    """Run a store with empty buckets on this machine, to try cloudckpt without an account, until Ctrl-C.

    It accepts any credentials. Objects are kept in memory, and are lost at the end. Stdout gets the exports for
    another shell.

    Example: cloudckpt dev-server s3 --port 9000
    """
    from cloudckpt.testing import servers

    buckets = bucket or ["bucket"]
    for name in buckets:
        if not _BUCKET_NAME.fullmatch(name):
            raise typer.BadParameter(
                f"{name!r} cannot name a bucket: a name has 3 to 63 lowercase letters, digits, '.', '_' or '-', and a "
                "letter or a digit at each end",
                param_hint="--bucket",
            )
    with getattr(servers, _SERVER_FUNCTIONS[kind])(port=port) as server:
        for name in buckets:
            server.create_bucket(name)
        typer.echo(f"{server.name} answers at {server.endpoint_url}. In another shell, paste:\n", err=True)
        for name, value in server.environment.items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        uris = [f"{server.scheme}://{name}/run" for name in buckets]
        typer.echo(f"\nand then save to {' or '.join(uris)}, or run: cloudckpt doctor {uris[0]}", err=True)
        typer.echo("The server accepts any credentials, from programs on this machine alone.", err=True)
        typer.echo("Ctrl-C ends the server. Its objects are in memory, and are lost then.", err=True)
        try:
            while server.is_running:
                time.sleep(_POLL_S)
        except KeyboardInterrupt:  # the way to end it, and no error
            return
        raise RuntimeError(f"{server.name} has ended")
