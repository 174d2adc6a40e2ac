"""The jobs of trainers, readers and janitors. A job raises if a request is refused, or its work is left half done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.commit.gc.leftovers import LONG_AGO, begin_upload, put
from tests.kit.options import make_options
from tests.kit.wrapped import FaultyStore, permanent
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
import cloudckpt.doctor
from cloudckpt import Options
from cloudckpt.options import MIB
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Store

_PART_BYTES = 5 * MIB
_NUM_PARTS = 2
_LAYOUT: Mapping[str, Any] = {"object_bytes": _PART_BYTES, "connections": 1}
"""With which what failed fails where it should, and is found again."""


_UPLOADED = f"saved/data/{LONG_AGO}/0-1.safetensors"


@dataclass(slots=True)
class Place:
    """A prefix, as one role sees it and as its owner does."""

    root: str
    role: Mapping[str, Any] = field(repr=False)
    """The role's storage options."""
    owner: Mapping[str, Any] = field(repr=False)
    watched: list[FaultyStore] = field(default_factory=list)

    def options(self, **more: Any) -> Options:
        """The role's. The endpoint is believed, as Amazon's own is: nothing is probed."""
        return self._options(self.role, wrap_store=self._watch, **more)

    def owners(self, **more: Any) -> Options:
        """For what has to be there beforehand, and for looking at it afterwards."""
        return self._options(self.owner, wrap_store=FaultyStore, **more)

    def store(self) -> Store:
        return open_store(self.root, self.owners())

    def all_keys(self) -> set[str]:
        return {info.key for info in self.store().list()}

    def _options(self, storage_options: Mapping[str, Any], **more: Any) -> Options:
        return make_options(
            storage_options=storage_options, part_bytes=_PART_BYTES, tile_bytes=MIB, retries=1, timeout_s=60.0, **more
        )

    def _watch(self, store: Store) -> FaultyStore:
        self.watched.append(FaultyStore(store))
        return self.watched[-1]

    def num_parts_sent(self) -> int:
        return sum(store.count("upload_part") for store in self.watched)


