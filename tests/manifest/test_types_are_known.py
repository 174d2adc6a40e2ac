"""Types are looked into when modules are imported, by one thread, and never by several that decode at once."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.manifest.samples import as_json

SCRIPT = """
import sys
from cloudckpt._commit import fence
from cloudckpt._manifest import codec, model
from cloudckpt._plan import header

fences = fence.encode_fence(fence.new_fence(keeps=None))
# Whoever has to look into a type from here on does not find what its annotations name.
for module in (fence, codec, model, header):
    vars(module).update(dict.fromkeys(["Any", "int", "str", "tuple", "dict", "StoredObject", "Chunk"], None))
fence._HEAD_DECODER.decode(fences)
fence._FENCE_DECODER.decode(fences)
header._ENTRY_DECODER.decode(b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}')
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
