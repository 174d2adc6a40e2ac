"""What must survive a writer that is used again, an interrupt, and checkpoints of other kinds at one place."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.in_memory import Memory

import cloudckpt
from cloudckpt.stores.local import files


def _state(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((2000,), value) for i in range(4)}


def _loaded(uri: str) -> float:
    target = _state(0)
    cloudckpt.load(target, uri)
    values = {float(tensor.unique()) for tensor in target.values()}
    assert len(values) == 1, "two saves were mixed"
    return values.pop()


def test_a_later_failure_of_the_same_writer_leaves_what_it_committed(memory: Memory) -> None:
    """If this fails, a broken state dict at step 2 removes the data of the checkpoint of step 1."""
    writer = cloudckpt.ObjectStoreWriter(memory.uri(), overwrite=True)
    cloudckpt.save(_state(1), storage_writer=writer)
    with pytest.raises(cloudckpt.errors.CloudckptError):
        cloudckpt.save({"a": {"b": 1}, "a.b": 2}, storage_writer=writer)
    assert _loaded(memory.uri()) == 1


def test_discard_keeps_what_a_commit_refers_to(memory: Memory) -> None:
    """torch also reports a failure where something broke only after the commit; the data is the checkpoint's then."""

    class Careless(cloudckpt.ObjectStoreWriter):
        def finish(self, metadata, results):  # type: ignore[no-untyped-def]
            self.kept = list(self._job._written_keys)  # type: ignore[union-attr]
            super().finish(metadata, results)
            self._job._written_keys = self.kept  # type: ignore[union-attr]  # as on a rank that did not commit itself
            raise OSError("after the commit")

    with pytest.raises(BaseException, match="after the commit"):
        cloudckpt.save(_state(1), storage_writer=Careless(memory.uri()))
    assert _loaded(memory.uri()) == 1


def test_background_saves_of_one_writer_keep_to_their_uris(tmp_path: Path) -> None:
    """A writer that is pointed to its next URI while it still saves puts one state where another belongs."""
    writer = cloudckpt.ObjectStoreWriter(tmp_path / "unused")
    handles = [
        cloudckpt.async_save(_state(step), str(tmp_path / f"step-{step}"), storage_writer=writer) for step in (1, 2, 3)
    ]
    for handle in handles:
        handle.result(60)
    assert [_loaded(str(tmp_path / f"step-{step}")) for step in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("which", ["torch's", "a rank's own"])
def test_checkpoints_of_other_kinds_are_not_hidden_unasked(tmp_path: Path, which: str) -> None:
    """A save beside one would make later loads return something else than before."""
    if which == "torch's":
        dcp.save(_state(1), checkpoint_id=str(tmp_path / "c"))
    else:
        cloudckpt.save(_state(1), tmp_path / "c" / "rank-0")
    with pytest.raises(cloudckpt.CheckpointExistsError, match="Checkpoint already exists"):
        cloudckpt.save(_state(2), tmp_path / "c")


def test_torch_does_not_save_beside_a_checkpoint_while_enabled(tmp_path: Path) -> None:
    """What torch saved there would never be loaded again, since loads find the manifest."""
    path = str(tmp_path / "c")
    cloudckpt.save(_state(1), path)
    try:
        cloudckpt.enable()
        with pytest.raises(BaseException, match="Checkpoint already exists"):
            dcp.save(_state(2), checkpoint_id=path)
        cloudckpt.enable(overwrite=True)
        dcp.save(_state(2), checkpoint_id=path)
    finally:
        cloudckpt.disable()
    assert _loaded(path) == 2


def test_a_converting_load_works_in_inference_mode(memory: Memory) -> None:
    """Inference mode belongs to a thread, and reads run in others."""
    cloudckpt.save(_state(3), memory.uri())
    with torch.inference_mode():
        target = {name: torch.zeros(2000, dtype=torch.bfloat16) for name in _state(0)}
        cloudckpt.load(target, memory.uri())
        assert all(bool((tensor == 3).all()) for tensor in target.values())


def test_an_error_after_the_manifest_appeared_keeps_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for a refusal, it would remove the data of a checkpoint that everybody can see."""
    real = files.fsync_directory

    def broken(directory: str) -> None:
        if (tmp_path / "c" / "manifest.json").exists():
            raise OSError(errno.EIO, "input/output error")
        real(directory)

    monkeypatch.setattr(files, "fsync_directory", broken)
    with contextlib.suppress(cloudckpt.errors.CloudckptError):
        cloudckpt.save(_state(1), tmp_path / "c")
    assert _loaded(str(tmp_path / "c")) == 1
