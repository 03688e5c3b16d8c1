"""Copies of a model in different weight layouts or widened, for benchmarks, and the memory that drafters add.

The residual stream is padded with channels of zeros. The added attention heads and MLP units read the residual stream
with random weights, and their output weights are zero. This preserves the logits of RMSNorm models with separate
projections and no other weights, as in the Llama skeleton.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.drafters import CrossVocabularyDrafter, Guard, LayerSkipDrafter, MergedDrafter, ModelDrafter, Router
from selfspec.drafters.batch_policy import int8_cache_runtimes
from selfspec.drafters.head_drafter import HeadDrafter
from selfspec.llm.default_profile import resolve_profile
from selfspec.llm.llm import LLM, wrap
from selfspec.measure.bench_methods import Weights, any_drafts, weights_of
from selfspec.measure.cost_fitting import fastest_plain
from selfspec.models.families import Parts, find_family
from selfspec.models.families.llama import Llama
from selfspec.models.layout import apply_layout_, choose, layout_times, weight_bytes
from selfspec.models.loading import DeviceMap, load_model
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import check_profile, named_profile, with_lookup_files
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.types.identity import Identity


@torch.no_grad()
def widen(model: Any, factor: int, *, seed: int = 0) -> Any:
    """Return a new `transformers` model of `factor` times the hidden size, heads and MLP units, with the same logits.

    Head size, layers and vocabulary are unchanged. Norms are rescaled: the mean square over D' = factor * D channels is
    D / D' of the old one, so eps' = eps * D / D' and weight' = weight * sqrt(D / D'), which is exact in floating point
    if the factor is a power of 4. About half of the weights are zeros, those of the output and down projections. Raises
    `SelfspecError` for a factor below 1 or a model that is not of the Llama skeleton.
    """
    if factor < 1:
        raise SelfspecError(f"widening factor {factor}: expected at least 1")
    family = find_family(model.config, type(model).__name__)
    if type(family) is not Llama:
        raise SelfspecError(f"{type(model).__name__} cannot be widened; expected a model of the Llama skeleton")
    narrow = family.parts(model)
    config = copy.deepcopy(model.config)
    config.head_dim = narrow.head_dim
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, name, getattr(config, name) * factor)
    config.rms_norm_eps = config.rms_norm_eps / factor
    weight = narrow.head.module.weight
    # Created on the model's device and in its dtype, so that a large model need not fit into memory twice.
    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []), weight.device:
        torch.manual_seed(seed)
        widened = type(model)._from_config(config, dtype=weight.dtype).eval()
    widened.generation_config = copy.deepcopy(model.generation_config)
    wide = family.parts(widened)
    _fill(wide.embedding.weight, narrow.embedding.weight, clear=True)
    if not config.tie_word_embeddings:
        _fill(wide.head.module.weight, weight)
    for new, old in zip(_norms(wide), _norms(narrow), strict=True):
        new.weight[: len(old.weight)] = old.weight * factor**-0.5
    for group, source in zip(wide.groups(), narrow.groups(), strict=True):
        for new, old in zip(group.modules, source.modules, strict=True):
            _linear(new, old, writes=group.writes)
    return widened


def _norms(parts: Parts) -> list[Any]:
    """Return the norms of the residual stream."""
    return [parts.norm, *(norm for layer in parts.layers for norm in layer.norms)]


def _linear(new: nn.Linear, old: nn.Linear, *, writes: bool) -> None:
    """Copy `old` into the corner of `new`; if it `writes` to the residual stream, set all other weights to zero."""
    _fill(new.weight, old.weight, clear=writes)
    if old.bias is not None:
        _fill(new.bias, old.bias, clear=True)


def _fill(new: Tensor, old: Tensor, *, clear: bool = False) -> None:
    """Copy `old` into the corner of `new`; with `clear`, set all else to zero."""
    if clear:
        new.zero_()
    new[tuple(slice(n) for n in old.shape)] = old


@dataclass(frozen=True)
class ModelCopies:
    """The copies of a benchmark's model, each with the weight layout that suits the methods that run on it.

    `plain`: the copy for plain decoding. `drafting`: that for drafting; the same object as `plain` if the layouts are
    equal. `hf`: that for `transformers`' own generate, in the layout as loaded; None if no method needs it. `layouts`:
    the layouts of `plain` and `drafting` by name. `widened`: the factor by which the model was widened (1: not
    widened). `identity`: the identity of the model before widening. `profile`: the profile to draft with (None: plain
    decoding); `has_default_profile`: whether that is the default profile, as none is known for the weights.
    """

    plain: LLM
    drafting: LLM
    hf: LLM | None
    layouts: Mapping[str, str]
    identity: Identity
    widened: int
    profile: Profile | None = None
    has_default_profile: bool = False

    def on(self, weights: Weights) -> LLM:
        """Return the copy named `plain`, `drafting` or `hf`. Raises `ValueError` if that copy was not loaded."""
        llm = {"plain": self.plain, "drafting": self.drafting, "hf": self.hf}[weights]
        if llm is None:
            raise ValueError(f"no model was loaded for {weights}; pass its methods to load_model_copies")
        return llm

    @property
    def models(self) -> dict[str, LLM]:
        """The distinct copies by name: `drafting` only if it is not the same object as `plain`, `hf` only if loaded."""
        copies = {"plain": self.plain, "drafting": self.drafting} | ({} if self.hf is None else {"hf": self.hf})
        return {name: llm for name, llm in copies.items() if name != "drafting" or llm is not self.plain}


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

    `widened`: the factor by which to widen the model (see `widen`; 1: not at all). `profile` and `store`: what
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
    layouts = {"plain": choose(times, drafting=False), "drafting": choose(times, drafting=True, quantized_drafts=low)}
    if not any_drafts(methods):
        layouts["drafting"] = layouts["plain"]

    def ready(model: Any, layout: str | None) -> LLM:
        if layout is not None:
            apply_layout_(model, layout)
        return wrap(model, tokenizer, profile="none", name=name)

    hf = ready(_copy_of(model), None) if "hf" in weights_of(methods) else None
    drafting = None if layouts["drafting"] == layouts["plain"] else ready(_copy_of(model), layouts["drafting"])
    plain = ready(model, layouts["plain"])
    if drafting is not None and fastest_plain((plain, drafting)) is drafting:
        plain, layouts["plain"] = drafting, layouts["drafting"]
    return ModelCopies(plain, drafting or plain, hf, layouts, identity, widened, chosen, default)


def _copy_of(model: Any) -> Any:
    """Return a deep copy of a model that shares the head's weight, often tied to the embedding and the largest."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, nn.Parameter):
        return copy.deepcopy(model)
    return copy.deepcopy(model, {id(weight): nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)})


