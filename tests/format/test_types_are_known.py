"""Types are looked into when modules are imported, by one thread, and never by several that decode at once."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.format.samples import as_json

SCRIPT = """
import sys
from cloudckpt.commit import fences
from cloudckpt.format import codec, model, safetensors

document = fences.encode_fence(fences.new_fence(keeps=None))
# Whoever has to look into a type from here on does not find what its annotations name.
for module in (fences, codec, model, safetensors):
    vars(module).update(dict.fromkeys(["Any", "int", "str", "tuple", "dict", "StoredObject", "Chunk"], None))
fences._HEAD_DECODER.decode(document)
fences._FENCE_DECODER.decode(document)
safetensors._ENTRY_DECODER.decode(b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}')
codec._HEAD_DECODER.decode(b"{}")
codec._MANIFEST_DECODER.decode(sys.stdin.buffer.read())
"""


def test_no_type_is_looked_into_while_decoding() -> None:
    """If this fails, threads that load their first checkpoints at the same time crash the process now and then."""
    document = json.dumps(as_json() | {"crc32c": "00000000"}).encode()
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=document, capture_output=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
