"""Which profile a model is used with: one that is given, or one that ships and was made for it."""

from __future__ import annotations

import warnings
from pathlib import Path

from selfspec.errors import SelfspecError
from selfspec.profile import Identity, Profile, shipped_profiles


def choose_profile(identity: Identity, profile: str | Path | Profile) -> Profile | None:
    """The profile itself, none, or, for `auto`, a shipped one that is known to be faster."""
    if profile != "auto":
        return profile if isinstance(profile, Profile) else None
    return next((p for p in shipped_for(identity).values() if not p.slower), None)


def shipped_for(identity: Identity) -> dict[str, Profile]:
    """The shipped profiles, by name, that were made for this very model."""
    return {name: profile for name, profile in shipped_profiles().items() if _made_for(profile, identity)}


def check_profile(profile: Profile, identity: Identity) -> None:
    """Raise `SelfspecError` when a profile is of another architecture; warn when of other weights."""
    if difference := profile.model.mismatch(identity):
        raise SelfspecError(f"the profile is of another model: {difference}; search one with: selfspec search")
    if profile.model.other_weights(identity):
        warnings.warn(
            "the profile was made for other weights of this architecture; it is lossless all the same, but may be slow",
            stacklevel=2,
        )


def _made_for(profile: Profile, identity: Identity) -> bool:
    if profile.model.mismatch(identity):
        return False
    if profile.model.fingerprint and identity.fingerprint:
        return not profile.model.other_weights(identity)
    return profile.model.name is not None and profile.model.name == identity.name
