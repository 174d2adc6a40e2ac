"""``cloudckpt doctor``."""

from __future__ import annotations

import pytest
from tests.cli.conftest import Run, run  # noqa: F401  # a fixture
from tests.e2e.places import Place

from cloudckpt.testing.servers import clean_environment


def test_all_is_well(place: Place, run: Run) -> None:  # noqa: F811  # the fixture
    """If this fails, a script that asks before it trains is told no."""
    ended = run("doctor", place.uri())
    assert ended.code == 0
    assert "create-if-absent works" in ended.out
    assert "✓" in ended.out
    assert ended.out.rstrip().splitlines()[-1].startswith(("All is well", "Saves and loads will work"))
    assert place.keys() == []


def test_what_is_wrong_is_told_with_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811  # as above
    """If this fails, a script that asks before it trains is told yes, or a user is left without advice."""
    for name, value in clean_environment({}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    at = ("doctor", "s3://bucket/run", "--endpoint-url", "http://127.0.0.1:1", "--timeout", "3")
    ended = run(*at)
    assert ended.code == 1
    assert "✗  credentials" in ended.out
    assert "–  endpoint" in ended.out  # noqa: RUF001  # a sign of the table
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    ended = run(*at)
    assert ended.code == 1
    assert "✗  endpoint" in ended.out
    assert "Check that it runs" in ended.out
    document = run(*at, "--json").document
    assert not document["is_healthy"]
    assert [check["name"] for check in document["checks"] if check["outcome"] == "failed"] == ["endpoint"]


@pytest.mark.parametrize("arguments", [["--deadline", "0"], ["--deadline", "nan"], ["-o", "no_such_option=1"]])
def test_wrong_usage(run: Run, arguments: list[str]) -> None:  # noqa: F811  # as above
    """If this fails, a typing error passes for an ill store."""
    assert run("doctor", "s3://bucket/run", *arguments).code == 2
