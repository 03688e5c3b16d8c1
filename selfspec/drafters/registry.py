"""Which drafter each kind of draft in a profile is made into. A new kind is one file and one line: `register(...)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import make_controller
from selfspec.drafters.free import FreeDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.plain import PlainDrafter
from selfspec.facts.acceptance import AcceptanceCurve
from selfspec.facts.confidence import PROBABILITY
from selfspec.facts.costs import WIDER
from selfspec.profile.draft import DraftSpec, LayerSkipSpec, LookupSpec, PlainSpec, ProposerSpec, register_spec
from selfspec.profile.schema import Profile
from selfspec.proposers.ahead import Ahead
from selfspec.proposers.base import Proposer
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Drafter

Spec = TypeVar("Spec", bound=DraftSpec)

_PROPOSERS: dict[str, Callable[[], Proposer]] = {"lookup": Lookup}
_MAKERS: dict[str, Callable[[Runtime, Any, Profile], Drafter]] = {}


def register(spec: type[Spec], make: Callable[[Runtime, Spec, Profile], Drafter]) -> None:
    """Let profiles say `draft: {kind: ...}` of the kind that `spec` describes; `make` gives the drafter for one.

    `make(runtime, described, profile)` raises `SelfspecError` where that does not fit the model. Raises
    `SelfspecError` for a class that does not say its kind, and for a kind that another class holds.
    """
    _MAKERS[register_spec(spec)] = make


def make_drafter(runtime: Runtime, profile: Profile) -> Drafter:
    """The drafter that a profile describes. Raises `SelfspecError` where it does not fit the model."""
    kind = profile.draft.kind
    if kind not in _MAKERS:
        raise SelfspecError(f"kind '{kind}' of drafts has no drafter; register it with one")
    return _MAKERS[kind](runtime, profile.draft, profile)


def make_ahead(specs: Sequence[ProposerSpec], wider: Sequence[float]) -> Ahead:
    """What guesses below a draft path; `wider`: what its passes over 2, 3, .. tokens take, over one."""
    return Ahead([_PROPOSERS[spec.kind]() for spec in specs], (1.0, *wider) if specs else (1.0,))


def make_layer_skip(runtime: Runtime, spec: LayerSkipSpec, profile: Profile) -> LayerSkipDrafter:
    """The model itself along a cheaper path. Raises `SelfspecError` where that does not fit the model."""
    return LayerSkipDrafter(
        runtime,
        spec.path,
        make_controller(spec.controller, profile.outlook),
        candidates=spec.candidates,
        confidence=spec.confidence or PROBABILITY,
        ahead=make_ahead(spec.proposers or (), WIDER if profile.costs is None else profile.costs.wider),
    )


def make_free(spec: LookupSpec, profile: Profile) -> FreeDrafter:
    """A proposer's guesses as drafts: they cost nothing but their verification."""
    outlook = replace(profile.outlook, draft=0.0, curve=profile.acceptance or AcceptanceCurve())
    return FreeDrafter([_PROPOSERS[spec.kind]()], make_controller(spec.controller, outlook))


register(PlainSpec, lambda runtime, spec, profile: PlainDrafter())
register(LayerSkipSpec, make_layer_skip)
register(LookupSpec, lambda runtime, spec, profile: make_free(spec, profile))
