"""Ways of decoding by their names, each as a profile. Knows nothing of torch."""

from __future__ import annotations

from selfspec.basics.errors import SelfspecError
from selfspec.facts.identity import Identity
from selfspec.facts.methods import FREE, OWN
from selfspec.profile.draft import GuessesSpec, parse_draft
from selfspec.profile.schema import Profile


def check_method(name: str) -> None:
    """Raise `SelfspecError` for a name that is none of our ways of decoding."""
    if name not in OWN:
        raise SelfspecError(f"method '{name}' is not known; known: {', '.join(OWN)}")


def by_method(name: str, profile: Profile | None, model: Identity) -> Profile:
    """What drafts by a method, at the costs of `profile` where there is one.

    `plain`: nothing; `skip`: as the profile has it; `path`: its draft path without guesses; else what the name says,
    `lookup` with the profile's proposers. Raises `SelfspecError` for an unknown name, and for `skip` and `path` without
    a profile that drafts.
    """
    check_method(name)
    if name == "plain":
        return Profile(model=model)
    if name in FREE:
        draft = parse_draft(FREE[name])
        own = getattr(profile.draft, "proposers", None) if profile is not None else None
        if isinstance(draft, GuessesSpec) and own:
            draft = GuessesSpec(proposers=own)
        return (profile or Profile(model=model)).model_copy(update={"draft": draft, "acceptance": None, "also": []})
    if profile is None or not profile.drafts:
        raise SelfspecError(f"method '{name}' needs a profile that drafts; name one, or search one: selfspec search")
    return profile if name == "skip" else profile.unaided
