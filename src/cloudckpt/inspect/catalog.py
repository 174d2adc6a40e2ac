"""List the checkpoints under a root, and on request all other data that saves wrote there."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, TypeAlias, TypeVar

from cloudckpt._clock import datetime_of
from cloudckpt._display import Listing, with_short_repr
from cloudckpt._workers import run_all
from cloudckpt.commit.attempts import save_id_time
from cloudckpt.commit.entries import CommitTimes, SummaryReader, manifest_key
from cloudckpt.commit.garbage_plan import FoundItem, Inventory, attempt_time
from cloudckpt.commit.garbage_removal import group_uploads
from cloudckpt.commit.log import (
    TORCH_METADATA_KEY,
    describe_folders,
    has_checkpoints,
    list_entries,
    list_kept_folders,
    read_log_once,
)
from cloudckpt.commit.references import find_claimed
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointError,
    CloudckptError,
    InvalidURIError,
    UnsupportedFormatError,
)
from cloudckpt.io.client import StoreClient, open_client
from cloudckpt.options import DEFAULT_CONNECTIONS, Options
from cloudckpt.stores import open_store
from cloudckpt.stores.base import UploadInfo
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")

_T = TypeVar("_T")

CheckpointState = Literal["committed", "damaged", "newer", "denied", "in progress", "garbage", "referenced", "torch"]

METRICS_KEY = "metrics"
"""The key of the metrics in the ``metadata`` of a manifest."""
EARLIER_KEY = "earlier_metrics"
"""The key of the metrics of the run's earlier steps, by step: retention may have removed these since."""
_DIGITS = re.compile(r"([0-9]+)")
_ONE_HOUR = timedelta(hours=1)
_UNCOMMITTED_STATES = ("in progress", "garbage", "referenced")
_DAMAGED: CheckpointState = "damaged"
_NEWER: CheckpointState = "newer"


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint, or the data of one save that is not committed. One location can have several of these.

    ``state`` is one of:

    - ``"committed"``: the checkpoint can be loaded.
    - ``"damaged"``: a manifest exists and cannot be read.
    - ``"newer"``: only a newer cloudckpt reads the format.
    - ``"denied"``: this user may not look at the location.
    - ``"in progress"``: data of a save that may still be committed.
    - ``"garbage"``: data that no save will commit, or that shows no sign of life. `gc` removes it.
    - ``"referenced"``: data of a removed checkpoint that another one refers to (`Options.unchanged`). It stays.
    - ``"torch"``: a checkpoint of torch's own writer, whose size is unknown.

    Without ``list_checkpoints(root, all=True)``, only ``"committed"`` is listed, and the fields from `num_bytes` on are
    not set.
    """

    uri: str
    """URI of the checkpoint."""
    name: str
    """Last segment of `uri`: ``step-100`` of ``s3://bucket/run/step-100``."""
    committed_at: datetime
    """Time of the commit in UTC, by the clock of the coordinator. If the manifest has no time (format 1.0) or cannot be
    read, it is the store's time of the manifest. In the other states, it is the store's time of the last write; if
    denied, the time of the listing."""
    state: CheckpointState = "committed"
    """See the list of states."""
    num_bytes: int | None = None
    """Size of the data objects, and on a path of unfinished uploads. None if unknown."""
    num_objects: int | None = None
    """Number of data objects. None if unknown."""
    num_bytes_elsewhere: int = 0
    """Size of the data objects in folders of other checkpoints, to which this one refers. Part of `num_bytes`."""
    num_objects_elsewhere: int = 0
    """Number of data objects in folders of other checkpoints."""
    num_uploads: int = 0
    """Number of unfinished uploads."""
    attempt: str = ""
    """Identifier of the save, or of the copy."""
    save_id: str = ""
    """torch's identifier of the save, which copies keep."""
    world_size: int | None = None
    """Number of ranks that saved; of an uncommitted save, the number of ranks that have written data."""
    num_tensors: int | None = None
    """Number of tensors. None if unknown."""
    manifest_number: int = 0
    """Number of the manifest: 0 for the first save, one more for each overwrite and each fence of a deletion or gc."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """``Options.metadata`` of the save."""
    problem: str = ""
    """The reason why the checkpoint cannot be read."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that a manager saved in `metadata`. NaN stands for a value that was not finite."""
        return parse_metrics(self.metadata)

    @property
    def save_s(self) -> float | None:
        """Seconds from the start of the save to its commit, by the writer's clock. A copy keeps those of the save. None
        if unknown.
        """
        times: list[datetime] = []
        for read_time, identifier in ((save_id_time, self.save_id), (attempt_time, self.attempt)):
            with contextlib.suppress(ValueError):  # it has no time
                times.append(read_time(identifier))
        seconds = (self.committed_at - times[0]).total_seconds() if times else -1.0
        return seconds if self.state == "committed" and seconds >= 0 else None


