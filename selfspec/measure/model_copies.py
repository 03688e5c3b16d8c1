"""The copies of a model that methods are measured on, each with the weight layout that suits it best."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.llm.llm import LLM, wrap
from selfspec.measure.bench_methods import Weights, any_drafts, weights_of
from selfspec.measure.cost_fitting import fastest_plain
from selfspec.models.layout import apply_layout_, choose, layout_times
from selfspec.models.loading import DeviceMap, load_model
from selfspec.models.widen import widen
from selfspec.types.identity import Identity


@dataclass(frozen=True)
class ModelCopies:
    """The models of a benchmark, each with the weight layout that suits its methods; `hf` keeps the layout as loaded.

    `plain` and `skip` are the same model if their layouts agree. `identity` is the model's before it was widened.
    """

    plain: LLM
    skip: LLM
    hf: LLM | None
    layouts: Mapping[str, str]
    identity: Identity
    widened: int

    def on(self, weights: Weights) -> LLM:
        """Return the model for methods on these weights. Raises `ValueError` for a copy that was not loaded."""
        llm = {"plain": self.plain, "skip": self.skip, "hf": self.hf}[weights]
        if llm is None:
            raise ValueError(f"no model was loaded for {weights}; name its methods to load_model_copies")
        return llm

    @property
    def models(self) -> dict[str, LLM]:
        """The distinct models by name."""
        copies = {"plain": self.plain, "skip": self.skip} | ({} if self.hf is None else {"hf": self.hf})
        return {name: llm for name, llm in copies.items() if name != "skip" or llm is not self.plain}


def load_model_copies(
    name: str,
    methods: Sequence[str],
    *,
    widened: int = 1,
    device: str | DeviceMap,
    dtype: str,
    quantized_drafts: bool | Callable[[Identity], bool] = False,
) -> ModelCopies:
    """Load a model and optionally widen it, with a copy for each layout that the methods need. Raises `SelfspecError`.

    `quantized_drafts`: whether drafts are quantised, which may depend on the model's identity.
    """
    model, tokenizer = load_model(name, device=device, dtype=dtype)
    identity = wrap(model, tokenizer, profile="none", name=name).identity
    if widened > 1:
        model = widen(model, widened)
    low = quantized_drafts(identity) if callable(quantized_drafts) else quantized_drafts
    times = layout_times(model)
    layouts = {"plain": choose(times, drafting=False), "skip": choose(times, drafting=True, quantized_drafts=low)}
    if not any_drafts(methods):
        layouts["skip"] = layouts["plain"]

    def ready(model: Any, layout: str | None) -> LLM:
        if layout is not None:
            apply_layout_(model, layout)
        return wrap(model, tokenizer, profile="none", name=name)

    hf = ready(copy.deepcopy(model), None) if "hf" in weights_of(methods) else None
    skip = None if layouts["skip"] == layouts["plain"] else ready(copy.deepcopy(model), layouts["skip"])
    plain = ready(model, layouts["plain"])
    if skip is not None and fastest_plain((plain, skip)) is skip:
        plain, layouts["plain"] = skip, layouts["skip"]
    return ModelCopies(plain, skip or plain, hf, layouts, identity, widened)
