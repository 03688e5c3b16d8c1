"""Registry of drafters by the `kind` of a profile's draft. A new kind takes one file and one `register(...)` call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypedDict, TypeVar

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import Controller, make_controller
from selfspec.draft_modules.heads import Head
from selfspec.draft_modules.int4_quantization import open_int4
from selfspec.draft_modules.module_files import read_part, trained_of
from selfspec.draft_modules.registry import make_head
from selfspec.drafters.adaptive_path import ClaspDrafter, SwiftDrafter
from selfspec.drafters.controlled import LookupDrafter, PlainDrafter
from selfspec.drafters.draft_model import CrossVocabularyDrafter, ModelDrafter
from selfspec.drafters.guard import Guard
from selfspec.drafters.head_drafter import HeadBelow, HeadDrafter
from selfspec.drafters.jacobi import JacobiDrafter, LookaheadDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.recycle import InputDrafter, RecycleDrafter
from selfspec.drafters.router import make_router
from selfspec.drafters.tree_merge import MergedDrafter
from selfspec.models.layout import apply_layout_
from selfspec.models.loading import load_model, load_tokenizer
from selfspec.models.shards import check_unsharded
from selfspec.models.vocabularies import TokenizerMap
from selfspec.profile.draft_spec import (
    DraftSpec,
    LayerSkipSpec,
    LookupSpec,
    PlainSpec,
    ProposerSpec,
    RecycleSpec,
    register_spec,
)
from selfspec.profile.drafter_specs import (
    ClaspSpec,
    HeadSpec,
    InputSpec,
    JacobiSpec,
    LookaheadSpec,
    MergedSpec,
    ModelSpec,
    SwiftSpec,
)
from selfspec.profile.schema import Profile
from selfspec.proposers.base import Proposer, ProposerChain
from selfspec.proposers.history import AnswerHistory
from selfspec.proposers.lookup import Lookup
from selfspec.proposers.store import Store, StoreProposer
from selfspec.runtime import open_runtime
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.types.acceptance import PROBABILITY, AcceptanceCurve, Confidence, PayoffModel
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import WIDER
from selfspec.types.draft_path import FULL, DraftPath

Spec = TypeVar("Spec", bound=DraftSpec)

_MAKERS: dict[str, Callable[[Runtime, Any, Profile], Drafter]] = {}


def register(spec: type[Spec], make: Callable[[Runtime, Spec, Profile], Drafter]) -> None:
    """Register a kind of draft: profiles with this `kind` are parsed as `spec`, and `make` builds their drafter.

    `make(runtime, spec, profile)` raises `SelfspecError` if the spec does not fit the model. Raises `SelfspecError`
    for a class without a kind, and for a kind that another class has registered.
    """
    _MAKERS[register_spec(spec)] = make


def make_drafter(runtime: Runtime, profile: Profile) -> Drafter:
    """Build the drafter that a profile describes.

    If the profile has alternatives (`also`), this is a `Router` between the profile's own drafter and those of the
    alternatives. Raises `SelfspecError` if the profile does not fit the model.
    """
    return make_router(profile, lambda alternative: _build_drafter(runtime, alternative))


def make_guarded(
    runtime: Runtime,
    profile: Profile,
    measure_payoff: Callable[[Runtime, Profile], PayoffModel | None] | None = None,
    *,
    together: bool = False,
) -> Drafter:
    """Build the drafter as `make_drafter` does, with a `Guard` around the profile's own drafter and each alternative's.

    `together`: with one guard around all of them, for a batch, whose rounds all of them share.
    `measure_payoff(runtime, profile)` measures a payoff model on this machine, which the guard uses for seeded
    sequences. Without `measure_payoff`, or if it returns None, the guard uses the profile's costs. If the profile has
    no costs either, the drafts of seeded sequences are not limited. Raises `SelfspecError` as `make_drafter` does.
    """

    def guard(alternative: Profile) -> Guard:
        payoff = alternative.payoff if alternative.costs else None
        return Guard(
            make_drafter(runtime, alternative),
            payoff=payoff,
            measure_payoff=measure_payoff and partial(measure_payoff, runtime, alternative),
        )

    return guard(profile) if together else make_router(profile, guard)


def _build_drafter(runtime: Runtime, profile: Profile) -> Drafter:
    kind = profile.draft.kind
    if kind not in _MAKERS:
        raise SelfspecError(f"kind '{kind}' of drafts has no drafter; register it with one")
    return _MAKERS[kind](runtime, profile.draft, profile)


def make_proposer(spec: ProposerSpec, vocabulary: int | None) -> Proposer:
    """Build a proposer for a model with this vocabulary size (None: unknown).

    Raises `SelfspecError` if the proposer's file cannot be read, or was made with another vocabulary size.
    """
    if spec.path is None:
        return Lookup()
    if spec.kind == "answers":
        return AnswerHistory(spec.path, vocabulary)
    store = Store(spec.path)
    store.check(vocabulary)
    return StoreProposer(store)


def make_proposer_chain(specs: Sequence[ProposerSpec], wider: Sequence[float], vocabulary: int | None) -> ProposerChain:
    """Build the proposers whose lookup tokens draft passes check.

    `wider`: costs of a draft pass over 2, 3, .. tokens, relative to a draft pass over one token. `vocabulary`: the
    model's vocabulary size; None: unknown. Raises `SelfspecError` as `make_proposer` does.
    """
    return ProposerChain([make_proposer(spec, vocabulary) for spec in specs], (1.0, *wider) if specs else (1.0,))


ChainSpec = LayerSkipSpec | HeadSpec | ModelSpec | SwiftSpec | ClaspSpec


class _ChainOptions(TypedDict):
    """The arguments that the makers of all autoregressive drafters take from a profile."""

    controller: Controller
    candidates: int
    confidence: Confidence
    proposer_chain: ProposerChain


def _chain_options(runtime: Runtime, spec: ChainSpec, profile: Profile, wider: Sequence[float]) -> _ChainOptions:
    """Return the arguments by name; `wider`: as in `make_proposer_chain`."""
    return {
        "controller": make_controller(spec.controller, profile.payoff),
        "candidates": spec.candidates,
        "confidence": spec.confidence or PROBABILITY,
        "proposer_chain": make_proposer_chain(
            profile.local_proposers(spec), wider, runtime.skeleton.identity.vocabulary
        ),
    }


def make_layer_skip(runtime: Runtime, spec: LayerSkipSpec, profile: Profile) -> LayerSkipDrafter:
    """Build the drafter that runs the model along a draft path.

    Raises `SelfspecError` if the path does not fit the model.
    """
    wider = WIDER if profile.costs is None else profile.costs.along(profile.path).wider
    below = None
    if spec.below is not None:
        below = HeadBelow(_head(runtime, profile, spec.below.part), (1.0, *wider), spec.below.step)
    return LayerSkipDrafter(
        runtime,
        draft_path(runtime, spec, profile),
        below=below,
        **_chain_options(runtime, spec, profile, wider),
    )


def draft_path(runtime: Runtime, spec: LayerSkipSpec, profile: Profile) -> DraftPath:
    """Return a profile's draft path, after its trained modules and int4 weights, if any, were registered.

    Raises `SelfspecError` if these cannot be read or do not fit the model.
    """
    path = spec.path

    def key(name: str) -> str:
        return profile.parts[name].sha256 if name in profile.parts else name

    if spec.int4_weights is not None:
        check_unsharded(runtime.model, "a file of int4 weights")
        runtime.register_int4(key(spec.int4_weights), open_int4(runtime, profile.part_path(spec.int4_weights)))
        path = replace(path, int4_weights=key(spec.int4_weights))
    if spec.trained is not None:
        check_unsharded(runtime.model, "a trained path")
        part = read_part(profile.part_path(spec.trained))
        runtime.register_trained(key(spec.trained), trained_of(runtime, part))
        path = replace(path, trained=key(spec.trained))
    return path


def make_head_drafter(runtime: Runtime, spec: HeadSpec, profile: Profile) -> HeadDrafter:
    """Build the drafter of a draft head, whose file lies beside the profile.

    Raises `SelfspecError` if the head was trained for another model.
    """
    return HeadDrafter(_head(runtime, profile, spec.part), **_chain_options(runtime, spec, profile, ()))


def _head(runtime: Runtime, profile: Profile, part: str) -> Head:
    check_unsharded(runtime.model, "a trained head")
    return make_head(runtime, read_part(profile.part_path(part)))


def make_model(runtime: Runtime, spec: ModelSpec, profile: Profile) -> ModelDrafter | CrossVocabularyDrafter:
    """Build a drafter with a separate draft model: a folder beside the profile, or a model loaded by its name.

    If the two models' vocabulary sizes differ, only tokens that both tokenizers share are drafted. Raises
    `SelfspecError` if the draft model cannot be loaded, or if the target's tokenizer is needed and unavailable.
    """
    local_folder = None if profile.folder is None else profile.folder / spec.model
    name = str(local_folder) if local_folder is not None and local_folder.is_dir() else spec.model
    device = str(runtime.device) if spec.device == "auto" else spec.device
    own, tokenizer = _draft_model(name, device, spec.dtype, spec.bits)
    path = FULL if spec.bits is None else DraftPath.from_modes([spec.bits] * (2 * own.layers), head=spec.bits)
    options = _chain_options(runtime, spec, profile, WIDER)
    sizes = (runtime.skeleton.identity.vocabulary or 0, own.skeleton.identity.vocabulary or 0)
    if sizes[0] != sizes[1]:
        words = TokenizerMap(_tokenizer(profile), tokenizer, sizes=sizes)
        return CrossVocabularyDrafter(runtime, own, words, path=path, **options)
    return ModelDrafter(runtime, own, path=path, **options)


@lru_cache(maxsize=1)
def _draft_model(name: str, device: str, dtype: str, bits: str | None) -> tuple[Runtime, Any]:
    """Load a draft model and its tokenizer. The cache lets several drafters share one copy of the weights."""
    model, tokenizer = load_model(name, device=device, dtype=dtype)
    apply_layout_(model, drafting=True, quantized_drafts=bits is not None)
    return open_runtime(model), tokenizer


def _tokenizer(profile: Profile) -> Any:
    """Load the tokenizer of the model that a profile names. Raises `SelfspecError` if the tokenizer is unavailable."""
    name = profile.model.name
    if name is None:
        raise SelfspecError(
            "the draft model has another vocabulary size, so the model's tokenizer is needed; expected `model.name` in "
            "the profile"
        )
    try:
        return load_tokenizer(name)
    except SelfspecError as error:
        raise SelfspecError(
            f"the draft model has another vocabulary size, so the tokenizer of {name} is needed; {error}"
        ) from error


def make_merged(runtime: Runtime, spec: MergedSpec, profile: Profile) -> MergedDrafter:
    """Build the drafter that merges the proposals of several drafters into one token tree.

    Only layer-skip drafters get the profile's acceptance curve. Raises `SelfspecError` if a drafter cannot be built.
    """

    def alone(draft_spec: DraftSpec) -> Profile:
        ours = profile.acceptance if isinstance(draft_spec, LayerSkipSpec | MergedSpec) else None
        return profile.model_copy(update={"draft": draft_spec, "acceptance": ours})

    return MergedDrafter([_build_drafter(runtime, alone(draft_spec)) for draft_spec in spec.drafters])


def make_lookup_drafter(runtime: Runtime, spec: LookupSpec, profile: Profile) -> LookupDrafter:
    """Build a lookup drafter. Only the verification of its drafts takes time."""
    vocabulary = runtime.skeleton.identity.vocabulary
    proposers = [make_proposer(proposer, vocabulary) for proposer in profile.local_proposers(spec)]
    return LookupDrafter(proposers, _lookup_controller(spec.controller, profile))


def make_recycle(spec: RecycleSpec, profile: Profile) -> RecycleDrafter:
    """Build a token-recycling drafter. Only the verification of its drafts takes time."""
    return RecycleDrafter(_lookup_controller(spec.controller, profile), candidates=spec.candidates)


def make_input(spec: InputSpec, profile: Profile) -> InputDrafter:
    """Build an input-guided drafter. Only the verification of its drafts takes time."""
    return InputDrafter(_lookup_controller(spec.controller, profile))


def make_jacobi(spec: JacobiSpec) -> JacobiDrafter:
    """Build a Jacobi (parallel decoding) drafter."""
    return JacobiDrafter(spec.method, block=spec.block, parallel=spec.parallel, start=spec.start)


def make_lookahead(spec: LookaheadSpec) -> LookaheadDrafter:
    """Build a lookahead-decoding drafter."""
    return LookaheadDrafter(window=spec.window, ngram=spec.ngram, guesses=spec.guesses)


def make_swift(runtime: Runtime, spec: SwiftSpec, profile: Profile) -> SwiftDrafter:
    """Build a SWIFT drafter, which searches for its skip set while it decodes."""
    options = _chain_options(runtime, spec, profile, WIDER)
    return SwiftDrafter(runtime, **options, window=spec.window, every=spec.every, patience=spec.patience)


def make_clasp(runtime: Runtime, spec: ClaspSpec, profile: Profile) -> ClaspDrafter:
    """Build a CLaSp drafter (skip set by dynamic programming). Raises `SelfspecError` for too many skipped layers."""
    options = _chain_options(runtime, spec, profile, WIDER)
    return ClaspDrafter(runtime, **options, skip=spec.skip_layers, every=spec.every)


def _lookup_controller(controller: ControllerSpec, profile: Profile) -> Controller:
    payoff = replace(profile.payoff, draft=0.0, curve=profile.acceptance or AcceptanceCurve())
    return make_controller(controller, payoff)


register(SwiftSpec, make_swift)
register(ClaspSpec, make_clasp)
register(PlainSpec, lambda runtime, spec, profile: PlainDrafter())
register(LayerSkipSpec, make_layer_skip)
register(HeadSpec, make_head_drafter)
register(ModelSpec, make_model)
register(MergedSpec, make_merged)
register(LookupSpec, make_lookup_drafter)
register(RecycleSpec, lambda runtime, spec, profile: make_recycle(spec, profile))
register(InputSpec, lambda runtime, spec, profile: make_input(spec, profile))
register(JacobiSpec, lambda runtime, spec, profile: make_jacobi(spec))
register(LookaheadSpec, lambda runtime, spec, profile: make_lookahead(spec))
