"""Verification rules: which drafted tokens the whole model would have emitted, and what comes next.

A rule takes a draft, the whole model's processed scores for the root and each token `[1 + m, V]`, the sampler,
and the absolute position of the first drafted token. It returns the accepted path (nodes, in order) and the token
that follows it. Knows nothing of models, caches and drafters.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from selfspec.drafts import Draft
from selfspec.errors import SelfspecError
from selfspec.sampling import Sampler


class Rule(Protocol):
    """A verification rule."""

    def __call__(self, draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> tuple[tuple[int, ...], int]:
        """The accepted path and the next token."""


def greedy(draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> tuple[tuple[int, ...], int]:
    """Keep the deepest path of tokens that are each the whole model's own argmax."""
    del sampler, position
    best: list[int] = scores.argmax(-1).tolist()
    deepest, matches = -1, [True]  # matches[0]: the root
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        matches.append(matches[parent + 1] and token == best[parent + 1])
        if matches[-1] and (deepest < 0 or draft.depths[node] > draft.depths[deepest]):
            deepest = node
    return draft.path_to(deepest), best[deepest + 1]


def token(draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> tuple[tuple[int, ...], int]:
    """Token rejection (Leviathan et al. 2211.17192, Chen et al. 2302.01318), with siblings by recursion.

    A token x drawn from q is accepted with probability min(1, r(x) / q(x)), r starting as the target's p; a
    rejected one leaves r = norm((r - q)+) and q without x for its next sibling. What is emitted follows p exactly.
    """
    p = sampler.probs(scores)
    if not len(draft):
        return (), sampler.draw(p[0], position)
    parents = torch.tensor(draft.parents, device=p.device) + 1
    tokens = torch.tensor(draft.tokens, device=p.device)
    p_of: list[float] = p[parents, tokens].tolist()
    q_of = _proposal_of(draft, tokens)
    path: list[int] = []
    row = 0
    while True:
        residual, accepted = p[row], -1
        for place, node in enumerate(draft.children[row]):
            if place == 0:
                q, r_x, q_x = None, p_of[node], q_of[node]
            else:
                q = _proposal(draft, node, draft.children[row][:place], residual)
                r_x, q_x = float(residual[draft.tokens[node]]), float(q[draft.tokens[node]])
            if sampler.coin(1.0 if r_x >= q_x else r_x / q_x):
                accepted = node
                break
            residual = _residual(residual, _proposal(draft, node, (), residual) if q is None else q, otherwise=p[row])
        if accepted < 0:
            return tuple(path), sampler.draw(residual, position + len(path))
        path.append(accepted)
        row = accepted + 1


def _proposal_of(draft: Draft, tokens: Tensor) -> list[float]:
    """Q of each token under its row, nothing removed; 1 where it was chosen deterministically."""
    if draft.q is None:
        return [1.0] * len(draft)
    rows = torch.tensor(draft.q_row, device=draft.q.device)
    drawn: list[float] = draft.q[rows.clamp(min=0), tokens].tolist()
    return [1.0 if row < 0 else value for row, value in zip(draft.q_row, drawn, strict=True)]


def _proposal(draft: Draft, node: int, before: tuple[int, ...], like: Tensor) -> Tensor:
    """The distribution `[V]` that `node` was drawn from, its siblings `before` it on the same row removed."""
    row = draft.q_row[node]
    if row < 0 or draft.q is None:
        q = torch.zeros_like(like)
        q[draft.tokens[node]] = 1
        return q
    q = draft.q[row]
    gone = [draft.tokens[i] for i in before if draft.q_row[i] == row]
    if gone:
        q = q.clone()
        q[gone] = 0
        q = q / q.sum()
    return q


def _residual(r: Tensor, q: Tensor, *, otherwise: Tensor) -> Tensor:
    """norm((r - q)+); `otherwise` when nothing finite is left, which only rounding can bring about."""
    left = (r - q).clamp(min=0)
    total = float(left.sum())
    return left / total if 0 < total < float("inf") else otherwise


RULES: dict[str, Rule] = {"greedy": greedy, "token": token}


def find_rule(name: str | None, sampler: Sampler) -> Rule:
    """A rule by name, or the default: `greedy` for a greedy sampler, `token` otherwise.

    Raises `SelfspecError` for an unknown name, and for a rule that does not fit the sampler.
    """
    if name is None:
        name = "greedy" if sampler.greedy else "token"
    if name not in RULES:
        raise SelfspecError(f"verification rule '{name}' is not known; known: {', '.join(RULES)}")
    if (name == "greedy") != sampler.greedy:
        kind = "temperature 0" if sampler.greedy else "sampling"
        raise SelfspecError(f"verification rule '{name}' does not fit {kind}")
    return RULES[name]
