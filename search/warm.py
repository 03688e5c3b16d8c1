"""Warm starts: skip sets worth trying first. They matter more than which sampler proposes the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.facts.costs import CostModel
from selfspec.facts.skip import SkipSet

from .space import Space
from .target_text import Streams

SHARES = (0.25, 0.375, 0.5, 0.625)  # of all variables: so many of those that matter least are skipped
BUDGETS = 24  # levels of skipped cost that the dynamic programme distinguishes


def first_k(space: Space, gains: Sequence[float]) -> tuple[SkipSet, ...]:
    """The variables that gain most (or hurt least), the first k of them for several k."""
    ranked = sorted(range(len(space)), key=lambda i: -gains[i])
    chosen = ({*ranked[: round(len(space) * share)]} for share in SHARES)
    return tuple(space.choose(some) for some in chosen)


def every_second(space: Space) -> SkipSet:
    """Every second layer, where SWIFT (Xia et al. 2410.06916) starts."""
    second = tuple(range(1, space.layers - 1, 2))
    return space.nearest(SkipSet(second, second))


def cosines(space: Space, streams: Streams) -> list[float]:
    """For each variable, the mean cosine of the streams that enter and leave it in the whole model."""
    return [_cosine(*_ends(part, streams), streams.real) for part in space.variables]


def _ends(part: SkipSet, streams: Streams) -> tuple[Tensor, Tensor]:
    """The whole model's streams before and after a variable's sub-layers."""
    layer = (part.attention or part.mlp)[0]
    before = streams.entering[layer] if part.attention else streams.between[layer]
    return before, streams.entering[layer + 1] if part.mlp else streams.between[layer]


def programme(space: Space, streams: Streams, costs: CostModel) -> tuple[SkipSet, ...]:
    """One skip set for each budget of skipped cost, by dynamic programming over the sub-layers in order.

    After CLaSp (Chen et al. 2505.24196), with one decision for all positions. A state is the stream `[B, n, D]` that
    some choice has led to; of running a variable's sub-layers on the state of cost j and skipping them from the state
    of cost j - c, the one with the higher mean cosine to the whole model's stream is kept. Sets whose budgets lie
    near half of the whole come first.
    """
    prices = [len(part.attention) * costs.attention + len(part.mlp) * costs.mlp for part in space.variables]
    unit = (sum(prices) or 1.0) / BUDGETS
    steps = [max(1, round(price / unit)) for price in prices]
    layer = 0
    states: dict[int, tuple[Tensor, tuple[int, ...]]] = {0: (streams.entering[0], ())}
    for number, (part, step) in enumerate(zip(space.variables, steps, strict=True)):
        mine = (part.attention or part.mlp)[0]
        while layer < mine:  # a kept layer before it
            states = {j: (_run(x, SkipSet((layer,), (layer,)), streams), taken) for j, (x, taken) in states.items()}
            layer += 1
        goal = _ends(part, streams)[1]
        after = {j: (_run(x, part, streams), taken) for j, (x, taken) in states.items()}
        for j, (x, taken) in states.items():
            old = after.get(j + step)
            if j + step < BUDGETS and (
                old is None or _cosine(x, goal, streams.real) > _cosine(old[0], goal, streams.real)
            ):
                after[j + step] = (x, (*taken, number))
        states = after
        layer = mine + 1 if part.mlp else mine
    sets = {j: space.choose(taken) for j, (_, taken) in states.items() if taken}
    return tuple(dict.fromkeys(sets[j] for j in sorted(sets, key=lambda j: abs(j - BUDGETS / 2))))


def _run(x: Tensor, part: SkipSet, streams: Streams) -> Tensor:
    """The stream after a variable's sub-layers ran on it."""
    for layer in part.attention:
        added = streams.branch(layer, "attention", x)
        x = x.to(added.device) + added
    for layer in part.mlp:
        added = streams.branch(layer, "mlp", x)
        x = x.to(added.device) + added
    return x


def _cosine(a: Tensor, b: Tensor, real: Tensor) -> float:
    similar = torch.cosine_similarity(a.float(), b.to(a.device).float(), dim=-1)
    return float(similar[real.to(a.device)].mean())
