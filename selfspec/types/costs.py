"""Costs of drafting and verification on one machine: plain data, for profiles, controllers and the search.

`selfspec.measure.cost_fitting` fits it. Does not import torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from selfspec.basics.checked_model import Data, Positive, Rate, Seconds
from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import DraftPath, LowMode, Mode, SkipSet, as_path
from selfspec.types.draft_work import LOOKUP_CALL, DraftCall, Work, draft_pass
from selfspec.types.methods import MOST_ROWS

WIDER = (1.12, 1.24, 1.36, 1.48, 1.6)  # default relative cost of draft steps over 2, 3, .. tokens
CHEAPER = 0.9  # a quantised mode is worth trying if it costs less than this share of full precision


AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ModeCosts(Data):
    """Seconds of a quantised attention sub-layer, MLP sub-layer and head in a draft step.

    `wider`: the time of a draft step over 2, 3, .. tokens along a path of this mode, relative to one over one token;
    empty: as in the cost model.
    """

    attention: Seconds
    mlp: Seconds
    head: Seconds
    wider: list[AboveZero] = []


class CostModel(Data):
    """Seconds, measured (or assumed) of one model, device and dtype with `context` keys in the cache.

    A draft step takes `base`, plus `attention` and `mlp` for each such sub-layer that runs. Each attention sub-layer
    takes `attention_per_key` more for every cached key beyond `context`, or less for fewer keys; along a quantised
    path, which reads int8 copies of keys and values, `low_per_key` (None: as much). A verification pass of `widths[i]`
    rows takes `verify[i]`; for more than one row that includes the fixed cost of starting a draft. Each row after the
    first takes `row_per_key` more in each attention sub-layer for every cached key beyond `context`. Every round takes
    `round` on top. `prefill` is per prompt token. `head` is the part of `base` that the language-model head over the
    whole vocabulary takes. `wider`: the time of a draft step over 2, 3, .. tokens, relative to a draft step over one
    token, along paths of whose mode `low` does not say it. `low`: the costs of quantised sub-layers and head, by mode;
    a missing mode is assumed to cost as much as full precision. `fastest`: the time of a plain decode step with the
    weight layout that suits it, if the measured layout suits drafting. `error`: mean relative error of the draft step's
    cost on paths left out of the fit.
    """

    context: Positive
    base: Seconds
    attention: Seconds
    mlp: Seconds
    attention_per_key: Seconds = 0.0
    low_per_key: Seconds | None = None
    row_per_key: Seconds = 0.0
    widths: Annotated[list[Positive], Field(min_length=1)]
    verify: Annotated[list[AboveZero], Field(min_length=1)]
    round: Seconds
    prefill: Seconds = 0.0
    head: Seconds = 0.0
    wider: list[AboveZero] = list(WIDER)
    low: dict[LowMode, ModeCosts] = {}
    fastest: AboveZero | None = None
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
        """Seconds of one plain decode step."""
        return self.round + self.verify[0]

    @property
    def baseline(self) -> float:
        """Seconds of the fastest plain decode step, the baseline of speedups."""
        return self.plain if self.fastest is None else self.fastest

    def draft(
        self, path: DraftPath | SkipSet, layers: int, *, keys: int | None = None, vocabulary: float = 1.0
    ) -> float:
        """Return the seconds of one draft step of a model of `layers` layers along a path, over `keys` cached keys.

        `keys`: None: `context` keys. `vocabulary`: the share of the vocabulary that the language-model head covers.
        """
        path = as_path(path)
        further = 0 if keys is None else keys - self.context
        low = self.low_per_key if path.low_precision else None
        per_key = further * (self.attention_per_key if low is None else low)
        seconds = self.base
        prices = self._prices
        for mode, cost in prices.items():
            attention, mlp = _counts(path, mode, layers, prices)
            seconds += attention * max(cost.attention + per_key, 0.0) + mlp * cost.mlp
        head = prices.get(path.head, self._full).head
        return max(seconds - self.head + vocabulary * head, 0.0)

    def cheaper_in(self, mode: Mode) -> bool:
        """Return whether sub-layers in this mode cost less than `CHEAPER` times their cost at full precision."""
        mine, full = self._prices.get(mode, self._full), self._full
        return mine.attention + mine.mlp < CHEAPER * (full.attention + full.mlp)

    @property
    def _full(self) -> ModeCosts:
        return ModeCosts(attention=self.attention, mlp=self.mlp, head=self.head)

    @property
    def _prices(self) -> dict[Mode, ModeCosts]:
        low: dict[Mode, ModeCosts] = {mode: cost for mode, cost in self.low.items()}  # noqa: C416 (as another type)
        return {"full": self._full, **low}

    def along(self, path: DraftPath | SkipSet) -> Self:
        """Return the cost model of drafts along a path: with `wider` of the mode that most of its sub-layers run in."""
        path = as_path(path)
        sublayers = {mode: len(getattr(path, mode).attention) + len(getattr(path, mode).mlp) for mode in self.low}
        most = max(sublayers, key=lambda mode: sublayers[mode], default=None)
        if most is None or not sublayers[most] or not self.low[most].wider:
            return self
        return self.model_copy(update={"wider": self.low[most].wider})

    def draft_share(self, path: DraftPath | SkipSet, layers: int) -> float:
        """Return the time of a draft step divided by the time of a plain decode step (Leviathan et al.'s c)."""
        return self.draft(path, layers) / self.plain

    def passes(self, draft: float) -> tuple[float, ...]:
        """Return the seconds of draft steps over 1, 2, .. tokens; `draft`: the seconds for one token."""
        return (draft, *(draft * share for share in self.wider))

    def call_costs(self, draft: float) -> dict[DraftCall, float]:
        """Return the seconds of one call of each kind of draft work; `draft`: those of a draft step over one token."""
        steps = {draft_pass(rows): seconds for rows, seconds in enumerate(self.passes(draft), start=1)}
        return {LOOKUP_CALL: 0.0, **steps}

    def verification(self, rows: int) -> float:
        """Return the seconds of a verification pass of `rows` rows, linear between measured widths and beyond the last.

        The extrapolation beyond the last two widths never falls: a falling pair is a disturbed measurement.
        """
        if rows <= self.widths[0] or len(self.widths) == 1:
            return self.verify[0]
        high = min(bisect_left(self.widths, rows), len(self.widths) - 1)
        (a, t_a), (b, t_b) = ((self.widths[i], self.verify[i]) for i in (high - 1, high))
        rise = t_b - t_a if rows <= b else max(t_b - t_a, 0.0)
        return t_b + rise * (rows - b) / (b - a)

    def seconds(self, rounds: Mapping[tuple[Work, int], int], prices: Mapping[DraftCall, float]) -> float:
        """Return the seconds of decoding by these rounds.

        `rounds[work, w]`: the number of rounds that took this draft work and verified w rows. `prices`: the seconds of
        one call of each kind of draft work.
        """
        return sum(
            times * (self.round + sum(calls * prices[part] for part, calls in work) + self.verification(rows))
            for (work, rows), times in rounds.items()
        )


def _counts(path: DraftPath, mode: Mode, layers: int, priced: Collection[Mode]) -> tuple[int, int]:
    """Return how many attention and how many MLP sub-layers run in a mode; modes not in `priced` count as full."""
    if mode != "full":
        sublayers: SkipSet = getattr(path, mode)
        return len(sublayers.attention), len(sublayers.mlp)
    others = [path.skip, *(getattr(path, other) for other in priced if other != "full")]
    return layers - sum(len(o.attention) for o in others), layers - sum(len(o.mlp) for o in others)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of a pass by its total number of tokens, 0, 1, 2, .., whatever the number of sequences.

    `verify[n]`: a full pass over n tokens, with the round's other work; `draft[n]`: a pass along the draft path. Beyond
    the last entry, costs rise with the mean slope of the upper half of the entries. Raises `SelfspecError` if `verify`
    or `draft` has fewer than three entries.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]

    def __post_init__(self) -> None:
        if min(len(self.verify), len(self.draft)) < 3:
            raise SelfspecError("costs of passes: expected at least those over 0, 1 and 2 tokens")

    @classmethod
    def from_measurements(cls, verify: Mapping[int, float], draft: Mapping[int, float], *, most: int) -> PassCosts:
        """Interpolate measured costs, given by number of tokens, up to `most` tokens; costs never fall with tokens."""
        return cls(_filled(verify, most), _filled(draft, most))

    @classmethod
    def from_cost_model(cls, costs: CostModel, draft: float) -> PassCosts:
        """Return the costs of a profile, which are of one sequence; `draft`: the seconds of a draft step."""
        full = (costs.round + costs.verification(rows) for rows in range(1, MOST_ROWS + 1))
        return cls((0.0, *full), (0.0, *costs.passes(draft)))

    def verified(self, tokens: int) -> float:
        """Return the seconds of a full pass over `tokens` tokens."""
        return _seconds_for(self.verify, tokens)

    def wider(self, tokens: int, more: int) -> float:
        """Return the seconds that `more` further tokens add to a full pass over `tokens` tokens."""
        return self.verified(tokens + more) - self.verified(tokens)

    def drafted(self, tokens: int) -> float:
        """Return the seconds of a pass along the draft path over `tokens` tokens."""
        return _seconds_for(self.draft, tokens)


def _filled(timed: Mapping[int, float], most: int) -> tuple[float, ...]:
    known = sorted(timed.items())
    for i in range(len(known) - 2, -1, -1):  # disturbed measurements are too long, never too short
        known[i] = known[i][0], min(known[i][1], known[i + 1][1])
    filled = [0.0]
    for tokens in range(1, max(most, 2) + 1):
        high = next((i for i, (n, _) in enumerate(known) if n >= tokens), len(known) - 1)
        (a, x), (b, y) = known[max(high - 1, 0)], known[max(high, 1) if len(known) > 1 else high]
        seconds = y if a == b else x + (y - x) * (tokens - a) / (b - a)
        filled.append(seconds)
    return tuple(filled)


def _seconds_for(seconds: tuple[float, ...], tokens: int) -> float:
    last = len(seconds) - 1
    if tokens <= last:
        return seconds[tokens]
    half = last // 2
    return seconds[last] + (tokens - last) * (seconds[last] - seconds[half]) / (last - half)
