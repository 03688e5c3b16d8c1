"""Verification rules on the device: what `speculation/rules.py` decides about a chain, with tensors alone.

Each rule reads the random numbers that the host's rule would draw, in the same order. How many of them it uses depends
on the outcome, as on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.runtime.device_tokens import Chosen, drawn, leading
from selfspec.speculation import rules
from selfspec.speculation.rules import Rule


class Verdicts(NamedTuple):
    """The verdicts on B drafts, each `[B]`: how many tokens are accepted, and the token after them.

    `possible`: whether that token can be chosen at all. `used`: how many random numbers the round used.
    """

    accepted: Tensor
    token: Tensor
    possible: Tensor
    used: Tensor


class Drafts(NamedTuple):
    """B drafts of n computed tokens `[B, n]`, of which the first `length` `[B]` count.

    `q` `[B, n, V]`: what the tokens were drawn from. `numbers` `[B, 2 n + 1]`: random numbers, one of which each
    counted token has used.
    """

    tokens: Tensor
    length: Tensor
    q: Tensor
    numbers: Tensor

    @property
    def counts(self) -> Tensor:
        """Whether each token counts, `[B, n]`."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.length.unsqueeze(1)

    def coins(self, order: Tensor) -> Tensor:
        """Return the random numbers of the coins that are tossed `order`-th, `[B, n]`, the first being 0."""
        return self.numbers.gather(1, self.length.unsqueeze(1) + order.clamp(min=0))


def follow(tokens: Tensor, counts: Tensor, target: Chosen) -> Verdicts:
    """Accept tokens `[B, n]` as long as they equal the target's, as the rules `greedy` and `match`.

    `counts` `[B, n]`: whether each token counts. `target`: its tokens in the rows of the roots and of all tokens.
    """
    shape = len(tokens), -1
    right, able = target.tokens.view(shape), target.possible.view(shape)
    accepted = leading((tokens == right[:, :-1]) & counts)
    return Verdicts(accepted, _at(right, accepted), _at(able, accepted), torch.zeros_like(accepted))


def token(drafts: Drafts, p: Tensor) -> Verdicts:
    """Accept each token x with probability min(1, p(x) / q(x)) until one is rejected, as the rule `token`."""
    steps = torch.arange(drafts.tokens.shape[1], device=p.device).expand_as(drafts.tokens)
    accepted = leading((drafts.coins(steps) < _ratios(drafts, p)) & drafts.counts)
    coins = torch.minimum(accepted + 1, drafts.length)
    return _drawn_after(drafts, p, accepted, coins, torch.ones_like(accepted, dtype=p.dtype))


def block(drafts: Drafts, p: Tensor) -> Verdicts:
    """Accept the longest beginning of the draft whose coin succeeds, as the rule `block`; the longest's comes first."""
    n = drafts.tokens.shape[1]
    ratios, weights = _ratios(drafts, p), [torch.ones_like(drafts.length, dtype=torch.float64)]
    for i in range(n):
        weights.append((weights[-1] * ratios[:, i]).clamp(max=1))
    weight = torch.stack(weights, 1)  # [B, n + 1]
    left = _left(p[:, :-1], drafts.q, weight[:, :-1]).sum(-1).double()
    lengths = torch.arange(1, n + 1, device=p.device)
    whole = lengths == drafts.length.unsqueeze(1)
    # The coin of a beginning of i tokens reads what is left in the row after them, which the last token may lack.
    after = torch.cat([left[:, 1:], torch.zeros_like(left[:, :1])], 1)
    denominator = after + 1 - weight[:, 1:]
    partial = (after / denominator).clamp(max=1).where(denominator > 0, (denominator == 0).to(after.dtype))
    chances = torch.where(whole, weight[:, 1:], partial)
    won = (drafts.coins(drafts.length.unsqueeze(1) - lengths) < chances) & drafts.counts
    accepted = (won * lengths).amax(1)
    coins = torch.minimum(drafts.length - accepted + 1, drafts.length)
    return _drawn_after(drafts, p, accepted, coins, _at(weight, accepted).to(p.dtype))


SAMPLED: dict[Rule, Callable[[Drafts, Tensor], Verdicts]] = {rules.token: token, rules.block: block}


def sample(p: Tensor, numbers: Tensor) -> Verdicts:
    """Draw a token from p `[B, V]` without a draft, with the first of the random numbers `[B, ..]`."""
    tokens, possible = drawn(p, numbers[:, 0])
    none = torch.zeros_like(tokens)
    return Verdicts(none, tokens, possible, none + 1)


def _drawn_after(drafts: Drafts, p: Tensor, accepted: Tensor, coins: Tensor, weight: Tensor) -> Verdicts:
    """Draw the next token: after the whole draft from p, else from what q leaves of p times `weight` `[B]`."""
    of_target, last = _at(p, accepted), accepted.clamp(max=drafts.tokens.shape[1] - 1)
    left = _left(of_target, _at(drafts.q, last), weight)
    total = left.sum(-1)
    residual = (accepted < drafts.length) & (total > 0) & (total < torch.inf)
    distribution = torch.where(residual.unsqueeze(1), left / total.unsqueeze(1), of_target)
    used = drafts.length + coins
    tokens, possible = drawn(distribution, _at(drafts.numbers, used))
    return Verdicts(accepted, tokens, possible, used + 1)


def _ratios(drafts: Drafts, p: Tensor) -> Tensor:
    """Return p / q of each drafted token `[B, n]`, in float64, as the host's rules compute it."""
    at = drafts.tokens.unsqueeze(-1)
    of_p, of_q = (of.gather(-1, at).squeeze(-1).double() for of in (p[:, :-1], drafts.q))
    return torch.where(of_q > 0, (of_p / of_q).masked_fill(~(of_p >= 0), 0), (of_p > 0).double())


def _left(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """Return (weight p - q)+ for p and q `[.., V]` and weights `[..]`."""
    return (weight.to(p.dtype).unsqueeze(-1) * p - q).clamp(min=0)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Return `values` `[B, n, ..]` at an index `[B]` of each row, `[B, ..]`."""
    at = index.view(-1, 1, *[1] * (values.dim() - 2)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, at).squeeze(1)