def state(fill: float = 1.0) -> dict[str, Any]:
    """Something that goes up in parts, and an object."""
    return {"w": torch.full(((_NUM_PARTS - 1) * _PART_BYTES // 4 + 1000,), fill), "step": int(fill)}


def small(fill: float = 1.0) -> dict[str, Any]:
    """Something that goes up whole."""
    return {"w": torch.full((100,), fill), "step": int(fill)}


def save(place: Place) -> None:
    cloudckpt.save(state(), f"{place.root}/saved", options=place.options(), no_dist=True)


def overwrite(place: Place) -> None:
    """Overwrite a checkpoint. Raises if the objects of the old one stay."""
    uri = _saved(place)
    before = place.all_keys()
    cloudckpt.save(state(2.0), uri, overwrite=True, options=place.options(), no_dist=True)
    assert not before & place.all_keys()


def fail(place: Place) -> None:
    """A save that fails leaves no unfinished upload."""
    _fail(place, state())
    assert not place.all_keys()
    assert not list(place.store().list_uploads())


def resume(place: Place) -> None:
    """The parts of a copy that failed are not sent again."""
    source, target = f"{place.root}/saved", f"{place.root}/copied"
    cloudckpt.save(state(), source, options=place.owners(**_LAYOUT), no_dist=True)
    failing, watched = _failing()
    options = place._options(place.owner, wrap_store=failing, resume=True, **_LAYOUT)
    with contextlib.suppress(cloudckpt.CloudckptError):  # as it should
        cloudckpt.copy(source, target, options=place.options(), target_options=options)
    assert sum(store.count("complete_multipart") for store in watched) == 1
    # The source has other credentials, so the service is not asked to copy.
    options = place.options(resume=True, **_LAYOUT)
    cloudckpt.copy(source, target, options=place.owners(), target_options=options)
    assert place.num_parts_sent() == 0


def load(place: Place) -> None:
    found = small(-1.0)
    cloudckpt.load(found, _saved(place), options=place.options(), no_dist=True)
    assert found["step"] == 1


def list_checkpoints(place: Place) -> None:
    _saved(place)
    assert len(cloudckpt.list_checkpoints(place.root, options=place.options())) == 1


def verify(place: Place) -> None:
    cloudckpt.verify(_saved(place), options=place.options())


def delete(place: Place) -> None:
    uri = _saved(place)
    begin_upload(place.store(), _UPLOADED)
    cloudckpt.delete(uri, options=place.options())
    assert not any("data/" in key for key in place.all_keys())
    assert _UPLOADED not in {upload.key for upload in place.store().list_uploads()}


def gc(place: Place) -> None:
    uri = _saved(place)
    garbage = f"saved/data/{LONG_AGO}/0-0.safetensors"
    put(place.store(), garbage)
    begin_upload(place.store(), _UPLOADED)
    cloudckpt.gc(place.root, older_than=0, dry_run=False, options=place.options())
    assert garbage not in place.all_keys()
    assert _UPLOADED not in {upload.key for upload in place.store().list_uploads()}
    cloudckpt.verify(uri, options=place.owners())


def copy(place: Place) -> None:
    """From one folder to another, which the service is asked to do by itself."""
    options = place.options()
    cloudckpt.copy(_saved(place), f"{place.root}/copied", options=options, target_options=options)
    cloudckpt.verify(f"{place.root}/copied", options=place.owners())


def examine(place: Place) -> None:
    """All that saves and loads rely on, but for what is a comfort."""
    report = cloudckpt.doctor.examine(place.root, options=place.options())
    assert report.is_healthy, str(report)
    assert not place.all_keys()


def put_data(place: Place) -> None:
    """An object of data that nobody saves."""
    put(open_store(place.root, place.options()), f"saved/data/{LONG_AGO}/0-0.safetensors")


def leave_the_prefix(place: Place) -> None:
    """Look at what lies beside the prefix: names, or content."""
    beside = f"{place.root.rpartition('/')[0]}ning/beside"  # begins as the prefix does, and is another folder
    cloudckpt.save({"step": 1}, beside, options=place.owners(), no_dist=True, overwrite=True)
    tries: tuple[Callable[[], object], ...] = (
        lambda: list(open_store(beside, place.options()).list()),
        lambda: open_store(beside, place.options()).read("manifest.json", max_bytes=MIB),
        lambda: open_store(beside, place.options()).delete(["manifest.json"]),
        lambda: put(open_store(beside, place.options()), "manifest.9.json"),
    )
    refusals = [refusal for refusal in map(_refusal, tries) if refusal is not None]
    if len(refusals) == len(tries):
        raise refusals[-1]


JOBS: Mapping[str, Callable[[Place], None]] = {
    job.__name__: job
    for job in (
        save,
        overwrite,
        fail,
        resume,
        load,
        list_checkpoints,
        verify,
        delete,
        gc,
        copy,
        examine,
        put_data,
        leave_the_prefix,
    )
}


def _refusal(look: Callable[[], object]) -> cloudckpt.errors.AccessDeniedError | None:
    try:
        look()
    except cloudckpt.errors.AccessDeniedError as error:
        return error
    return None


def _saved(place: Place) -> str:
    uri = f"{place.root}/saved"
    cloudckpt.save(small(), uri, options=place.owners(), no_dist=True)
    return uri


def _failing() -> tuple[Callable[[Store], FaultyStore], list[FaultyStore]]:
    """Return what makes stores whose uploads cannot be completed, and a list that these are appended to."""
    watched: list[FaultyStore] = []

    def failing(store: Store) -> FaultyStore:
        watched.append(FaultyStore(store))
        complete = "complete_multipart"
        watched[-1].fail(complete, error=lambda: permanent(complete), times=9)
        return watched[-1]

    return failing, watched


def _fail(place: Place, state_dict: dict[str, Any]) -> None:
    """A save whose uploads cannot be completed."""
    failing, watched = _failing()
    options = place._options(place.role, wrap_store=failing, **_LAYOUT)
    with contextlib.suppress(cloudckpt.CloudckptError, CheckpointException):  # as it should
        cloudckpt.save(state_dict, f"{place.root}/failing", options=options, no_dist=True)
    assert sum(store.count("complete_multipart") for store in watched) == 1
