"""A store that echoes what it was sent, or knows, in its answers: no message repeats a secret."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from cloudckpt import errors
from cloudckpt.stores.s3 import S3Store

if TYPE_CHECKING:
    from pathlib import Path

KEY, SECRET, TOKEN = "AKIDOFATEST", "se/cret+of=HUSH/1", "to/ken+of=/" + 30 * "HUSH/2"


def _environment(patch: pytest.MonkeyPatch, _: Path) -> dict[str, Any]:
    for name, value in (("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET), ("SESSION_TOKEN", TOKEN)):
        patch.setenv(f"AWS_{name}", value)
    return {}


def _options(_patch: pytest.MonkeyPatch, _: Path) -> dict[str, Any]:
    return {"access_key_id": KEY, "secret_access_key": SECRET, "session_token": TOKEN}


@pytest.mark.parametrize("configure", [_environment, _options])
@pytest.mark.parametrize("as_sent", [str, lambda text: quote(text, safe="")], ids=["plain", "quoted"])
@pytest.mark.parametrize("kind", ["own", "foreign", "range"])
def test_no_secret_that_a_store_echoes_is_repeated(
    scripted: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    configure: Any,
    as_sent: Any,
    kind: str,
) -> None:
    """If this fails, an error in a training log gives the bucket away, wherever the credentials came from."""
    words = f"{as_sent(SECRET)} {as_sent(TOKEN)} {KEY}"
    answers = {
        "own": scripted.error(403, "InvalidToken", words),
        "foreign": scripted.reply(404, as_sent(TOKEN), {"Content-Type": as_sent(SECRET)}),
        "range": scripted.reply(206, "x", {"Content-Range": words}),
    }
    server = scripted.serve(answers[kind])
    options = {"endpoint_url": server.endpoint_url, "region": "eu-west-1", **configure(monkeypatch, tmp_path)}
    store = S3Store("bucket", "", storage_options=options, timeout_s=20, connections=2)
    with pytest.raises(errors.StoreError) as caught:
        store.read_into("k", 0, [memoryview(bytearray(4))])
    assert server.requests[0].headers["x-amz-security-token"] == TOKEN
    said = f"{caught.value} {vars(caught.value)!r} {store!r}"
    assert "***" in said
    assert "HUSH" not in said
    if kind == "own":
        assert KEY in said  # it names a key, as a user's name does, and says which one was refused
