"""Steps that lie where training is about to save."""

from __future__ import annotations

from collections.abc import Collection

from cloudckpt._manager.steps import Steps
from cloudckpt._uri import parse_location
from cloudckpt.errors import CheckpointExistsError
from cloudckpt.newest import Ranks
from cloudckpt.options import Options

_MOST_SHOWN = 5


def steps_under(root: str, options: Options) -> list[int]:
    """The committed ones, the lowest first: what rank 0 finds, on all ranks. Of manifests, only the heads are read.

    Raises torch's ``CheckpointException``, on all of them, where the store does not answer.
    """

    def find() -> list[int]:
        steps = Steps(parse_location(root), options, alone_ranks=None)
        # A save meets those of torch's own writer, too.
        return sorted({*(info.step for info in steps.found(with_metrics=False)), *steps.of_torch()})

    return Ranks(None, no_dist=False, root=root, timeout_s=options.timeout_s).agreed("find", find)


def refuse_taken(root: str, steps: Collection[int], *, after: int | None, to_do: str) -> None:
    """Raises `CheckpointExistsError` where there are steps above `after`, or any at all where that is None.

    Training would meet them one by one, hours later, or its retention remove what nobody has asked it to.
    """
    taken = [step for step in sorted(steps) if after is None or step > after]
    if not taken:
        return
    shown = ", ".join(map(str, taken[:_MOST_SHOWN])) + (", …" if len(taken) > _MOST_SHOWN else "")
    begins = "begins anew" if after is None else f"goes on from step {after}"
    raise CheckpointExistsError(
        f"training {begins}, but {root} has step{'s' if len(taken) > 1 else ''} {shown} already. {to_do}",
        uri=root,
    )
