"""Profiles that ship with the package, profiles of named methods, and the choice of a model's profile."""

from __future__ import annotations

import difflib
import functools
import warnings
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from selfspec.basics.errors import SelfspecError, short
from selfspec.basics.files import kind
from selfspec.profile.draft_spec import DraftSpec, LayerSkipSpec, LookupSpec, ProposerSpec, Skip, parse_draft
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.profile.reading import parse_profile, read_profile
from selfspec.profile.schema import Profile
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, HeadMode
from selfspec.types.identity import UNNAMED, Identity
from selfspec.types.methods import EARLY_EXIT, FREE, NAMED, OWN, STAGED, draft_model_of


def shipped_profiles() -> dict[str, Profile]:
    """Return the profiles that ship with the package by name, which is the file's name without `.yaml`."""
    return {name: _shipped(file) for name, file in _shipped_files().items()}


def find_profile_file(name: str | Path) -> Profile:
    """Read a profile from a file, or find a shipped profile by name. Raises `SelfspecError`."""
    path = Path(name)
    if not str(name):
        raise SelfspecError("the profile's name is empty; expected a file or the name of a shipped profile")
    if kind(path) != "missing":
        return read_profile(path)
    shipped = _shipped_files()
    if str(name) in shipped:
        return _shipped(shipped[str(name)])
    near = difflib.get_close_matches(str(name), shipped, 1)
    hint = f"did you mean {near[0]}? All shipped profiles" if near else "shipped profiles"
    lacking = f"profile {name}: no such file, and no shipped profile of that name"
    raise SelfspecError(f"{lacking}; {hint} are listed by: selfspec profile list")


def _shipped_files() -> dict[str, Traversable]:
    folder = resources.files("selfspec.profiles")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return {f.name[: -len(".yaml")]: f for f in files}


def _shipped(file: Traversable) -> Profile:
    return _parsed(file.read_text("utf-8"), file.name)


@functools.cache
def _parsed(text: str, name: str) -> Profile:
    return parse_profile(text, source=name)


def check_method(name: str) -> None:
    """Raise `SelfspecError` for an unknown decoding method."""
    if name not in OWN and draft_model_of(name) is None:
        more = ", ".join(f"{kind}NAME" for kind in NAMED)
        raise SelfspecError(f"method '{name}' is not known; known: {', '.join(OWN)}, {more}")


def by_method(name: str, profile: Profile | None, model: Identity) -> Profile:
    """Return the profile of a named decoding method, with the costs of `profile` if there is one.

    `plain`: no drafts; `profile`: the profile itself; `path`: its draft path without lookup tokens; `early-exit`: the
    first half of the layers; `model:NAME`: a draft model; `staged:NAME`: a draft model that itself verifies lookup
    tokens (Spector and Re 2308.04623); otherwise the method of that name, `lookup` with the profile's proposers.
    Raises `SelfspecError` for an unknown name, and for `profile` and `path` without a profile that drafts.
    """
    check_method(name)
    if name == "plain":
        return Profile(model=model)
    if (draft := _draft(name, profile, model)) is not None:
        return Profile(model=model, draft=draft) if profile is None else profile.with_other_draft(draft)
    if profile is None or not profile.drafts:
        raise SelfspecError(f"method '{name}' needs a profile that drafts; name one, or search one: selfspec search")
    return profile if name == "profile" else profile.path_only


def quantized_profile(model: Identity, mode: Literal["int8", "int4"], *, head: HeadMode, drafted: int) -> Profile:
    """Return the profile that drafts `drafted` tokens with every sub-layer in `mode`, and with lookup tokens."""
    path = DraftPath.from_modes([mode] * (2 * model.layers), head=head)
    controller = ControllerSpec(name="fixed", options={"k": drafted})
    return Profile(model=model, draft=LayerSkipSpec.from_path(path, controller, proposers=[ProposerSpec()]))


def _draft(name: str, profile: Profile | None, model: Identity) -> DraftSpec | None:
    """Return the draft spec of a method that needs no profile; None for methods that use a profile's draft."""
    if (smaller := draft_model_of(name)) is not None:
        return ModelSpec(model=smaller, proposers=[ProposerSpec()] if name.startswith(STAGED) else None)
    if name == EARLY_EXIT:
        rest = list(range(max(1, model.layers // 2), model.layers))
        return LayerSkipSpec(skip=Skip(attention=rest, mlp=rest), controller=ControllerSpec(name="rate"))
    if name not in FREE:
        return None
    own = getattr(profile.draft, "proposers", None) if profile is not None else None
    return LookupSpec(proposers=own) if name == "lookup" and own else parse_draft(FREE[name])


def named_profile(profile: str | Path | Profile) -> str | Profile:
    """Resolve a profile object, a file or a shipped name; return `auto` and `none` as is. Raises `SelfspecError`."""
    if isinstance(profile, Profile):
        return profile
    if not isinstance(profile, str | Path):
        raise SelfspecError(f"profile {short(profile)}: expected a Profile, a file, a name, auto or none")
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
        of, model = (
            f" ({each.name})" if each.name not in (None, UNNAMED) else "" for each in (profile.model, identity)
        )
        raise SelfspecError(
            f"the profile is of another model{of}: {difference}{model}; leave out --model, or make a profile of this "
            "one with: selfspec search"
        )
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
