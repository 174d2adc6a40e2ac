"""Find the committed steps under a root, and the metrics that were saved with them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, SupportsFloat, TypeAlias, TypeVar

from cloudckpt._display import with_short_repr
from cloudckpt._messages import name_all
from cloudckpt._this_process import is_first_warning
from cloudckpt.commit.entries import CommitTimes, LogEntry, SummaryReader, manifest_key
from cloudckpt.commit.log import lists_rank_checkpoints, lists_torch_checkpoint, read_log_once
from cloudckpt.dcp.ranks.rank_calls import RankCalls
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CloudckptError,
    InvalidOptionError,
)
from cloudckpt.format.plain_values import is_unicode
from cloudckpt.inspect.catalog import METRICS_KEY, commit_order, look_at_folders, parse_metrics
from cloudckpt.io.client import MAX_LOOKS, StoreClient, open_client
from cloudckpt.options import Options
from cloudckpt.stores import open_store
from cloudckpt.uri import STEP_FOLDER, Location, parse_location

_log = logging.getLogger("cloudckpt")

STEP_KEY = "step"
"""The key of the step's number in the ``metadata`` of a manifest."""

StepPlace: TypeAlias = Literal["root", "fast", "both", "owed"]

_T = TypeVar("_T")
_own_uris: set[str] = set()
"""URIs of all checkpoints that this process saves or copies to a root, also through other managers."""


def note_own_uris(uris: Iterable[str]) -> None:
    """Record checkpoints that this process saves or copies, so that `Steps` takes none for another job's."""
    _own_uris.update(uris)


def format_folder(step: int, again: int = 0) -> str:
    """Return the name of a step's folder. `again` counts the checkpoints that were saved beside damaged ones."""
    return f"step-{step}-again-{again}" if again else f"step-{step}"


def parse_folder(name: str) -> int | None:
    """Return the step whose folder is called `name`, or None if it is not the folder of a step."""
    match = STEP_FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def parse_step_uri(uri: str) -> int:
    """Return the step at `uri`, which a manager has named."""
    step = parse_folder(uri.rpartition("/")[2])
    if step is None:
        raise ValueError(f"{uri} is not the URI of a step")
    return step


def check_metrics(metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float | None]:
    """Convert metrics to values that JSON can hold; None stands for a value that is not finite.

    Raises `InvalidOptionError` unless each metric is a name with a number.
    """
    if not isinstance(metrics, (Mapping, type(None))):
        raise InvalidOptionError(f"metrics must be a dict of numbers by name, not {metrics!r:.80}")
    numbers: dict[str, float | None] = {}
    for name, value in (metrics or {}).items():
        try:
            # float() of a tensor that requires gradients makes torch warn.
            plain = value.detach() if hasattr(value, "detach") else value
            is_named = isinstance(name, str) and is_unicode(name)
            number = float(plain) if is_named and not isinstance(value, (str, bytes)) else None
        except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last for a non-scalar tensor
            number = None
        if number is None:
            raise InvalidOptionError(f"metrics must be numbers by name, not {name!r}: {value!r:.80}")
        numbers[name] = number if math.isfinite(number) else None
    return numbers


def build_metadata(step: int, numbers: Mapping[str, float | None]) -> dict[str, Any]:
    """Build the metadata of a step's manifest."""
    return {STEP_KEY: step, METRICS_KEY: dict(numbers)} if numbers else {STEP_KEY: step}


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """One committed checkpoint of a `CheckpointManager`."""

    step: int
    """Number of the step."""
    uri: str
    """URI of the checkpoint."""
    committed_at: datetime
    """See `cloudckpt.types.CheckpointInfo.committed_at`. If each rank saves alone, the time of rank 0."""
    num_bytes: int | None = None
    """Size of the data objects. None if the manifest is damaged."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that were saved with the step. NaN stands for a value that was not finite."""
    place: StepPlace = "root"
    """``"root"``, ``"fast"`` for the fast place in front of the root, or ``"both"``. ``"owed"``: the fast place has the
    step, and the root is to get a copy, which it does not have yet."""
    copy_uri: str | None = None
    """URI of the copy under the root, if `uri` is in the fast place and both have the step."""


def name_of(info: StepInfo) -> str:
    """Return the name of a checkpoint's folder, such as ``step-100``."""
    return info.uri.rpartition("/")[2]


