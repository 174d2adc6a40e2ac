"""``cloudckpt verify``."""

from __future__ import annotations

from tests.cli.conftest import Run, save, state_of
from tests.e2e.places import Place

import cloudckpt


def test_what_is_whole_is_said_to_be(place: Place, run: Run) -> None:
    """If this fails, a script cannot rely on exit code 0, or the figures are others than the library's."""
    save(place.uri())
    ended = run("verify", place.uri(), "--json")
    assert ended.code == 0
    report = cloudckpt.verify(place.uri())
    document = ended.document
    assert document["is_whole"] is True
    assert (document["num_bytes"], document["num_tensors"]) == (report.num_bytes, report.num_tensors)
    table = run("verify", place.uri())
    assert table.code == 0
    assert "is whole" in table.out


def test_every_damaged_object_is_named(place: Place, run: Run) -> None:
    """If this fails, damage goes unseen, or who sees it does not know where it is."""
    save(
        place.uri(),
        {f"t{number}": tensor for number, tensor in enumerate(state_of()["model"].values())},
        options=cloudckpt.Options(object_bytes=1),
    )
    damaged, missing = place.data_keys()
    content = bytearray(place.read(damaged))
    content[-1] ^= 1
    place.write(damaged, bytes(content))
    place.remove(missing)
    ended = run("verify", place.uri())
    assert ended.code == 1
    assert len(ended.out.splitlines()) == 2
    assert damaged.rpartition("/")[2] in ended.out
    assert missing.rpartition("/")[2] in ended.out
    document = run("verify", place.uri(), "--json").document
    assert (document["is_whole"], len(document["problems"])) == (False, 2)


def test_progress_comes_to_the_whole(place: Place) -> None:
    """If this fails, a bar stands still or ends before the end."""
    save(place.uri(), options=cloudckpt.Options(object_bytes=1))
    events: list[cloudckpt.Event] = []
    report = cloudckpt.verify(place.uri(), options=cloudckpt.Options(on_event=events.append))
    (planned,) = (event for event in events if event.name == "verify.planned")
    assert planned.num_bytes == report.num_bytes
    assert sum(event.num_bytes for event in events if event.name == "verify.range_read") == report.num_bytes
