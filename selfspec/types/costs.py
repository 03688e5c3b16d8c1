"""What drafting and verifying cost on one machine: plain data, for profiles, controllers and the search.

`selfspec.measure.cost_fitting` measures it. Knows nothing of torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from selfspec.basics.checked_model import Data, Positive, Rate, Seconds
from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import DraftPath, LowMode, Mode, as_path
from selfspec.types.draft_work import GUESS, DraftCall, Work, draft_pass
from selfspec.types.skip import SkipSet

WIDER = (1.12, 1.24, 1.36, 1.48, 1.6)  # what draft steps over 2, 3, .. tokens take where that was not measured
CHEAPER = 0.9  # of what running in full costs: a mode that costs more is not worth trying


class Prices(Data):
    """Seconds of an attention and an MLP sub-layer, and of the head, that run in few bits in a draft step."""

    attention: Seconds
    mlp: Seconds
    head: Seconds


class CostModel(Data):
    """Seconds, measured on one model, device and dtype with `context` keys in the cache.

    A draft step takes `base`, and `attention` and `mlp` for each sub-layer of the kind that runs; each attention takes
    `attention_per_key` more for every key in the cache beyond `context`, or less. A verification of `widths[i]` rows
    takes `verify[i]`; for more than one row that includes the fixed cost of starting a draft. Every round takes `round`
    on top. `prefill` is per prompt token; `head` is the part of a draft step that the head over the whole vocabulary
    takes. `wider`: what a draft step over 2, 3, .. tokens takes, over one of one token. `low`: the prices of what runs
    in few bits instead, by mode; modes that are not there are taken to cost what running in full does. `fastest`: of a
    plain decoding step on weights that lie in memory as suits it, where those measured lie as suits drafting. `error`:
    mean relative error of the draft step on paths that the fit did not see.
    """

    context: Positive
    base: Seconds
    attention: Seconds
    mlp: Seconds
    attention_per_key: Seconds = 0.0
    widths: Annotated[list[Positive], Field(min_length=1)]
    verify: Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]
    round: Seconds
    prefill: Seconds = 0.0
    head: Seconds = 0.0
    wider: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = list(WIDER)
    low: dict[LowMode, Prices] = {}
    fastest: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    error: Rate | None = None

    @model_validator(mode="after")
    def _table(self) -> Self:
        if len(self.widths) != len(self.verify):
            raise SelfspecError(
                f"costs: {len(self.widths)} widths and {len(self.verify)} verify times; expected as many"
            )
        if self.widths[0] != 1 or any(a >= b for a, b in zip(self.widths, self.widths[1:], strict=False)):
            raise SelfspecError("costs.widths: expected rising numbers of rows from 1 on")
        return self

    @property
    def plain(self) -> float:
        """Seconds of one plain decoding step."""
        return self.round + self.verify[0]

    @property
    def baseline(self) -> float:
        """Seconds of a plain decoding step where it is fastest: what speedups are over."""
        return self.plain if self.fastest is None else self.fastest

    def draft(
        self, path: DraftPath | SkipSet, layers: int, *, keys: int | None = None, vocabulary: float = 1.0
    ) -> float:
        """Seconds of one draft step of a model of `layers` layers along a path, over `keys` keys.

        `vocabulary`: the share of the vocabulary that its head is over.
        """
        path = as_path(path)
        further = 0 if keys is None else keys - self.context
        per_key = further * self.attention_per_key
        seconds = self.base
        prices = self._prices
        for mode, of in prices.items():
            attention, mlp = _counts(path, mode, layers, prices)
            seconds += attention * max(of.attention + per_key, 0.0) + mlp * of.mlp
        head = prices.get(path.head, self._full).head
        return max(seconds - self.head + vocabulary * head, 0.0)

    def cheaper_in(self, mode: Mode) -> bool:
        """Whether sub-layers are cheaper in that mode than in full."""
        mine, full = self._prices.get(mode, self._full), self._full
        return mine.attention + mine.mlp < CHEAPER * (full.attention + full.mlp)

    @property
    def _full(self) -> Prices:
        return Prices(attention=self.attention, mlp=self.mlp, head=self.head)

    @property
    def _prices(self) -> dict[Mode, Prices]:
        low: dict[Mode, Prices] = {mode: of for mode, of in self.low.items()}  # noqa: C416 (as another type)
        return {"full": self._full, **low}

    def draft_share(self, path: DraftPath | SkipSet, layers: int) -> float:
        """A draft step as a share of a plain decoding step: the literature's c."""
        return self.draft(path, layers) / self.plain

    def passes(self, draft: float) -> tuple[float, ...]:
        """Seconds of draft steps over one token, which takes `draft`, over two at once, and so on."""
        return (draft, *(draft * share for share in self.wider))

    def prices(self, draft: float) -> dict[DraftCall, float]:
        """Seconds of one call of each part of a draft's work, where a draft step over one token takes `draft`."""
        steps = {draft_pass(rows): seconds for rows, seconds in enumerate(self.passes(draft), start=1)}
        return {GUESS: 0.0, **steps}

    def verification(self, rows: int) -> float:
        """Seconds of a verification of `rows` rows: between measured widths, and beyond the last two, a line.

        That beyond the last two never falls: where they do, they were disturbed.
        """
        if rows <= self.widths[0] or len(self.widths) == 1:
            return self.verify[0]
        high = min(bisect_left(self.widths, rows), len(self.widths) - 1)
        (a, t_a), (b, t_b) = ((self.widths[i], self.verify[i]) for i in (high - 1, high))
        rise = t_b - t_a if rows <= b else max(t_b - t_a, 0.0)
        return t_b + rise * (rows - b) / (b - a)

    def seconds(self, rounds: Mapping[tuple[Work, int], int], prices: Mapping[DraftCall, float]) -> float:
        """Seconds of decoding in which `rounds[work, w]` rounds drafted with this work and verified w rows.

        `prices`: seconds of one call of each part of the work.
        """
        return sum(
            times * (self.round + sum(calls * prices[part] for part, calls in work) + self.verification(rows))
            for (work, rows), times in rounds.items()
        )


def _counts(path: DraftPath, mode: Mode, layers: int, priced: Collection[Mode]) -> tuple[int, int]:
    """How many attention and MLP sub-layers run in a mode; those of modes without a price count as in full."""
    if mode != "full":
        of: SkipSet = getattr(path, mode)
        return len(of.attention), len(of.mlp)
    others = [path.skip, *(getattr(path, other) for other in priced if other != "full")]
    return layers - sum(len(o.attention) for o in others), layers - sum(len(o.mlp) for o in others)
