"""torch's stream extensions (``torch.distributed.checkpoint._extension``), such as compression.

Transformed bytes are stored with the descriptors that undo the transformation, and can only be read whole. See
``docs/design/024-stream-extensions.md``.
"""

from __future__ import annotations

import importlib
import io
import typing
from collections.abc import Iterable, Sequence
from typing import IO, Any

import torch

from cloudckpt._messages import install_advice
from cloudckpt._torch_compat import Extension, ExtensionRegistry, StreamTransformExtension, ZStandard
from cloudckpt.errors import (
    CheckpointError,
    CloudckptError,
    InvalidOptionError,
    MissingDependencyError,
    UnsupportedFormatError,
)
from cloudckpt.options import MIB
from cloudckpt.tensors.tensor_bytes import dtype_of

_PIECE_BYTES = 16 * MIB
_MIN_LEVEL, _MAX_LEVEL = -100, 22
_MAX_THREADS = 256


class WriteTransforms:
    """The extensions of a save, in torch's order: the first is next to the store. Falsy if there are none.

    Raises `InvalidOptionError` for an extension without a descriptor, by which a reader would find it.
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

    def apply(self, fqn: str, content: memoryview, *, uri: str) -> tuple[memoryview, tuple[str, ...]]:
        """Return the stored form of `content`, and the descriptors that undo the transformation.

        Raises `CheckpointError`, with the name of the entry, if an extension fails.
        """
        target = _OpenBytesIO()
        stream: Any = target
        descriptors = tuple(extension.get_descriptor() for extension in self._extensions)
        try:
            for extension in self._extensions:
                stream = extension.transform_to(stream)
                if isinstance(stream, io.RawIOBase):
                    stream = _WholeWriter(stream)
            stream.write(content)
            stream.close()
        except CloudckptError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{fqn!r} could not be saved to {uri} through {', '.join(descriptors)}: "
                f"{type(error).__name__}: {error}",
                uri=uri,
            ) from error
        # List them in the order to undo them. torch's own writer lists them in the order of their application.
        return target.getbuffer(), descriptors


class ReadTransforms:
    """The extensions that a load can undo: first the given ones, then those of a registry, by default torch's."""

    def __init__(self, registry: ExtensionRegistry | None, extensions: Iterable[StreamTransformExtension] = ()) -> None:
        self._classes: dict[str, type[Extension]] = dict((registry or ExtensionRegistry()).extensions)
        if self._classes.get(ZStandard.registry_name()) is ZStandard:  # the same format; ours names the missing package
            self._classes[ZStandard.registry_name()] = Zstandard
        self._given = {extension.registry_name(): extension for extension in extensions}

    def check(self, descriptors: Iterable[str], *, fqn: str, uri: str) -> None:
        """Raise the error that `undo` would raise for a missing extension."""
        for descriptor in descriptors:
            self._find(descriptor, fqn=fqn, uri=uri)

    def undo(self, descriptors: Sequence[str], stored: Any, *, max_bytes: int, fqn: str, uri: str) -> bytearray | None:
        """Return the original bytes; None if they exceed `max_bytes`, since a few bytes can unpack to any number.

        Raises `UnsupportedFormatError` for an unknown descriptor, `MissingDependencyError`, and `CheckpointError` if an
        extension fails on bytes that are undamaged.
        """
        extensions = [self._find(descriptor, fqn=fqn, uri=uri) for descriptor in descriptors]
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
                "Check that the extension is set up as it was at the save (its key, its version)",
                uri=uri,
            ) from error
        return content

    def _find(self, descriptor: str, *, fqn: str, uri: str) -> StreamTransformExtension:
        name, _, version = descriptor.partition("/")
        given = self._given.get(name)
        if given is not None and given.get_descriptor() == descriptor:
            return given
        kind = type(given) if given is not None else self._classes.get(name)
        saved = f"{fqn!r} of {uri} was saved through the extension {descriptor!r}"
        if kind is None:
            raise UnsupportedFormatError(
                f"{saved}, which is not known here. Load it from Python, with the extension in the options",
                uri=uri,
            )
        try:
            extension = kind.from_descriptor(version)
        except MissingDependencyError as error:
            raise MissingDependencyError(f"{saved}. {error}") from error
        except Exception as error:
            raise UnsupportedFormatError(
                f"{saved}, which {kind.__name__} does not take: {type(error).__name__}: {error}", uri=uri
            ) from error
        if not isinstance(extension, StreamTransformExtension):
            raise UnsupportedFormatError(
                f"{saved}, for which {kind.__name__} gives no stream extension, but a {type(extension).__name__}",
                uri=uri,
            )
        return extension


