"""Tidy data frames of a study, and the pick from its Pareto front of acceptance, draft cost and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import make_controller
from selfspec.profile.schema import Calibration, Prediction, Profile, SearchRecord
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import FULL
from selfspec.types.identity import Identity, extra_share

from .finalists import profile_from_score
from .ledger import Entry, Ledger, reads_study
from .objective import ALONE
from .quantizing import with_int4_part
from .space import Space
from .trace import deepest


def pareto(entries: Sequence[Entry], memory: Callable[[Entry], float | None] = lambda entry: None) -> list[Entry]:
    """Return the trials on the Pareto front of acceptance, draft cost and memory, by rising draft cost.

    `memory` returns the extra memory of a trial's path; None counts as 0. Pruned trials are left out. Of several equal
    trials, the first trial is returned.
    """
    known = [e for e in entries if e.draft_cost is not None and not e.score.pruned]
    ranked = sorted(((e.draft_cost or 0.0, memory(e) or 0.0, -e.score.acceptance_rate, i) for i, e in enumerate(known)))
    front: list[tuple[float, float, float, int]] = []
    for cost, extra_memory, wrong, i in ranked:  # later trials cost no less
        if not any(other[1] <= extra_memory and other[2] <= wrong for other in front):
            front.append((cost, extra_memory, wrong, i))
    return [known[i] for *_, i in front]


@reads_study
def memory_of(ledger: Ledger) -> Callable[[Entry], float | None]:
    """Return a function from a trial to its path's extra memory, as a share of the model's bytes (`extra_share`)."""
    model = Identity.model_validate(ledger.settings["model"])
    dtype = ledger.settings.get("held") or str(ledger.settings.get("dtype", "")).removeprefix("torch.")
    return lambda entry: extra_share(entry.score.path, model, dtype=dtype)


@reads_study
def best_within(ledger: Ledger, max_draft_cost: float | None = None, max_memory: float | None = None) -> Entry:
    """Return the fastest trial by prediction whose draft step costs at most `max_draft_cost` of a plain step.

    `max_memory`: the largest extra memory, as a share of the model's bytes. None: no limit. Raises `SelfspecError` if
    no trial is within the limits.
    """
    known = [e for e in ledger.entries if not e.score.pruned]
    if max_memory is not None:
        memory_share = memory_of(ledger)
        shares = [memory_share(e) or 0.0 for e in known]
        known = [e for e, share in zip(known, shares, strict=True) if share <= max_memory]
        if shares and not known:
            raise SelfspecError(
                f"{ledger.description}: no trial's extra memory is {max_memory:g} of the model's bytes or less; "
                f"the smallest is {min(shares):.3f}"
            )
    if max_draft_cost is not None:
        costs = [e.draft_cost for e in known if e.draft_cost is not None]
        known = [e for e in known if e.draft_cost is not None and e.draft_cost <= max_draft_cost]
        if costs and not known:
            raise SelfspecError(
                f"{ledger.description}: no trial's draft step costs {max_draft_cost:g} of a plain one or less; "
                f"the cheapest costs {min(costs):.3f}"
            )
    if not known:
        raise SelfspecError(f"{ledger.description}: holds no trials that could be picked from")
    return max(known, key=lambda e: e.score.tokens_per_second)


@reads_study
def as_profile(ledger: Ledger, entry: Entry) -> Profile:
    """Return the profile that the search would save if it chose this trial, without measurements."""
    settings, texts, score = ledger.settings, ledger.texts, entry.score
    calibration = None if texts is None else texts.calibration
    if calibration is None:
        calibration = Calibration.model_validate(settings["calibration text"])
    searched = SearchRecord(
        strategy=settings["strategy"],
        objective=settings["objective"],
        trials=len(ledger.scores),
        seed=settings["seed"],
        seconds=round(sum(e.seconds for e in ledger.entries), 1),
        max_new_tokens=settings["max_new_tokens"] if texts is None else texts.max_new_tokens,
        temperature=settings["temperature"],
        kv=settings["kv"],
    )
    base = Profile(
        model=Identity.model_validate({**settings["model"], "name": settings["name"]}),
        calibration=calibration,
        search=searched,
        costs=ledger.costs,
        note=f"picked from {ledger.description}; not measured",
    )
    base = with_int4_part(base, ledger.int4)
    if ledger.int4 is not None and len(score.path.int4) and not base.parts:
        lost = "the int4 weights that it was scored with are not in the cache, so that they are rounded to nearest"
        base = base.model_copy(update={"note": f"{base.note}; {lost}"})
    predicted = None
    if entry.draft_cost is not None:
        predicted = Prediction(
            speedup=round(score.speedup, 3),
            tokens_per_second=round(score.tokens_per_second, 2),
            acceptance_rate=round(score.acceptance_rate, 4),
            tokens_per_round=round(score.tokens_per_round, 3),
            draft_cost=round(entry.draft_cost, 4),
        )
    return profile_from_score(base, score, ledger.confidence).model_copy(update={"predicted": predicted})


@reads_study
def trials_frame(ledger: Ledger) -> pd.DataFrame:
    """Return a row for each trial of a study, in the order in which they were kept.

    Columns: `seconds` (the scoring time up to and including this trial, summed over all workers), `speedup` (predicted,
    over plain decoding), `best` (the highest speedup so far, without pruned trials, which cover a share of the texts
    only), `skipped`, `attention` and `mlp` (numbers of skipped sub-layers), `int8` and `int4` (numbers of quantised
    sub-layers), `draft_cost` (a draft step as a share of a plain step; NaN if decoding was timed), `on_front` (no other
    trial is better in both acceptance and draft cost); further columns are fields of `Score`. Raises `SelfspecError` if
    the study has no trials.
    """
    front = {id(entry) for entry in pareto(ledger.entries)}
    rows = []
    for number, entry in enumerate(ledger.entries, 1):
        score = entry.score
        rows.append(
            {
                "trial": number,
                "seconds": entry.seconds,
                "speedup": score.speedup,
                "tokens_per_second": score.tokens_per_second,
                "acceptance_rate": score.acceptance_rate,
                "tokens_per_round": score.tokens_per_round,
                "draft_cost": entry.draft_cost,
                "skipped": len(score.skip),
                "int8": len(score.path.int8),
                "int4": len(score.path.int4),
                "attention": len(score.skip.attention),
                "mlp": len(score.skip.mlp),
                "pruned": score.pruned,
                "controller": score.controller.name,
                "candidates": score.candidates,
                "on_front": id(entry) in front,
            }
        )
    if not rows:
        raise SelfspecError(f"{ledger.description}: holds no trials yet")
    frame = pd.DataFrame(rows).astype({"draft_cost": float})
    frame["seconds"] = frame["seconds"].cumsum()
    best = frame["speedup"].where(~frame["pruned"]).cummax().ffill()
    frame.insert(3, "best", best)
    return frame


@reads_study
def sensitivity_frame(ledger: Ledger) -> pd.DataFrame:
    """Return a row for each part that may be skipped: a layer's `attention`, its `mlp`, or both as a `layer`.

    `speedup`: the predicted speedup over plain decoding if drafts always have `draft_tokens` tokens, only this part is
    skipped, and all other parts run in the base mode (`Space.base`). `gain`: the relative change of the speedup against
    skipping nothing, negative for a loss. Both are NaN if the speedup is not known. Raises `SelfspecError` if the study
    has no gains of single changes or no cost model.
    """
    costs, gains = ledger.costs, ledger.gains
    if gains is None or costs is None:
        raise SelfspecError(
            f"{ledger.description}: holds no gains of single sub-layers; "
            "expected a search with --objective replay, warm starts, and time enough (--minutes)"
        )
    space = _space(ledger)
    if len(space) != len(gains):
        raise SelfspecError(f"{ledger.description} is damaged ({len(gains)} gains for {len(space)} parts)")
    drafted = _drafted(ledger.settings)
    round_seconds = costs.round + drafted * costs.draft(FULL, space.layers) + costs.verification(drafted + 1)
    nothing = (drafted + 1) * costs.plain / round_seconds  # with nothing skipped, every drafted token is right
    rows = []
    for name, modes, values, start in zip(space.names, space.choices, gains, space.start, strict=True):
        part, _, layer = name.partition(" ")
        if "skip" in modes:
            speedup = values[modes.index("skip")] or float("nan")
            rows.append((int(layer), part, speedup, speedup / (values[start] or nothing) - 1, drafted))
    return pd.DataFrame(rows, columns=["layer", "part", "speedup", "gain", "draft_tokens"])


def _space(ledger: Ledger) -> Space:
    settings = ledger.settings
    space = Space(settings["model"]["layers"], tuple(settings["keep"]), settings["granularity"])
    return space if ledger.choices is None else ledger.choices.narrow(space)


def _drafted(settings: dict[str, Any]) -> int:
    """Return the draft length of the drafts that skipped each part alone."""
    spec = settings.get("controller")
    return ALONE if spec is None else min(ALONE, deepest([make_controller(ControllerSpec.model_validate(spec))]))
