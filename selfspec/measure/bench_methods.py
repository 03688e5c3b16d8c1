"""The registry of the methods that `selfspec bench` can run, by name. Importing it does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.types.methods import EARLY_EXIT, FREE, NAMED, draft_model_of

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.llm.options import Options
    from selfspec.measure.timing import Method
    from selfspec.profile.schema import Profile
    from selfspec.speculation.drafter import Drafter

CONTEXT, REPEATS = 128, 24  # to time a draft model's decode step: keys in the KV cache, and number of timed steps
LOOKUP_TOKENS = 10  # tokens that prompt lookup drafts, the value in transformers' documentation

EXIT = "assistant_early_exit"  # in `BenchMethod.settings`, a value of n means: exit after 1/n of the layers
THEIR_DRAFT_MODEL = "hf-model:"
OF_PROFILE = ("profile", "path", "guarded")  # methods that draft as the benchmark's profile says

_log = logging.getLogger("selfspec")
Weights = Literal["plain", "drafting", "hf"]
Keep = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class BenchMethod:
    """One decoding method that a benchmark compares.

    `weights`: the copy of the model that the method runs on: `plain` and `drafting` have the layouts that suit plain
    decoding and drafting, `hf` the layout as loaded. `profile(llm, profile)`: for selfspec's drafting methods, returns
    the profile to draft with, given the benchmark's profile; None for plain decoding and for methods of `transformers`.
    `guarded`: whether the guard bounds the cost of drafting, as in `generate`. `settings`, for methods of
    `transformers`: fields of its `GenerationConfig`. `assistant`: the name of its assistant model; None: no assistant.
    """

    weights: Weights
    profile: Callable[[LLM, Profile], Profile] | None = None
    guarded: bool = False
    settings: Mapping[str, int] = field(default_factory=dict)
    assistant: str | None = None

    def drafter(self, llm: LLM, profile: Profile) -> Drafter | None:
        """Return the drafter on `llm`, the copy that `weights` names; None without a `profile`."""
        if self.profile is None:
            return None
        own = self.profile(llm, profile)
        return llm.guarded_drafter(own) if self.guarded else llm.drafter_for(own)

    def make(self, llm: LLM, options: Options, keep: Keep, drafter: Drafter | None) -> Method:
        """Return the method to time on `llm`, the copy that `weights` names; `keep` receives each text's token ids."""
        from selfspec.drafters import PlainDrafter
        from selfspec.measure.timing import method, transformers_generate

        if self.weights != "hf":
            return method(llm, drafter or PlainDrafter(), options, keep=lambda generation: keep(generation.tokens))
        settings, assistant = self.settings, None
        if self.assistant is not None:
            from selfspec.models.loading import load_model

            assistant = load_model(self.assistant, device=str(llm.runtime.device), dtype="auto")
        elif EXIT in settings:
            settings = {EXIT: max(1, llm.runtime.layers // settings[EXIT])}
        return transformers_generate(llm, options, settings=settings, assistant=assistant, keep=keep)


def _named(name: str, weights: Weights = "plain") -> BenchMethod:
    """Return the method whose name determines its draft settings; the costs come from the benchmark's profile."""

    def profile(llm: LLM, base_profile: Profile) -> Profile:
        from selfspec.profile.shipped import by_method

        return by_method(name, base_profile, llm.identity)

    return BenchMethod(weights, profile)


def _of_file(name: str) -> BenchMethod:
    """Return the method that drafts with the profile in the file `name`."""

    def profile(llm: LLM, _: Profile) -> Profile:
        from selfspec.profile.shipped import check_profile, find_profile_file

        own = find_profile_file(name)
        check_profile(own, llm.identity)
        return own

    return BenchMethod("drafting", profile)


def _of_draft_model(name: str) -> BenchMethod:
    """Return the method `model:NAME` or `staged:NAME`, which drafts with another model.

    The cost of its draft step is timed first and stored in the profile, in plain decode steps of the target.
    """

    def profile(llm: LLM, base_profile: Profile) -> Profile:
        from selfspec.drafters import CrossVocabularyDrafter, ModelDrafter
        from selfspec.measure.cost_fitting import forward_seconds
        from selfspec.profile.shipped import by_method

        method_profile = by_method(name, base_profile, llm.identity)
        drafter = llm.drafter_for(method_profile)
        own = drafter.runtime if isinstance(drafter, ModelDrafter | CrossVocabularyDrafter) else llm.runtime
        context = max(0, min(CONTEXT, *(runtime.skeleton.context - 1 for runtime in (own, llm.runtime))))
        step = forward_seconds(own, context, repeats=REPEATS) / forward_seconds(llm.runtime, context, repeats=REPEATS)
        return method_profile.model_copy(
            update={"draft": method_profile.draft.model_copy(update={"step": round(step, 4)})}
        )

    return BenchMethod("plain", profile)


METHODS = {
    "plain": BenchMethod("plain"),
    "profile": BenchMethod("drafting", lambda _, profile: profile),
    "path": BenchMethod("drafting", lambda _, profile: profile.path_only),
    "guarded": BenchMethod("drafting", lambda _, profile: profile, guarded=True),
    EARLY_EXIT: _named(EARLY_EXIT, "drafting"),
    **{name: _named(name) for name in FREE},
    # methods of transformers: plain decoding, early exit after half of the layers, and prompt lookup
    "hf": BenchMethod("hf"),
    "hf-early-exit": BenchMethod("hf", settings={EXIT: 2}),
    "hf-prompt-lookup": BenchMethod("hf", settings={"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
}


def find_method(name: str) -> BenchMethod:
    """Return a method by name: a registered one, a profile's file, `model:NAME`, `staged:NAME` or `hf-model:NAME`.

    Raises `SelfspecError` for an unknown name.
    """
    if name in METHODS:
        return METHODS[name]
    if is_profile(name):
        return _of_file(name)
    if draft_model_of(name) is not None:
        return _of_draft_model(name)
    if (model := draft_model(name)) is not None:
        return BenchMethod("hf", assistant=model)
    more = ", ".join(f"{kind}NAME" for kind in (*NAMED, THEIR_DRAFT_MODEL)) + ", PROFILE.yaml"
    raise SelfspecError(f"method '{name}' is not known; known: {', '.join(METHODS)}, {more}")


def is_profile(name: str) -> bool:
    """Return whether a method's name is the file name of a profile."""
    return name.endswith((".yaml", ".yml"))


def draft_model(name: str) -> str | None:
    """Return the draft model's name in a method's name, such as `NAME` in `model:NAME`; None without a draft model."""
    return draft_model_of(name, (*NAMED, THEIR_DRAFT_MODEL))


def check_methods(methods: Sequence[str]) -> None:
    """Raise `SelfspecError` unless all methods are known and distinct, with `plain` among them."""
    for name in methods:
        find_method(name)
    if len(set(methods)) < len(methods):
        raise SelfspecError("a method is named twice")
    if "plain" not in methods:
        raise SelfspecError("the methods must have 'plain' among them: every speed is compared with it")


def weights_of(methods: Sequence[str]) -> set[Weights]:
    """Return the names of the model copies that the methods run on, as in `BenchMethod.weights`."""
    return {find_method(name).weights for name in methods}


def any_drafts(methods: Sequence[str]) -> bool:
    """Return whether any method runs on the copy of the model whose weight layout is chosen for drafting."""
    return "drafting" in weights_of(methods)


def check_supported(name: str, llm: LLM, profile: Profile) -> None:
    """Raise `UnsupportedModelError` if a method cannot run on a model, or with a profile that drafts nothing."""
    method = find_method(name)
    if name in OF_PROFILE and not profile.drafts:
        raise UnsupportedModelError(
            f"method '{name}' needs a profile that drafts; name it with --profile, or run selfspec search"
        )
    if (method.settings or method.assistant) and getattr(llm.model, "_is_stateful", False):
        raise UnsupportedModelError(
            "assisted generation of transformers takes no model with recurrent states, such as "
            f"{type(llm.model).__name__}; expected method 'hf', or methods of selfspec"
        )
    if name in FREE:
        method.drafter(llm, profile)


def supported(names: Sequence[str], llm: LLM, profile: Profile) -> list[str]:
    """Return the methods among `names` that can run on a model; log which cannot, and why."""
    left: list[str] = []
    for name in names:
        try:
            check_supported(name, llm, profile)
        except UnsupportedModelError as error:
            _log.warning("method '%s' is left out: %s", name, error)
        else:
            left.append(name)
    return left
