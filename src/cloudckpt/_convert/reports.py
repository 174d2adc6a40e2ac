"""What a copy or a conversion did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Format: TypeAlias = Literal["safetensors", "torch", "dcp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What `cloudckpt.copy` did."""

    source: str
    target: str
    attempts: tuple[str, ...]
    """Of the copy; of each rank's, where the ranks saved on their own."""
    num_objects: int
    num_bytes: int
    """Of all data objects."""
    num_service_bytes: int
    """Of these, what the service copied, and said the recorded CRC32C of."""
    num_read_back_bytes: int
    """Of these, what the service copied without saying so, and was then read at the target and compared."""
    num_reused_bytes: int
    """Of these, what an earlier copy had left there (`Options.resume`), and was read at the target and compared."""
    was_there: bool
    """An earlier copy had committed all of it (`Options.resume`), so that nothing was written."""
    num_requests: int
    num_retries: int
    copy_s: float

    @property
    def bytes_per_s(self) -> float:
        """Throughput."""
        return self.num_bytes / self.copy_s if self.copy_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What `cloudckpt.export_checkpoint` or `cloudckpt.import_checkpoint` did."""

    source: str
    target: str
    format: Format
    num_tensors: int
    num_values: int
    """Python objects."""
    left_out: tuple[str, ...]
    """The names of Python objects that the format cannot hold, where the caller agreed to it."""
    files: tuple[str, ...]
    """What an export wrote, relative to the folder it is in. Of an import, the data objects."""
    num_bytes: int
    """Of the files."""
    convert_s: float

    @property
    def bytes_per_s(self) -> float:
        """Throughput."""
        return self.num_bytes / self.convert_s if self.convert_s > 0 else 0.0
