"""One ranged read, into the memory of everything that wants some of it."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class _Source(NamedTuple):
    """Bytes ``[begin, end)`` of the object, in memory."""

    begin: int
    end: int
    content: torch.Tensor


@contextlib.contextmanager
def opened(request: Request, targets: Targets, arena: Arena) -> Iterator[list[memoryview]]:
    """Views to fill with the request's bytes, in order; left without an error, the targets have got theirs.

    Most views are the targets' own memory. Bytes that nobody wants or that have to be converted go through a buffer of
    `arena`. What several want, as names of tied tensors do, is read into the memory of one of them, and copied.
    """
    parts: list[memoryview | _Gap] = []
    copied: list[Want] = []
    shared: list[tuple[int, int, memoryview]] = []
    reached = request.begin
    position = 0
    for begin, end, wants in _stretches(request):
        filled, view = _direct(wants, begin, end, targets)
        if len(wants) > 1 or view is None:
            copied += [want for want in wants if want is not filled]
        if view is None:
            continue
        if reached < begin:
            parts.append(gap := _gap(reached, begin, position))
            position = gap.position + begin - reached
        parts.append(view)
        if len(wants) > 1:
            shared.append((begin, end, view))
        reached = end
    if reached < request.end:
        parts.append(gap := _gap(reached, request.end, position))
        position = gap.position + request.end - reached
    with arena.lend(position) if position else contextlib.nullcontext(torch.empty(0, device="cpu")) as buffer:
        yield [
            bytes_view(buffer[part.position : part.position + part.end - part.begin])
            if isinstance(part, _Gap)
            else part
            for part in parts
        ]
        if copied:
            sources = [
                _Source(part.begin, part.end, buffer[part.position : part.position + part.end - part.begin])
                for part in parts
                if isinstance(part, _Gap)
            ]
            sources += [_Source(begin, end, torch.frombuffer(view, dtype=torch.uint8)) for begin, end, view in shared]
            sources.sort(key=_end_of)  # none overlaps another
            for want in copied:
                _copy(want, sources, targets)


def _stretches(request: Request) -> Iterator[tuple[int, int, Sequence[Want]]]:
    """The wants by what of the request they want; together those of which one wants what another does."""
    low, high = request.begin, request.end
    if not request.overlapping:
        for want in request.wants:
            yield max(want.begin, low), min(want.end, high), (want,)
        return
    begin = end = low
    together: list[Want] = []
    for want in request.wants:
        if together and want.begin < end:
            together.append(want)
            end = max(end, min(want.end, high))
            continue
        if together:
            yield begin, end, together
        begin, end, together = max(want.begin, low), min(want.end, high), [want]
    if together:
        yield begin, end, together


def _direct(
    wants: Sequence[Want], begin: int, end: int, targets: Targets
) -> tuple[Want, memoryview] | tuple[None, None]:
    """The want whose own memory takes bytes ``[begin, end)``, and that memory; none where not each wants all of it."""
    if len(wants) > 1 and any(want.begin > begin or want.end < end for want in wants):
        return None, None
    for want in wants:
        view = targets.direct_view(want.consumer, begin, end)
        if view is not None:
            return want, view
    return None, None


def _gap(begin: int, end: int, position: int) -> _Gap:
    return _Gap(begin=begin, end=end, position=position + (begin - position) % _ALIGNMENT_BYTES)


def _copy(want: Want, sources: Sequence[_Source], targets: Targets) -> None:
    for number in range(bisect.bisect_right(sources, want.begin, key=_end_of), len(sources)):
        source = sources[number]
        if source.begin >= want.end:
            break
        begin, end = max(want.begin, source.begin), min(want.end, source.end)
        if begin < end:
            targets.copy_from(want.consumer, source.content[begin - source.begin : end - source.begin], begin)


def _end_of(source: _Source) -> int:
    return source.end
