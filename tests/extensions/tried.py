"""Extensions that note what they are asked, and one that never gives the same bytes twice."""

from __future__ import annotations

import io
import os
from typing import IO

from tests.extensions.ciphers import Xor, flipped


class Noting(Xor):
    """Counts what is decoded."""

    def __init__(self, key: int) -> None:
        super().__init__(key)
        self.num_decoded = 0

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002  # torch's name
        """As it says."""
        self.num_decoded += 1
        return super().transform_from(input)


class Salted(Xor):
    """A cipher with a nonce, as real ones have: the same tensor is stored as other bytes each time."""

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """The nonce first."""
        return _Salting(output)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002  # torch's name
        """Undone by it."""
        (salt,) = input.read(1)
        return io.BytesIO(flipped(input.read(), salt))


class _Salting(io.BytesIO):
    def __init__(self, output: IO[bytes]) -> None:
        super().__init__()
        self._output = output

    def close(self) -> None:
        if not self.closed:
            (salt,) = os.urandom(1)
            self._output.write(bytes([salt]) + flipped(self.getvalue(), salt))
            self._output.close()
        super().close()
