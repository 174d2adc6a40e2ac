"""Zstandard, as torch's own extension of that name stores it."""

from __future__ import annotations

import importlib
import typing
from typing import IO, Any

from torch.distributed.checkpoint._extension import StreamTransformExtension

from cloudckpt.errors import InvalidOptionError, MissingDependencyError

_LEAST_LEVEL, _MOST_LEVEL = -100, 22
_MOST_THREADS = 256


class Zstandard(StreamTransformExtension):
    """Compresses with Zstandard (RFC 8878), for ``Options(extensions=[Zstandard()])``.

    `level` goes from -100 (fast) to 22 (small). With `threads`, each tensor is compressed by so many at once. Loads
    need neither: they know it without being told, and so does torch's ``ZStandard``, whose descriptor it shares.

    Raises `InvalidOptionError`; `MissingDependencyError` without the package ``zstandard``.
    """

    def __init__(self, *, level: int = 3, threads: int = 0) -> None:
        super().__init__()
        for name, value, least, most in (
            ("level", level, _LEAST_LEVEL, _MOST_LEVEL),
            ("threads", threads, 0, _MOST_THREADS),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InvalidOptionError(
                    f"Zstandard: {name} must be a whole number from {least} to {most}, not {value!r}"
                )
        self.level = level
        self.threads = threads
        _library()

    @staticmethod
    def registry_name() -> str:
        """By which a reader looks for it."""
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> Zstandard:
        """To read what was written with `get_descriptor`. Raises ``ValueError`` for a newer version."""
        if version.partition(".")[0] != "1":
            raise ValueError(f"version {version} is newer than what is known here, version 1")
        return Zstandard()

    def get_descriptor(self) -> str:
        """As the manifest has it."""
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """A stream that compresses into `output`."""
        compressor = _library().ZstdCompressor(level=self.level, threads=self.threads)
        return typing.cast("IO[bytes]", compressor.stream_writer(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002  # torch's name
        """A stream that decompresses `input`."""
        return typing.cast("IO[bytes]", _library().ZstdDecompressor().stream_reader(input))


def _library() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise MissingDependencyError("Zstandard needs the package zstandard: pip install 'cloudckpt[zstd]'") from error
