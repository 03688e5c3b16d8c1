"""The skeleton of a `transformers` model of any family: its modules as callables, its sizes and limits.

The runtime reads and checks the skeleton once. Errors name the unsupported feature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec.basics.errors import UnsupportedModelError
from selfspec.models.dispatch import check_hooks, check_places, containers, device_of, dtype_of, is_dense, weight_of
from selfspec.models.families import Parts, find_family, is_lean
from selfspec.models.families.base import AttentionSpec, Block, Sizes
from selfspec.models.linears import Call, Moved
from selfspec.models.low_precision import Kernel
from selfspec.models.norms import Norm, Norms
from selfspec.models.quantized_sublayers import QuantizedSublayers
from selfspec.models.shards import full_weight, is_sharded, local_parts, local_sizes
from selfspec.types.identity import Identity

ROPES = ("default", "linear", "llama3", "yarn")
# RoPE types that recompute frequencies from each call's longest position; constant only up to the original length.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
ENDLESS = 2**20  # positions of a model whose configuration sets no limit
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The identity, sizes and limits of a model.

    `context` is the number of supported positions, and `context_reason` the reason for that number. `ends` are the end
    tokens. `device` is the device of input tokens and output logits.
    """

    identity: Identity
    sizes: Sizes
    context: int
    context_reason: str
    ends: frozenset[int]
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton(ModelFacts):
    """A model as the runtime sees it.

    `embed` maps token ids `[B, n]` to the residual stream `[B, n, D]`. `blocks` are the layers. `norm` and `head`
    compute logits from rows of the residual stream. `head_over(tokens)` returns a head that computes only the logits of
    `tokens`, or None if the head's weight cannot be read. `attention_specs` are the layers' windows and RoPE. `scaling`
    multiplies the products of queries and keys. `norms` updates the norms after weight changes. `quantizer` makes
    quantised sub-layers and heads.
    """

    embed: Call
    blocks: tuple[Block, ...]
    norm: Norm
    head: Call
    head_over: Callable[[Sequence[int]], Call | None]
    attention_specs: tuple[AttentionSpec, ...]
    scaling: float
    norms: Norms
    quantizer: QuantizedSublayers

    @property
    def parts(self) -> Parts:
        """The model's modules."""
        return self.quantizer.parts

    @property
    def gain(self) -> Tensor:
        """The factor `[D]` of the last norm."""
        return self.norms.gain(self.parts.norm)

    def refresh(self) -> None:
        """Update norms after in-place changes to their weights."""
        self.norms.refresh()


def read_skeleton(model: Any, *, kernel: Kernel | None = None) -> Skeleton:
    """Read the skeleton of a loaded `transformers` causal language model; `kernel` is as in `QuantizedSublayers`.

    Raises `UnsupportedModelError`, which names the unsupported feature and the supported features.
    """
    config = getattr(model, "config", None)
    if hasattr(model, "get_base_model"):  # PEFT: adapters are inside the modules that the runtime calls
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{type(model).__name__} with a prompt-learning adapter is not supported; remove the adapter"
            )
        model = model.get_base_model()
    family = find_family(config, type(model).__name__)
    assert config is not None
    context, limit = context_of(config)
    parts = family.parts(model)
    inside = containers(model, parts.called())
    check_hooks(inside)
    check_places(model, [layer.module for layer in parts.layers], inside)
    sizes = read_sizes(model, parts)
    norms = Norms(parts.eps, sizes.dtype, parts.formula)
    blocks = tuple(family.block(layer, norms) for layer in parts.layers)
    last = blocks[-1].device
    return Skeleton(
        embed=family.embed(parts),
        blocks=blocks,
        norm=norms.read(parts.norm, last),
        head=_brought(family.head(parts), parts, last),
        head_over=partial(family.head_over, parts),
        attention_specs=parts.attention_specs,
        scaling=parts.scaling,
        identity=read_identity(config).model_copy(update={"fingerprint": _fingerprint(parts)}),
        sizes=sizes,
        context=context,
        context_reason=limit,
        ends=ends_of(model),
        device=device_of(parts.embedding),
        norms=norms,
        quantizer=QuantizedSublayers(family, local_parts(model, parts), norms, kernel),
    )


