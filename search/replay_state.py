"""The drafts that a replay is working on, and the record of each.

A start is a position of a text from which a draft is made.
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
    """Drafts under way, `[B, n]`, padded; `ids` numbers the starts of all texts."""

    ids: Tensor
    start: Tensor  # position of the last committed token
    token: Tensor  # next input token
    matched: Tensor  # all tokens drafted so far match the text
    weight: Tensor  # P of rule `block`
    real: Tensor  # not padding
    own: Tensor  # [B, n, scratch]: scratch slots that hold this draft's keys
    drafted: Tensor  # [B, n, depth]

    def pick(self, index: Tensor, real: Tensor) -> None:
        """Keep the rows `index` `[B, m]`."""
        for name in ("ids", "start", "token", "matched", "weight"):
            setattr(self, name, getattr(self, name).gather(1, index))
        self.real = real
        for name in ("own", "drafted"):
            t = getattr(self, name)
            setattr(self, name, t.gather(1, index.unsqueeze(-1).expand(-1, -1, t.shape[-1])))


class Record:
    """The draft from every start: `token` and `confidence` are `[starts, depth]`, the other fields `[starts]`."""

    def __init__(self, starts: int, depth: int) -> None:
        self.token = torch.zeros((starts, depth), dtype=torch.long)
        self.confidence = torch.zeros((starts, depth), dtype=torch.float64)
        self.depth = torch.zeros(starts, dtype=torch.long)
        self.run = torch.zeros(starts, dtype=torch.long)
        self.rank = torch.zeros(starts, dtype=torch.long)
        self.unfinished = torch.zeros(starts, dtype=torch.bool)


def confident(confidence: Confidence, probability: Tensor, logit_gap: Tensor | None) -> Tensor:
    """Return `Confidence.of` for tokens of these probabilities `[B, n]` and gaps `logit_gap` `[B, n]` (None: zeros)."""
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
    """Return the values `[B, n, V]` whose maximum is drafted: q over the noise tied to each row's text and position."""
    noise = [ties.noise(p, q) for ties, positions in zip(tied, position.tolist(), strict=True) for p in positions]
    return q / torch.stack(noise).view(q.shape)
