"""The unfinished drafts of a replay, and the record of all drafts.

A start is a position of a text that a draft begins at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.types.confidence import Confidence

from .seeded_noise import SeededNoise


@dataclass(slots=True)
class ReplayState:
    """The unfinished drafts: n drafts of each of B texts, padded, in tensors `[B, n]`."""

    ids: Tensor  # index of the draft's start among the starts of all texts
    start: Tensor  # position of the last committed token
    token: Tensor  # next input token
    matched: Tensor  # whether all tokens drafted so far match the text
    weight: Tensor  # the acceptance weight P of rule `block`
    real: Tensor  # whether the entry is a draft, not padding
    own: Tensor  # [B, n, scratch]: which scratch slots of the KV cache hold this draft's keys
    drafted: Tensor  # [B, n, depth]: the tokens drafted so far

    def pick(self, index: Tensor, real: Tensor) -> None:
        """Keep the drafts at `index` `[B, m]` of each text; `real` `[B, m]`: which of these are not padding."""
        for name in ("ids", "start", "token", "matched", "weight"):
            setattr(self, name, getattr(self, name).gather(1, index))
        self.real = real
        for name in ("own", "drafted"):
            t = getattr(self, name)
            setattr(self, name, t.gather(1, index.unsqueeze(-1).expand(-1, -1, t.shape[-1])))


class Record:
    """The results of the drafts from all starts.

    `token` and `confidence`, `[starts, depth]`: the drafted tokens. `depth`, `run`, `rank` and `unfinished`,
    `[starts]`: the draft length, and `runs`, `ranks` and `unfinished` of `Trace`.
    """

    def __init__(self, starts: int, depth: int) -> None:
        self.token = torch.zeros((starts, depth), dtype=torch.long)
        self.confidence = torch.zeros((starts, depth), dtype=torch.float64)
        self.depth = torch.zeros(starts, dtype=torch.long)
        self.run = torch.zeros(starts, dtype=torch.long)
        self.rank = torch.zeros(starts, dtype=torch.long)
        self.unfinished = torch.zeros(starts, dtype=torch.bool)


def confident(confidence: Confidence, probability: Tensor, logit_gap: Tensor | None) -> Tensor:
    """Return `Confidence.estimate` for each `probability` `[B, n]` and gap `logit_gap` `[B, n]` (None: zeros)."""
    if confidence.plain:
        return probability
    each = zip(
        probability.flatten().tolist(),
        (torch.zeros_like(probability) if logit_gap is None else logit_gap).flatten().tolist(),
        strict=True,
    )
    values = torch.tensor([confidence.estimate(p, g) for p, g in each], dtype=torch.float64, device=probability.device)
    return values.view(probability.shape)


def with_ties(q: Tensor, position: Tensor, tied: Sequence[SeededNoise]) -> Tensor:
    """Return `q` `[B, n, V]` over the noise of each draft's text and position; its largest value is drafted."""
    noise = [ties.noise(p, q) for ties, positions in zip(tied, position.tolist(), strict=True) for p in positions]
    return q / torch.stack(noise).view(q.shape)
