"""The debts of a fast place: steps that its root is owed, and their copies to the root."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cloudckpt._display import shown
from cloudckpt.convert.conversion import Conversion, check_apart
from cloudckpt.convert.copying import run_copy
from cloudckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    InvalidURIError,
    StoreError,
)
from cloudckpt.events import Event
from cloudckpt.inspect.removal import KeptObject
from cloudckpt.manager.policies import RetentionPolicy, find_superseded
from cloudckpt.manager.steps import StepFolder, StepInfo, Steps, name_of, own_uris, parse_folder, raise_if_denied
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context, log_and_deliver
from cloudckpt.stores.open import options_at
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")

FAST_KEY = "fast"
"""The key of the record of `make_record` in the ``metadata`` of a manifest."""
_FINAL_FAILURES = (CorruptCheckpointError, CheckpointExistsError)
"""Failures of a copy after which another try is in vain."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """Result of one run that copied owed steps from the fast place to the root."""

    drained: tuple[str, ...]
    """URIs under the root to which steps were copied, newest first."""
    failed: tuple[KeptObject, ...]
    """Steps of the fast place that the root is still owed, each with the reason. The next commit tries again, except
    for a damaged step, and for a step whose name another save has taken at the root."""


def make_record(root: Location, *, is_owed: bool, may_overwrite: bool) -> dict[str, Any]:
    """Make the record of a step in a fast place: its root, and whether the root is owed a copy."""
    return {"root": root.uri, "is_owed": is_owed, "may_overwrite": may_overwrite}


class Debts:
    """The steps of a fast place that its root is owed, and their copies to the root.

    A debt is open until the root has a copy of the step, or needs none any more. The manifest of the step has the
    record of the debt (`make_record`), so a debt outlives the process.

    Args:
        location: The fast place.
        root_steps: Steps of the root.
        root_policy: Checkpoints that the root keeps. It needs no copy of any other.
        get_damaged_uris: Returns the URIs that `restore` found damaged.
        on_drained: Called with the URI of each copy.

    Raises:
        InvalidURIError: One of the places is inside the other.

    """

    def __init__(
        self,
        location: Location,
        root_steps: Steps,
        *,
        root_policy: RetentionPolicy,
        get_damaged_uris: Callable[[], Collection[str]],
        on_drained: Callable[[str], None],
    ) -> None:
        self.steps = Steps(location, dataclasses.replace(root_steps.options, storage_options={}), is_shared=True)
        try:
            check_apart(*(Context(steps.location, steps.options, rank=0) for steps in (self.steps, root_steps)))
        except InvalidURIError:
            raise InvalidURIError(
                f"the fast place {location.uri} and the root {root_steps.location.uri} are the same, or one is inside "
                "the other. Choose a fast place beside the root, on a drive that answers sooner"
            ) from None
        self.root_steps, self._root_policy = root_steps, root_policy
        self.get_damaged_uris, self._on_drained = get_damaged_uris, on_drained
        self._closed: set[tuple[datetime, str]] = set()
        """Commit time and URI of each step of which the root needs no copy any more."""
        self.known: dict[str, StepInfo | None] = {}
        """URIs of open debts. None stands for a step that this process has committed and not listed yet."""
        self._final_failures: dict[tuple[datetime, str], CheckpointError] = {}
        """The failure of each step that cannot be copied."""
        self._has_warned_of_others = False
        self.report: DrainReport | None = None
        """Report of the last run."""

    def list_own(self, *, excluded_uris: Collection[str] = ()) -> list[StepFolder]:
        """Return the committed steps of this run, including damaged ones, whose damage a restore names.

        Raises `StoreError`, also if access to a step is denied.
        """
        folders = self.steps.list_folders(excluded_uris=excluded_uris, with_metadata=True)
        raise_if_denied(folders)
        committed = [folder for folder in folders if folder.info is not None]
        others = [folder.uri for folder in committed if not folder.problem and not self.is_own(folder)]
        if others and not self._has_warned_of_others:
            self._has_warned_of_others = True
            _log.warning(
                "ignoring %d steps in the fast place %s, because they are of another run than %s: %s",
                len(others), self.steps.location.uri, self._root.uri, ", ".join(others),
            )  # fmt: skip
        own = [folder for folder in committed if folder.uri not in others]
        self.note(own)
        return own

    def note(self, folders: Sequence[StepFolder]) -> None:
        """Record the open debts in `folders`."""
        own = [folder for folder in folders if self.is_own(folder)]
        own_uris.update(self._root.child(folder.uri.rpartition("/")[2]).uri for folder in own)  # a drain may copy them
        self.known |= {folder.uri: folder.info for folder in own if self.is_open(folder)}

    def check(self) -> None:
        """Raise `CheckpointError` if the last run has left a debt open."""
        failed = () if self.report is None else self.report.failed
        if failed:
            reasons = "; ".join(f"{item.uri}: {item.reason}" for item in failed)
            raise CheckpointError(
                f"{self._root.uri} does not have all steps that were saved for it. Start the run again, or run "
                f"'cloudckpt drain {self.steps.location.uri} {self._root.uri}'. {reasons}",
                uri=self._root.uri,
            )

    @property
    def is_behind(self) -> bool:
        """True if more than one debt is open whose step can be copied."""
        return len(self.known.keys() - {uri for _, uri in self._final_failures}) > 1

    def drain(
        self, *, ends_at_s: float = math.inf, get_connections: Callable[[int], int] = lambda most: most
    ) -> DrainReport:
        """Copy the steps that the root is owed, newest first, until `ends_at_s`, a time of ``time.monotonic``.

        `get_connections` takes the most requests that the options allow, and returns how many may be in flight now. It
        is called again and again.

        Raises `CloudckptError` if the steps here cannot be listed. The report has all other failures.
        """
        known = dict(self.known)
        owed = self._find_open()
        gone = sorted(known.keys() - {folder.uri for folder in owed})
        drained: list[str] = []
        failed = [
            KeptObject(uri=uri, reason="it is not there any more")
            for uri in gone
            if not self._close_if_copied(uri, known[uri])
        ]
        while owed:
            folder, *owed = owed
            try:
                drained += self._drain_one(folder, ends_at_s, get_connections)
            except CloudckptError as error:
                failed.append(KeptObject(uri=folder.uri, reason=str(error)))
                if isinstance(error, StoreError) or time.monotonic() >= ends_at_s:  # the next one would fail, too
                    failed += [KeptObject(uri=other.uri, reason="not tried after the failure") for other in owed]
                    break
        return self._set_report(drained, failed)

    def try_to_drain(self, get_connections: Callable[[int], int]) -> None:
        """Run `drain`, and report its failure instead of raising it."""
        try:
            self.drain(get_connections=get_connections)
        except BaseException as error:  # noqa: BLE001  # no caller waits for this thread, so the report has it
            reason = str(error) or repr(error)
            if not self.known:
                _log.warning("could not look for steps that %s is owed: %s", self._root.uri, reason)
            self._set_report((), [KeptObject(uri=uri, reason=reason) for uri in sorted(self.known)])

    def _set_report(self, drained: Sequence[str], failed: Sequence[KeptObject]) -> DrainReport:
        for item in failed:
            words = f"{self._root.uri} does not have the step that was saved to {item.uri} for it: {item.reason}"
            log_and_deliver(Event(name="drain.failed", uri=item.uri, rank=0), self.steps.options, words=words)
        self.report = DrainReport(drained=tuple(drained), failed=tuple(failed))
        return self.report

    @property
    def _root(self) -> Location:
        return self.root_steps.location

    def is_own(self, folder: StepFolder) -> bool:
        """Return True if the step in a folder belongs to the root."""
        return _record_of(folder).get("root") == self._root.uri

    def is_open(self, folder: StepFolder) -> bool:
        """Return True if the step in a folder is an open debt, as far as this process knows."""
        return is_recorded_debt(folder) and _key_of(folder) not in self._closed

    def _find_open(self) -> list[StepFolder]:
        """Return the steps whose debts may be open, newest first."""
        owed = []
        # Each removed step leaves a fence for a day, and this look follows each save: skip the fences.
        for folder in self.list_own(excluded_uris=self.steps.fenced_at.keys() - self.known.keys()):
            if folder.problem and folder.uri not in self.known:
                _log.warning("cannot tell if %s is owed %s: %s", self._root.uri, folder.uri, folder.problem)
            elif folder.problem or self.is_open(folder):
                owed.append(folder)
        return sorted(owed, key=_key_of, reverse=True)

    def _needs_no_copy(self, info: StepInfo) -> bool:
        """Return True if the root has the step, or a later one of its number, or would remove a copy at once."""
        policy = self._root_policy
        folders = self.root_steps.list_folders(
            step=info.step if policy.keeps_all else None, with_metadata=policy.keep_best is not None
        )
        raise_if_denied(folders)
        infos = [folder.info for folder in folders if folder.info is not None]
        # A later checkpoint of the step may stand beside a damaged one, under another name.
        has_it = any(copy.step == info.step and copy.committed_at >= info.committed_at for copy in infos)
        return has_it or info in find_superseded([*infos, info], policy, damaged=self.get_damaged_uris())

    def _close_if_copied(self, uri: str, info: StepInfo | None) -> bool:
        """Close the debt of the step at `uri` if the root needs no copy any more. Return True if so."""
        if info is None or not self._needs_no_copy(info):
            return False
        self._close(uri, info)
        return True

    def _close(self, uri: str, info: StepInfo) -> None:
        self._closed.add((info.committed_at, uri))
        self.known.pop(uri, None)

    def _drain_one(self, folder: StepFolder, ends_at_s: float, get_connections: Callable[[int], int]) -> list[str]:
        """Copy one step, unless the root needs no copy any more. Return the URI of the copy, or raise the failure."""
        info, key = _info_of(folder), _key_of(folder)
        if self._close_if_copied(folder.uri, info):
            return []
        if (failure := self._final_failures.get(key)) is not None:
            raise failure
        if folder.problem:
            raise CorruptCheckpointError(folder.problem, uri=folder.uri)

        def check_time(_done_bytes: int, _total_bytes: int) -> None:
            if time.monotonic() >= ends_at_s:
                raise CheckpointError("the deadline has passed; another drain sends only what is missing", uri=target)

        target = self._root.child(name_of(info)).uri
        try:
            conversion = Conversion(
                folder.uri,
                target,
                options=self.steps.options,
                target_options=dataclasses.replace(self.root_steps.options, resume=True),
                overwrite=folder.metadata[FAST_KEY].get("may_overwrite") is True,
                on_progress=check_time,
            )
            hedger = conversion.target.client.hedger
            hedger.get_ceiling = lambda: get_connections(hedger.most_connections)
            run_copy(conversion)
        except _FINAL_FAILURES as error:
            if self._close_if_copied(folder.uri, info):  # another process has copied it, or saved it again
                return []
            self._final_failures[key] = error
            raise
        self._close(folder.uri, info)
        self.root_steps.known_uris.add(target)
        words = f"copied {folder.uri} to {target}"
        log_and_deliver(Event(name="drain.committed", uri=target, rank=0), self.steps.options, words=words)
        self._on_drained(target)
        return [target]


def drain(
    fast: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    deadline_s: float = math.inf,
    options: Options | None = None,
) -> DrainReport:
    """Copy the steps that `root` is owed from the fast place of a `CheckpointManager`, newest first.

    Every byte is compared with the checksums of the save. Objects and parts that an earlier copy has sent whole are not
    sent again. Safe beside a running manager: a step is committed once. `drain` does not know the manager's rules, so
    it can copy a step that these have removed at the root; the next run of the manager removes the copy.

    Args:
        fast: The fast place.
        root: Folder of all steps.
        deadline_s: Seconds after which nothing more is sent.
        options: Options for `root`.

    Returns:
        The steps that were copied, and those that `root` is still owed.

    Raises:
        CheckpointNotFoundError: `fast` has no step, or only steps of another root.
        InvalidURIError: One of the places is inside the other.
        StoreError: The steps in `fast` cannot be listed.

    Example::

        report = drain("/nvme/run", "s3://bucket/run", deadline_s=20)
        print(report.failed)

    """
    place, location = parse_location(fast), parse_location(root)
    debts = Debts(
        place,
        Steps(location, options or Options()),
        root_policy=RetentionPolicy(keep_last=None, keep_every=None, keep_best=None),
        get_damaged_uris=tuple,
        on_drained=lambda _: None,
    )
    committed = [folder for folder in debts.steps.list_folders(with_metadata=True) if folder.info is not None]
    roots = {str(_record_of(folder)["root"]) for folder in committed if "root" in _record_of(folder)}
    if not committed:
        raise CheckpointNotFoundError(f"no step of a run is in {place.uri}: check the path", uri=place.uri)
    if roots and location.uri not in roots:
        raise CheckpointNotFoundError(
            f"the steps in {place.uri} are of {', '.join(sorted(roots))}, not of {location.uri}: pass the root as the "
            "run names it",
            uri=place.uri,
        )
    return debts.drain(ends_at_s=time.monotonic() + deadline_s)


def _record_of(folder: StepFolder) -> Mapping[str, Any]:
    record = folder.metadata.get(FAST_KEY)
    return record if isinstance(record, dict) else {}


def root_of(folder: StepFolder) -> str:
    """Return the root of a step in a fast place; empty for a step elsewhere."""
    return str(_record_of(folder).get("root", ""))


def is_recorded_debt(folder: StepFolder) -> bool:
    """Return True if the manifest in a folder records that the root is owed a copy."""
    return _record_of(folder).get("is_owed") is True


def explain_debt(uri: str, metadata: Mapping[str, Any], committed_at: datetime, options: Options) -> str:
    """Return why the step at `uri` in a fast place must stay, if its root lacks the owed copy; otherwise "".

    Looks under the root, with `options` if it is a store of the same kind as the fast place.
    """
    place, _, name = uri.rpartition("/")
    folder = StepFolder(uri=uri, metadata=metadata)
    root = root_of(folder)
    if not is_recorded_debt(folder) or root in ("", place):
        return ""
    try:
        location = parse_location(root)
        options = options_at(location, parse_location(uri), options)
        folders = Steps(location, options).list_folders(step=parse_folder(name))
        raise_if_denied(folders)
    except CloudckptError as error:
        return f"{root} was owed it, and cannot be asked for its copy: {error}"
    if any(folder.info is not None and folder.info.committed_at >= committed_at for folder in folders):
        return ""
    return f"{root} is owed it, and has no copy: run 'cloudckpt drain {place} {root}' first"


def _info_of(folder: StepFolder) -> StepInfo:
    assert folder.info is not None  # noqa: S101  # only committed steps are owed
    return folder.info


def _key_of(folder: StepFolder) -> tuple[datetime, str]:
    return _info_of(folder).committed_at, folder.uri
