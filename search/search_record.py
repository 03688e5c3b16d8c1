"""The record of a search in its profile: the work that was done, and the work for which there was no time."""

from __future__ import annotations

from selfspec.profile.schema import Profile, SearchRecord
from selfspec.types.costs import CostModel

from .context import SearchContext
from .finalists import versions
from .options import SearchOptions
from .quantizing import with_int4_part

RECORDED = ("strategy", "objective", "seed", "temperature", "kv", "minutes")  # options recorded in the profile


def initial_profile(
    search: SearchContext, options: SearchOptions, *, interrupted: bool = False, costs: CostModel | None = None
) -> Profile:
    """Return the profile of a search without its results; the seconds of the search are 0 for now."""
    texts = search.ledger.texts
    searched = SearchRecord(
        **{name: getattr(options, name) for name in RECORDED},
        max_new_tokens=options.max_new_tokens if texts is None else texts.max_new_tokens,
        trials=len(search.ledger.scores),
        seconds=0.0,
        interrupted=interrupted,
    )
    calibration = None if texts is None else texts.calibration
    profile = Profile(model=search.llm.identity, calibration=calibration, search=searched, costs=costs)
    return with_int4_part(profile, search.int4)


def profile_without_trials(search: SearchContext, options: SearchOptions) -> Profile:
    """Return the profile of a search that had no time for a trial; it skips nothing, and its note says why."""
    budget, step = search.budget, search.pace.at(max(map(len, search.prompts))).step
    note = (
        f"no path was tried: of the limit of {budget.seconds:.3g} s, {budget.loaded:.3g} s had passed when the "
        f"model was loaded, and no trial fits the remaining time at {step * 1e3:.3g} ms a plain step; "
        "expected more minutes"
    )
    base = initial_profile(search, options)
    assert base.search is not None
    record = base.search.model_copy(update={"seconds": round(budget.spent, 1)})
    return base.model_copy(update={"search": record, "versions": versions(), "note": note})


def with_shortfall_note(search: SearchContext, options: SearchOptions, profile: Profile) -> Profile:
    """Return the profile with the seconds of the search, and a note of the work for which there was no time."""
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