Mode: TypeAlias = Literal["min", "max"]
_MODE_WORDS: Mapping[Mode, re.Pattern[str]] = {
    "min": re.compile("loss|error|err|perplexity|ppl|nll|mse|mae|rmse|wer|cer|fid|bpb"),
    "max": re.compile("accuracy|acc|f1|auc|auroc|bleu|rouge|iou|miou|precision|recall|r2|psnr|ssim|reward"),
}


def mode_of_name(metric: str) -> Mode | None:
    """Return the direction that the words of a metric's name suggest, or None; always None with ``neg``."""
    words = re.split(r"[\W_]+", metric.lower())
    modes = [mode for mode, pattern in _MODE_WORDS.items() if any(map(pattern.fullmatch, words))]
    return modes[0] if len(modes) == 1 and "neg" not in words else None


def parse_metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Read the metrics from the metadata of a manifest. Values that are no numbers are left out."""
    values = metadata.get(METRICS_KEY)
    if not isinstance(values, dict):
        return {}
    return {
        name: _to_float(value)
        for name, value in values.items()
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    }


def parse_earlier_metrics(metadata: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Read the metrics of the run's earlier steps, by step, from the metadata of a manifest."""
    found = metadata.get(EARLIER_KEY)
    by_step = found if isinstance(found, dict) else {}
    numbers = [key for key in by_step if re.fullmatch("[0-9]{1,18}", key)]
    return {int(number): parse_metrics({METRICS_KEY: by_step[number]}) for number in numbers}


def _to_float(value: float | None) -> float:
    try:
        return math.nan if value is None else float(value)
    except OverflowError:  # a whole number in JSON can have any number of digits
        return math.nan


def list_checkpoints(
    root: str | os.PathLike[str],
    *,
    all: bool = False,  # the word of `ls --all`
    alive_within: timedelta = _ONE_HOUR,
    check: bool = False,
    options: Options | None = None,
) -> list[CheckpointInfo]:
    """List the committed checkpoints directly under `root`, oldest first.

    Checkpoints are sorted by `CheckpointInfo.committed_at`, which copies keep; at equal times by name, numbers by
    value. Each checkpoint costs one listing and one small read. With `all`, each folder costs two listings and a read
    of its whole manifest. Unfinished uploads are left out if the store refuses to list them.

    Args:
        root: Folder of the checkpoints.
        all: Also list, at `root` and directly under it, damaged checkpoints, uncommitted saves and checkpoints of
            torch's own writer, each with its state and size.
        alive_within: With `all`, an uncommitted save is in progress if it wrote something in this time and began after
            the last commit. Otherwise it is garbage.
        check: With `all`, validate the entry of every tensor in each manifest, as a load does. This takes about twenty
            times the computing.
        options: How to reach the store.

    Returns:
        The checkpoints. Empty if there is none.

    Raises:
        InvalidURIError: `root` cannot name a folder.
        StoreError: A request failed, or this user may look at none of the folders.
        CheckpointChangedError: The folders change so fast that no two looks agree.

    Example::

        for info in cloudckpt.list_checkpoints("s3://bucket/run"):
            print(info.name, info.committed_at)

    """
    return list_with_fences(root, all=all, alive_within=alive_within, check=check, options=options or Options())[0]


