"""Find the committed steps under a root, and the metrics that were saved with them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, SupportsFloat, TypeVar

from cloudckpt._workers import each_done
from cloudckpt.commit.commit_time import CommitTimes
from cloudckpt.commit.manifest_log import (
    MOST_LOOKS,
    Entry,
    holds_torch_checkpoint,
    look_until_stable,
    manifest_key,
    parse_ranks,
    read_log,
    read_manifest,
)
from cloudckpt.errors import AccessDeniedError, CheckpointChangedError, CheckpointError, InvalidOptionError
from cloudckpt.io.retry import Retrier
from cloudckpt.manager.retention_policy import StepInfo, sort_newest_first
from cloudckpt.options import DEFAULT_CONNECTIONS, Options
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store
from cloudckpt.uri import Location

STEP_KEY = "step"
METRICS_KEY = "metrics"
"""Keys in the ``metadata`` of a manifest."""

_T = TypeVar("_T")
_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,17})(?:-again-([1-9][0-9]{0,17}))?")
_MAX_MANIFESTS = 4
"""Maximum number of manifests in memory at once: the manifest of a large model takes hundreds of MiB."""


def format_folder(step: int, again: int = 0) -> str:
    """Return the name of a step's folder. `again` counts the checkpoints that were saved beside damaged ones."""
    return f"step-{step}-again-{again}" if again else f"step-{step}"


def parse_folder(name: str) -> int | None:
    """Return the step whose folder is called `name`, or None if it is not the folder of a step."""
    match = _FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def parse_step_uri(uri: str) -> int:
    """Return the step at `uri`, which a manager has named."""
    step = parse_folder(uri.rpartition("/")[2])
    if step is None:
        raise ValueError(f"{uri} is not the URI of a step")
    return step


def check_metrics(metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float | None]:
    """Convert metrics to values that JSON can hold; None stands for a value that is not finite.

    Raises `InvalidOptionError` for anything that is not a number with a name.
    """
    if not isinstance(metrics, (Mapping, type(None))):
        raise InvalidOptionError(f"metrics must be a dict of numbers by name, not {metrics!r:.80}")
    numbers: dict[str, float | None] = {}
    for name, value in (metrics or {}).items():
        try:
            # float() of a tensor that requires gradients makes torch warn.
            plain = value.detach() if hasattr(value, "detach") else value
            number = None if isinstance(value, (str, bytes)) or not _is_json_text(name) else float(plain)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last for a non-scalar tensor
            number = None
        if number is None:
            raise InvalidOptionError(f"metrics must be numbers by name, not {name!r}: {value!r:.80}")
        numbers[name] = number if math.isfinite(number) else None
    return numbers


def _is_json_text(name: object) -> bool:
    """Return True for a string without lone surrogates, which UTF-8 cannot encode."""
    return isinstance(name, str) and not any("\ud800" <= character <= "\udfff" for character in name)


def build_metadata(step: int, numbers: Mapping[str, float | None]) -> dict[str, Any]:
    """Build the metadata of a step's manifest."""
    return {STEP_KEY: step, METRICS_KEY: dict(numbers)} if numbers else {STEP_KEY: step}


def parse_metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Read the metrics from the metadata of a manifest. Values of other types are another program's and left out."""
    values = metadata.get(METRICS_KEY)
    if not isinstance(values, dict):
        return {}
    return {
        name: _to_float(value)
        for name, value in values.items()
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    }


def _to_float(value: float | None) -> float:
    try:
        return math.nan if value is None else float(value)
    except OverflowError:  # a whole number in JSON can have any number of digits
        return math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFolder:
    """State of one step's folder at the time of a listing."""

    uri: str
    info: StepInfo | None = None
    """None if nothing is committed there."""
    number: int | None = None
    """Number of the manifest that counts."""
    top: int = -1
    """Highest number in its log, or the sum of those of its ranks; -1 for each empty log."""
    fenced_at: datetime | None = None
    """Time of the fence that a deleted checkpoint leaves, if there is nothing else."""
    denied: AccessDeniedError | None = None
    """Error that hides the folder's content or its metrics. All other fields but `uri` are unknown then."""
    problem: str = ""
    """Reason why the metrics are unknown: the manifest is damaged or of a newer format."""

    @property
    def is_missing(self) -> bool:
        """True if one look found nothing committed."""
        return self.info is None and self.denied is None