def sort_newest_first(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Sort by commit time. At equal times, the higher step counts as newer."""
    return sorted(steps, key=lambda info: commit_order(info.committed_at, name_of(info)), reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFolder:
    """State of one step's folder at the time of a listing."""

    uri: str
    info: StepInfo | None = None
    """None if nothing is committed there."""
    highest_number: int = -1
    """Highest number in the log of the folder; -1 for an empty log."""
    fenced_at: datetime | None = None
    """Time of the fence that a deleted checkpoint leaves, if the log has no current manifest."""
    is_half_deleted: bool = False
    """True if a deletion has hidden a checkpoint, and not removed all of its manifests."""
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Metadata of the manifest, if it was read."""
    denied: AccessDeniedError | None = None
    """Error that hides the folder's content or its metrics. All other fields but `uri` are unknown then."""
    problem: str = ""
    """Reason why the metrics are unknown: the manifest is damaged or of a newer format."""

    @property
    def committed(self) -> StepInfo:
        """The step of a folder that has one."""
        assert self.info is not None  # noqa: S101  # the caller has looked
        return self.info

    @property
    def is_missing(self) -> bool:
        """True if one look found nothing committed."""
        return self.info is None and self.denied is None


class Steps:
    """The steps in the folder at `location`: a root, or a fast place. Thread-safe.

    Args:
        location: Folder of all steps.
        options: Options of the manager.
        is_shared: Other runs may save here, too.

    """

    def __init__(self, location: Location, options: Options, *, is_shared: bool = False) -> None:
        self.location, self._is_shared = location, is_shared
        self._seen_uris: set[str] = set()
        """URIs of all folders that a look at all steps has found."""
        self._times = CommitTimes()
        self._have_times = self._has_warned_of_higher = False
        self.options = options
        self.run_uris: set[str] = set()
        """URIs of the checkpoints in all places that the manager has saved, or found in a `restore`. Its rules hold for
        no others."""
        self.begun_uris: set[str] = set()
        """URIs to which the manager has begun a save, whose commit may be not yet in `run_uris`."""
        self.known_uris: set[str] = set()
        """URIs of all checkpoints that a look has found, or this process has made, also if they were removed since."""
        self.fenced_at: dict[str, datetime] = {}
        """URIs of deleted checkpoints whose fence is still there, and the time of the fence. `Retention` fills it."""
        self._read: dict[tuple[str, int, datetime], tuple[Mapping[str, Any], int]] = {}
        """The metadata and the size of each step whose manifest was read. A look at all steps drops missing ones."""

    def uri_of(self, step: int) -> str:
        """Return the URI to which a step is saved."""
        return self._uri_of_folder(format_folder(step))

    def find_committed(self, step: int | None = None, *, with_metadata: bool) -> list[StepInfo]:
        """Return the committed steps, or the checkpoints of one step, newest first.

        Raises:
            StoreError: The store failed, or denied access to a step, which could be the newest.
            CheckpointChangedError: No two looks agreed.

        """
        folders = self.list_folders(step=step, with_metadata=with_metadata)
        raise_if_denied(folders)
        return sort_newest_first([folder.info for folder in folders if folder.info is not None])

    def find_latest(self) -> StepInfo | None:
        """Return the step that was committed last, with its metrics. Raises the errors of `find_committed`."""
        newest = next(iter(self.find_committed(with_metadata=False)), None)
        if newest is None:
            return None
        folder = self._look_at(name_of(newest), self._open_client(), SummaryReader())
        return folder.info or newest  # None if it was just removed

    def read_metadata(self, name: str) -> Mapping[str, Any]:
        """Return the metadata of the checkpoint in the folder `name`; {} if none is there. Raises as `find_latest`."""
        return self._look_at(name, self._open_client(), SummaryReader()).metadata

    def find_half_deleted(self) -> list[int]:
        """Return the steps that a deletion has hidden and not removed, lowest first. Raises as `list_folders`."""
        return sorted({parse_step_uri(folder.uri) for folder in self.list_folders() if folder.is_half_deleted})

    def find_torch_steps(self) -> list[int]:
        """Return the steps that torch's own writer has saved, lowest first. Raises the errors of `find_committed`."""
        return self._find_foreign(lists_torch_checkpoint)

    def find_steps_of_ranks(self) -> list[int]:
        """Return the steps whose folders hold a checkpoint of rank 0 alone, lowest first. Raises as `list_folders`."""
        return self._find_foreign(lists_rank_checkpoints)

    def list_folders(
        self, *, step: int | None = None, excluded_uris: Collection[str] = (), with_metadata: bool = False
    ) -> list[StepFolder]:
        """Look at the folders of all steps, or of one.

        A commit counts as missing only if two looks in a row agree. The highest number of a log only rises, until gc
        removes the log of a checkpoint that was deleted long ago. So no commit came between two looks that agree.
        Raises `StoreError`, and `CheckpointChangedError` if no two looks agree.

        With metadata, and so with metrics, each manifest is read once and remembered. The metadata of a damaged
        manifest stays unknown, and `StepFolder.problem` says why.
        """
        client = self._open_client()
        summaries = SummaryReader() if with_metadata else None

        def list_names() -> list[str]:
            return [
                name
                for name in _list_names(client)
                if self._uri_of_folder(name) not in excluded_uris and step in (None, parse_folder(name))
            ]

        def look(name: str) -> tuple[StepFolder, Hashable]:
            try:
                folder = self._look_at(name, client, summaries)
            except AccessDeniedError as error:
                folder = StepFolder(uri=self._uri_of_folder(name), denied=error)
            return folder, folder if folder.is_missing else None

        folders = list(self._look_at_folders(list_names, look, client).values())
        committed = {folder.uri for folder in folders if folder.info is not None}
        self.known_uris |= committed
        if step is None:
            self._note_seen({folder.uri for folder in folders})
            self._have_times = True
            if summaries is not None:
                self._read = {key: summary for key, summary in [*self._read.items()] if key[0] in committed}
        return folders

    @property
    def most_bytes(self) -> int:
        """Size of the largest step that the last look at all steps with metadata, or a later read, has found; or 0."""
        return max((num_bytes for _, num_bytes in [*self._read.values()]), default=0)

    def look_for_others(self) -> None:
        """Warn, once, of a step that another job has begun to save since the first look at all steps. Never raises."""
        with contextlib.suppress(CloudckptError):  # the save finds it out
            self._note_seen({*self.list_uris()})

    def warn_of_higher(self, step: int, begin: str, *, damaged_uris: Collection[str]) -> None:
        """Warn, once, of steps above `step`: the first that a job saves, or the one that was committed last.

        `begin` is the beginning of the warning, before the number. Looks at known steps alone.
        """
        higher = sorted(
            {number for uri in self.known_uris.difference(damaged_uris) if (number := parse_step_uri(uri)) > step}
        )
        if higher and not self._has_warned_of_higher:
            self._has_warned_of_higher = True
            _log.warning(
                "%s %d, and %s also has %s. If another job saves there, pass another root, because each job restores "
                "and removes the other's steps. Delete higher steps that are not wanted (cloudckpt rm), or continue "
                "from one with restore(…, step=…)",
                begin,
                step,
                self.location.uri,
                name_all("step", higher),
            )

    def _note_seen(self, uris: set[str]) -> None:
        others = sorted(uris - self._seen_uris - _own_uris, key=parse_step_uri)
        self._seen_uris |= uris
        if others and self._have_times and not self._is_shared and is_first_warning("others", self.location.uri):
            _log.warning(
                "another job has saved %s since this one looked at the steps of %s. Two jobs with one root restore and "
                "then remove each other's steps: stop one of them, or give each a root of its own",
                others[0],
                self.location.uri,
            )

    def list_uris(self) -> list[str]:
        """Return the URIs of all folders with the name of a step, also of those that were deleted."""
        return [self._uri_of_folder(name) for name in _list_names(self._open_client())]

    def read_times(self) -> None:
        """Read the times of all commits, unless this was done, so that the next one is later. Never raises."""
        if self._have_times:
            return
        try:
            self.list_folders()
        except CloudckptError as error:
            if is_first_warning("commit times", self.location.uri):  # and not with each save
                _log.warning(
                    "could not look at the steps under %s, so the time of the next commit comes from this machine's "
                    "clock alone: %s",
                    self.location.uri,
                    error,
                )

    def may_have(self, name: str) -> bool:
        """Return False if the folder `name` holds no checkpoint as far as this process knows.

        Makes no request after the first look at all folders. Another process can commit the step at any time; the
        conditional commit finds that out.
        """
        if not self._have_times:
            self.list_folders()
        return self._uri_of_folder(name) in self.known_uris

    def _find_foreign(self, is_foreign: Callable[[StoreClient], bool]) -> list[int]:
        """Return the steps whose folders are foreign, lowest first, once two looks at all folders agree."""
        client = self._open_client()

        def look_at(name: str) -> tuple[bool, Hashable]:
            answer = is_foreign(self._at(client, name))
            return answer, ("twice", answer)

        answers = self._look_at_folders(lambda: _list_names(client), look_at, client)
        return sorted(parse_step_uri(name) for name, answer in answers.items() if answer)

    def _look_at_folders(
        self, list_names: Callable[[], list[str]], look: Callable[[str], tuple[_T, Hashable]], client: StoreClient
    ) -> dict[str, _T]:
        return look_at_folders(list_names, look, options=self.options, client=client, changing=self._make_changed_error)

    def _look_at(self, name: str, client: StoreClient, summaries: SummaryReader | None) -> StepFolder:
        for _ in range(MAX_LOOKS):
            folder = self._try_to_look_at(name, client, summaries)
            if folder is not None:
                return folder
        raise self._make_changed_error()

    def _try_to_look_at(self, name: str, client: StoreClient, summaries: SummaryReader | None) -> StepFolder | None:
        """Look at the log of a step. Return None if a manifest was replaced or removed meanwhile."""
        client = self._at(client, name)
        log = read_log_once(client, is_lenient=True)
        if log.current_entry is not None:
            return self._build_committed(name, log.current_entry, log.highest_number, client, summaries)
        return StepFolder(
            uri=self._uri_of_folder(name),
            highest_number=log.highest_number,
            fenced_at=log.entries[-1].modified_at if log.entries and log.current_number is None else None,
            is_half_deleted=log.current_number is None and not all(entry.has_fence_size for entry in log.entries),
        )

    def _build_committed(
        self, name: str, entry: LogEntry, highest_number: int, client: StoreClient, summaries: SummaryReader | None
    ) -> StepFolder | None:
        uri = self._uri_of_folder(name)
        moment = self._times.read(client, manifest_key(entry.number), entry)
        if moment is None:
            return None
        metadata: Mapping[str, Any] = {}
        num_bytes: int | None = None
        problem = ""
        try:
            if summaries is not None:
                key = uri, entry.number, moment
                if key not in self._read:
                    if (summary := summaries.read(client, entry)) is None:
                        return None
                    self._read[key] = summary.metadata, summary.num_bytes
                metadata, num_bytes = self._read[key]
        except CheckpointError as error:
            problem = str(error)
        info = StepInfo(
            step=parse_step_uri(uri),
            uri=uri,
            committed_at=moment,
            num_bytes=num_bytes,
            metrics=parse_metrics(metadata),
        )
        return StepFolder(uri=uri, info=info, highest_number=highest_number, metadata=metadata, problem=problem)

    def _uri_of_folder(self, name: str) -> str:
        return self.location.child(name).uri

    def _open_client(self) -> StoreClient:
        return open_client(self.location, self.options)

    def _at(self, client: StoreClient, name: str) -> StoreClient:
        return client.at(open_store(self.location.child(name), self.options))

    def _make_changed_error(self) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"the steps under {self.location.uri} keep changing, so the committed ones are unknown. Try again",
            uri=self.location.uri,
        )


