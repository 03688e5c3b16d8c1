"""Picking from a study's trials: those that no other beats in both acceptance and draft cost, the best at a cost."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.basics.errors import SelfspecError
from selfspec.facts.identity import Identity
from selfspec.profile.schema import Calibration, Prediction, Profile, SearchRecord

from .finalists import drafting_as
from .ledger import Entry, Ledger


def pareto(entries: Sequence[Entry]) -> list[Entry]:
    """The trials that none beats, rising in draft cost and in acceptance; pruned ones are left out."""
    front: list[Entry] = []
    known = [e for e in entries if e.draft_cost is not None and not e.score.pruned]
    for entry in sorted(known, key=lambda e: (e.draft_cost, -e.score.acceptance_rate)):
        if not front or entry.score.acceptance_rate > front[-1].score.acceptance_rate:
            front.append(entry)
    return front


def best_within(ledger: Ledger, max_draft_cost: float | None) -> Entry:
    """The fastest trial by prediction, its draft step no dearer than that share of a plain one.

    Raises `SelfspecError` where there is none.
    """
    known = [e for e in ledger.entries if not e.score.pruned]
    if max_draft_cost is not None:
        costs = [e.draft_cost for e in known if e.draft_cost is not None]
        known = [e for e in known if e.draft_cost is not None and e.draft_cost <= max_draft_cost]
        if costs and not known:
            raise SelfspecError(
                f"{ledger.place}: no trial's draft step costs {max_draft_cost:g} of a plain one or less; "
                f"the cheapest costs {min(costs):.3f}"
            )
    if not known:
        raise SelfspecError(f"{ledger.place}: holds no trials that could be picked from")
    return max(known, key=lambda e: e.score.tokens_per_second)


def as_profile(ledger: Ledger, entry: Entry) -> Profile:
    """The profile of a trial, as the search would write it, but not measured."""
    said, texts, score = ledger.settings, ledger.texts, entry.score
    calibration = None if texts is None else texts.calibration
    if calibration is None:
        calibration = Calibration.model_validate(said["calibration text"])
    searched = SearchRecord(
        strategy=said["strategy"],
        objective=said["objective"],
        trials=len(ledger.scores),
        seed=said["seed"],
        seconds=round(sum(e.seconds for e in ledger.entries), 1),
        max_new_tokens=said["max_new_tokens"] if texts is None else texts.max_new_tokens,
        temperature=said["temperature"],
        kv=said["kv"],
    )
    base = Profile(
        model=Identity.model_validate({**said["model"], "name": said["name"]}),
        calibration=calibration,
        search=searched,
        costs=ledger.costs,
        note=f"picked from {ledger.place}; not measured",
    )
    predicted = None
    if entry.draft_cost is not None:
        predicted = Prediction(
            speedup=round(score.speedup, 3),
            tokens_per_second=round(score.tokens_per_second, 2),
            acceptance_rate=round(score.acceptance_rate, 4),
            tokens_per_round=round(score.tokens_per_round, 3),
            draft_cost=round(entry.draft_cost, 4),
        )
    return drafting_as(base, score, ledger.confidence).model_copy(update={"predicted": predicted})
