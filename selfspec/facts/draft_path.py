"""Draft paths: how the model runs while it drafts. Plain data; `runtime` compiles it against a model."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.basics.errors import SelfspecError
from selfspec.facts.skip import NOTHING_SKIPPED, SkipSet


@dataclass(frozen=True, slots=True)
class DraftPath:
    """How each sub-layer and the head run while drafting; what is not named here runs in full.

    `skip`: the sub-layers that are bypassed. `vocabulary`: the only tokens whose logits the head computes; None: all.
    Raises `SelfspecError` for a vocabulary that is empty, or names a token twice or below 0.
    """

    skip: SkipSet = NOTHING_SKIPPED
    vocabulary: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        tokens = self.vocabulary
        if tokens is not None and (not tokens or len(set(tokens)) < len(tokens) or min(tokens) < 0):
            raise SelfspecError("a draft vocabulary is of one or more different tokens from 0")


FULL = DraftPath()