def extra_drafter_bytes(drafter: Drafter, runtime: Runtime) -> int:
    """Return the bytes that a drafter takes: quantised weights, draft heads, and a draft model with its KV cache.

    The int8 copies of keys and values that its drafts have read count too. `runtime`: the target's runtime. Of a
    `Router`, the drafter that takes the most memory counts.
    """
    copies = sum(own.cache.copy_bytes for own in int8_cache_runtimes(drafter))
    return _bytes_without_copies(drafter, runtime) + copies


def _bytes_without_copies(drafter: Drafter, runtime: Runtime) -> int:
    match drafter:
        case Guard():
            return _bytes_without_copies(drafter.drafter, runtime)
        case Router():
            return max(_bytes_without_copies(route.drafter, runtime) for route in drafter.routes)
        case MergedDrafter():
            return sum(_bytes_without_copies(member, runtime) for member in drafter.drafters)
        case ModelDrafter() | CrossVocabularyDrafter():
            own = drafter.runtime
            return weight_bytes(own.model) + own.cache.bytes + own.extra_bytes(drafter.path)
        case LayerSkipDrafter():
            head = 0 if drafter.below is None else drafter.below.texts.head.bytes
            return runtime.extra_bytes(drafter.path) + head
        case HeadDrafter():
            return drafter.texts.head.bytes
    return 0
