"""Warm starts: draft paths to try first, which matter more than the choice of strategy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath, Mode, SkipSet

from .replay_state import Streams
from .space import Point, Space
from .strategies import Gains

SHARES = (0.25, 0.375, 0.5, 0.625)  # shares of the variables to skip, by falling gain
FEW = (0.05, 0.1, 0.2, 0.35)  # the same, if the other variables run quantised and are cheap already
BUDGETS = 24  # levels of skipped cost in the dynamic programme


def likely(space: Space, gains: Gains) -> tuple[DraftPath, ...]:
    """Return the paths to try first, by the gain of each single change.

    If the base mode of the space is full, they are the paths of `first_k`. If the base mode is quantised, they are:
    everything in int8; everything in int4; those of `mostly_int4`; for each cheaper mode, the paths that have the k
    variables of the highest gain in this mode, for several k, and all other variables in the base mode; and two skip
    sets in full precision.
    """
    if space.base == "full":
        return first_k(space, gains)
    paths = [*space.uniform, *mostly_int4(space)]
    for mode in space.modes[space.modes.index(space.base) + 1 :]:
        paths += first_k(space, gains, mode=mode, shares=FEW, rest=space.start)
    return (*paths, *first_k(space, gains)[:2])


def mostly_int4(space: Space) -> tuple[DraftPath, ...]:
    """Return paths in int4 with some MLPs in int8: the last, all, or those of the last quarter of the layers.

    MLPs cause four fifths of the loss of agreement of int4, and the last MLP a tenth (SmolLM2). If the space lacks
    int8, these MLPs run in full. With granularity "layer", the MLPs' whole layers do not run in int4.
    """
    if "int4" not in space.modes:
        return ()
    better: Mode = "int8" if "int8" in space.modes else "full"
    mlps = [i for i, part in enumerate(space.variables) if part.mlp]
    quarter = [i for i in mlps if space.variables[i].mlp[0] >= space.layers - max(1, space.layers // 4)]
    return tuple(space.choose(some, better, rest=space.all_in("int4")) for some in (mlps[-1:], mlps, quarter) if some)


def first_k(
    space: Space,
    gains: Gains,
    *,
    mode: Mode = "skip",
    shares: Sequence[float] = SHARES,
    rest: Point | None = None,
) -> tuple[DraftPath, ...]:
    """Return paths that have the k variables of the highest gain in `mode`, for several k.

    `shares`: the values of k, as shares of the variables that may have `mode`. `rest`: the modes of all other variables
    (None: full).
    """
    able = {i: modes.index(mode) for i, modes in enumerate(space.choices) if mode in modes}
    ranked = sorted(able, key=lambda i: -gains[i][able[i]])
    chosen = ({*ranked[: round(len(able) * share)]} for share in shares)
    return tuple(space.choose(variables, mode, rest=rest) for variables in chosen if variables)


def every_second(space: Space) -> DraftPath:
    """Return the path that skips every second layer, where SWIFT (Xia et al. 2410.06916) starts."""
    second = tuple(range(1, space.layers - 1, 2))
    return space.nearest(SkipSet(second, second))


def every_fourth(space: Space) -> DraftPath:
    """Return the path that skips every fourth layer, whose drafts are often but not always right."""
    fourth = tuple(range(1, space.layers - 1, 4)) or (0,)
    return space.nearest(SkipSet(fourth, fourth))


def by_cosines(space: Space, streams: Streams) -> Gains:
    """Return the gains of skipping each variable, estimated by how little it changes the residual stream.

    The gain is the cosine of the residual streams before and after the variable's sub-layers, less 1; modes other than
    skip have gain 0.
    """
    cosines = [*_cosines(space, streams), 1.0]  # the head, where it is a variable, has no cosine
    return tuple(
        tuple(cosines[min(i, len(cosines) - 1)] - 1 if mode == "skip" else 0.0 for mode in modes)
        for i, modes in enumerate(space.choices)
    )


def _cosines(space: Space, streams: Streams) -> list[float]:
    """Return, for each variable, the mean cosine of the whole model's residual streams before and after it."""
    return [_cosine(*_ends(part, streams), streams.real) for part in space.variables]


def _ends(part: SkipSet, streams: Streams) -> tuple[Tensor, Tensor]:
    """Return the whole model's residual streams before and after the sub-layers `part` of a variable."""
    layer = (part.attention or part.mlp)[0]
    before = streams.entering[layer] if part.attention else streams.between[layer]
    return before, streams.entering[layer + 1] if part.mlp else streams.between[layer]


def programme(space: Space, streams: Streams, costs: CostModel) -> tuple[DraftPath, ...]:
    """Return one path for each budget of skipped cost, by dynamic programming over the sub-layers in order.

    Sub-layers that are not skipped run in the base mode. `streams`: the whole model's residual streams.

    The method is that of CLaSp (Chen et al. 2505.24196), with one decision for all positions. The state j is the
    residual stream `[B, n, D]` after choices that skip j units of cost. For the next variable, of cost c, the new state
    j is the better of two results: the old state j with the variable's sub-layers run, and the old state j - c, which
    skips them. The better result has the higher mean cosine to the whole model's residual stream. Paths whose budgets
    are near half of the total cost come first.
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
    """Return the residual stream `x` after the sub-layers `part` of a variable have run on it."""
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
