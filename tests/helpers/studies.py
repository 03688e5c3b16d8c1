"""A small study made by hand, without a model: four trials of a model of two layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from selfspec.search.ledger import Ledger
from selfspec.search.objective import Score
from selfspec.search.space import Space
from selfspec.search.storage import MEMORY

from selfspec.profile.schema import Measurement
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath

# A plain step takes 10 s, and so does a draft step that skips nothing; five rows are verified in 15 s.
COSTS = CostModel(context=9, base=2.0, attention=1.0, mlp=3.0, widths=[1, 5], verify=[10.0, 15.0], round=0.0)
SETTINGS = {
    "name": "a <script>alert(1)</script> model",
    "model": {"layers": 2, "model_type": "llama"},
    "calibration text": {"source": "texts", "prompts": 2, "tokens": 20, "sha256": "0"},
    "strategy": "climb",
    "objective": "replay",
    "seed": 0,
    "max_new_tokens": 8,
    "temperature": 0.0,
    "kv": "shared",
    "keep": [],
    "granularity": "sublayer",
    "controller": None,
}
GAINS = tuple((0.0, skipped) for skipped in (1.0, 0.5, 1 / 1.1, 0.0))  # attention 0, mlp 0, ...; the last is unknown
TRIALS = (  # attention, mlp, speedup, acceptance, draft cost, pruned
    ((0,), (), 0.9, 0.9, 0.9, False),
    ((0, 1), (), 1.2, 0.8, 0.8, False),
    ((1,), (0,), 1.1, 0.6, 0.6, False),
    ((1,), (1,), 1.5, 0.5, 0.7, True),
)


def small_study(where: str | Path = MEMORY, study: str = "selfspec", **settings: object) -> Ledger:
    """The study in a file, or in memory; each trial took two seconds."""
    ledger = Ledger(where, study, {**SETTINGS, **settings})
    ledger.keep_costs(COSTS)
    ledger.keep_gains(GAINS)
    for attention, mlp, speedup, acceptance, cost, pruned in TRIALS:
        controller = ControllerSpec(name="fixed", options={"k": 2})
        score = Score(
            DraftPath.skipping(attention, mlp),
            speedup / 10,
            speedup,
            acceptance,
            1 + acceptance,
            controller,
            pruned,
            candidates=3,
        )
        ledger.keep_score(score, Space(2), draft_cost=cost, seconds=2.0)
    return ledger


def measured_as(speedup: float, interval: tuple[float, float] | None = None) -> Callable[..., Measurement]:
    """What takes the place of measuring: every drafter is found to be so many times as fast as plain decoding."""

    def measure(llm, drafter, prompts, options, *, held_out, rounds, **_):
        return Measurement(
            machine="test",
            device="cpu",
            dtype="float32",
            threads=1,
            prompts=len(prompts),
            held_out=held_out,
            max_new_tokens=options.max_new_tokens,
            rounds=rounds,
            temperature=0,
            plain_tokens_per_second=100,
            tokens_per_second=100 * speedup,
            speedup=speedup,
            interval=[*(interval or (speedup, speedup))],
            acceptance_rate=0.5,
            tokens_per_round=2,
        )

    return measure
