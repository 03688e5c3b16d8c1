"""What of a search's options is wrong, told before a model is loaded."""

from __future__ import annotations

import math

from selfspec.basics.errors import SelfspecError

from .space import GRANULARITIES
from .strategies import check_strategy

OBJECTIVES = ("replay", "wallclock")
KV = ("shared", "own")


def check_options(
    *,
    objective: str,
    strategy: str,
    granularity: str,
    kv: str,
    trials: int,
    count: int,
    seed: int,
    minutes: float | None,
    context: int | None,
    max_draft_cost: float | None,
) -> None:
    """Raise `SelfspecError` for a wrong option of `find_profile`, as far as no model is needed to tell."""
    if objective not in OBJECTIVES:
        raise SelfspecError(f"objective '{objective}' is not known; known: {', '.join(OBJECTIVES)}")
    check_strategy(strategy)
    if granularity not in GRANULARITIES:
        raise SelfspecError(f"granularity '{granularity}' is not known; known: {', '.join(GRANULARITIES)}")
    if kv not in KV:
        raise SelfspecError(f"kv '{kv}' is not known; known: {', '.join(KV)}")
    if kv == "own" and objective == "wallclock":
        raise SelfspecError("kv 'own' needs the replay objective: selfspec's own decoding shares the target's cache")
    if trials < 1 or count < 1:
        raise SelfspecError(f"want at least 1 trial and 1 prompt, got {trials} and {count}")
    if not 0 <= seed < 2**32:
        raise SelfspecError(f"seed {seed}: want 0 to {2**32 - 1}")
    if minutes is not None and not 0 < minutes < math.inf:
        raise SelfspecError(f"minutes {minutes}: want more than 0, and finite")
    if context is not None and context < 1:
        raise SelfspecError(f"context {context}: want at least 1 key")
    if max_draft_cost is not None and not 0 < max_draft_cost < math.inf:
        raise SelfspecError(f"max_draft_cost {max_draft_cost}: want more than 0 and finite, as a share of a plain step")
    if objective == "wallclock" and (context is not None or max_draft_cost is not None):
        raise SelfspecError("context and max_draft_cost need the cost model of the replay objective")
