"""The files of an export. The file by which readers find the others is written last."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from cloudckpt.commit.log import settle
from cloudckpt.convert.endpoints import part_bytes_for, upload_session
from cloudckpt.convert.reports import Progress
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    Hint,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from cloudckpt.io.resume import Body
from cloudckpt.pipeline.context import Context
from cloudckpt.stores._body import crc32c_of
from cloudckpt.tensors.host_memory import Arena

_log = logging.getLogger("cloudckpt")

_MAX_SHOWN = 3
_WILDCARD = re.compile(r"[*?[]")


class Files:
    """Files of one export in one folder of a store.

    `patterns` match the names that an export of this format writes. If such a file exists, `check` fails, unless
    `overwrite`. `clear` then removes the old export before any file is written, beginning with `entries`, the files by
    which readers find the others.
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
        """Raise `CheckpointExistsError` if a file exists that may not be replaced."""
        if not self._overwrite:
            self._refuse(self._find_names())

    def _refuse(self, found: Sequence[str]) -> None:
        if found:
            more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
            raise CheckpointExistsError(
                f"{', '.join(self._target.store.url(name) for name in found[:_MAX_SHOWN])}{more} is there already: "
                "nothing was written",
                uri=self._target.uri,
                hint=Hint(
                    advice="Choose another place, or pass {option} to replace it.", option="overwrite", value="True"
                ),
            )

    def clear(self, names: Iterable[str]) -> None:
        """Remove the export that is to be replaced. Without `overwrite`, make sure that no file has one of `names`.

        Raises what `check` raises. A HEAD finds what a listing may have left out.
        """
        target = self._target
        if not self._overwrite:
            self._refuse([name for name in names if self._is_there(name)])
            return
        doomed = sorted(self._find_names(), key=lambda name: name not in self._entries)
        if doomed:
            target.retrier.call(target.store.delete, doomed)

    @contextlib.contextmanager
    def upload(self, *, budget_bytes: int) -> Iterator[Callable[[str, Callable[[Arena], Body]], None]]:
        """Yield a function that uploads a file of a given name and body. All files exist when the context ends."""
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
            session.tasks.join()
            self.written |= {receipt.key: receipt.size_bytes for receipt in session.receipts()}

    def upload_only(self, name: str, body_in: Callable[[Arena], Body], *, size_bytes: int, budget_bytes: int) -> None:
        """Upload the only file of an export. One that takes one request is created only if absent."""
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
        """Put the file by which readers find the others. A file that another program put there meanwhile stays."""
        self._put_last(name, [memoryview(content)])

    def _put_last(self, name: str, views: Sequence[memoryview]) -> None:
        target, crc32c, size_bytes = self._target, crc32c_of(views), sum(view.nbytes for view in views)
        is_creating = self._creates()
        try:
            target.retrier.call(target.store.put, name, views, crc32c=crc32c, if_absent=is_creating)
        except ObjectExistsError as error:
            # It is ours if the answer to an earlier try was lost.
            if target.retrier.call(target.store.read, name, max_bytes=1 << 40) != b"".join(views):
                mixed = " The files of the two may be mixed:" if self.written else " To keep both,"
                raise CheckpointExistsError(
                    f"{target.store.url(name)} came to be there while this export ran, and was left alone.{mixed} "
                    "export to a place of its own",
                    uri=target.uri,
                ) from error
        except StoreError:
            self._remove([name, *self.written])  # the put may have succeeded all the same
            raise
        self.written[name] = size_bytes
        self._progress.add(size_bytes)

    def _remove(self, names: Sequence[str]) -> None:
        target = self._target
        try:
            target.new_retrier().call(target.store.delete, names)
        except StoreError as error:
            _log.warning("could not remove what a failed export left: %s", error)

    def _find_names(self) -> list[str]:
        """Find the files of an earlier export. Two listings must agree, because one may lack a file."""

        def look() -> tuple[list[str], Hashable]:
            names = self._list_names()
            return names, ("found", *names)

        def changing() -> CheckpointChangedError:
            return CheckpointChangedError(
                f"{self._target.uri} lists other files each time: nothing was written. Export to a place of its own",
                uri=self._target.uri,
            )

        return settle(look, changing=changing)

    def _is_there(self, name: str) -> bool:
        try:
            self._target.retrier.call(self._target.store.head, name)
        except ObjectNotFoundError:
            return False
        return True

    def _list_names(self) -> list[str]:
        target = self._target
        # A folder can hold very many other files, so only these prefixes are listed.
        prefixes = {_WILDCARD.split(pattern, maxsplit=1)[0] for pattern in self._patterns}
        infos = target.retrier.call(lambda: [info for prefix in prefixes for info in target.store.list(prefix)])
        names = {info.key for info in infos if "/" not in info.key}
        return sorted(name for name in names if any(fnmatch.fnmatchcase(name, each) for each in self._patterns))

    def _creates(self) -> bool:
        """Return True if the last file may only be created, and the store supports that."""
        target = self._target
        if self._overwrite or target.options.commit != "conditional":
            return False
        return target.new_retrier().call(target.store.probe).conditional_create