def list_with_fences(
    root: str | os.PathLike[str], *, all: bool, alive_within: timedelta, check: bool, options: Options
) -> tuple[Listing[CheckpointInfo], int]:
    """Return `list_checkpoints`, and with `all` the number of folders that have only the fence of a removed one."""
    location = parse_location(root)
    client = open_client(location, options)
    looks = _FolderLooks(
        location,
        options,
        client,
        alive_since=datetime.now(timezone.utc) - alive_within,
        summaries=SummaryReader(check=check),
    )
    results = look_at_folders(
        looks.list_root_and_names if all else looks.list_names,
        looks.read_states if all else looks.find_commit,
        options=options,
        client=client,
        changing=lambda: CheckpointChangedError(
            f"the checkpoints at {location.uri} change all the time, so that no two looks found the same. List them "
            "again",
            uri=location.uri,
        ),
    )
    infos = [info for infos_of_folder in results.values() for info in infos_of_folder]
    if looks.denials and len(looks.denials) == len(infos):
        raise looks.denials[0]
    infos.sort(key=lambda info: (*commit_order(info.committed_at, info.name), info.attempt))
    return Listing(infos), sum(name in looks.fenced for name, infos_of_folder in results.items() if not infos_of_folder)


def commit_order(committed_at: datetime, name: str) -> tuple[datetime, list[tuple[int, str]]]:
    """Return the sort key of a checkpoint, oldest first. At equal times names decide, and numbers in them by value."""
    texts = _DIGITS.split(name)
    return committed_at, [(int(text), "") if _DIGITS.fullmatch(text) else (-1, text) for text in texts]


def latest(root: str | os.PathLike[str], *, options: Options | None = None) -> CheckpointInfo | None:
    """Return the checkpoint directly under `root` that was committed last.

    The checkpoint may be damaged; `load_latest` skips damaged checkpoints. Raises the errors of `list_checkpoints`. If
    there is no checkpoint, a warning names the folders under `root` that have checkpoints in them.

    Args:
        root: Folder of the checkpoints.
        options: How to reach the store.

    Returns:
        The checkpoint, or None if there is none.

    Example::

        newest = cloudckpt.latest("s3://bucket/run")
        if newest is not None:
            cloudckpt.load(newest.uri, model=model)

    """
    newest = next(reversed(list_checkpoints(root, options=options)), None)
    if newest is None and (deeper := describe_deeper(root, options or Options())):
        _log.warning("no checkpoint is committed directly under %s: %s", parse_location(root).uri, deeper)
    return newest


def describe_deeper(root: str | os.PathLike[str], options: Options) -> str:
    """Return words that name the folders under `root` with checkpoints in them; "" if there are none.

    The words are a hint, so failures are ignored, and only the last folders by name are looked at.
    """
    location = parse_location(root)
    try:
        names = [name for name in list_kept_folders(open_client(location, options)) if _is_openable(location, name)]
        folders = [name for name in names if has_checkpoints(open_client(location.child(name), options))]
    except CloudckptError:
        return ""
    return f"it has the {describe_folders(folders)}. Name the one that holds the checkpoints" if folders else ""


def look_at_folders(
    list_names: Callable[[], Sequence[str]],
    look: Callable[[str], tuple[_T, Hashable]],
    *,
    options: Options,
    client: StoreClient,
    changing: Callable[[], CheckpointChangedError],
) -> dict[str, _T]:
    """Return the result of `look` for each folder, by name, once two looks in a row agree on what is missing.

    `look` returns its result for a folder, and a truthy value if something is missing there: then the folder is looked
    at again. Two looks must also agree on the names of the folders, because a listing may lack one. Raises the error
    of `changing` if no two looks agree.

    The second listing is made beside the calls of `look`. It counts only if nothing is missing in any folder. Otherwise
    this order of events would hide a checkpoint:

    1. The second listing finds the folders.
    2. A save commits in a new folder, and the newest of the listed folders is deleted.
    3. `look` finds the deleted folder empty.
    """
    results: dict[str, tuple[_T, Hashable]] = {}
    early_listing: list[list[str]] = []

    def look_at(name: str | None) -> None:
        if name is None:
            early_listing.append(sorted(list_names()))
        else:
            results[name] = look(name)

    def look_at_all() -> tuple[Sequence[str], Hashable]:
        names = early_listing.pop() if early_listing else sorted(list_names())
        is_first = not results
        for name in [name for name, (_, missing) in results.items() if missing]:
            del results[name]
        num_threads = options.connections or DEFAULT_CONNECTIONS
        new: list[str | None] = [name for name in names if name not in results]
        if new and is_first and "" not in new:  # the root itself is seldom a checkpoint: it would count as missing
            new.insert(0, None)  # the second listing
        run_all(new, look_at, num_threads=num_threads, name="cloudckpt-list", on_failure=client.stop)
        all_missing = tuple((name, missing) for name, (_, missing) in sorted(results.items()) if missing)
        if all_missing:
            early_listing.clear()
        return names, all_missing

    client.confirm(look_at_all, unconfirmed=lambda answer: (*answer[0], answer[1]), changing=changing)
    return {name: result for name, (result, _) in sorted(results.items())}


