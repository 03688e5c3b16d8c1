"""What a profile says of the search that made it: what was really done, and what there was no time for."""

from __future__ import annotations

from selfspec.profile.schema import Profile, SearchRecord
from selfspec.types.costs import CostModel

from .finalists import versions
from .options import SearchOptions
from .prepare import Search

RECORDED = ("strategy", "objective", "seed", "temperature", "kv", "minutes")  # options that the profile tells


def begun(
    search: Search, options: SearchOptions, *, interrupted: bool = False, costs: CostModel | None = None
) -> Profile:
    """What a profile says of a search, whatever was found; its seconds are not known yet."""
    texts = search.ledger.texts
    searched = SearchRecord(
        **{name: getattr(options, name) for name in RECORDED},
        max_new_tokens=options.max_new_tokens if texts is None else texts.max_new_tokens,
        trials=len(search.ledger.scores),
        seconds=0.0,
        interrupted=interrupted,
    )
    calibration = None if texts is None else texts.calibration
    return Profile(model=search.llm.identity, calibration=calibration, search=searched, costs=costs)


def untried(search: Search, options: SearchOptions) -> Profile:
    """The profile of a search that had no time to try anything: it skips nothing, and says why."""
    budget = search.budget
    note = (
        f"nothing was tried: of the {budget.seconds:.3g} s asked for, {budget.loaded:.3g} had passed "
        f"when the model was loaded, and the rest is too little at {search.pace.step * 1e3:.3g} ms a plain step; "
        "give it more minutes"
    )
    base = begun(search, options)
    assert base.search is not None
    record = base.search.model_copy(update={"seconds": round(budget.spent, 1)})
    return base.model_copy(update={"search": record, "versions": versions(), "note": note})


def with_shortage(search: Search, options: SearchOptions, profile: Profile) -> Profile:
    """The profile, with the seconds that the search took, and what it had no time for in its note."""
    budget, texts, made = search.budget, search.ledger.texts, profile.search
    assert texts is not None
    assert made is not None
    counts = [
        (texts.prompts, len(search.prompts), "prompts"),
        (texts.max_new_tokens, options.max_new_tokens, "tokens after each"),
        (made.trials, options.trials, "trials"),
    ]
    cut = [f"{done} of {asked} {what}" for done, asked, what in counts if done < asked]
    short = f"time sufficed for {', '.join(cut)}" if cut and budget.limited and not made.interrupted else None
    note = "; ".join(part for part in (profile.note, short) if part) or None
    record = made.model_copy(update={"seconds": round(budget.spent, 1)})
    return profile.model_copy(update={"search": record, "note": note})
