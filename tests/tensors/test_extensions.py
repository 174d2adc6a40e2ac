"""Stream extensions."""

from __future__ import annotations

import io
import zlib

import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

import cloudckpt


class _Whole(io.BytesIO):
    """A stream that transforms all that was written to it when it is closed."""

    def __init__(self, output, function):
        super().__init__()
        self._output, self._function = output, function

    def close(self):
        if not self.closed:
            self._output.write(self._function(self.getvalue()))
            self._output.close()
            super().close()


class _Zip(StreamTransformExtension):
    @staticmethod
    def registry_name():
        return "test.zip"

    @staticmethod
    def from_descriptor(version):
        return _Zip()

    def get_descriptor(self):
        return "test.zip/1"

    def transform_to(self, output):
        return _Whole(output, zlib.compress)

    def transform_from(self, input):  # noqa: A002  # torch's name
        return io.BytesIO(zlib.decompress(input.read()))


class _Xor(_Zip):
    @staticmethod
    def registry_name():
        return "test.xor"

    @staticmethod
    def from_descriptor(version):
        return _Xor()

    def get_descriptor(self):
        return "test.xor/1"

    def transform_to(self, output):
        return _Whole(output, self._flip)

    def transform_from(self, input):  # noqa: A002  # torch's name
        return io.BytesIO(self._flip(input.read()))

    @staticmethod
    def _flip(data):
        return bytes(byte ^ 0x5A for byte in data)


def test_several_extensions_are_undone_in_the_reverse_order(tmp_path):
    """torch's own descriptors name them in the order of application; taken as the order to undo them, nothing loads."""
    registry = ExtensionRegistry()
    registry.register(_Zip)
    registry.register(_Xor)
    saved = {"w": torch.arange(1000.0).reshape(10, 100), "value": [1, 2, 3]}
    writer = cloudckpt.ObjectStoreWriter(tmp_path / "c", _extensions=[_Xor(), _Zip()])
    cloudckpt.save(saved, storage_writer=writer)
    loaded = {"w": torch.zeros(10, 100), "value": [0, 0, 0]}
    cloudckpt.load(loaded, storage_reader=cloudckpt.ObjectStoreReader(tmp_path / "c", _extension_registry=registry))
    assert torch.equal(loaded["w"], saved["w"])
    assert loaded["value"] == [1, 2, 3]
