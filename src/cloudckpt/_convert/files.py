"""The files of an export: written once, the one by which readers find the others last."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import re
from collections.abc import Callable, Iterator, Sequence

from cloudckpt._convert.bodies import FileBody
from cloudckpt._convert.progress import Progress
from cloudckpt._convert.sides import part_bytes_for, upload_session
from cloudckpt._pipeline.context import Context
from cloudckpt._stage.arena import Arena
from cloudckpt._transfer.resume import Body
from cloudckpt.errors import CheckpointExistsError, ObjectExistsError, StoreError
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
        found = self._found()
        if found and not self._overwrite:
            more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
            raise CheckpointExistsError(
                f"{', '.join(self._target.store.url(name) for name in found[:_MAX_SHOWN])}{more} is there already, and "
                "overwrite is False: nothing was written. Choose another place, or pass overwrite=True to replace it",
                uri=self._target.uri,
            )

    def clear(self) -> None:
        """Remove what is to be replaced."""
        target, found = self._target, self._found() if self._overwrite else []
        doomed = sorted(found, key=lambda name: name not in self._entries)
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

    def upload_file(self, name: str, path: str, *, size_bytes: int, budget_bytes: int) -> None:
        """One local file, whose size is `size_bytes`."""
        with self.upload(budget_bytes=budget_bytes) as submit:
            submit(name, lambda arena: FileBody(path, arena, size_bytes=size_bytes))

    def put_last(self, name: str, content: bytes) -> None:
        """The file by which readers find the others. Where one came to be there meanwhile, it stays."""
        try:
            self._put_last(name, content)
        except StoreError:
            self._remove([name, *self.written])  # it may be there all the same
            raise

    def _put_last(self, name: str, content: bytes) -> None:
        target, views = self._target, [memoryview(content)]
        crc32c = crc32c_of(views)
        is_creating = not self._overwrite and target.options.commit == "conditional" and self._can_create()
        try:
            target.retrier.call(lambda: target.store.put(name, views, crc32c=crc32c, if_absent=is_creating))
        except ObjectExistsError as error:
            if target.retrier.call(lambda: target.store.read(name, max_bytes=1 << 40)) != content:
                raise CheckpointExistsError(
                    f"{target.store.url(name)} came to be there while this export ran, and was left alone. The files "
                    "of the two may be mixed: export to a place of its own",
                    uri=target.uri,
                ) from error
        self.written[name] = len(content)
        self._progress.add(len(content))

    def _remove(self, names: Sequence[str]) -> None:
        target = self._target
        try:
            target.new_retrier().call(lambda: target.store.delete(names))
        except StoreError as error:
            _log.warning("could not remove what a failed export left: %s", error)

    def _found(self) -> list[str]:
        target = self._target
        # By what the names begin with: beside the file, there may be a bucket's worth of others.
        prefixes = {_WILDCARD.split(pattern, maxsplit=1)[0] for pattern in self._patterns}
        infos = target.retrier.call(lambda: [info for prefix in prefixes for info in target.store.list(prefix)])
        names = {info.key for info in infos if "/" not in info.key}
        return sorted(name for name in names if any(fnmatch.fnmatchcase(name, each) for each in self._patterns))

    def _can_create(self) -> bool:
        return self._target.new_retrier().call(self._target.store.probe).conditional_create
