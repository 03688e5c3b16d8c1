"""Verification rules, which decide which drafted tokens are accepted and which token comes next.

A rule takes a draft, the target's processed scores for the root and each token `[1 + m, V]`, the sampler, and the
sequence position of the first drafted token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.speculation.drafts import Draft
from selfspec.speculation.host_sync import to_lists
from selfspec.speculation.sampling import NO_TOKEN, Sampler


class Verdict(NamedTuple):
    """The result of a rule: `path`, the accepted nodes in order, and `token`, the next token.

    `p` `[1 + m, V]`: the target's probabilities in the rows of the root and of each token, before any residual was
    taken; None if the rule did not need the probabilities.
    """

    path: tuple[int, ...]
    token: int
    p: Tensor | None = None


class Rule(Protocol):
    """The interface of verification rules."""

    def __call__(self, draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> Verdict:
        """Return the accepted path and the next token."""


def greedy(draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> Verdict:
    """Accept the deepest path on which every token is the target's argmax."""
    del sampler, position
    values, best = to_lists(scores.max(-1))
    return _follow(draft, [int(t) if v > -math.inf else -1 for t, v in zip(best, values, strict=True)])


def match(draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> Verdict:
    """Accept the deepest path on which every token equals the target's draw with the noise tied to its position.

    The text then equals plain decoding with the same seed, for any draft. A draft made with the same noise is accepted
    with probability at least (1 - TV) / (1 + TV), TV the total variation distance between p and q (Daliri et al.
    2408.07978).
    """
    depths = (0, *draft.depths)
    p = sampler.probs(scores)
    return _follow(draft, sampler.draws(p, [position + depth for depth in depths]), p)


def _follow(draft: Draft, target_tokens: Sequence[int], p: Tensor | None = None) -> Verdict:
    """Accept the deepest path on which every token equals the target's token in its parent's row.

    `target_tokens`: the target's token in each row (the root, then each token); -1: no token can be chosen there.
    Raises `SelfspecError` if no token can be chosen after the path.
    """
    deepest, matches = -1, [True]  # matches[0]: the root
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        matches.append(matches[parent + 1] and token == target_tokens[parent + 1])
        if matches[-1] and (deepest < 0 or draft.depths[node] > draft.depths[deepest]):
            deepest = node
    if target_tokens[deepest + 1] < 0:
        raise SelfspecError(NO_TOKEN)
    return Verdict(draft.path_to(deepest), target_tokens[deepest + 1], p)


def token(draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> Verdict:
    """Token-level rejection sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318), recursive over candidates.

    A token x drawn from q is accepted with probability min(1, r(x) / q(x)), where r is the target's p at first. A
    rejected token leaves the residual distribution r = norm((r - q)+), and q without x, for the next candidate. Emitted
    tokens follow p exactly.
    """

    def judge(spine: Sequence[int], p: Tensor, ratios: Sequence[float]) -> tuple[int, Tensor]:
        num_accepted = 0
        while num_accepted < len(spine) and sampler.coin(min(1.0, ratios[num_accepted])):
            num_accepted += 1
        if num_accepted == len(spine):
            return num_accepted, p[num_accepted]
        return num_accepted, _residual(
            p[num_accepted], _proposal(draft, spine[num_accepted], (), p[num_accepted]), otherwise=p[num_accepted]
        )

    return _verify(draft, scores, sampler, position, judge)


def block(draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> Verdict:
    """Block verification (Sun et al. 2403.10444): judge a chain as a whole, never worse than token by token.

        P_0 = 1;  P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))
        R_i = sum over x of (P_i p_{i+1}(x) - q_{i+1}(x))+      h_i = R_i / (R_i + 1 - P_i), the last one P_i

    For each i a coin with probability h_i is tossed; the number of accepted tokens is the last i whose coin succeeds.
    The next token is drawn from the residual r = norm((P_i p_{i+1} - q_{i+1})+), or from p after the whole chain. In a
    tree, the chains of first children are the blocks. Where a block ends early, the further candidates are proposals
    for r, recursively as in `token`; a new block begins below an accepted candidate.
    """

    def judge(spine: Sequence[int], p: Tensor, ratios: Sequence[float]) -> tuple[int, Tensor]:
        weights = [1.0]
        for ratio in ratios:
            weights.append(min(1.0, weights[-1] * ratio))
        q = torch.stack([_proposal(draft, node, (), p[0]) for node in spine])
        left = (torch.tensor(weights[:-1], dtype=p.dtype, device=p.device)[:, None] * p[:-1] - q).clamp(min=0)
        num_accepted = _num_accepted(weights, left.sum(-1).tolist(), sampler)
        return num_accepted, p[num_accepted] if num_accepted == len(spine) else _normalised(
            left[num_accepted], otherwise=p[num_accepted]
        )

    return _verify(draft, scores, sampler, position, judge)


def _verify(
    draft: Draft,
    scores: Tensor,
    sampler: Sampler,
    position: int,
    judge: Callable[[Sequence[int], Tensor, Sequence[float]], tuple[int, Tensor]],
) -> Verdict:
    """Verify the draft top-down: judge each chain of first children, then try other candidates where it breaks.

    `judge(spine, p, ratios)` takes such a chain, p `[1 + len(spine), V]` of the rows from its parent on, and p / q of
    its tokens. It returns the number of accepted tokens and the distribution `[V]` of the token after them.
    """
    p = sampler.probs(scores)
    p_of, q_of = _chances(draft, p)
    path: list[int] = []
    row, distribution = 0, p[0]
    while draft.children[row]:
        spine, rows = [], [row]  # the chain of first children, and the rows that predict them
        while draft.children[rows[-1]]:
            spine.append(draft.children[rows[-1]][0])
            rows.append(spine[-1] + 1)
        num_accepted, distribution = judge(spine, p[rows], [_ratio(p_of[node], q_of[node]) for node in spine])
        path += spine[:num_accepted]
        row = rows[num_accepted]
        if num_accepted == len(spine):
            break
        node, distribution = _candidates(draft, row, distribution, sampler, otherwise=p[row])
        if node < 0:
            break
        path.append(node)
        row, distribution = node + 1, p[node + 1]
    return Verdict(tuple(path), sampler.draw(distribution, position + len(path)), p)


def _num_accepted(weights: Sequence[float], left: Sequence[float], sampler: Sampler) -> int:
    """Return how many tokens of a block are accepted: the last whose coin succeeds."""
    for i in range(len(left), 0, -1):
        if i == len(left):
            chance = weights[i]
        else:
            denominator = left[i] + 1 - weights[i]  # NaN if p is
            chance = min(1.0, left[i] / denominator) if denominator > 0 else float(denominator == 0)
        if sampler.coin(chance):
            return i
    return 0


def _candidates(draft: Draft, row: int, residual: Tensor, sampler: Sampler, *, otherwise: Tensor) -> tuple[int, Tensor]:
    """Try a position's candidates after the first, in order; return the accepted node, and the residual `[V]` left.

    The node is -1 if no candidate is accepted. `residual`: the distribution after the first candidate's rejection;
    `otherwise`: the distribution to use if rounding leaves no mass.
    """
    children = draft.children[row]
    for place in range(1, len(children)):
        node = children[place]
        q = _proposal(draft, node, children[:place], residual)
        x = draft.tokens[node]
        if sampler.coin(min(1.0, _ratio(float(residual[x]), float(q[x])))):
            return node, residual
        residual = _residual(residual, q, otherwise=otherwise)
    return -1, residual


def _ratio(p: float, q: float) -> float:
    """Return p / q; 0 if p is NaN; if rounding left q = 0: 1 for p > 0, else 0."""
    return (p / q if p >= 0 else 0.0) if q > 0 else float(p > 0)


def _chances(draft: Draft, p: Tensor) -> tuple[list[float], list[float]]:
    """Return p and q of each token in its parent's row, before any removal; q is 1 for a deterministic token."""
    if not len(draft):
        return [], []
    tokens = torch.tensor(draft.tokens, device=p.device)
    chances = p[torch.tensor(draft.parents, device=p.device) + 1, tokens]
    if draft.q is None:
        return to_lists([chances])[0], [1.0] * len(draft)
    rows = torch.tensor(draft.q_row, device=draft.q.device)
    of_p, drawn = to_lists([chances, draft.q[rows.clamp(min=0), tokens.to(draft.q.device)].to(p.device)])
    return of_p, [1.0 if row < 0 else value for row, value in zip(draft.q_row, drawn, strict=True)]


def _proposal(draft: Draft, node: int, before: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the distribution `[V]` that `node` was drawn from, without the candidates `before` from its row of q."""
    row = draft.q_row[node]
    if row < 0 or draft.q is None:
        q = torch.zeros_like(like)
        q[draft.tokens[node]] = 1
        return q
    q = draft.q[row]
    removed = [draft.tokens[i] for i in before if draft.q_row[i] == row]
    if removed:
        q = q.clone()
        q[removed] = 0
        q = q / q.sum()
    return q


def _residual(r: Tensor, q: Tensor, *, otherwise: Tensor) -> Tensor:
    """Return norm((r - q)+), or `otherwise` if rounding left no finite positive mass."""
    return _normalised((r - q).clamp(min=0), otherwise=otherwise)


def _normalised(left: Tensor, *, otherwise: Tensor) -> Tensor:
    total = float(left.sum())
    return left / total if 0 < total < float("inf") else otherwise


RULES: dict[str, Rule] = {"greedy": greedy, "match": match, "block": block, "token": token}


def find_rule(name: str | None, sampler: Sampler) -> Rule:
    """Return a rule by name, or the default: `greedy` without sampling, `match` with tied noise, else `block`.

    Raises `SelfspecError` for an unknown name, and for a rule that does not fit the sampler: `match` needs noise tied
    to sequence positions, which would correlate the coins and draws of `token` and `block`.
    """
    fits = ["greedy"] if sampler.greedy else ["match"] if sampler.tied else ["block", "token"]
    name = fits[0] if name is None else name
    check_rule(name)
    if name not in fits:
        kind = "temperature 0" if sampler.greedy else "sampling with tied noise" if sampler.tied else "untied sampling"
        if name == "greedy":
            kind, fits = "sampling", ["match", "block", "token"]
        raise SelfspecError(f"verification rule '{name}' does not fit {kind}; expected {' or '.join(fits)}")
    return RULES[name]


def check_rule(name: str) -> None:
    """Raise `SelfspecError` for an unknown rule name."""
    if name not in RULES:
        raise SelfspecError(f"verification rule '{name}' is not known; known: {', '.join(RULES)}")
