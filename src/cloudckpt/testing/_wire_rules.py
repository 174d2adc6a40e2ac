"""Which requests something is done to: by count, or drawn with a seed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from cloudckpt.testing._draw import Draw, without_attempts
from cloudckpt.testing._wire_actions import Action, CutAnswer, CutRequest, CutSomewhere, LoseAnswer, Seen

_UPLOAD_ID = re.compile(r"(?<=[?&])(uploadId|upload_id)=[^&]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which requests something is done to, and what.

    A rule counts every request that it matches. Of those it lets the first `skip` pass, acts on the next `times`
    (``None``: all of them), and lets the rest pass. With a `probability` below 1, it acts on that part of those alone.
    Which they are depends on `seed`, the method, the target and how often both came before, and not on what else
    moves at the time. Ids that are drawn anew for each save and upload play no part.
    """

    action: Action
    method: str | None = None
    """``None``: any."""
    path: str = ""
    """A regular expression, searched for in path and query as they are sent (percent-encoded)."""
    header: str | None = None
    """A header that the request must have, whatever its value."""
    skip: int = 0
    times: int | None = 1
    probability: float = 1.0
    seed: int = 0

    def matches(self, request: Seen) -> bool:
        """Whether the request counts."""
        return (
            self.method in (None, request.method)
            and re.search(self.path, request.target) is not None
            and (self.header is None or request.header(self.header) is not None)
        )

    def acts_on(self, num_before: int) -> bool:
        """Whether something is done to a match before which `num_before` others came."""
        return self.skip <= num_before and (self.times is None or num_before < self.skip + self.times)


@dataclass(slots=True, kw_only=True)
class CountedRule:
    rule: Rule
    num_matched: int = 0
    num_alike: Counter[tuple[str, str]] = field(default_factory=Counter)

    def action_on(self, request: Seen) -> Action | None:
        """What is done to `request`, which is counted; `None` where the rule is not due."""
        rule = self.rule
        if not rule.matches(request):
            return None
        self.num_matched += 1
        alike = (request.method, _UPLOAD_ID.sub("", without_attempts(request.target)))
        self.num_alike[alike] += 1
        if not rule.acts_on(self.num_matched - 1):
            return None
        draw = Draw(rule.seed, *alike, self.num_alike[alike])
        if draw.fraction("acts") >= rule.probability:
            return None
        return _cut(rule.action, request, draw) if isinstance(rule.action, CutSomewhere) else rule.action


def _cut(action: CutSomewhere, request: Seen, draw: Draw) -> Action:
    kind = draw.below(3, "kind")
    if kind == 0:
        return CutRequest(after_bytes=draw.below(int(request.header("content-length") or 0) + 1, "bytes"))
    if kind == 1:
        return LoseAnswer()
    after_bytes = draw.below(action.longest_answer_bytes, "bytes")
    return CutAnswer(after_bytes=after_bytes, reset=draw.below(2, "reset") == 1)
