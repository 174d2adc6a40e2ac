"""What fsspec's file systems really do, and how to get an instance of one where it is needed.

fsspec promises neither atomic writes nor create-if-absent; some of what lies behind it does. The table below says
which, and everything that it does not name is taken to do neither.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec

from cloudckpt.errors import MissingDependencyError

Filesystem = Any  # fsspec.spec.AbstractFileSystem, whose methods have no types


class Create(enum.Enum):
    """How create-if-absent comes about."""

    NO = "it does not"
    LOCK = "look and write under a lock of this process, beyond which the file system does not reach"
    OVERWRITE = "pipe_file(overwrite=False), which sends the condition with the request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What one protocol does beyond what fsspec promises."""

    create: Create = Create.NO
    pipes_whole: bool = False
    """`pipe_file` makes the object visible whole or not at all."""
    locked: bool = False
    """Its calls are not safe to run side by side."""


_BACKENDS = {
    "memory": Backend(create=Create.LOCK, pipes_whole=True, locked=True),
    # Put Blob with If-None-Match: *; above 64 MiB, blocks that Put Block List makes an object of, with that condition.
    "abfs": Backend(create=Create.OVERWRITE, pipes_whole=True),
    "az": Backend(create=Create.OVERWRITE, pipes_whole=True),
}


def backend_of(kind: type[Filesystem]) -> Backend:
    """The table's entry for a class of file systems, less what its installed version lacks."""
    protocols = (kind.protocol,) if isinstance(kind.protocol, str) else kind.protocol
    found = next((_BACKENDS[protocol] for protocol in protocols if protocol in _BACKENDS), Backend())
    if found.create is Create.OVERWRITE and not _takes(kind, "overwrite"):
        return Backend(pipes_whole=found.pipes_whole, locked=found.locked)
    return found


def _takes(kind: type[Filesystem], parameter: str) -> bool:
    # The coroutine is what a class of ours writes itself; the method of that name is made from it.
    method = getattr(kind, "_pipe_file", None) or kind.pipe_file
    return parameter in inspect.signature(method).parameters


@contextlib.contextmanager
def _importing(protocol: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(f"{protocol}:// needs a package that is not installed: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How to make instances of one file system, in any process and thread. Never shows its options."""

    kind: type[Filesystem]
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of_protocol(cls, protocol: str, options: Mapping[str, Any]) -> Source:
        """Raises `MissingDependencyError` where the protocol's package is not installed."""
        with _importing(protocol):
            kind = fsspec.get_filesystem_class(protocol)  # type: ignore[no-untyped-call]
        return cls(kind=kind, options=dict(options))

    @classmethod
    def of_instance(cls, filesystem: Filesystem) -> Source:
        """New instances will equal `filesystem`: fsspec takes two with the same arguments for one."""
        return cls(kind=type(filesystem), args=tuple(filesystem.storage_args), options=dict(filesystem.storage_options))

    def new(self) -> Filesystem:
        """An instance of its own: nothing shared with other users of fsspec, and no cached listings if it can.

        Raises `MissingDependencyError`: some file systems import what they need only now.
        """
        options = {**self.options, "skip_instance_cache": True}
        takes = inspect.signature(self.kind.__init__).parameters.values()
        if any(taken.kind is taken.VAR_KEYWORD or taken.name == "use_listings_cache" for taken in takes):
            options["use_listings_cache"] = False
        protocol = self.kind.protocol
        with _importing(protocol if isinstance(protocol, str) else protocol[0]):
            return self.kind(*self.args, **options)


class Instances:
    """Hands out instances: one per process for asynchronous file systems, one per thread for all others.

    An event loop does not live through a fork, and most synchronous file systems hold one connection that two threads
    cannot share.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._shared: tuple[int, Filesystem] | None = None
        self._of_thread = threading.local()

    def __reduce__(self) -> tuple[type[Instances], tuple[Source]]:
        return Instances, (self.source,)

    def get(self) -> Filesystem:
        """The calling thread's instance."""
        if not self.source.kind.async_impl:
            mine: tuple[int, Filesystem] | None = getattr(self._of_thread, "instance", None)
            if mine is None or mine[0] != os.getpid():
                mine = self._of_thread.instance = (os.getpid(), self.source.new())
            return mine[1]
        shared = self._shared
        if shared is None or shared[0] != os.getpid():
            if shared is not None:
                self._lock = threading.Lock()  # forked, perhaps while another thread held it
            with self._lock:
                shared = self._shared
                if shared is None or shared[0] != os.getpid():
                    shared = self._shared = (os.getpid(), self.source.new())
        return shared[1]