def _list_names(client: StoreClient) -> list[str]:
    return [name for name in client.list_directories() if parse_folder(name) is not None]


def raise_if_denied(folders: Sequence[StepFolder]) -> None:
    """Raise `StepFolder.denied` of the first of `folders` that has one."""
    for folder in folders:
        if folder.denied is not None:
            raise folder.denied


def find_steps_on_all_ranks(root: str, options: Options) -> list[int]:
    """Return the committed steps on all ranks, lowest first. Rank 0 lists them and reads only the manifests' heads.

    Steps of torch's own writer are included, because a save would collide with them too. Raises torch's
    ``CheckpointException`` on all ranks if the store fails.
    """

    def find() -> list[int]:
        steps = Steps(parse_location(root), options)
        return sorted({*(info.step for info in steps.find_committed(with_metadata=False)), *steps.find_torch_steps()})

    return RankCalls(None, no_dist=False, root=root, timeout_s=options.timeout_s).broadcast("find", find)


def refuse_existing_steps(root: str, steps: Collection[int], *, after: int | None, hint: str) -> None:
    """Raise `CheckpointExistsError` if there are steps above `after`, or any step if `after` is None.

    Without this check, training would collide with them hours later, or its retention would remove them.
    """
    existing = [step for step in sorted(steps) if after is None or step > after]
    if not existing:
        return
    starts = "starts from scratch" if after is None else f"continues from step {after}"
    raise CheckpointExistsError(
        f"training {starts}, but {root} already has {name_all('step', existing)}. {hint}", uri=root
    )
