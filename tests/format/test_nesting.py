"""How deep and how long the lists of a state dict may be: as the user's are, and not as an attacker's would be."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.format.samples import URI, as_json
from tests.format.test_hostile import fast_signed
from tests.oracles import signed

import cloudckpt
from cloudckpt.errors import InvalidManifestError
from cloudckpt.format.codec import decode


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize(
    "state",
    [
        {"a": [{}, torch.ones(1)]},
        {"a": [{}, {}, {}, {"x": torch.ones(1)}, {}]},
        {"a": [{}] * 100 + [[{}, torch.ones(1)]]},
    ],
    ids=["one", "between", "deeper"],
)
def test_empty_containers_in_lists_can_be_saved(state: dict[str, Any]) -> None:
    """If this fails, a state dict with an empty dictionary in a list, which torch flattens to nothing, is refused."""
    cloudckpt.save(state, f"memory://nesting/{len(str(state))}")
    cloudckpt.verify(f"memory://nesting/{len(str(state))}")


@pytest.mark.timeout(20)
def test_lists_within_lists_are_counted() -> None:
    """If this fails, a manifest of a megabyte makes a loader fill the memory with empty places."""
    num_entries = 3000
    manifest = as_json()
    manifest["tensors"] = {}
    manifest["values"] = {f"v{i}": {"object_index": 0, "begin": 0, "end": 0} for i in range(num_entries)}
    manifest["nesting"] = {f"v{i}": [i, num_entries - 1] for i in range(num_entries)}
    with pytest.raises(InvalidManifestError, match="places in all"):
        decode(fast_signed(json.dumps(manifest).encode()), uri=URI)
    manifest["nesting"] = {f"v{i}": ["all", i] for i in range(num_entries)}
    decode(fast_signed(json.dumps(manifest).encode()), uri=URI)
    manifest["typed_nesting"] = {f"v{i}": [["all"], i] for i in range(num_entries)}
    manifest["empty_mappings"] = [[[i], [None], num_entries] for i in range(300)]
    decode(fast_signed(json.dumps(manifest).encode()), uri=URI)
    manifest["empty_mappings"] += [[[i], num_entries] for i in range(100)]
    with pytest.raises(InvalidManifestError, match="places in all"):
        decode(fast_signed(json.dumps(manifest).encode()), uri=URI)


@pytest.mark.parametrize("member", ["nesting", "typed_nesting", "empty_mappings"])
@pytest.mark.parametrize("index", [-1, 2**63, 10**30])
def test_indices_that_are_none_are_refused(member: str, index: int) -> None:
    """If this fails, a list is filled from its end, or for ever."""
    manifest = as_json()
    manifest[member] = [["w", index]] if member == "empty_mappings" else {"w": ["w", index]}
    with pytest.raises(InvalidManifestError, match="has an index outside"):
        decode(signed(json.dumps(manifest).encode()), uri=URI)
