"""Calls that another thread can end, by their connections."""

from __future__ import annotations

import socket

import pytest

from cloudckpt.stores.http_clients import CallScope, follow


def test_the_connection_in_use_is_ended_and_no_other() -> None:
    """If this fails, a straggler goes on, or somebody else's request breaks because a connection was used before."""
    before, peer_of_before = socket.socketpair()
    now, peer_of_now = socket.socketpair()
    with before, now, peer_of_before, peer_of_now, CallScope() as scope:
        follow(before)
        follow(now)
        scope.cancel()
        assert now.recv(1) == b""
        peer_of_before.sendall(b"x")
        assert before.recv(1) == b"x"
        with pytest.raises(ConnectionAbortedError):
            follow(before)


def test_what_is_no_socket_is_not_ended() -> None:
    """If this fails, a request through a proxy that speaks TLS fails because it is slow."""
    with CallScope() as scope:
        follow(object())  # type: ignore[arg-type]  # what urllib3 has there
        assert not scope.is_cancellable
        scope.cancel()
