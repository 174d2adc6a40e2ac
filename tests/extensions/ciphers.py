"""Extensions as users write them, in a module that the upload process can import."""

from __future__ import annotations

import io
from typing import IO, Any

from torch.distributed.checkpoint._extension import StreamTransformExtension


class Xor(StreamTransformExtension):
    """A cipher with a key of its own, which its class does not know."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key = key

    @staticmethod
    def registry_name() -> str:
        return "tests.xor"

    @staticmethod
    def from_descriptor(version: str) -> Xor:
        raise ValueError("the key is missing")

    def get_descriptor(self) -> str:
        return "tests.xor/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Writer(output, self.key)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # torch's name
        return _Reader(input, self.key)  # type: ignore[return-value]


class _Writer(io.RawIOBase):  # without `writable`, as a stream of torch's own
    """Takes less than it is given, as raw streams may."""

    def __init__(self, output: IO[bytes], key: int) -> None:
        self._output, self._key = output, key

    def write(self, data: Any) -> int:
        taken = bytes(data[:1000])
        self._output.write(flipped(taken, self._key))
        return len(taken)

    def close(self) -> None:
        if not self.closed:
            self._output.close()
        super().close()


class _Reader(io.RawIOBase):
    def __init__(self, source: IO[bytes], key: int) -> None:
        self._source, self._key = source, key

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = flipped(self._source.read(len(buffer)), self._key)
        buffer[: len(piece)] = piece
        return len(piece)


def flipped(data: bytes, key: int) -> bytes:
    return data.translate(bytes(byte ^ key for byte in range(256)))


class Miscounting(Xor):
    """Loses the last byte when it decodes, or finds one more."""

    def __init__(self, key: int, *, more: bool) -> None:
        super().__init__(key)
        self.more = more

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # torch's name
        content = flipped(input.read(), self.key)
        return io.BytesIO(content + b"!" if self.more else content[:-1])
