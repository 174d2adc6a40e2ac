"""One rank's part in one load that ranks make together: opened before the plans, closed when all have loaded."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable

from cloudckpt._ranks.met_group import MetGroup
from cloudckpt._share.board import Board
from cloudckpt._share.deal import LEAST_MACHINES, Deal, Offer
from cloudckpt._share.door import Entrance
from cloudckpt._share.exchange import Exchange
from cloudckpt._share.plan import Range
from cloudckpt.options import Options


class Session:
    """The board and the door that this rank shows to others, and its exchange with them."""

    def __init__(self, group: MetGroup) -> None:
        self._group = group
        self._board: Board | None = None
        self._entrance: Entrance | None = None
        self._exchange: Exchange | None = None
        # A rank that never comes to read meets the others there, and they need not wait for its bytes.
        group.call_at_end(self.leave)

    def offer(self, wanted: Callable[[], list[Range]], *, scheme: str, options: Options) -> Offer | None:
        """What this rank wants, for others that want the same; None where they are not to share, or cannot."""
        how = options.share_reads
        # Of a file system, the machine itself hands on what one rank has read.
        if how == "never" or (how == "auto" and scheme == "file"):
            return None
        # Elsewhere a word that says "there" can be seen before what it speaks of, which only a checksum notices.
        if not options.verify and platform.machine() not in ("x86_64", "AMD64"):
            return None
        self._board = Board.new()
        if self._board is None:
            return None
        # Between machines nothing but a checksum tells who sent what; and fewer of them would not share.
        if options.verify and (how == "always" or self._group.size() >= LEAST_MACHINES):
            self._entrance = Entrance.new()
        return Offer(
            address=self._board.address,
            wanted=wanted(),
            verify=options.verify,
            insists=how == "always",
            door=self._entrance.door if self._entrance is not None else None,
        )

    def exchange(self, deal: Deal | None, *, rank: int, options: Options) -> Exchange | None:
        """With those that `deal` names; None, which they are told, where this rank has to read all for itself."""
        exchange = None
        if deal is not None and self._board is not None:
            with contextlib.suppress(OSError, ValueError):  # there is no memory for it here
                exchange = deal.exchange(self._board, self._entrance, rank=rank, options=options)
        if exchange is not None and not exchange.segments:
            exchange.close()
            exchange = None
        self._exchange = exchange
        if exchange is None:
            self.leave()
        elif exchange.inlet is None and self._entrance is not None:
            self._entrance.close()
        return exchange

    def leave(self) -> None:
        """Nothing more will come from this rank, and it needs nothing more."""
        if self._board is not None:
            self._board.leave()
        if self._exchange is not None:
            self._exchange.leave()
        elif self._entrance is not None:
            self._entrance.close()

    def close(self) -> None:
        """When all ranks have loaded, or none needs this one any more."""
        self._group.call_at_end(None)
        self.leave()
        if self._exchange is not None:
            self._exchange.close()
        if self._entrance is not None:
            self._entrance.close()
        if self._board is not None:
            self._board.close()
        self._board = self._entrance = self._exchange = None
