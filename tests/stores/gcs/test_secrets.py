"""A store that echoes what it was sent, or knows, in its answers: no message repeats a secret."""

from __future__ import annotations

from typing import Any

import pytest
from google.oauth2.credentials import Credentials

from cloudckpt import errors

TOKEN, REFRESH, CLIENT = "ya29.a/token+of=" + 30 * "HUSH", "1//refresh-HUSH", "client-HUSH"


@pytest.mark.parametrize("kind", ["own", "plain", "page", "range"])
def test_no_secret_that_a_store_echoes_is_repeated(scripted: Any, kind: str) -> None:
    """If this fails, an error in a training log gives the bucket away."""
    words = f"Bearer {TOKEN} {REFRESH} {CLIENT}"
    answers = {
        "own": scripted.error(403, "forbidden", words),
        "plain": scripted.reply(403, words, {"Content-Type": "text/plain", "X-GUploader-UploadID": "u"}),
        "page": scripted.reply(404, words, {"Content-Type": TOKEN}),
        "range": scripted.reply(206, "x", {"Content-Range": words}),
    }
    server = scripted.serve(answers[kind])
    credentials = Credentials(
        token=TOKEN, refresh_token=REFRESH, client_id="id", client_secret=CLIENT, token_uri=server.endpoint_url
    )
    store = server.store(credentials=credentials, project="p")
    with pytest.raises(errors.StoreError) as caught:
        store.read_into("k", 0, [memoryview(bytearray(4))])
    assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert "HUSH" not in f"{caught.value} {vars(caught.value)!r} {store!r}"


def test_a_token_that_was_renewed_meanwhile_is_not_repeated(scripted: Any) -> None:
    """If this fails, the answer to the request that went out before shows a token that is still good for an hour."""
    tokens = scripted.tokens()

    def answer(connection: Any, request: Any) -> None:
        tokens.refresh(None)
        scripted.error(403, "forbidden", request.headers["authorization"])(connection, request)

    with pytest.raises(errors.AccessDeniedError) as caught:
        scripted.serve(answer).store(credentials=tokens, project="p").head("k")
    assert "HUSH" not in str(caught.value)
