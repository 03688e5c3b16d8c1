"""Warm starts: draft paths worth trying first. They matter more than which sampler proposes the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.types.costs import CostModel
from selfspec.types.draft_path import LOW, DraftPath, Mode
from selfspec.types.skip import SkipSet

from .climbing import Gains
from .space import Point, Space
from .target_text import Streams

SHARES = (0.25, 0.375, 0.5, 0.625)  # of all variables: so many of those that matter least are skipped
FEW = (0.05, 0.1, 0.2, 0.35)  # of them, where the rest is cheap already
BUDGETS = 24  # levels of skipped cost that the dynamic programme distinguishes


def likely(space: Space, gains: Gains) -> tuple[DraftPath, ...]:
    """The paths to try first, by what each change alone brings.

    Everything in 8 bits, and in 4; those variables that gain most (or hurt
    least) in a cheaper mode than the base in it, the first k of them for several k, the rest in the base mode; and with
    the rest in full.
    """
    if space.base == "full":
        return first_k(space, gains)
    found = [space.path(space.all_in(mode)) for mode in LOW if mode in space.modes]
    for mode in space.modes[space.modes.index(space.base) + 1 :]:
        found += first_k(space, gains, mode=mode, shares=FEW, rest=space.start)
    return (*found, *first_k(space, gains)[:2])


def first_k(
    space: Space,
    gains: Gains,
    *,
    mode: Mode = "skip",
    shares: Sequence[float] = SHARES,
    rest: Point | None = None,
) -> tuple[DraftPath, ...]:
    """The variables that gain most (or hurt least) in a mode, the first k of them for several k, the rest as told."""
    able = {i: of.index(mode) for i, of in enumerate(space.choices) if mode in of}
    ranked = sorted(able, key=lambda i: -gains[i][able[i]])
    chosen = ({*ranked[: round(len(able) * share)]} for share in shares)
    return tuple(space.choose(some, mode, rest=rest) for some in chosen if some)


def every_second(space: Space) -> DraftPath:
    """Every second layer, where SWIFT (Xia et al. 2410.06916) starts."""
    second = tuple(range(1, space.layers - 1, 2))
    return space.nearest(SkipSet(second, second))


def every_fourth(space: Space) -> DraftPath:
    """Every fourth layer: drafts that are often right, and not always."""
    fourth = tuple(range(1, space.layers - 1, 4)) or (0,)
    return space.nearest(SkipSet(fourth, fourth))


def by_cosines(space: Space, streams: Streams) -> Gains:
    """Gains by how little each variable changes the stream, the more bits are lost the less."""
    alike = [*_cosines(space, streams), 1.0]  # the head's, where it has a choice, is not known
    return tuple(
        tuple(alike[min(i, len(alike) - 1)] - 1 if mode == "skip" else 0.0 for mode in of)
        for i, of in enumerate(space.choices)
    )


def _cosines(space: Space, streams: Streams) -> list[float]:
    """For each variable, the mean cosine of the streams that enter and leave it in the whole model."""
    return [_cosine(*_ends(part, streams), streams.real) for part in space.variables]


def _ends(part: SkipSet, streams: Streams) -> tuple[Tensor, Tensor]:
    """The whole model's streams before and after a variable's sub-layers."""
    layer = (part.attention or part.mlp)[0]
    before = streams.entering[layer] if part.attention else streams.between[layer]
    return before, streams.entering[layer + 1] if part.mlp else streams.between[layer]


def programme(space: Space, streams: Streams, costs: CostModel) -> tuple[DraftPath, ...]:
    """One path for each budget of skipped cost, by dynamic programming over the sub-layers in order.

    What is not skipped runs in the base mode; the streams are the whole model's.

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
        if "skip" not in space.choices[number]:
            continue
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
    sets = {j: space.choose(taken, rest=space.start) for j, (_, taken) in states.items() if taken}
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
