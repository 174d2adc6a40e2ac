"""torch's stream extensions (`torch.distributed.checkpoint._extension`), such as compression.

What is transformed is stored as it comes out, with the descriptors that undo it; it can only be read whole. See
``docs/design/024-stream-extensions.md``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._extension import (
    Extension,
    ExtensionRegistry,
    StreamTransformExtension,
    ZStandard,
)
from torch.distributed.checkpoint.planner import WriteItem

from cloudckpt._manifest.torch_dtypes import dtype_of
from cloudckpt._stage.zstandard import Zstandard
from cloudckpt.errors import (
    CheckpointError,
    CloudckptError,
    InvalidOptionError,
    MissingDependencyError,
    UnsupportedFormatError,
)
from cloudckpt.options import MIB

_PIECE_BYTES = 16 * MIB


class WriteTransforms:
    """The extensions of a save, in torch's order: the first is the one next to the store. Falsy where there are none.

    Raises `InvalidOptionError` for one that has no descriptor, by which a reader would find it.
    """

    def __init__(self, extensions: Iterable[StreamTransformExtension] | None) -> None:
        self._extensions = tuple(extensions or ())
        for extension in self._extensions:
            descriptor = extension.get_descriptor()
            if not isinstance(descriptor, str) or not descriptor:
                raise InvalidOptionError(
                    f"Options: the descriptor of the extension {type(extension).__name__} must be a text such as "
                    f"'stream.zstd/1', not {descriptor!r}"
                )

    def __bool__(self) -> bool:
        return bool(self._extensions)

    def apply(self, item: WriteItem, content: memoryview, *, uri: str) -> tuple[memoryview, tuple[str, ...]]:
        """`content` as it is to be stored, and the descriptors that undo it.

        Raises `CheckpointError`, with the item's name, where an extension fails.
        """
        target = io.BytesIO()
        stream: Any = _Kept(target)
        try:
            for extension in self._extensions:
                stream = _whole(extension.transform_to(stream))
            stream.write(content)
            stream.close()
        except CloudckptError:
            raise
        except Exception as error:
            names = ", ".join(extension.get_descriptor() for extension in self._extensions)
            raise CheckpointError(
                f"{item.index.fqn!r} could not be saved to {uri} through {names}: {type(error).__name__}: {error}",
                uri=uri,
            ) from error
        # In the order to undo them, and not in that of their application, as torch's own writer has it.
        return target.getbuffer(), tuple(extension.get_descriptor() for extension in self._extensions)


class ReadTransforms:
    """What a load knows to undo: what its `registry` has, or torch's own registry, and `extensions` before these."""

    def __init__(self, registry: ExtensionRegistry | None, extensions: Iterable[StreamTransformExtension] = ()) -> None:
        self._classes: dict[str, type[Extension]] = dict((registry or ExtensionRegistry()).extensions)
        if self._classes.get(ZStandard.registry_name()) is ZStandard:  # the same format; it says what is missing
            self._classes[ZStandard.registry_name()] = Zstandard
        self._given = {extension.registry_name(): extension for extension in extensions}

    def check(self, descriptors: Iterable[str], *, fqn: str, uri: str) -> None:
        """Raise what `undo` would raise for lack of an extension."""
        for descriptor in descriptors:
            self._known(descriptor, fqn=fqn, uri=uri)

    def undo(self, descriptors: Sequence[str], stored: Any, *, max_bytes: int, fqn: str, uri: str) -> bytearray | None:
        """The original bytes; None where there are more than `max_bytes`, since a few bytes can unpack to any number.

        Raises `UnsupportedFormatError` for a descriptor that is not known, `MissingDependencyError`, and
        `CheckpointError` where an extension fails on bytes that are what was stored.
        """
        extensions = [self._known(descriptor, fqn=fqn, uri=uri) for descriptor in descriptors]
        stream: Any = io.BytesIO(stored)
        content = bytearray()
        try:
            for extension in extensions:
                stream = extension.transform_from(stream)
            while piece := stream.read(min(max_bytes + 1 - len(content), _PIECE_BYTES)):
                content += piece
                if len(content) > max_bytes:
                    return None
        except (CloudckptError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{fqn!r} of {uri} could not be decoded by {', '.join(descriptors)}: {type(error).__name__}: {error}. "
                "Look whether the extension is set up as it was at the save (its key, its version)",
                uri=uri,
            ) from error
        return content

    def _known(self, descriptor: str, *, fqn: str, uri: str) -> StreamTransformExtension:
        name, _, version = descriptor.partition("/")
        given = self._given.get(name)
        if given is not None and given.get_descriptor() == descriptor:
            return given
        kind = type(given) if given is not None else self._classes.get(name)
        if kind is None:
            raise UnsupportedFormatError(
                f"{fqn!r} of {uri} was saved through the extension {descriptor!r}, which is not known here. Give it to "
                "the load: Options(extensions=[…]), or ObjectStoreReader(_extension_registry=…)",
                uri=uri,
            )
        try:
            extension = kind.from_descriptor(version)
        except MissingDependencyError as error:
            raise MissingDependencyError(f"{fqn!r} of {uri} was saved through {descriptor!r}. {error}") from error
        except Exception as error:
            raise UnsupportedFormatError(
                f"{fqn!r} of {uri} was saved through {descriptor!r}, which {kind.__name__} does not take: "
                f"{type(error).__name__}: {error}",
                uri=uri,
            ) from error
        if not isinstance(extension, StreamTransformExtension):
            raise UnsupportedFormatError(
                f"{fqn!r} of {uri} was saved through {descriptor!r}, for which {kind.__name__} gives no stream "
                f"extension, but a {type(extension).__name__}",
                uri=uri,
            )
        return extension


def registry_with(registry: ExtensionRegistry | None, extensions: Iterable[StreamTransformExtension]) -> Any:
    """For torch's own reader: `registry`, and the classes of `extensions` as well."""
    added = tuple(extensions)
    if not added:
        return registry
    both = ExtensionRegistry()
    both.extensions.update(registry.extensions if registry is not None else {})
    for extension in added:
        both.register(type(extension))
    return both


def chunk_of(content: bytes | bytearray, dtype: str, lengths: Sequence[int]) -> torch.Tensor:
    """A stored chunk, of all its bytes as they were before they were transformed. It keeps a ``bytearray``'s memory."""
    if not content:
        return torch.empty(tuple(lengths), dtype=dtype_of(dtype), device="cpu")
    writable = content if isinstance(content, bytearray) else bytearray(content)
    flat: torch.Tensor = torch.frombuffer(writable, dtype=torch.uint8)
    return flat.view(dtype_of(dtype)).view(tuple(lengths))


class _Kept(io.BufferedIOBase):
    """Writes to `target`, which stays open when this is closed."""

    def __init__(self, target: io.BytesIO) -> None:
        self._target = target

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._target.write(data)


def _whole(stream: Any) -> Any:
    """`stream`, but that it takes all that it is given.

    A raw one may take less and say so, and who writes to it, be it the next extension, may not listen.
    """
    return _Insisting(stream) if isinstance(stream, io.RawIOBase) else stream


class _Insisting(io.BufferedIOBase):
    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        num_bytes = len(rest)
        while len(rest):
            num_taken = self._raw.write(rest)
            if not num_taken:
                raise BlockingIOError(f"{type(self._raw).__name__} takes no more")
            rest = rest[num_taken:]
        return num_bytes

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def close(self) -> None:
        self._raw.close()
        super().close()
