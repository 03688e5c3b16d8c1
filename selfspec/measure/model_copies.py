"""Copies of a model in different weight layouts, so that a benchmark runs each method on the layout that suits it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from selfspec.llm.default_profile import resolve_profile
from selfspec.llm.llm import LLM, wrap
from selfspec.measure.bench_methods import Weights, any_drafts, weights_of
from selfspec.measure.cost_fitting import fastest_plain
from selfspec.models.layout import apply_layout_, choose, layout_times
from selfspec.models.loading import DeviceMap, load_model
from selfspec.models.widen import widen
from selfspec.profile.choosing import check_profile, named_profile, with_lookup_files
from selfspec.profile.schema import Profile
from selfspec.types.identity import Identity


@dataclass(frozen=True)
class ModelCopies:
    """The copies of a benchmark's model, each with the weight layout that suits the methods that run on it.

    `plain`: the copy for plain decoding. `skip`: the copy for drafting; the same object as `plain` if the layouts are
    equal. `hf`: the copy for `transformers`' own generate, in the layout as loaded; None if no method needs it.
    `layouts`: the layouts of `plain` and `skip` by name. `widened`: the factor by which the model was widened (1: not
    widened). `identity`: the identity of the model before widening. `profile`: the profile to draft with (None: plain
    decoding); `has_default_profile`: whether that is the default profile, as none is known for the weights.
    """

    plain: LLM
    skip: LLM
    hf: LLM | None
    layouts: Mapping[str, str]
    identity: Identity
    widened: int
    profile: Profile | None = None
    has_default_profile: bool = False

    def on(self, weights: Weights) -> LLM:
        """Return the copy named `plain`, `skip` or `hf`. Raises `ValueError` if that copy was not loaded."""
        llm = {"plain": self.plain, "skip": self.skip, "hf": self.hf}[weights]
        if llm is None:
            raise ValueError(f"no model was loaded for {weights}; pass its methods to load_model_copies")
        return llm

    @property
    def models(self) -> dict[str, LLM]:
        """The distinct copies by name: `skip` only if it is not the same object as `plain`, `hf` only if loaded."""
        copies = {"plain": self.plain, "skip": self.skip} | ({} if self.hf is None else {"hf": self.hf})
        return {name: llm for name, llm in copies.items() if name != "skip" or llm is not self.plain}


def load_model_copies(
    name: str,
    methods: Sequence[str],
    *,
    widened: int = 1,
    device: str | DeviceMap,
    dtype: str,
    profile: str | Path | Profile = "none",
    store: str | Path | None = None,
) -> ModelCopies:
    """Load a model, with a copy for each weight layout that the methods need.

    `widened`: the factor by which to widen the model (see `models.widen`; 1: not at all). `profile` and `store`: what
    to draft with, as in `load`. Raises `SelfspecError` if the model cannot be loaded or widened, and for a profile of
    another model.
    """
    model, tokenizer = load_model(name, device=device, dtype=dtype)
    identity = wrap(model, tokenizer, profile="none", name=name).identity
    if widened > 1:
        model = widen(model, widened)
    chosen, default = resolve_profile(named_profile(profile), model, identity)
    if (chosen := with_lookup_files(chosen, identity, store, None)) is not None:
        check_profile(chosen, identity)
    low = chosen is not None and chosen.path.low_precision
    times = layout_times(model)
    layouts = {"plain": choose(times, drafting=False), "skip": choose(times, drafting=True, quantized_drafts=low)}
    if not any_drafts(methods):
        layouts["skip"] = layouts["plain"]

    def ready(model: Any, layout: str | None) -> LLM:
        if layout is not None:
            apply_layout_(model, layout)
        return wrap(model, tokenizer, profile="none", name=name)

    hf = ready(_copy_of(model), None) if "hf" in weights_of(methods) else None
    skip = None if layouts["skip"] == layouts["plain"] else ready(_copy_of(model), layouts["skip"])
    plain = ready(model, layouts["plain"])
    if skip is not None and fastest_plain((plain, skip)) is skip:
        plain, layouts["plain"] = skip, layouts["skip"]
    return ModelCopies(plain, skip or plain, hf, layouts, identity, widened, chosen, default)


def _copy_of(model: Any) -> Any:
    """Return a deep copy of a model that shares the head's weight, often tied to the embedding and the largest."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, nn.Parameter):
        return copy.deepcopy(model)
    return copy.deepcopy(model, {id(weight): nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)})
