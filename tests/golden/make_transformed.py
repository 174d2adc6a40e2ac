"""Writes the golden checkpoints that went through stream extensions, once for each released version of the format:

    python -m tests.golden.make_transformed

Like ``make.py``, whose state dict it saves, it refuses to touch what is there.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import IO

import torch.distributed as dist
from tests.golden.make import VERSION, WORLD_SIZE, make, state_dict
from tests.kit.options import make_options
from torch.distributed.checkpoint._extension import StreamTransformExtension

import cloudckpt

HERE = Path(__file__).resolve().parent / "transformed"
KEY = 0x5A


class Cipher(StreamTransformExtension):
    """Flips bits, as a user's cipher would. It is never to change: golden files were written with it."""

    @staticmethod
    def registry_name() -> str:
        """Return the name that the manifest has."""
        return "golden.cipher"

    @staticmethod
    def from_descriptor(version: str) -> Cipher:
        """The one that there is."""
        return Cipher()

    def get_descriptor(self) -> str:
        """Return the descriptor that the manifest has."""
        return "golden.cipher/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """A stream that encrypts."""
        return _Encrypting(output)

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # torch's name
        """A stream that decrypts."""
        return io.BytesIO(flipped(input.read()))


class _Encrypting(io.BytesIO):
    def __init__(self, output: IO[bytes]) -> None:
        super().__init__()
        self._output = output

    def close(self) -> None:
        if not self.closed:
            self._output.write(flipped(self.getvalue()))
            self._output.close()
        super().close()


def flipped(data: bytes) -> bytes:
    """Each byte with the key's bits flipped."""
    return bytes(byte ^ KEY for byte in data)


def save_on_rank(rank: int, directory: Path, port: int) -> None:
    """One that is compressed, and one that is encrypted after that."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    for name, chain in (("compressed", [cloudckpt.Zstandard()]), ("encrypted", [cloudckpt.Zstandard(), Cipher()])):
        options = make_options(tile_bytes=4096, part_bytes=4096, extensions=chain)
        cloudckpt.save(state_dict(), str(directory / name), options=options)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    make(HERE / VERSION, save_on_rank)
