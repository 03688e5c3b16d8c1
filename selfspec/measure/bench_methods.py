"""What `selfspec bench` can run: each method by its name, in a registry. Imports torch only when one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from selfspec.basics.errors import SelfspecError
from selfspec.facts.methods import DRAFT_MODEL, EARLY_EXIT, FREE

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.llm.options import Options
    from selfspec.measure.timing import Method
    from selfspec.profile.schema import Profile
    from selfspec.speculation.drafter import Drafter

LOOKUP_TOKENS = 10  # that prompt lookup drafts, as in transformers' documentation

Weights = Literal["plain", "skip", "hf"]
Keep = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class BenchMethod:
    """One way of decoding that a benchmark compares.

    `weights`: which copy of the model it runs on; `plain` and `skip` lie in memory as
    suits plain decoding and drafting, `hf` as loaded, for `transformers` itself. `make(llm, profile, options, keep)`
    gives what is timed, where `llm` is that copy, `profile` says what drafts, and `keep` is shown the token ids of
    every text.
    """

    weights: Weights
    make: Callable[[LLM, Profile, Options, Keep], Method]


def _ours(llm: LLM, options: Options, keep: Keep, drafter: Drafter | None = None) -> Method:
    """Our decoding, plainly or with a drafter."""
    from selfspec.drafters import PlainDrafter
    from selfspec.measure.timing import method

    return method(
        llm, drafter or PlainDrafter(), options, first_plain=True, keep=lambda generation: keep(generation.tokens)
    )


def _named(name: str, weights: Weights = "plain") -> BenchMethod:
    """Drafts of which the name says all, at the profile's costs."""

    def make(llm: LLM, profile: Profile, options: Options, keep: Keep) -> Method:
        from selfspec.profile.methods import by_method

        return _ours(llm, options, keep, llm.drafts_with(by_method(name, profile, llm.identity)))

    return BenchMethod(weights, make)


def _theirs(llm: LLM, options: Options, keep: Keep, settings: Mapping[str, int] = MappingProxyType({})) -> Method:
    """Decoding by transformers, with further settings of its `generate`."""
    from selfspec.measure.timing import transformers_generate

    return transformers_generate(llm, options, settings=settings, keep=keep)


METHODS = {
    # nothing drafted
    "plain": BenchMethod("plain", lambda llm, profile, options, keep: _ours(llm, options, keep)),
    # the profile's drafter, and the same as `generate` runs it
    "skip": BenchMethod(
        "skip", lambda llm, profile, options, keep: _ours(llm, options, keep, llm.drafts_with(profile))
    ),
    "path": BenchMethod(  # its draft path alone, without guesses
        "skip", lambda llm, profile, options, keep: _ours(llm, options, keep, llm.drafts_with(profile.unaided))
    ),
    "guarded": BenchMethod("skip", lambda llm, profile, options, keep: _ours(llm, options, keep, llm.guarded(profile))),
    EARLY_EXIT: _named(EARLY_EXIT, "skip"),
    **{name: _named(name) for name in FREE},
    # transformers' own, its drafts from the first half of the layers, and from the prompt
    "hf": BenchMethod("hf", lambda llm, profile, options, keep: _theirs(llm, options, keep)),
    "hf-early-exit": BenchMethod(
        "hf",
        lambda llm, profile, options, keep: _theirs(
            llm, options, keep, {"assistant_early_exit": max(1, llm.runtime.layers // 2)}
        ),
    ),
    "hf-prompt-lookup": BenchMethod(
        "hf",
        lambda llm, profile, options, keep: _theirs(llm, options, keep, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    ),
}


def find_method(name: str) -> BenchMethod:
    """A method by its name; `model:NAME` drafts by a smaller model. Raises `SelfspecError` for an unknown one."""
    if name in METHODS:
        return METHODS[name]
    if name.startswith(DRAFT_MODEL) and name != DRAFT_MODEL:
        return _named(name)
    raise SelfspecError(f"method '{name}' is not known; known: {', '.join(METHODS)}, {DRAFT_MODEL}NAME")


def check_methods(methods: Sequence[str]) -> None:
    """Raise `SelfspecError` unless these are methods, each once, `plain` among them."""
    for name in methods:
        find_method(name)
    if len(set(methods)) < len(methods):
        raise SelfspecError("a method is named twice")
    if "plain" not in methods:
        raise SelfspecError("the methods must have 'plain' among them: everything is compared with it")


def weights_of(methods: Sequence[str]) -> set[Weights]:
    """The copies of the model that methods run on."""
    return {find_method(name).weights for name in methods}


def any_drafts(methods: Sequence[str]) -> bool:
    """Whether any of them drafts as the profile says."""
    return "skip" in weights_of(methods)
