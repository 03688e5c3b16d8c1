"""The kinds of drafts that engines distinguish: n-gram lookup, the model's own sub-layers, another model, a head."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import PartFile, read_part
from selfspec.draft_modules.registry import HEADS
from selfspec.profile.draft_spec import LayerSkipSpec, LookupSpec, ProposerSpec
from selfspec.profile.head_spec import HeadSpec
from selfspec.profile.model_spec import ModelSpec
from selfspec.profile.schema import Profile
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath


@dataclass(frozen=True, slots=True)
class LookupDraft:
    """Prompt lookup; `answers`: earlier answers are looked up too."""

    answers: bool


@dataclass(frozen=True, slots=True)
class Sublayers:
    """The model's own sub-layers along a draft path, with the whole vocabulary."""

    path: DraftPath


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A separate draft model, by its specification."""

    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A trained draft head; `places`: its longest draft, in tokens."""

    part: PartFile
    places: int


@dataclass(frozen=True, slots=True)
class UnsupportedDraft:
    """A draft method that no engine has: its `kind` in profiles, and what an engine could run instead."""

    kind: str
    instead: str


Drafts = LookupDraft | Sublayers | DraftModel | TrainedHead | UnsupportedDraft
_LOOKUP = "lookup tokens alone (draft: {kind: lookup})"
_LAYER_SET = "a fixed set of whole layers, found by selfspec search --kv own"
_INSTEAD = {
    "recycle": _LOOKUP,
    "input": _LOOKUP,
    "jacobi": _LOOKUP,
    "lookahead": _LOOKUP,
    "swift": _LAYER_SET,
    "clasp": _LAYER_SET,
    "merged": "one of its drafters, in a profile of its own",
}
_FAR = 2**16  # draft length, in tokens: longer than any engine drafts


def drafts_of(profile: Profile) -> Drafts:
    """Return how a profile drafts. Raises `SelfspecError` if it drafts nothing or has several draft methods."""
    if not profile.drafts:
        raise SelfspecError("the profile drafts nothing, so there is nothing to export")
    if profile.also:
        raise SelfspecError("the profile holds several ways to draft; engines have one: export one of the profiles")
    spec = profile.draft
    if isinstance(spec, LookupSpec):
        return LookupDraft(any(proposer.kind == "answers" for proposer in spec.proposers))
    if isinstance(spec, ModelSpec):
        return DraftModel(spec)
    if isinstance(spec, HeadSpec):
        part = read_part(profile.part_path(spec.part))
        places = part.settings.get("net", part.settings).get("places", _FAR)
        return TrainedHead(part, int(places)) if part.kind in HEADS else UnsupportedDraft(part.kind, _LOOKUP)
    if isinstance(spec, LayerSkipSpec):
        if spec.trained is not None:
            raise SelfspecError(
                f"the profile's path has a trained part ({spec.trained}), which no engine runs; "
                "export the profile that it was trained for"
            )
        return Sublayers(spec.model_copy(update={"vocabulary": None}).path)
    return UnsupportedDraft(spec.kind, _INSTEAD.get(spec.kind, _LOOKUP))


def with_fixed_length(profile: Profile, tokens: int) -> Profile:
    """Return the profile with chains of `tokens` tokens and no lookup tokens or candidates beside, as engines draft."""
    spec = profile.draft
    update: dict[str, object] = {"candidates": 1, "proposers": None, "confidence": None, "vocabulary": None}
    if isinstance(spec, LookupSpec):
        proposers = [proposer for proposer in spec.proposers if proposer.kind != "store"]
        update = {"proposers": proposers or [ProposerSpec()]}
    known = type(spec).model_fields
    bare = profile.model_copy(
        update={"draft": spec.model_copy(update={name: value for name, value in update.items() if name in known})}
    )
    return bare.with_controller(ControllerSpec(name="fixed", options={"k": tokens}))
