"""A round's decisions on its tokens, computed on the device as samplers, controllers and rules do on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.speculation.sampling import gaps
from selfspec.types.acceptance import MIN_GAP, MIN_PROBABILITY, Confidence


class Chosen(NamedTuple):
    """The token of each of n rows `[n]`, and whether it can be chosen at all `[n]`, from `scores` `[n, V]`.

    `p` `[n, V]`: the probabilities; None if they were not needed. `race` `[n, V]`: p divided by the tied noise, if any.
    """

    tokens: Tensor
    possible: Tensor
    scores: Tensor
    p: Tensor | None = None
    race: Tensor | None = None


def choose(scores: Tensor, noise: Tensor | None = None, numbers: Tensor | None = None) -> Chosen:
    """Choose the token of each row of processed scores `[n, V]`, as `Sampler.take` chooses it.

    It is drawn with the noise `[n, V]` tied to its position, or with a random number `[n]`; without both, the best.
    """
    if numbers is not None:
        p = scores.softmax(-1)
        return Chosen(*drawn(p, numbers), scores, p)
    if noise is None:
        best, tokens = scores.max(-1)
        return Chosen(tokens, best > -torch.inf, scores)
    p = scores.softmax(-1)
    race = p / noise
    best, tokens = race.max(-1)
    return Chosen(tokens, (best > 0) & (best < torch.inf), scores, p, race)


def drawn(p: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from each row of unnormalised p `[n, V]` with a random number `[n]`, as `Sampler.draw` does untied.

    Return the tokens, and whether any can be drawn, both `[n]`.
    """
    cumulative = p.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    tokens = torch.searchsorted(cumulative, total * numbers.unsqueeze(1), right=True)
    last = torch.searchsorted(cumulative, total)  # where rounding would put it beyond p, and where p is not finite
    tokens = torch.minimum(tokens, last).clamp(max=p.shape[-1] - 1)
    return tokens.squeeze(1), ((total > 0) & (total < torch.inf)).squeeze(1)


def others(chosen: Chosen, candidates: int) -> list[Tensor]:
    """Return the next best `candidates` - 1 tokens of each row, each `[n]`, as if those before could not be chosen.

    So samplers draw further candidates: with the noise of the first one.
    """
    left, tokens = chosen.scores if chosen.race is None else chosen.race, [chosen.tokens]
    for _ in range(candidates - 1):
        left = left.scatter(-1, tokens[-1].unsqueeze(-1), -torch.inf)
        tokens.append(left.max(-1).indices)
    return tokens[1:]


def confidences(chosen: Chosen, confidence: Confidence) -> Tensor:
    """Return the confidence `[n]` in each chosen token, in float64, as `Confidence.estimate` computes it."""
    x: float | Tensor = confidence.bias
    if confidence.probability:
        p = chosen.scores.softmax(-1) if chosen.p is None else chosen.p
        of_tokens = p.gather(-1, chosen.tokens.unsqueeze(-1)).squeeze(-1).double()
        if confidence.plain:
            return of_tokens
        bounded = of_tokens.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        x = x + confidence.probability * (bounded / (1 - bounded)).log()
    if confidence.gap:
        gap = gaps(chosen.scores if chosen.race is None else chosen.race.log())
        x = x + confidence.gap * gap.double().clamp(min=MIN_GAP).log()
    if not isinstance(x, Tensor):
        return torch.full_like(chosen.tokens, confidence.estimate(0.0, 0.0), dtype=torch.float64)
    return 1 / (1 + (-x).exp())


def goes_on(confidence: Tensor, rule: Tensor, knots: int) -> Tensor:
    """Return whether drafting goes on after each of n tokens, for confidences `[B, n]` of B sequences.

    `rule` `[B, ..]`: the numbers of each sequence's `StoppingRule`: `least`, and with `knots` > 0 `prices`, and the
    curve's knots, `accepted` and `following`.
    """
    n = confidence.shape[1]
    if not knots:
        return confidence >= rule[:, :n]
    longest = (rule.shape[1] - 3 * knots) // 2
    least, prices = rule[:, :n], rule[:, longest : longest + n]
    at, accepted, following = rule[:, 2 * longest :].view(-1, 3, knots).unbind(1)
    below = (torch.searchsorted(at.contiguous(), confidence, right=True) - 1).clamp(0, knots - 2)

    def interpolated(values: Tensor) -> Tensor:
        low, high = values.gather(1, below), values.gather(1, below + 1)
        return low + share * (high - low)

    first = at.gather(1, below)
    share = ((confidence - first) / (at.gather(1, below + 1) - first)).clamp(0, 1)
    chances = interpolated(accepted).cumprod(1) * interpolated(following)
    return (confidence >= least) & (chances > prices)


def leading(holds: Tensor) -> Tensor:
    """Return how many of n values `[.., n]` are true before the first that is not, `[..]`."""
    return holds.long().cumprod(-1).sum(-1)
