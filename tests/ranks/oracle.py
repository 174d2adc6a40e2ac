"""What ranks may be told of a job's saves, judged by what each of them did, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ranks.world import PART_S, TIMEOUT_S, Act, World

_HARMLESS = ("makes", "is slow")


def complaints(world: World, *, longest_s: float, num_after: int) -> list[str]:
    """All there are; none where the ranks were told what is right, each in time.

    `longest_s` is what a call of a rank that is not slow may take, and `num_after` the number of saves that may fail
    after the last act that does harm.
    """
    return [*_mixed(world), *_wrongly_blamed(world), *_not_made(world, num_after), *_too_long(world, longest_s)]


def _mixed(world: World) -> Iterator[str]:
    for key, one in world.gatherings.items():
        if len(one.labels) == world.num_ranks and len(set(one.labels.values())) > 1:
            yield f"ranks that do different things were in collective {key} together: {one.labels}"


def _wrongly_blamed(world: World) -> Iterator[str]:
    for rank, told in enumerate(world.told):
        for number, one in enumerate(told):
            if one.outcome != "failed":
                continue
            until = number + 1 if world.is_in_step else len(world.program)
            guilty = {who for who in range(world.num_ranks) if _has_done_harm(world, who, until)}
            if not one.lost:
                yield f"rank {rank} was told of nobody in save {number}: {one}"
            elif rank not in guilty and (innocent := set(one.lost) - guilty):
                yield f"rank {rank} was told of {innocent} in save {number}: {one}"


def _has_done_harm(world: World, rank: int, until: int) -> bool:
    return any(acts[rank].kind not in _HARMLESS for acts in world.program[:until])


def _not_made(world: World, num_after: int) -> Iterator[str]:
    if world.dead:
        return
    harmful = [number for number, acts in enumerate(world.program) if not all(map(_is_harmless, acts))]
    begins_at = harmful[-1] + 1 + num_after if harmful else 0
    # Where nothing else joins the ranks, one that has missed saves may be in another's last ones when that has ended.
    ends_at = len(world.program) - (0 if world.is_in_step else num_after)
    for number in range(begins_at, ends_at):
        if any(told[number].outcome != "made" for told in world.told):
            yield f"save {number} was not made by all: {[told[number].outcome for told in world.told]}"


def _is_harmless(act: Act) -> bool:
    return act.kind in _HARMLESS


def _too_long(world: World, longest_s: float) -> Iterator[str]:
    for rank, told in enumerate(world.told):
        for number, one in enumerate(told):
            # Ranks that are slow or late are waited for by those who see that they live.
            acts = world.program[number] if world.is_in_step else [act for acts in world.program for act in acts]
            allowed_s = longest_s + sum(PART_S.get(act.kind, 0.0) for act in acts)
            spent_s = one.ended_s - one.begun_s
            if spent_s > allowed_s:
                yield f"rank {rank} was in save {number} for {spent_s / TIMEOUT_S:.1f} times timeout_s: {one}"
