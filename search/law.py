"""Sampled replay, exact in law: what a real drafter and token verification did, given the text that came out.

Pure torch: knows nothing of models and texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Noise(Protocol):
    """Random choices of one depth of a sampled replay, for n rows; `place` numbers the choices of a row."""

    def coin(self, chance: Tensor, place: int) -> Tensor:
        """True with these chances, `[n]`."""

    def draw(self, weights: Tensor, place: int) -> Tensor:
        """A token for each row, `[n]`, by weights `[n, V]` of any sum."""


@dataclass(frozen=True, slots=True)
class Uniforms:
    """Choices made by uniform numbers `[n, places]`, so that they belong to the row and not to the batch."""

    numbers: Tensor

    def coin(self, chance: Tensor, place: int) -> Tensor:
        """True where the number lies below the chance."""
        return self.numbers[:, place] < chance

    def draw(self, weights: Tensor, place: int) -> Tensor:
        """The token whose share of the cumulated weights holds the number."""
        cumulated = weights.cumsum(-1, dtype=torch.float64)
        points = self.numbers[:, place, None] * cumulated[:, -1:]
        drawn = torch.searchsorted(cumulated, points, right=True).squeeze(-1)
        last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
        return torch.minimum(drawn, last)


def draft_beside(
    p: Tensor, q: Tensor, following: Tensor, matched: Tensor, noise: Noise, candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a real drafter and token verification would have done, given that the text came out: exact in law.

    `p`, `q` `[n, V]`: the target's and the draft's distributions; `following` `[n]`: the text's next token, itself
    drawn from p. Where `matched`, with chance min(1, q(x)/p(x)) the drafted token is x, accepted; otherwise it is
    y ~ norm((q - p)+), rejected, and further candidates (drawn from q without those before) are tried against what
    is left of p. Elsewhere the token is drawn from q. Returns the drafted token, whether it is the text's, and the
    number of the candidate that was x (0: none).
    """
    x = following.unsqueeze(-1)
    p_x, q_x = p.gather(-1, x).squeeze(-1), q.gather(-1, x).squeeze(-1)
    accepted = noise.coin(_chance(q_x, p_x, matched), 0)
    wrong = noise.draw(torch.where(matched.unsqueeze(-1), _left(q, p, otherwise=q), q), 1)
    token = torch.where(accepted, following, wrong)
    rank = torch.zeros_like(following)
    untried, r, left = matched & ~accepted, _left(p, q, otherwise=p), q
    for candidate in range(1, candidates):
        left = left.scatter(-1, wrong.unsqueeze(-1), 0)
        total = left.sum(-1, keepdim=True)
        untried = untried & (total.squeeze(-1) > 0)
        if not bool(untried.any()):
            break
        left = left / total.clamp(min=torch.finfo(left.dtype).tiny)
        r_x, left_x = r.gather(-1, x).squeeze(-1), left.gather(-1, x).squeeze(-1)
        hit = noise.coin(_chance(left_x, r_x, untried), 2 * candidate)
        rank = torch.where(hit, candidate, rank)
        untried = untried & ~hit
        wrong = noise.draw(_left(left, r, otherwise=left), 2 * candidate + 1)
        r = _left(r, left, otherwise=p)
    return token, accepted, rank


def _chance(q: Tensor, p: Tensor, possible: Tensor) -> Tensor:
    """min(1, q / p), and 0 where it is not possible."""
    return torch.where(possible, torch.where(q >= p, 1.0, q / p.clamp(min=torch.finfo(p.dtype).tiny)), 0.0)


def _left(a: Tensor, b: Tensor, *, otherwise: Tensor) -> Tensor:
    """norm((a - b)+) for each row; `otherwise` where nothing is left."""
    left = (a - b).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, otherwise)