def _is_openable(location: Location, name: str) -> bool:
    """Return True if a checkpoint can have this name. Names of folders of other tools may form no valid URI."""
    try:
        parse_location(location.child(name).uri)
    except InvalidURIError:
        return False
    return True


class _FolderLooks:
    """Looks at the folders under one root, for `list_checkpoints`. Several threads use it."""

    def __init__(
        self, root: Location, options: Options, client: StoreClient, *, alive_since: datetime, summaries: SummaryReader
    ) -> None:
        self._root, self._options, self._client = root, options, client
        self._alive_since, self._summaries = alive_since, summaries
        self._times = CommitTimes()
        self._uploads: Mapping[str, Sequence[UploadInfo]] = {}
        self.denials: list[AccessDeniedError] = []
        self.fenced: set[str] = set()
        """The names of folders without a checkpoint whose log has entries."""

    def list_names(self) -> list[str]:
        """List the folders under the root."""
        return [name for name in self._client.list_directories() if _is_openable(self._root, name)]

    def list_root_and_names(self) -> list[str]:
        """List the root itself as ``""`` and the folders under it, and group the unfinished uploads by folder."""
        self._uploads = group_uploads(self._client)
        names = (name for name in self._uploads if name and _is_openable(self._root, name))
        return sorted({"", *names, *self.list_names()})

    def find_commit(self, name: str) -> tuple[list[CheckpointInfo], Hashable]:
        """Return the checkpoint in a folder, or else the log, in which no existing manifest is current."""
        log = read_log_once(self._client, prefix=f"{name}/", is_lenient=True)
        entry, time = log.current_entry, None
        if entry is not None:
            time = self._times.read(self._client, f"{name}/{manifest_key(entry.number)}", entry)
        if time is None:
            return [], log
        return [CheckpointInfo(uri=self._root.child(name).uri, name=name, committed_at=time)], None

    def read_states(self, name: str) -> tuple[list[CheckpointInfo], Hashable]:
        """Return the states of everything in a folder, and the missing keys if no checkpoint there is whole."""
        location = self._root.child(name) if name else self._root
        try:
            client = self._client.at(open_store(location, self._options))
            inventory = Inventory(has_hidden_uploads=client.store.capabilities.has_hidden_uploads)
            for info in client.list("data/"):
                inventory.add_object(info)
            uploads = self._uploads.get(name, ())
            if client.store.capabilities.has_hidden_uploads:  # the listing of all fails if one folder is closed
                uploads = client.list_uploads("" if name else "data/")
            for upload in uploads:
                inventory.add_upload(upload)
            checkpoint, beside, vanished, fenced_at = self._read_checkpoint(location, client, inventory.items_at(""))
            alive_since = max(self._alive_since, fenced_at or self._alive_since)
            if name and fenced_at is not None:
                self.fenced.add(name)
            has_claims = any(item.kind == "claim" for item in beside)
            claimed = (find_claimed(client) or frozenset()) if has_claims else frozenset()
            referenced = [item for item in beside if item.key in claimed]
            unreferenced = [item for item in beside if item.key not in claimed]
            uncommitted = [
                *self._describe_attempts(location, referenced, checkpoint, alive_since=None),
                *self._describe_attempts(location, unreferenced, checkpoint, alive_since=alive_since),
            ]
            infos = [*([checkpoint] if checkpoint else []), *uncommitted]
            infos = infos or self._read_torch_checkpoint(location, client)
        except AccessDeniedError as error:
            self.denials.append(error)
            now = datetime.now(timezone.utc)
            denied = CheckpointInfo(
                uri=location.uri, name=location.name, committed_at=now, state="denied", problem=str(error)
            )
            return [denied], None
        return infos, vanished or {info.state for info in infos}.issubset(_UNCOMMITTED_STATES)

    def _read_checkpoint(
        self, location: Location, client: StoreClient, items: Sequence[FoundItem]
    ) -> tuple[CheckpointInfo | None, Sequence[FoundItem], Hashable, datetime | None]:
        """Return the checkpoint, if any; the data beside it; the log, if the current manifest is missing; and a time.

        The time is that of the newest fence, if no manifest is current: no save that began earlier can be committed. If
        the manifest is missing in two looks, the checkpoint is damaged: no program that follows the protocol removes
        the current one.
        """
        log = summary = vanished = None
        problem, state = "", _DAMAGED
        try:
            log = read_log_once(client)
            entry = log.current_entry
            summary = self._summaries.read(client, entry) if entry is not None else None
            if log.current_number is not None and summary is None:
                vanished = log
                problem = f"{manifest_key(log.current_number)} was removed by other means than cloudckpt's"
        except CheckpointChangedError:
            raise
        except UnsupportedFormatError as error:
            problem, state = str(error), _NEWER
        except CheckpointError as error:
            problem = str(error)
        if log is not None and summary is not None and entry is not None:
            named = {stored.key for stored in summary.objects if not stored.folder}
            elsewhere = [stored.size for stored in summary.objects if stored.folder]
            committed_at_ns = summary.committed_at_ns
            checkpoint = CheckpointInfo(
                uri=location.uri,
                name=location.name,
                committed_at=entry.modified_at if committed_at_ns is None else datetime_of(committed_at_ns),
                num_bytes=summary.num_bytes,
                num_objects=len(summary.objects),
                num_bytes_elsewhere=sum(elsewhere),
                num_objects_elsewhere=len(elsewhere),
                attempt=summary.attempt,
                save_id=summary.save_id or "",
                world_size=summary.world_size,
                num_tensors=len(summary.tensors),
                manifest_number=entry.number,
                metadata=summary.metadata,
            )
            return checkpoint, [item for item in items if item.key not in named], None, None
        if not problem:
            return None, items, None, max((entry.modified_at for entry in log.entries), default=None) if log else None
        entries = log.entries if log is not None else list_entries(client)
        times = [entry.modified_at for entry in entries] or [item.moment for item in items]
        unreadable = CheckpointInfo(
            uri=location.uri,
            name=location.name,
            committed_at=max(times, default=datetime.now(timezone.utc)),
            state=state,
            num_bytes=sum(item.size_bytes for item in items),
            num_objects=sum(item.kind == "data" for item in items),
            num_uploads=sum(item.kind == "upload" for item in items),
            problem=problem,
        )
        return unreadable, (), vanished, None

    def _describe_attempts(
        self,
        location: Location,
        items: Iterable[FoundItem],
        checkpoint: CheckpointInfo | None,
        *,
        alive_since: datetime | None,
    ) -> Iterable[CheckpointInfo]:
        """Describe each save that has data in `items`. Without `alive_since`, other checkpoints refer to it."""
        by_attempt: defaultdict[str, list[FoundItem]] = defaultdict(list)
        for item in items:
            if item.kind != "claim":
                by_attempt[item.attempt].append(item)
        for attempt, own_items in by_attempt.items():
            last_write = max(item.moment for item in own_items)
            if attempt:  # a server can date unfinished uploads wrongly
                last_write = max(last_write, attempt_time(attempt))
            objects = [item for item in own_items if item.kind == "data"]
            is_alive = (alive_since is not None and last_write >= alive_since) and (
                checkpoint is None
                or (
                    attempt > checkpoint.attempt
                    and (attempt_time(attempt) if attempt else last_write) >= checkpoint.committed_at
                )
            )
            yield CheckpointInfo(
                uri=location.uri,
                name=location.name,
                committed_at=last_write,
                state="referenced" if alive_since is None else "in progress" if is_alive else "garbage",
                num_bytes=sum(item.size_bytes for item in own_items),
                num_objects=len(objects),
                num_uploads=sum(item.kind == "upload" for item in own_items),
                attempt=attempt,
                world_size=len(
                    {item.key.rpartition("/")[2].partition("-")[0] for item in own_items if item.kind != "probe"}
                ),
            )

    def _read_torch_checkpoint(self, location: Location, client: StoreClient) -> list[CheckpointInfo]:
        return [
            CheckpointInfo(uri=location.uri, name=location.name, committed_at=info.modified_at, state="torch")
            for info in client.list(TORCH_METADATA_KEY)
            if info.key == TORCH_METADATA_KEY
        ]
