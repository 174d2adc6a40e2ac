"""Calls of DCP's that the ranks make together, and what becomes of them where a rank is lost.

See ``docs/design/009-waiting-for-ranks.md``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._ranks.group import Call, Purpose, begin, exists
from cloudckpt.errors import RankLostError


@contextlib.contextmanager
def in_company(
    process_group: dist.ProcessGroup | None,
    purpose: Purpose = "foreground",
    *,
    doing: str,
    uri: str,
    timeout_s: float,
) -> Iterator[dist.ProcessGroup | None]:
    """The group for a call of DCP's in this context. A lost rank is a failure of the call, by torch's own exception.

    It is `process_group` itself where there is nobody to wait for, or no way to.
    """
    try:
        call = begin(process_group, purpose, doing=doing, uri=uri, timeout_s=timeout_s)
    except RankLostError as error:
        raise failure_by_loss(error) from None
    with accompanied(call):
        yield process_group if call is None else call.group


@contextlib.contextmanager
def accompanied(call: Call | None) -> Iterator[None]:
    """End `call` with this context, in the way in which DCP's call in it ended; see `in_company`."""
    has_left = True
    try:
        yield
        has_left = False
    except CheckpointException:
        has_left = False  # it is the same on all ranks
        raise
    except RankLostError as error:
        raise failure_by_loss(error) from None
    except Exception as error:
        if call is None or exists(call.group):
            raise
        raise failure_by_loss(call.without_group()) from error
    finally:
        if call is not None:
            call.end(has_left=has_left)


def failure_by_loss(error: RankLostError) -> CheckpointException:
    """`error` in the form in which DCP reports failures by rank."""
    return CheckpointException("meeting", dict.fromkeys(error.ranks or (0,), (error, None)))  # type: ignore[arg-type]
