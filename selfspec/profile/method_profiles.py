"""Profiles of the decoding methods that have a name."""

from __future__ import annotations

from typing import Literal

from selfspec.basics.errors import SelfspecError
from selfspec.profile.draft_spec import DraftSpec, LayerSkipSpec, LookupSpec, ProposerSpec, Skip, parse_draft
from selfspec.profile.model_spec import ModelSpec
from selfspec.profile.schema import Profile
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, HeadMode
from selfspec.types.identity import Identity
from selfspec.types.methods import EARLY_EXIT, FREE, NAMED, OWN, STAGED, draft_model_of


def check_method(name: str) -> None:
    """Raise `SelfspecError` for an unknown decoding method."""
    if name not in OWN and draft_model_of(name) is None:
        more = ", ".join(f"{kind}NAME" for kind in NAMED)
        raise SelfspecError(f"method '{name}' is not known; known: {', '.join(OWN)}, {more}")


def by_method(name: str, profile: Profile | None, model: Identity) -> Profile:
    """Return the profile of a named decoding method, with the costs of `profile` if there is one.

    `plain`: no drafts; `skip`: the profile itself; `path`: its draft path without lookup tokens; `early-exit`: the
    first half of the layers; `model:NAME`: a draft model; `staged:NAME`: a draft model that itself verifies lookup
    tokens (Spector and Re 2308.04623); otherwise the method of that name, `lookup` with the profile's proposers.
    Raises `SelfspecError` for an unknown name, and for `skip` and `path` without a profile that drafts.
    """
    check_method(name)
    if name == "plain":
        return Profile(model=model)
    if (draft := _draft(name, profile, model)) is not None:
        return (profile or Profile(model=model)).model_copy(update={"draft": draft, "acceptance": None, "also": []})
    if profile is None or not profile.drafts:
        raise SelfspecError(f"method '{name}' needs a profile that drafts; name one, or search one: selfspec search")
    return profile if name == "skip" else profile.path_only


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