def identity_of(model: Any) -> Identity:
    """Return a model's identity, with a fingerprint of its weights if it is of a supported family."""
    return read_skeleton(model).identity if is_lean(model) else read_identity(model.config)


def decoder_part(config: Any) -> Any:
    """Return the part of a configuration that describes the text decoder: all of it for a model of text alone."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def read_identity(config: Any) -> Identity:
    """Return the identity of a model from its configuration, without the weights' fingerprint."""
    config = decoder_part(config)
    return Identity(
        name=getattr(config, "_name_or_path", None) or None,
        model_type=config.model_type,
        # LongCat-Flash counts the attentions in `num_hidden_layers`, two in each of its `num_layers` layers.
        layers=getattr(config, "num_layers", None) or config.num_hidden_layers,
        hidden=_number(config, "hidden_size"),
        heads=_number(config, "num_attention_heads"),
        kv_heads=_number(config, "num_key_value_heads", "num_attention_heads"),
        intermediate=_number(config, "intermediate_size"),
        vocabulary=config.vocab_size,
    )


def read_sizes(model: Any, parts: Parts) -> Sizes:
    """Return the sizes of the layers of a model with these parts, on this process where it is sharded."""
    config = model.config
    sizes = Sizes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=parts.head_dim,
        eps=parts.eps,
        dtype=dtype_of(parts.embedding),
    )
    return local_sizes(model, parts, sizes) if is_sharded(model) else sizes


def _number(config: Any, *names: str) -> int | None:
    """Return the first of a configuration's numbers that is there; None for what differs from layer to layer."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _brought(head: Call, parts: Parts, stream: torch.device) -> Call:
    """Return `head` for normalised rows on the device `stream`, which are moved to the head's device if necessary."""
    device = device_of(parts.head.module)
    if device == stream == device_of(parts.norm):
        return head
    return Moved(head, device)


def context_of(config: Any, *, any_rope: bool = False) -> tuple[int, str]:
    """Return the number of supported positions, and the reason for the limit.

    Raises `UnsupportedModelError` for an unknown RoPE type, unless `any_rope`: the model's own forward computes it.
    """
    context, limit = int(getattr(config, "max_position_embeddings", None) or ENDLESS), "the model's context"
    for rope in _ropes(config):
        kind = rope.get("rope_type", "default")
        if kind in LENGTH_DEPENDENT_ROPES:
            sources = (rope, vars(config))
            original = next((source[ORIGINAL] for source in sources if source.get(ORIGINAL)), context)
            if original < context:
                context, limit = int(original), f"the original length of '{kind}' rope, beyond which keys would change"
        elif kind not in ROPES and not any_rope:
            supported = ", ".join((*ROPES, *LENGTH_DEPENDENT_ROPES))
            raise UnsupportedModelError(f"rope type '{kind}' is not supported; supported: {supported}")
    return context, limit


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return a configuration's RoPE parameters: one entry for all layers, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope_params for rope_params in rope.values() if isinstance(rope_params, dict)]
    return kinds or [rope]


def ends_of(model: Any) -> frozenset[int]:
    """Return the end tokens that the generation config names, or else the model's config."""
    generation = getattr(model, "generation_config", None)
    end = getattr(generation, "eos_token_id", None)
    return end_tokens(getattr(decoder_part(model.config), "eos_token_id", None) if end is None else end)


def end_tokens(ids: int | Iterable[int] | None) -> frozenset[int]:
    """Return the set of end tokens from a configuration's single id, several ids, or None."""
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def _fingerprint(parts: Parts) -> str | None:
    """Return a hash of 64 values from each of three layers' first norm and last linear, rounded to bfloat16.

    Returns None if a weight is quantised. The hash is the same for a bfloat16 checkpoint loaded in any wider dtype.
    """
    layers = parts.layers
    digest = hashlib.sha256()
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for module in (layer.norms[0], layer.groups[-1].modules[-1]):
            weight = None if getattr(module, "bits", None) else weight_of(module)
            if weight is None or not is_dense(weight) or not weight.is_floating_point():
                return None
            values = full_weight(weight).detach().flatten()[:64].to("cpu", torch.bfloat16).view(torch.int16)
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]