def extend_registry(registry: ExtensionRegistry | None, extensions: Iterable[StreamTransformExtension]) -> Any:
    """Return a registry for torch's own reader that has the classes of `extensions` too."""
    added = tuple(extensions)
    if not added:
        return registry
    both = ExtensionRegistry()
    both.extensions.update(registry.extensions if registry is not None else {})
    for extension in added:
        both.register(type(extension))
    return both


def decode_chunk(content: bytes | bytearray, dtype: str, lengths: Sequence[int]) -> torch.Tensor:
    """Return a transformed chunk as a tensor of its original bytes. The tensor shares the memory of a ``bytearray``."""
    if not content:
        return torch.empty(tuple(lengths), dtype=dtype_of(dtype), device="cpu")
    writable = content if isinstance(content, bytearray) else bytearray(content)
    flat: torch.Tensor = torch.frombuffer(writable, dtype=torch.uint8)
    return flat.view(dtype_of(dtype)).view(tuple(lengths))


class _OpenBytesIO(io.BytesIO):
    """A `BytesIO` that keeps its content when another stream closes it."""

    def close(self) -> None:
        pass


class _WholeWriter(io.BufferedIOBase):
    """Writes until a raw stream has taken all bytes. One write may take fewer, which the next extension may not
    check.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        remaining = memoryview(data).cast("B")
        num_bytes = len(remaining)
        while len(remaining):
            num_taken = self._raw.write(remaining)
            if not num_taken:
                raise BlockingIOError(f"{type(self._raw).__name__} takes no more")
            remaining = remaining[num_taken:]
        return num_bytes

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def close(self) -> None:
        self._raw.close()
        super().close()


class Zstandard(StreamTransformExtension):
    """Compresses with Zstandard (RFC 8878), as a stream extension of torch's.

    A load needs no option to read it, and torch's ``ZStandard`` reads it too: both have the same descriptor.

    Args:
        level: From -100 (fast) to 22 (small).
        threads: Number of threads that compress each tensor. 0 adds no thread.

    Raises:
        InvalidOptionError: An argument is out of its range.
        MissingDependencyError: The package ``zstandard`` is not installed.

    Example::

        options = cloudckpt.Options(extensions=[cloudckpt.Zstandard(level=3)])
        cloudckpt.save("s3://bucket/run/step-100", model=model, options=options)
        cloudckpt.load("s3://bucket/run/step-100", model=model)

    """

    def __init__(self, *, level: int = 3, threads: int = 0) -> None:
        super().__init__()
        for name, value, low, high in (("level", level, _MIN_LEVEL, _MAX_LEVEL), ("threads", threads, 0, _MAX_THREADS)):
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise InvalidOptionError(
                    f"Zstandard: {name} must be a whole number from {low} to {high}, not {value!r}"
                )
        self.level = level
        self.threads = threads
        import_zstandard("Zstandard")

    @staticmethod
    def registry_name() -> str:
        """Return the name by which a reader finds the extension."""
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> Zstandard:
        """Return an extension that reads what `get_descriptor` describes. Raises ``ValueError`` for a newer version."""
        if version.partition(".")[0] != "1":
            raise ValueError(f"version {version} is newer than what is known here, version 1")
        return Zstandard()

    def get_descriptor(self) -> str:
        """Return the descriptor that the manifest has."""
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that compresses into `output`."""
        compressor = import_zstandard("Zstandard").ZstdCompressor(level=self.level, threads=self.threads)
        return typing.cast("IO[bytes]", compressor.stream_writer(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # torch's name
        """Return a stream that decompresses `input`."""
        return typing.cast("IO[bytes]", import_zstandard("Zstandard").ZstdDecompressor().stream_reader(input))


def import_zstandard(what: str) -> Any:
    """Return the module of the package zstandard, which `what` needs. Raises `MissingDependencyError`."""
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise MissingDependencyError(f"{what} needs the package zstandard: {install_advice('zstd')}") from error
