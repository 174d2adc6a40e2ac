"""One ranged read, into the memory of everything that wants some of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cloudckpt._plan.reads import Request, Want
from cloudckpt._stage.arena import Arena
from cloudckpt._stage.tensors import bytes_view
from cloudckpt._stage.wholes import Targets

_ALIGNMENT_BYTES = 16  # the largest element


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Bytes of the request that go through a buffer."""

    begin: int
    end: int
    position: int
    """In the buffer; aligned as in the object, so that elements are aligned there too."""


@contextlib.contextmanager
def opened(request: Request, targets: Targets, arena: Arena) -> Iterator[list[memoryview]]:
    """Views to fill with the request's bytes, in order; left without an error, the targets have got theirs.

    Most views are the targets' own memory. Bytes that nobody wants, that have to be converted, or that several want,
    go through a buffer of `arena`.
    """
    parts: list[memoryview | _Gap] = []
    copied: list[Want] = []
    reached = request.begin
    position = 0
    for want in request.wants:
        begin, end = max(want.begin, request.begin), min(want.end, request.end)
        view = None if request.overlapping else targets.direct_view(want.consumer, begin, end)
        if view is None:
            copied.append(want)
            continue
        if reached < begin:
            parts.append(gap := _gap(reached, begin, position))
            position = gap.position + begin - reached
        parts.append(view)
        reached = end
    if reached < request.end:
        parts.append(gap := _gap(reached, request.end, position))
        position = gap.position + request.end - reached
    with arena.lend(position) if position else contextlib.nullcontext(torch.empty(0)) as buffer:
        yield [
            bytes_view(buffer[part.position : part.position + part.end - part.begin])
            if isinstance(part, _Gap)
            else part
            for part in parts
        ]
        gaps = [part for part in parts if isinstance(part, _Gap)]
        for want in copied:
            _copy(want, gaps, buffer, targets)


def _gap(begin: int, end: int, position: int) -> _Gap:
    return _Gap(begin=begin, end=end, position=position + (begin - position) % _ALIGNMENT_BYTES)


def _copy(want: Want, gaps: Sequence[_Gap], buffer: torch.Tensor, targets: Targets) -> None:
    for gap in gaps:
        begin, end = max(want.begin, gap.begin), min(want.end, gap.end)
        if begin < end:
            start = gap.position + begin - gap.begin
            targets.copy_from(want.consumer, buffer[start : start + end - begin], begin)
