"""Which profile a model is used with: one that is given, or one that ships and was made for it."""

from __future__ import annotations

import warnings
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.profile.method_profiles import by_method
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file, shipped_profiles
from selfspec.types.identity import Identity


def named_profile(profile: str | Path | Profile) -> str | Profile:
    """The profile itself, that of a file or of a shipped one's name, or `auto` or `none`. Raises `SelfspecError`."""
    if isinstance(profile, Profile):
        return profile
    return str(profile) if profile in ("auto", "none") else find_profile_file(profile)


def choose_profile(identity: Identity, profile: str | Profile, method: str | None = None) -> Profile | None:
    """The profile itself, none, or, for `auto`, a shipped one that was measured to be faster on these weights.

    With a `method`, what drafts by it. Raises `SelfspecError` as `by_method` does.
    """
    if profile == "auto":
        found = next((p for p in shipped_for(identity).values() if not p.slower), None)
    else:
        found = profile if isinstance(profile, Profile) else None
    return found if method is None else by_method(method, found, identity)


def shipped_for(identity: Identity) -> dict[str, Profile]:
    """The shipped profiles, by name, that were measured on these very weights."""
    return {name: profile for name, profile in shipped_profiles().items() if _measured_on(profile, identity)}


def check_profile(profile: Profile, identity: Identity) -> None:
    """Raise `SelfspecError` when a profile is of another architecture; warn when of other weights."""
    if difference := profile.model.mismatch(identity):
        raise SelfspecError(f"the profile is of another model: {difference}; search one with: selfspec search")
    if profile.model.other_weights(identity):
        warnings.warn(
            "the profile was made for other weights of this architecture; it is lossless all the same, but may be slow",
            stacklevel=2,
        )


def _measured_on(profile: Profile, identity: Identity) -> bool:
    theirs = profile.model.fingerprint
    if not profile.measured or theirs is None or theirs != identity.fingerprint:
        return False
    return profile.model.mismatch(identity) is None


def guessing(
    profile: Profile | None, identity: Identity, store: str | Path | None, answers: str | Path | None
) -> Profile | None:
    """A profile, or none, with guesses from a store of texts and from earlier answers, where these are named.

    Raises `SelfspecError` where what drafts takes none.
    """
    if store is None and answers is None:
        return profile
    return (profile or Profile(model=identity)).guessing_from(store=store, answers=answers)
