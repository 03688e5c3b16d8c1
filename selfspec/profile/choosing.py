"""Choice of a model's profile: the profile that the user names, or a shipped profile measured on the same weights."""

from __future__ import annotations

import warnings
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.profile.method_profiles import by_method
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file, shipped_profiles
from selfspec.types.identity import Identity


def named_profile(profile: str | Path | Profile) -> str | Profile:
    """Resolve a profile object, a file or a shipped name; return `auto` and `none` as is. Raises `SelfspecError`."""
    if isinstance(profile, Profile):
        return profile
    return str(profile) if profile in ("auto", "none") else find_profile_file(profile)


def choose_profile(identity: Identity, profile: str | Profile, method: str | None = None) -> Profile | None:
    """Return the given profile; for `auto`, a shipped profile that was faster than plain decoding on these weights.

    None for `none`, and for `auto` if there is no such profile. With a `method`, return that method's profile instead,
    made from the chosen profile. Raises `SelfspecError` as `by_method` does.
    """
    if profile == "auto":
        chosen = next((p for p in shipped_for(identity).values() if not p.slower), None)
    else:
        chosen = profile if isinstance(profile, Profile) else None
    return chosen if method is None else by_method(method, chosen, identity)


def shipped_for(identity: Identity) -> dict[str, Profile]:
    """Return the shipped profiles, by name, that were measured on these weights (same fingerprint)."""
    return {name: profile for name, profile in shipped_profiles().items() if _measured_on(profile, identity)}


def check_profile(profile: Profile, identity: Identity) -> None:
    """Raise `SelfspecError` if a profile is for another architecture; warn if it is for other weights."""
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


def with_lookup_files(
    profile: Profile | None, identity: Identity, store: str | Path | None, answers: str | Path | None
) -> Profile | None:
    """Add proposers for the files of a retrieval store and of earlier answers to a profile (None: a plain profile).

    Without files, return `profile` unchanged. Raises `SelfspecError` for a kind of draft that takes no proposers.
    """
    if store is None and answers is None:
        return profile
    return (profile or Profile(model=identity)).with_proposers(store=store, answers=answers)
