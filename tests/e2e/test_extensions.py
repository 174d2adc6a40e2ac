"""Stream extensions on every store: what goes through them comes back, and damage never reaches them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.e2e.places import Place
from tests.extensions.ciphers import Xor
from tests.extensions.tried import Noting

import cloudckpt
from cloudckpt import Options, Zstandard

KEY = 0x5A
SMALL: dict[str, Any] = {"tile_bytes": 4096, "part_bytes": 16384, "object_bytes": 32768}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def state_of(fill: float) -> dict[str, Any]:
    weight = torch.full((100, 100), fill) + torch.arange(100.0)
    noise = torch.rand(20_000, generator=torch.Generator().manual_seed(7)) * fill
    return {"weight": weight, "tied": weight, "noise": noise, "half": torch.full((33,), fill).bfloat16(), "step": fill}


def assert_is(found: dict[str, Any], fill: float) -> None:
    for name, value in state_of(fill).items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


def loaded(uri: str, *extensions: Any) -> dict[str, Any]:
    state = state_of(0.0)
    cloudckpt.load(state, uri, no_dist=True, options=Options(extensions=extensions))
    return state


@pytest.mark.parametrize("mode", ["save", "thread"])
@pytest.mark.slow
def test_a_chain_goes_up_and_comes_back(place: Place, mode: str) -> None:
    """If this fails, a compressed and encrypted checkpoint cannot be had on this store, in one of the ways to save."""
    uri, chain = place.uri(), [Zstandard(), Xor(KEY)]
    if mode == "save":
        cloudckpt.save(state_of(2.0), uri, no_dist=True, options=Options(extensions=chain, **SMALL))
    else:
        options = Options(extensions=chain, **SMALL)
        cloudckpt.async_save(state_of(2.0), uri, no_dist=True, options=options).result(120)
        cloudckpt.close()
    assert_is(loaded(uri, *chain), 2.0)
    assert place.num_unfinished_uploads() == 0


def test_damage_is_found_before_it_is_decoded(place: Place) -> None:
    """If this fails, a decoder is fed with bytes that anybody may have put there; or damage is called a wrong key."""
    cloudckpt.save(state_of(2.0), place.uri(), no_dist=True, options=Options(extensions=[Xor(KEY)], **SMALL))
    tensors = cloudckpt.describe(place.uri()).tensors
    for key in place.data_keys():
        content = bytearray(place.read(key))
        for position in range(0, len(content), 4096):  # one in each tile
            content[position] ^= 0x10
        place.write(key, bytes(content))
    extension = Noting(KEY)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        loaded(place.uri(), extension)
    assert isinstance(caught.value, cloudckpt.CorruptCheckpointError)
    assert any(key.rpartition("/")[2] in str(caught.value) for key in place.data_keys())
    assert any(repr(tensor.name) in str(caught.value) for tensor in tensors)
    assert extension.num_decoded == 0
    with pytest.raises(cloudckpt.CorruptCheckpointError):
        cloudckpt.verify(place.uri())


def test_without_the_extension_it_is_verified_copied_and_not_loaded(place: Place) -> None:
    """If this fails, a backup of an encrypted checkpoint needs its key; or a load without it gives what is stored."""
    source, target = place.uri("source"), place.uri("target")
    cloudckpt.save(state_of(2.0), source, no_dist=True, options=Options(extensions=[Xor(KEY)], **SMALL))
    assert cloudckpt.verify(source).num_tensors == 4
    cloudckpt.copy(source, target)
    assert cloudckpt.verify(target).num_tensors == 4
    assert_is(loaded(target, Xor(KEY)), 2.0)
    with pytest.raises(
        cloudckpt.errors.UnsupportedFormatError, match=r"'tests.xor/1'.*with the extension in the options"
    ):
        loaded(target)
    with pytest.raises(
        cloudckpt.errors.UnsupportedFormatError, match=r"'tests.xor/1'.*with the extension in the options"
    ):
        cloudckpt.compare(source, target)


def test_a_value_goes_through_as_well(place: Place) -> None:
    """If this fails, Python objects of an encrypted checkpoint lie in the clear."""
    state = {"secret": "the-word-that-is-not-to-be-seen", "blob": io.BytesIO(b"the-word-that-is-not-to-be-seen")}
    cloudckpt.save(dict(state), place.uri(), no_dist=True, options=Options(extensions=[Xor(KEY)]))
    assert not [key for key in place.keys() if b"not-to-be-seen" in place.read(key)]  # noqa: SIM118  # it is no dict
    found = {"secret": "", "blob": io.BytesIO()}
    cloudckpt.load(found, place.uri(), no_dist=True, options=Options(extensions=[Xor(KEY)]))
    assert found["secret"] == state["secret"]
    assert found["blob"].getvalue() == state["blob"].getvalue()
