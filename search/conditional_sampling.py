"""Sampled replay: draw the drafts that a real drafter would have made, given the text that decoding emitted.

Drafts and the outcome of their verification follow exactly the joint distribution of real decoding. Pure torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.speculation.sampling import tied_noise


class SeededNoise:
    """The sampling noise of one text, a function of the text's seed and the position; kept in memory once drawn."""

    def __init__(self, seed: int | None) -> None:
        if seed is None:
            raise SelfspecError("rule 'match': a text without a seed; expected texts that were sampled with a seed")
        self._seed = seed
        self._cache: dict[int, Tensor] = {}

    def noise(self, position: int, like: Tensor) -> Tensor:
        """Return the noise `[V]` of an absolute position, for a vocabulary as in `like` `[.., V]`."""
        if position not in self._cache:
            self._cache[position] = tied_noise(self._seed, position, like)
        return self._cache[position]


class Noise(Protocol):
    """The random choices of n drafts at one depth of a sampled replay; `place` is the number of a draft's choice."""

    def coin(self, chance: Tensor, place: int) -> Tensor:
        """Return booleans `[n]`, each true with the chance in `chance` `[n]`."""

    def draw(self, weights: Tensor, place: int) -> Tensor:
        """Draw a token for each row, `[n]`, by unnormalised weights `[n, V]`."""

    def pick(self, rows: Tensor) -> Noise:
        """Return the choices of the drafts with the indices `rows`."""


@dataclass(frozen=True, slots=True)
class Uniforms:
    """Random choices by uniform numbers `[n, places]`, so that a draft's choices do not depend on the batch."""

    numbers: Tensor

    def coin(self, chance: Tensor, place: int) -> Tensor:
        """Return whether the uniform number of each draft at `place` is below its chance."""
        return self.numbers[:, place] < chance

    def draw(self, weights: Tensor, place: int) -> Tensor:
        """Return, for each draft, the token whose interval of the cumulative weights contains the uniform number."""
        cumulated = weights.cumsum(-1, dtype=torch.float64)
        points = self.numbers[:, place, None] * cumulated[:, -1:]
        drawn = torch.searchsorted(cumulated, points, right=True).squeeze(-1)
        last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
        return torch.minimum(drawn, last)

    def pick(self, rows: Tensor) -> Uniforms:
        """Return the choices of the drafts with the indices `rows`."""
        return Uniforms(self.numbers[rows])


def draft_given_text(
    p: Tensor, q: Tensor, following: Tensor, matched: Tensor, noise: Noise, candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one drafted token for each row and the outcome of its verification, given the text that decoding emitted.

    `q` `[n, V]`: the draft's distribution; `p` `[n, V]`: the target's for rule `token`; for rule `block`, the target's
    times the weight P of the tokens drafted so far (see `verify.block`). `following` `[n]`: the text's next token x,
    itself drawn from the target's distribution. Where all tokens drafted so far match the text (`matched`), the drafted
    token is x, accepted, with chance min(1, q(x)/p(x)). Otherwise it is a token y ~ norm((q - p)+), rejected, and
    further candidates, each drawn from q without all earlier candidates, are tried against the residual distribution
    norm((p - q)+). Where an earlier token did not match, the token is drawn from q. `candidates` includes the drafted
    token. Returns the drafted token, whether it matches the text, and which further candidate was x (1: the first
    one after the drafted token; 0: none).

    Derivation for `block`: the rule accepts at least i tokens of a draft that begins with x_1 .. x_i with chance P_i,
    whatever follows them. Given the text, that chance is P_i q(x_1) .. q(x_i) / (p(x_1) .. p(x_i)), and each step
    contributes the factor above. Where the draft breaks after i tokens, the next drafted token is y with chance
    q(y) (1 - P_{i+1}(y)), normalised over y, and the emitted token follows norm((P_i p - q)+), whatever y is.
    """
    x = following.unsqueeze(-1)
    p_x, q_x = p.gather(-1, x).squeeze(-1), q.gather(-1, x).squeeze(-1)
    accepted = noise.coin(_chance(q_x, p_x, matched), 0)
    token, rank = following.clone(), torch.zeros_like(following)
    off = (~matched).nonzero().squeeze(-1)
    if len(off):
        token[off] = noise.pick(off).draw(q[off], 1)
    broken = (matched & ~accepted).nonzero().squeeze(-1)
    if len(broken):
        token[broken], rank[broken] = _rejected(p[broken], q[broken], x[broken], noise.pick(broken), candidates)
    return token, accepted, rank


def _rejected(p: Tensor, q: Tensor, x: Tensor, noise: Noise, candidates: int) -> tuple[Tensor, Tensor]:
    """Return rejected drafted tokens, and which further candidate is the text's token `x` `[n, 1]` (0: none)."""
    token = wrong = noise.draw(_residual(q, p, otherwise=q), 1)
    rank = torch.zeros_like(wrong)
    untried, r, left = torch.ones_like(wrong, dtype=torch.bool), _residual(p, q, otherwise=p), q
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
        wrong = noise.draw(_residual(left, r, otherwise=left), 2 * candidate + 1)
        r = _residual(r, left, otherwise=p)
    return token, rank


def _chance(q: Tensor, p: Tensor, possible: Tensor) -> Tensor:
    """Return min(1, q / p), and 0 where not `possible`."""
    return torch.where(possible, torch.where(q >= p, 1.0, q / p.clamp(min=torch.finfo(p.dtype).tiny)), 0.0)


def _residual(a: Tensor, b: Tensor, *, otherwise: Tensor) -> Tensor:
    """Return norm((a - b)+) for each row; the row of `otherwise` if (a - b)+ is zero."""
    left = (a - b).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, otherwise)
