"""When a request counts as a straggler."""

from __future__ import annotations

from cloudckpt.io.hedging import PeerTimes


def peers_of(*took: tuple[int, float]) -> PeerTimes:
    peers = PeerTimes()
    for num_bytes, took_s in took:
        peers.add(num_bytes=num_bytes, took_s=took_s)
    return peers


def test_nothing_is_a_straggler_while_hardly_any_peer_is_known() -> None:
    """If this fails, the first requests of every transfer are made twice on a slow line."""
    assert PeerTimes().patience_s(100) is None
    assert peers_of(*[(100, 5.0)] * 3).patience_s(100) is None
    assert peers_of(*[(100, 5.0)] * 4).patience_s(100) == 15.0


def test_only_requests_of_similar_size_are_peers() -> None:
    """If this fails, a large part beside many small ones is always made twice."""
    peers = peers_of(*[(100, 5.0)] * 10, *[(10_000, 50.0)] * 4)
    assert peers.patience_s(200) == 15.0
    assert peers.patience_s(50) == 15.0
    assert peers.patience_s(10_000) == 150.0
    assert peers.patience_s(1000) is None


def test_one_slow_peer_changes_nothing_and_a_slow_line_does() -> None:
    """If this fails, one straggler hides the next one, or a line that gets slower has everything made twice."""
    assert peers_of(*[(100, 5.0)] * 10, (100, 500.0)).patience_s(100) == 15.0
    assert peers_of(*[(100, 5.0)] * 100, *[(100, 50.0)] * 64).patience_s(100) == 150.0
