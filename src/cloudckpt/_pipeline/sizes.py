"""How large the parts of a save and the reads of a load are: as large as can be, since each costs the client some CPU,
but so that there are some for every connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from cloudckpt._pipeline.context import Context
from cloudckpt._plan.reads import Want
from cloudckpt._plan.sizes import request_bytes_for
from cloudckpt.options import MIB

_PARTS_FOR_EACH_CONNECTION = 4
_SMALL_PART_BYTES = 16 * MIB
_REQUESTS_FOR_EACH_CONNECTION = 4
_SMALL_REQUEST_BYTES = 8 * MIB
_SHARED_READS = 8  # of a load that hands bytes on; smaller requests would cost more CPU than more of them bring


def part_bytes_of(context: Context, num_bytes: int, *, are_copied: bool) -> int:
    """Of an object's parts, in a save of `num_bytes`; `are_copied` where they are sent from buffers.

    Depends on nothing that another run would find different, since parts of another size cannot be resumed.
    """
    options = context.options
    most_bytes = options.part_bytes
    if are_copied:  # each part in flight has a buffer
        most_bytes = min(most_bytes, options.staging_bytes // context.connections)
    return request_bytes_for(
        num_bytes,
        connections=context.connections,
        for_each=_PARTS_FOR_EACH_CONNECTION,
        least_bytes=_SMALL_PART_BYTES,
        most_bytes=most_bytes,
    )


def request_bytes_of(context: Context, wants: Sequence[Want], copied: Sequence[bool], *, shares: bool) -> int:
    """Of the reads that bring `wants`; `copied` says of each consumer whether its bytes come by way of a buffer.

    With `shares` the load hands other bytes on, for which half of its memory is kept.
    """
    options = context.options
    wanted_bytes = copied_bytes = 0
    for want in wants:
        num_bytes = want.end - want.begin
        wanted_bytes += num_bytes
        copied_bytes += num_bytes * copied[want.consumer]
    most_bytes = options.request_bytes
    if shares:
        most_bytes = min(most_bytes, options.read_bytes // 4 // min(context.connections, _SHARED_READS))
    elif 2 * copied_bytes > wanted_bytes:  # each has a buffer, and there should be one for each connection
        most_bytes = min(most_bytes, (options.read_bytes - context.hedge_bytes) // context.connections)
    return request_bytes_for(
        wanted_bytes,
        connections=context.connections,
        for_each=_REQUESTS_FOR_EACH_CONNECTION,
        least_bytes=_SMALL_REQUEST_BYTES,
        most_bytes=most_bytes,
    )
