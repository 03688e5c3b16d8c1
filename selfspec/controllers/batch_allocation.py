"""Allocation of drafted tokens to the sequences of a batch: expected accepted tokens against the time of the round.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

KNOWN, MEMORY = 4.0, 0.9  # weight of the batch's acceptance rate, in drafts; decay of a draft's weight with each later


class AcceptanceHistory:
    """How often the first token of one sequence's drafts was accepted lately; the batch's rate counts as a prior."""

    def __init__(self) -> None:
        self._drafts = self._accepted = 0.0

    def record(self, accepted: bool) -> None:
        """Count a verified draft, and whether its first token was accepted."""
        self._drafts, self._accepted = MEMORY * self._drafts + 1, MEMORY * self._accepted + accepted

    def chance(self, shared: float) -> float:
        """Return the chance that the next draft's first token is accepted; `shared`: that chance in the whole batch."""
        return (KNOWN * shared + self._accepted) / (KNOWN + self._drafts)


def allocate_tokens(
    chances: Sequence[Sequence[float]],
    rate: float,
    draft_seconds: Callable[[int], float],
    verify_seconds: Callable[[int], float],
) -> list[int]:
    """Return how many further tokens each sequence drafts: those whose expected tokens exceed `rate` * time by most.

    `chances[i][d]`: the chance that the (d + 1)-th further token of sequence i is accepted, all tokens before it
    included, so it never rises with d. `draft_seconds(n)`: the seconds of a draft pass over n tokens; sequences draft
    in lockstep, so the d-th pass drafts the d-th further tokens. `verify_seconds(n)`: the seconds that n more tokens
    add to the verification pass.

    For each number of draft passes, tokens are added in order of chance, and the best of all these allocations is
    returned. As chances never rise with d, a token is never added before the token that it follows. The allocation is
    optimal if a draft pass takes a fixed time and a time per token, whatever the verification takes.
    """
    passes = max(map(len, chances), default=0)
    order = sorted((-chance, d, i) for i, row in enumerate(chances) for d, chance in enumerate(row))
    drafting = [draft_seconds(n) for n in range(1 + len(chances))]
    verifying = [verify_seconds(n) for n in range(1 + len(order))]
    best, depth, number = 0.0, 0, 0
    for limit in range(1, passes + 1):
        in_pass, tokens, seconds, taken = [0] * limit, 0.0, 0.0, 0
        for minus, d, _ in order:
            if d >= limit:
                continue
            taken, tokens = taken + 1, tokens - minus
            seconds += drafting[in_pass[d] + 1] - (drafting[in_pass[d]] if in_pass[d] else 0.0)
            in_pass[d] += 1
            worth = tokens - rate * (seconds + verifying[taken])
            if worth > best:
                best, depth, number = worth, limit, taken
    counts = [0] * len(chances)
    for _, _, i in [token for token in order if token[1] < depth][:number]:
        counts[i] += 1
    return counts
