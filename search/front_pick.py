"""Pick from a study's trials: the Pareto front of acceptance, draft cost and memory, and the best within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.basics.errors import SelfspecError
from selfspec.profile.schema import Calibration, Prediction, Profile, SearchRecord
from selfspec.types.bits import extra_share
from selfspec.types.identity import Identity

from .finalists import profile_from_score
from .int4_weights import with_int4_part
from .ledger import Entry, Ledger, reads_study


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
    dtype = str(ledger.settings.get("dtype", "")).removeprefix("torch.")
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
