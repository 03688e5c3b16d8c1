"""Limits on the search space: modes that the model and the machine support, draft cost, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from selfspec.basics.checked_model import Count, Data
from selfspec.basics.errors import SelfspecError
from selfspec.llm.llm import LLM
from selfspec.runtime.base import Runtime
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import LOW, DraftPath, Mode, SkipSet
from selfspec.types.identity import DTYPES

from .objective import Objective, Score
from .space import BYPASSING, Space

SHARES = {4: 0.3, 2: 0.55}  # share of the model's bytes that quantised weights may take, by the dtype's item size


class Choices(Data):
    """The modes that sub-layers and the head may have; `attention`, `mlp`: layers where these are never quantised."""

    modes: list[Mode]
    head: list[Mode]
    attention: list[Count] = []
    mlp: list[Count] = []

    def narrow(self, space: Space) -> Space:
        """Return `space` with these modes only."""
        fixed = SkipSet(tuple(self.attention), tuple(self.mlp))
        return replace(space, modes=tuple(self.modes), head=tuple(self.head), fixed=fixed)


def supported_choices(llm: LLM, modes: Sequence[Mode], *, memory: float) -> Choices:
    """Return those of `modes` that the model supports.

    Quantised modes need weights that selfspec can read, and `memory` (a share of the model's bytes) above 0.
    """
    runtime = llm.runtime
    layers = range(runtime.layers)
    low = [mode for mode in LOW if mode in modes and memory > 0]

    def without(part: str, mode: Mode) -> list[int]:
        return [i for i in layers if runtime.part_bytes(part, i, mode) is None]

    low = [mode for mode in low if len(without("attention", mode)) + len(without("mlp", mode)) < 2 * len(layers)]
    below = LOW[: LOW.index(low[0]) + 1] if low else ()  # int8 for int4 paths, too: an int4 head costs agreement
    head: list[Mode] = ["full", *(mode for mode in below if runtime.part_bytes("head", 0, mode) is not None)]
    return Choices(
        modes=[mode for mode in modes if mode in (*BYPASSING, *low)],
        head=head,
        attention=sorted({i for mode in low for i in without("attention", mode)}),
        mlp=sorted({i for mode in low for i in without("mlp", mode)}),
    )


def cheaper_choices(choices: Choices, costs: CostModel) -> Choices:
    """Return the modes that are cheaper than running in full. Raises `SelfspecError` if only full is left."""
    slow = {mode for mode in LOW if mode in choices.modes and not costs.cheaper_in(mode)}
    narrowed = choices.model_copy(
        update={
            "modes": [mode for mode in choices.modes if mode not in slow],
            "head": [mode for mode in choices.head if mode not in slow],
        }
    )
    if narrowed.modes == ["full"] and len(narrowed.head) < 2:
        raise SelfspecError(
            f"modes: {', '.join(slow)} is no cheaper than running in full here; expected skip among them"
        )
    return narrowed


@dataclass(frozen=True)
class MemoryBudget:
    """The limit on the extra memory of quantised weights; `limit`: a share of `model_bytes`, all weights' size."""

    runtime: Runtime
    model_bytes: int
    limit: float

    @classmethod
    def from_llm(cls, llm: LLM, limit: float | None) -> MemoryBudget:
        """Return the memory budget of a model; `limit` None: 0.3, or 0.55 for weights of 2 bytes."""
        size = 2 if llm.held in DTYPES else llm.runtime.dtype.itemsize
        return cls(llm.runtime, llm.weight_bytes, SHARES.get(size, 0.3) if limit is None else limit)

    def share(self, path: DraftPath) -> float:
        """Return the extra memory of a path as a share of the model's bytes."""
        return self.runtime.extra_bytes(path) / self.model_bytes

    def excess(self, path: DraftPath) -> float:
        """Return by how much a path's extra memory exceeds the limit, as a share of the model's bytes.

        0 or less: the path is within the limit, as every path without quantised weights is.
        """
        return self.share(path) - self.limit if path.low_precision else 0.0


@dataclass(frozen=True)
class BoundedObjective:
    """An objective with bounds on a path's draft cost and memory."""

    objective: Objective
    costs: CostModel | None
    space: Space
    max_draft_cost: float | None
    memory: MemoryBudget

    def score(self, path: DraftPath) -> Score | None:
        """Return the score of a path; None if the path exceeds its cost or memory bound."""
        if self.excess(path) > 0:
            return None
        return self.objective.score(path)

    def excess(self, path: DraftPath) -> float:
        """Return the larger excess over the bounds on draft cost (in plain steps) and memory (in model sizes)."""
        cost = self.draft_cost(path)
        over = 0.0 if self.max_draft_cost is None or cost is None else cost - self.max_draft_cost
        return max(over, self.memory.excess(path))

    def draft_cost(self, path: DraftPath) -> float | None:
        """Return the cost of a draft step as a share of a plain step; None without a cost model."""
        return None if self.costs is None else self.costs.draft_share(path, self.space.layers)