class Steps:
    """The steps under `root`. Thread-safe.

    Args:
        root: Folder of all steps.
        options: Options of the manager.
        get_num_ranks: Set if each rank saves on its own; returns the number of ranks. A step is committed once all of
            them have saved it.

    """

    def __init__(self, root: Location, options: Options, *, get_num_ranks: Callable[[], int] | None) -> None:
        self.root = root
        self.times = CommitTimes()
        self._options = options
        self._get_num_ranks = get_num_ranks
        self._metrics: dict[tuple[str, int, datetime], dict[str, float]] = {}

    def uri_of(self, step: int, again: int = 0) -> str:
        """Return the URI to which a step is saved."""
        return self._uri_of_folder(format_folder(step, again))

    def find_latest_uri(self, step: int) -> str:
        """Return the URI to which `step` was saved last, or else would be saved. Raises as `find_committed` does."""
        folders = self.list_folders(step=step)
        _raise_if_denied(folders)
        found = sort_newest_first([one.info for one in folders if one.info is not None])
        return found[0].uri if found else self.uri_of(step)

    def find_committed(self, *, with_metrics: bool) -> list[StepInfo]:
        """Return the committed steps, newest first.

        Raises:
            StoreError: The store failed, or denied access to a step, which could be the newest.
            CheckpointChangedError: No two looks agreed.

        """

        def look() -> tuple[list[StepFolder], Hashable]:
            folders = self.list_folders()
            _raise_if_denied(folders)
            if not with_metrics:
                return folders, None
            measured = self.read_metrics(folders)
            _raise_if_denied(measured)
            return measured, tuple(one for one, was in zip(measured, folders, strict=True) if one.top != was.top)

        folders = look_until_stable(look, changing=self._make_changed_error)
        return sort_newest_first([one.info for one in folders if one.info is not None])

    def find_torch_steps(self) -> list[int]:
        """Return the steps that torch's own writer has saved, lowest first. Raises as `find_committed` does."""

        def look(name: str, retrier: Retrier) -> Literal[True] | None:
            return holds_torch_checkpoint(self._open(name), retrier, is_confirmed=False) or None

        return sorted(self._find_foreign(look))

    def find_steps_of_other_mode(self) -> dict[int, int]:
        """Return the steps that a manager of the other mode, or one of fewer ranks, has saved.

        The values are the number of ranks that saved on their own, or 0 if all ranks saved one checkpoint together. A
        step that a rank has begun on its own and not committed is unfinished and left out. Raises as `find_committed`.
        """

        def is_committed(store: Store, retrier: Retrier, prefix: str = "") -> bool:
            log = read_log(store, retrier, prefix=prefix, is_confirmed=False, is_lenient=True)
            return log.counting is not None

        def look(name: str, retrier: Retrier) -> int | None:
            store = self._open(name)
            if self._get_num_ranks is None:
                if not is_committed(store, retrier, "rank-0/"):
                    return None
                return max(1, len(parse_ranks(retrier.collect(store.list_directories))))
            if is_committed(store, retrier):
                return 0
            ranks = parse_ranks(retrier.collect(store.list_directories))
            is_whole = ranks == list(range(len(ranks))) and 0 < len(ranks) < self._get_num_ranks()
            return len(ranks) if is_whole and all(is_committed(store, retrier, f"rank-{r}/") for r in ranks) else None

        return self._find_foreign(look)

    def list_folders(self, *, step: int | None = None, excluded_uris: Iterable[str] = ()) -> list[StepFolder]:
        """Look at the folders of all steps, or of one.

        A missing commit counts only after two equal looks, one after the other: logs only grow, so between the two
        nothing was committed anywhere. Raises `StoreError`, and `CheckpointChangedError` if no two looks agree.
        """
        retrier, excluded = self._make_retrier(), set(excluded_uris)
        found: dict[str, StepFolder] = {}

        def look(name: str) -> None:
            try:
                found[name] = self._look_at(name, retrier)
            except AccessDeniedError as error:
                found[name] = StepFolder(uri=self._uri_of_folder(name), denied=error)

        def look_at_all() -> tuple[list[StepFolder], Hashable]:
            names = {
                name
                for name in self._list_names(retrier)
                if self._uri_of_folder(name) not in excluded and step in (None, parse_folder(name))
            }
            for name in [name for name, one in found.items() if one.is_missing and name not in names]:
                del found[name]
            self._run_for_each([n for n in names if n not in found or found[n].is_missing], look, retrier)
            folders = [found[name] for name in sorted(found)]
            # The names are part of what two looks must agree on, because one listing may lack a folder.
            return folders, (tuple(sorted(names)), tuple(one for one in folders if one.is_missing))

        return look_until_stable(look_at_all, changing=self._make_changed_error)

    def read_metrics(self, folders: Sequence[StepFolder]) -> list[StepFolder]:
        """Add the metrics of the committed steps. Each manifest is read once and remembered.

        The metrics of a damaged manifest stay unknown, and `problem` says why. A step whose manifest has disappeared is
        looked at again.
        """
        retrier = self._make_retrier()
        found: dict[str, StepFolder] = {one.uri: one for one in folders}
        committed = [one.uri for one in folders if one.info is not None]

        def look(uri: str) -> None:
            try:
                for _ in range(MOST_LOOKS):
                    info, number = found[uri].info, found[uri].number
                    if info is None or number is None:
                        return
                    metrics = self._read_metrics_of(info, number, retrier)
                    if metrics is not None:
                        found[uri] = replace(found[uri], info=replace(info, metrics=metrics))
                        return
                    found[uri] = self._look_at(uri.rpartition("/")[2], retrier)
                raise self._make_changed_error()
            except AccessDeniedError as error:
                found[uri] = StepFolder(uri=uri, denied=error)
            except CheckpointChangedError:
                raise
            except CheckpointError as error:
                found[uri] = replace(found[uri], problem=str(error))

        self._run_for_each(committed, look, retrier, max_threads=_MAX_MANIFESTS)
        return [found[one.uri] for one in folders]

    def _find_foreign(self, look: Callable[[str, Retrier], _T | None]) -> dict[int, _T]:
        """Return the non-None results of `look` by step, once two looks at all folders agree."""
        retrier = self._make_retrier()

        def look_at_all() -> tuple[dict[str, _T], Hashable]:
            found: dict[str, _T] = {}
            names = self._list_names(retrier)

            def look_at(name: str) -> None:
                if (answer := look(name, retrier)) is not None:
                    found[name] = answer

            self._run_for_each(names, look_at, retrier)
            return found, (tuple(sorted(names)), tuple(sorted(found.items())))

        found = look_until_stable(look_at_all, changing=self._make_changed_error)
        return {parse_step_uri(self._uri_of_folder(name)): found[name] for name in sorted(found)}

    def _list_names(self, retrier: Retrier) -> list[str]:
        store = open_store(self.root, self._options)
        return [name for name in retrier.collect(store.list_directories) if parse_folder(name) is not None]

    def _run_for_each(
        self, items: Sequence[str], look: Callable[[str], None], retrier: Retrier, *, max_threads: int | None = None
    ) -> None:
        num_threads = self._options.connections or DEFAULT_CONNECTIONS
        num_threads = min(num_threads, max_threads or num_threads)
        for _ in each_done(items, look, num_threads=num_threads, name="cloudckpt-steps", on_failure=retrier.stop):
            pass

    def _look_at(self, name: str, retrier: Retrier) -> StepFolder:
        while (folder := self._try_to_look_at(name, retrier)) is None:
            pass  # the manifest was replaced or removed between two requests
        return folder

    def _try_to_look_at(self, name: str, retrier: Retrier) -> StepFolder | None:
        store = self._open(name)
        if self._get_num_ranks is not None:
            return self._try_to_look_at_ranks(name, store, self._get_num_ranks(), retrier)
        log = read_log(store, retrier, is_confirmed=False, is_lenient=True)
        if (entry := log.counting_entry) is not None:
            return self._build_committed(name, store, entry, log.top, retrier)
        is_fenced = log.counting is None and bool(log.entries)
        fenced_at = log.entries[-1].modified_at if is_fenced else None
        return StepFolder(uri=self._uri_of_folder(name), top=log.top, fenced_at=fenced_at)

    def _try_to_look_at_ranks(self, name: str, store: Store, num_ranks: int, retrier: Retrier) -> StepFolder | None:
        ranks = parse_ranks(retrier.collect(store.list_directories))
        if not set(range(num_ranks)) <= set(ranks):
            return StepFolder(uri=self._uri_of_folder(name))
        logs = [
            read_log(store, retrier, prefix=f"rank-{rank}/", is_confirmed=False, is_lenient=True)
            for rank in range(num_ranks)
        ]
        top = sum(log.top for log in logs)
        counting = [log.counting_entry for log in logs if log.counting_entry is not None]
        if len(counting) == num_ranks:  # the time of rank 0's commit is the step's: one clock orders all steps
            return self._build_committed(name, self._open(name, 0), counting[0], top, retrier)
        fences = [log.entries[-1].modified_at for log in logs if log.entries and log.counting is None]
        fenced_at = max(fences) if len(fences) == num_ranks else None
        return StepFolder(uri=self._uri_of_folder(name), top=top, fenced_at=fenced_at)

    def _build_committed(self, name: str, store: Store, entry: Entry, top: int, retrier: Retrier) -> StepFolder | None:
        moment = self.times.read(store, manifest_key(entry.number), entry, retrier)
        if moment is None:
            return None
        uri = self._uri_of_folder(name)
        info = StepInfo(step=parse_step_uri(uri), uri=uri, committed_at=moment)
        return StepFolder(uri=uri, info=info, number=entry.number, top=top)

    def _read_metrics_of(self, info: StepInfo, number: int, retrier: Retrier) -> dict[str, float] | None:
        """Return the metrics in one manifest, or None if it has disappeared."""
        key = (info.uri, number, info.committed_at)
        known = self._metrics.get(key)
        if known is not None:
            return known
        store = self._open(info.uri.rpartition("/")[2], None if self._get_num_ranks is None else 0)
        manifest = read_manifest(store, number, retrier)
        if manifest is None:
            return None
        self._metrics[key] = parse_metrics(manifest.metadata)
        return self._metrics[key]

    def _uri_of_folder(self, name: str) -> str:
        return self.root.child(name).uri

    def _open(self, name: str, rank: int | None = None) -> Store:
        location = self.root.child(name)
        return open_store(location if rank is None else location.child(f"rank-{rank}"), self._options)

    def _make_retrier(self) -> Retrier:
        return Retrier(retries=self._options.retries, timeout_s=self._options.timeout_s)

    def _make_changed_error(self) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"the steps under {self.root.uri} keep changing, so the committed ones cannot be told. Try again",
            uri=self.root.uri,
        )


def _raise_if_denied(folders: Sequence[StepFolder]) -> None:
    for one in folders:
        if one.denied is not None:
            raise one.denied
