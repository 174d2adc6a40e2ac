"""What commands say of manifests that are whole, and cannot be read all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from awscrt.checksums import crc32c
from tests.cli.conftest import Run, leave_unfinished, save
from tests.e2e.places import Place

import cloudckpt


def rewrite(place: Place, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest of ``step-1`` with a change, and a checksum that is right."""
    document = json.loads(place.read("step-1/manifest.json"))
    del document["crc32c"]
    change(document)
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    place.write("step-1/manifest.json", body + b',"crc32c":"%08x"}' % crc32c(body))


def _newer(document: dict[str, Any]) -> None:
    document["version"] = [9, 3]
    document["software"]["cloudckpt"] = "31.4"
    document["tensors"] = "in some other form"


def test_what_a_newer_one_wrote_says_to_upgrade(place: Place, run: Run) -> None:
    """If this fails, who has an older cloudckpt on one machine takes his checkpoint for damaged, or for a bug."""
    save(place.uri("step-1"))
    rewrite(place, _newer)
    leave_unfinished(place, "step-1", attempt="20200101T000000000Z-0123456789ab")
    uri = place.uri("step-1")
    for command in (["show", uri], ["verify", uri], ["diff", uri, uri], ["cp", uri, place.uri("step-2")]):
        ended = run(*command)
        assert (ended.code, ended.out) == (7, ""), command
        assert "written by cloudckpt 31.4 in version 9.3 of the format" in ended.err
        assert f"this cloudckpt, {cloudckpt.__version__}, reads up to 1.x. Upgrade cloudckpt" in ended.err
    listed = run("ls", place.root, "--json")
    assert (listed.code, [one["state"] for one in listed.document]) == (0, ["newer"])
    assert "Upgrade" in run("ls", place.root).err
    before = place.contents()
    left = run("gc", place.root, "--older-than", "0s", "--yes")
    assert "left alone" in left.out
    assert place.contents() == before
    assert run("rm", uri, "--yes").code == 0
    assert not place.data_keys()


def _name_twice(document: dict[str, Any]) -> None:
    document["values"]["model.w"] = {"object_index": 0, "begin": 0, "end": 0}


_TOLD_BY_OBJECTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a key that leads out": lambda document: document["objects"][0].update(key="../step-2/data/x/0-0.safetensors"),
    "a size below nothing": lambda document: document["objects"][0].update(size=-1),
    "too few checksums": lambda document: document["objects"][0].update(crc32c=""),
    "nobody saved": lambda document: document.update(world_size=0),
    "two of one name": _name_twice,
}
_TOLD_BY_TENSORS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a range beyond its object": lambda document: document["tensors"]["model.w"]["chunks"][0].__setitem__(4, 10**9),
    "a dtype that is none": lambda document: document["tensors"]["model.w"].update(dtype="float33"),
}


@pytest.mark.parametrize("what", [*_TOLD_BY_OBJECTS, *_TOLD_BY_TENSORS])
def test_what_show_refuses_is_not_called_committed(local: Place, run: Run, what: str) -> None:
    """If this fails, ls promises a checkpoint that nothing can load."""
    save(local.uri("step-1"))
    rewrite(local, {**_TOLD_BY_OBJECTS, **_TOLD_BY_TENSORS}[what])
    assert run("show", local.uri("step-1")).code == 1
    checked = run("ls", local.root, "--json", "--check")
    assert [one["state"] for one in checked.document] == ["damaged"]
    assert "contradicts itself" in checked.document[0]["problem"]
    if what in _TOLD_BY_OBJECTS:
        assert run("ls", local.root, "--json").document == checked.document
