"""A writer to the bucket cannot run code in a reader: no call runs it, unless the caller consents."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrity.tiny import told_by_module


@pytest.mark.slow
def test_a_bucket_full_of_malicious_pickles_runs_nothing(tmp_path: Path) -> None:
    """If this fails, whoever can write to the bucket owns every machine that lists, loads, verifies or cleans it."""
    found = told_by_module("malicious", str(tmp_path))
    assert found["seen"] == []
    assert found["mark"] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mark", "root"]
    for name, kinds in found["expected"].items():
        by_load, by_dcp, by_keys, by_verify = found["outcomes"][name]
        assert by_load in kinds, (name, by_load)
        assert by_dcp, name  # torch's own calls hand on only the text of some
        assert by_keys, name
        # Verifying reads no value's meaning: what was saved is there, bit for bit.
        assert bool(by_verify) != name.startswith("value-"), (name, by_verify)
    assert not any(text.startswith("foreign") for text in found["of_root"])
    # The traps are real ones, and the watch would have seen them.
    assert found["with_consent"]["mark"] is True
    assert any("os.system" in text for text in found["with_consent"]["seen"])
    print(
        f"malicious checkpoints: {len(found['expected'])}, calls: {4 * len(found['expected']) + len(found['of_root'])}"
    )
