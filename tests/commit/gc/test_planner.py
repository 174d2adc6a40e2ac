"""The plan of gc for any mixture of objects at a location, compared with an independent form of its rules."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.commit.entries import LogEntry
from cloudckpt.commit.garbage_plan import Inventory, plan_removal
from cloudckpt.stores.base import ObjectInfo, UploadInfo

DAY = timedelta(days=1)
BEFORE = datetime(2026, 6, 1, tzinfo=timezone.utc)
IDS = [f"{day:%Y%m%d}T000000000Z-00000000000{n}" for n, day in enumerate([BEFORE - 9 * DAY] * 3 + [BEFORE + DAY])]
IDS += [f"{IDS[0]}-r1", f"{IDS[1]}-r1", f"{IDS[2]}-r2"]

# Most are old: else hardly any example has something that only its name in a manifest keeps.
moments = st.sampled_from([BEFORE - 5 * DAY, BEFORE - 2 * DAY, BEFORE - DAY, BEFORE - DAY / 2, BEFORE, BEFORE + DAY])
data_keys = st.builds(
    lambda attempt, number: f"data/{attempt}/0-{number}.safetensors", st.sampled_from(IDS), st.integers(0, 1)
)
entries_of = st.dictionaries(st.integers(0, 4), st.tuples(st.sampled_from([97, 500]), moments), max_size=4)


@settings(max_examples=300)
@given(
    location=st.sampled_from(["", "run/step-1/"]),
    objects=st.dictionaries(data_keys, moments, max_size=6),
    uploads=st.dictionaries(data_keys, moments, max_size=3),
    log=entries_of,
    named=st.dictionaries(st.integers(0, 4), st.sets(data_keys, max_size=3), max_size=4),
    keeps=st.booleans(),
    is_fenced=st.booleans(),
)
def test_plan_of_gc_follows_the_rules(  # noqa: C901  # the rules are many
    location: str,
    objects: dict[str, datetime],
    uploads: dict[str, datetime],
    log: dict[int, tuple[int, datetime]],
    named: dict[int, set[str]],
    *,
    keeps: bool,
    is_fenced: bool,
) -> None:
    """If this fails, gc takes what lives or counts, leaves what is dead, or lays no fence where one is needed."""
    inventory = Inventory(has_hidden_uploads=False)
    for key, moment in objects.items():
        inventory.add_object(ObjectInfo(key=location + key, size_bytes=1, modified_at=moment))
    for number, (key, moment) in enumerate(uploads.items()):
        inventory.add_upload(UploadInfo(key=location + key, upload_id=str(number), started_at=moment))
    entries = [LogEntry(number=n, size_bytes=size, modified_at=moment) for n, (size, moment) in sorted(log.items())]
    manifests = [entry.number for entry in entries if not entry.has_fence_size]
    if entries and not entries[-1].has_fence_size:
        counting = entries[-1].number
    else:
        counting = manifests[-1] if manifests and keeps else None
    references = {number: keys for number, keys in named.items() if number in manifests}

    plan = plan_removal(
        inventory.items_at(location),
        entries,
        location=location,
        current=counting,
        references=references,
        claimed=(),
        before=BEFORE,
        is_fenced=is_fenced,
    )

    def lives(attempt: str) -> bool:
        mark = attempt.partition("-r")[2]
        family = [one for one in IDS if one == attempt or (mark and one.endswith(f"-r{mark}"))]
        # An attempt of which nothing is there keeps nothing: no other can take it up.
        return bool(signs_of(attempt)) and any(moment >= BEFORE for one in family for moment in signs_of(one))

    def signs_of(attempt: str) -> list[datetime]:
        own = [moment for lying in (objects, uploads) for key, moment in lying.items() if f"/{attempt}/" in key]
        if not own:
            return []
        by_name = [log[number][1] for number, keys in references.items() if any(f"/{attempt}/" in key for key in keys)]
        began = datetime.strptime(attempt[:8], "%Y%m%d").replace(tzinfo=timezone.utc)
        return [*own, *by_name, began]

    def attempt_of(key: str) -> str:
        return key.split("/")[1]

    kept = references.get(counting, set()) if counting is not None else set()
    dead = {key for key in objects if key not in kept and not lives(attempt_of(key))}
    assert {item.key for item in plan.objects} == {location + key for key in dead}
    assert {item.key for item in plan.uploads} == {location + key for key in uploads if not lives(attempt_of(key))}
    assert plan.needs_fence == (bool(dead) and not is_fenced)
    spent = {entry.number for entry in plan.entries}
    assert counting not in spent
    assert [entry.number for entry in plan.entries] == sorted(spent)
    for entry in entries[:-1]:
        old = entry.modified_at < BEFORE
        depends = any(lives(attempt_of(key)) for key in references.get(entry.number, ()))
        assert (entry.number in spent) == (entry.number != counting and old and not depends)
    if entries and entries[-1].number in spent:
        assert entries[-1].has_fence_size
        assert plan.needs_fence  # another one comes above it
    # What decides is never taken away, but where nothing else of ours is left.
    if plan.lone_fence is not None:
        assert plan.lone_fence == entries[-1]
        assert counting is None
        assert not dead
        assert plan.lone_fence.modified_at < BEFORE
        assert set(objects) == set()
        assert len(plan.uploads) == len(uploads)
        assert len(spent) == len(entries) - 1
