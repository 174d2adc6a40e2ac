"""The files of an export: written once, the one by which readers find the others last."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from cloudckpt._commit.resolve import settle
from cloudckpt._convert.progress import Progress
from cloudckpt._convert.sides import part_bytes_for, upload_session
from cloudckpt._pipeline.context import Context
from cloudckpt._stage.arena import Arena
from cloudckpt._transfer.resume import Body
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from cloudckpt.stores._body import crc32c_of

_log = logging.getLogger("cloudckpt")

_MAX_SHOWN = 3
_WILDCARD = re.compile(r"[*?[]")


class Files:
    """Files in one folder of a store.

    `patterns` fit the names of what an export of this format writes. What is there with such a name is left alone, and
    makes `check` fail, unless `overwrite`; then `clear` has the old export vanish as a whole before any file is
    written, by removing `entries`, the files by which readers find the others, first.
    """

    def __init__(
        self,
        target: Context,
        progress: Progress,
        *,
        patterns: Sequence[str],
        entries: Sequence[str],
        overwrite: bool,
        tile_bytes: int,
    ) -> None:
        self._target = target
        self._progress = progress
        self._patterns = patterns
        self._entries = entries
        self._overwrite = overwrite
        self._tile_bytes = tile_bytes
        self.written: dict[str, int] = {}
        """The sizes, by their names."""

    def check(self) -> None:
        """Raises `CheckpointExistsError` where something is there already that may not be replaced."""
        if not self._overwrite:
            self._refuse(self._found())

    def _refuse(self, found: Sequence[str]) -> None:
        if found:
            more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
            raise CheckpointExistsError(
                f"{', '.join(self._target.store.url(name) for name in found[:_MAX_SHOWN])}{more} is there already, and "
                "overwrite is False: nothing was written. Choose another place, or pass overwrite=True to replace it",
                uri=self._target.uri,
            )

    def clear(self, names: Iterable[str]) -> None:
        """Remove what is to be replaced; or, where nothing may be, make sure that nothing lies at `names`.

        Raises as `check` does: a HEAD tells of what a listing may have left out.
        """
        target = self._target
        if not self._overwrite:
            self._refuse([name for name in names if self._is_there(name)])
            return
        doomed = sorted(self._found(), key=lambda name: name not in self._entries)
        if doomed:
            target.retrier.call(lambda: target.store.delete(doomed))

    @contextlib.contextmanager
    def upload(self, *, budget_bytes: int) -> Iterator[Callable[[str, Callable[[Arena], Body]], None]]:
        """Gives what uploads one file, of a name and of what makes its body of an arena. All are there at the end."""
        part_bytes = part_bytes_for(self._target, budget_bytes=budget_bytes, tile_bytes=self._tile_bytes)
        with (
            contextlib.closing(Arena(budget_bytes=budget_bytes)) as arena,
            upload_session(
                self._target, self._progress, part_bytes=part_bytes, tile_bytes=self._tile_bytes, resumable=False
            ) as session,
        ):

            def submit(name: str, body_in: Callable[[Arena], Body]) -> None:
                session.submit(name, body_in(arena))

            yield submit
            self.written |= {receipt.key: receipt.size_bytes for receipt in session.finish()}

    def upload_only(self, name: str, body_in: Callable[[Arena], Body], *, size_bytes: int, budget_bytes: int) -> None:
        """The one file of an export, of `size_bytes`. It is created where it goes in one request: as in `put_last`."""
        store = self._target.store
        part_bytes = part_bytes_for(self._target, budget_bytes=budget_bytes, tile_bytes=self._tile_bytes)
        in_parts = store.capabilities.multipart and size_bytes > min(part_bytes, store.limits.max_put_bytes)
        if in_parts or not self._creates():
            with self.upload(budget_bytes=budget_bytes) as submit:
                submit(name, body_in)
            return
        with (
            contextlib.closing(Arena(budget_bytes=budget_bytes)) as arena,
            body_in(arena).open(0, size_bytes) as views,
        ):
            self._put_last(name, views)
        self._target.emit("save.part_uploaded", key=name, num_bytes=size_bytes)
        self._target.emit("save.object_uploaded", key=name, num_bytes=size_bytes)

    def put_last(self, name: str, content: bytes) -> None:
        """The file by which readers find the others. Where one came to be there meanwhile, it stays."""
        self._put_last(name, [memoryview(content)])

    def _put_last(self, name: str, views: Sequence[memoryview]) -> None:
        target, crc32c, size_bytes = self._target, crc32c_of(views), sum(view.nbytes for view in views)
        is_creating = self._creates()
        try:
            target.retrier.call(lambda: target.store.put(name, views, crc32c=crc32c, if_absent=is_creating))
        except ObjectExistsError as error:
            # It may be ours, where the answer to an earlier try was lost. Where that cannot be told, it stays.
            if target.retrier.call(lambda: target.store.read(name, max_bytes=1 << 40)) != b"".join(views):
                mixed = " The files of the two may be mixed:" if self.written else " To keep both,"
                raise CheckpointExistsError(
                    f"{target.store.url(name)} came to be there while this export ran, and was left alone.{mixed} "
                    "export to a place of its own",
                    uri=target.uri,
                ) from error
        except StoreError:
            self._remove([name, *self.written])  # it may be there all the same
            raise
        self.written[name] = size_bytes
        self._progress.add(size_bytes)

    def _remove(self, names: Sequence[str]) -> None:
        target = self._target
        try:
            target.new_retrier().call(lambda: target.store.delete(names))
        except StoreError as error:
            _log.warning("could not remove what a failed export left: %s", error)

    def _found(self) -> list[str]:
        """What lies there, as two looks in a row list it: one may lack some of it."""

        def look() -> tuple[list[str], Hashable]:
            names = self._listed()
            return names, ("found", *names)

        def changing() -> CheckpointChangedError:
            return CheckpointChangedError(
                f"{self._target.uri} lists other files each time: nothing was written. Export to a place of its own",
                uri=self._target.uri,
            )

        return settle(look, changing=changing)

    def _is_there(self, name: str) -> bool:
        try:
            self._target.retrier.call(lambda: self._target.store.head(name))
        except ObjectNotFoundError:
            return False
        return True

    def _listed(self) -> list[str]:
        target = self._target
        # By what the names begin with: beside the file, there may be a bucket's worth of others.
        prefixes = {_WILDCARD.split(pattern, maxsplit=1)[0] for pattern in self._patterns}
        infos = target.retrier.call(lambda: [info for prefix in prefixes for info in target.store.list(prefix)])
        names = {info.key for info in infos if "/" not in info.key}
        return sorted(name for name in names if any(fnmatch.fnmatchcase(name, each) for each in self._patterns))

    def _creates(self) -> bool:
        """Whether the file that decides may only be created, and the store can do so."""
        target = self._target
        if self._overwrite or target.options.commit != "conditional":
            return False
        return target.new_retrier().call(target.store.probe).conditional_create
