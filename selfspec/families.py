"""What the runtime needs of a `transformers` model: its leaf modules, sizes and limits, read and checked once.

Supported is the Llama skeleton (pre-norm, separate projections, RMSNorm, rotary positions): Llama 2/3.x, Mistral
and Qwen2. Everything else is refused by name. Knows nothing of caches, prompts and profiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from selfspec.errors import UnsupportedModelError
from selfspec.linears import Call, Onto, is_plain, linear, linear_onto, on_rows, side_by_side
from selfspec.profile import Identity

FAMILIES = ("llama", "mistral", "qwen2")
ROPES = ("default", "linear", "llama3", "yarn")
# These recompute their frequencies from each call's longest position: fixed only up to the original length.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Block:
    """The leaf modules of one decoder layer, each a callable on rows `[N, in]`; `o` and `down` add to the stream."""

    input_norm: Call
    qkv: Call  # query, key and value side by side
    o: Onto
    post_norm: Call
    gate_up: Call  # gate and up side by side
    down: Onto
    act: Call
    scaling: float
    device: torch.device


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model as the runtime sees it. `context` is the number of positions that can be served, `limit` says why."""

    embed: Call
    blocks: tuple[Block, ...]
    norm: Call
    head: Call
    rotary: nn.Module
    identity: Identity
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    limit: str
    ends: frozenset[int]
    dtype: torch.dtype
    device: torch.device


def read_skeleton(model: Any) -> Skeleton:
    """Read a loaded `transformers` causal language model.

    Raises `UnsupportedModelError`, naming what is not supported and what is.
    """
    config = getattr(model, "config", None)
    if hasattr(model, "get_base_model"):  # PEFT: its adapters are in the leaf modules
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{type(model).__name__} with learnt prompts is not supported; merge or remove it"
            )
        model = model.get_base_model()
    if not hasattr(model, "lm_head"):
        raise UnsupportedModelError(f"{type(model).__name__} has no language-model head; want a causal language model")
    check_family(config, type(model).__name__)
    assert config is not None
    context, limit = _context(config)
    body = model.model
    if not len(body.layers):
        raise UnsupportedModelError(f"{type(model).__name__} has no layers")
    _check_containers(model)
    first = body.layers[0].self_attn
    return Skeleton(
        embed=body.embed_tokens,
        blocks=tuple(_block(layer) for layer in body.layers),
        norm=_norm(body.norm),
        head=linear(model.lm_head),
        rotary=body.rotary_emb,
        identity=read_identity(config).model_copy(update={"fingerprint": _fingerprint(model)}),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=first.head_dim,
        context=context,
        limit=limit,
        ends=_ends(model),
        dtype=body.norm.weight.dtype,
        device=_device(body.embed_tokens),
    )


def check_family(config: Any, what: str) -> None:
    """Raise `UnsupportedModelError` when a configuration is of a family that is not served."""
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{what} (model_type {family!r}) is not supported; supported: causal language models of {_names(FAMILIES)}"
        )


def read_identity(config: Any) -> Identity:
    """What a configuration says of which model it is; the weights' fingerprint is left out."""
    return Identity(
        name=getattr(config, "_name_or_path", None) or None,
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
    )


def _block(layer: Any) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    return Block(
        input_norm=_norm(layer.input_layernorm),
        qkv=side_by_side([attention.q_proj, attention.k_proj, attention.v_proj]),
        o=linear_onto(attention.o_proj),
        post_norm=_norm(layer.post_attention_layernorm),
        gate_up=side_by_side([mlp.gate_proj, mlp.up_proj]),
        down=linear_onto(mlp.down_proj),
        act=F.silu if isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation)) else mlp.act_fn,
        scaling=attention.scaling,
        device=_device(layer.input_layernorm),
    )


def _check_containers(model: Any) -> None:
    """Raise `UnsupportedModelError` for a hook on a module that is never called, since it would be ignored.

    The runtime calls leaf modules. accelerate's own hooks only move data, and transformers' only record.
    """
    containers = [("the model", model), ("module 'model'", model.model)]
    for i, layer in enumerate(model.model.layers):
        name = f"model.layers.{i}"
        containers += [(f"module '{name}'", layer), (f"module '{name}.self_attn'", layer.self_attn)]
        containers += [(f"module '{name}.mlp'", layer.mlp)]
    for what, module in containers:
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [h for h in hooks if not str(getattr(h, "__module__", "")).startswith("transformers.")]
        if foreign or ("forward" in module.__dict__ and not hasattr(module, "_hf_hook")):
            raise UnsupportedModelError(
                f"{what} has a hook or a forward of its own, which would be ignored: selfspec calls the leaf modules "
                "(norms, projections, head); remove it, or put it there"
            )


def _norm(module: Any) -> Call:
    """RMSNorm as a callable: in float32 and float64 the same formula in fewer and cheaper calls.

    transformers' own computes in float32 whatever comes in; this keeps float64 exact. Half precision rounds in
    another order there: the module itself is called.
    """
    plain = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and is_plain(module)
    if not plain or module.weight.dtype not in (torch.float32, torch.float64) or module.weight.is_meta:
        return on_rows(module)
    weight = module.weight.detach()
    eps, share = weight.new_tensor(module.variance_epsilon), 1 / len(weight)

    def norm(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scaled: Tensor = (x * weight).mul_(torch.addcmul(eps, length, length, value=share).rsqrt_())
        return scaled

    return norm


def _device(module: nn.Module) -> torch.device:
    """Where a module computes: its weights' device, or, offloaded by accelerate, its hook's."""
    weight = next(module.parameters()).device
    if weight.type != "meta":
        return weight
    return torch.device(module._hf_hook.execution_device)  # type: ignore[union-attr, arg-type]


def _context(config: Any) -> tuple[int, str]:
    """Positions that can be served, and the reason for the limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    context, limit = int(config.max_position_embeddings), "the model's context"
    if kind in LENGTH_DEPENDENT_ROPES:
        original = rope.get("original_max_position_embeddings") or context
        if original < context:
            context, limit = int(original), f"the original length of '{kind}' rope, beyond which keys would change"
    elif kind not in ROPES:
        supported = _names((*ROPES, *LENGTH_DEPENDENT_ROPES))
        raise UnsupportedModelError(f"rope type '{kind}' is not supported; supported: {supported}")
    window = _window(config)
    if window is not None and window < context:
        context, limit = window, "the sliding window, within which attention is full"
    return context, limit


def _window(config: Any) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _ends(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    end = getattr(generation, "eos_token_id", None)
    return end_tokens(model.config.eos_token_id if end is None else end)


def end_tokens(ids: int | Iterable[int] | None) -> frozenset[int]:
    """The set of end tokens that a configuration writes as one, several, or none."""
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def _fingerprint(model: Any) -> str | None:
    """A hash of 64 values from each of three layers' first norm and down projection, rounded to bfloat16.

    None when a weight is quantised or offloaded. Equal for a bfloat16 checkpoint loaded in any wider dtype.
    """
    layers = model.model.layers
    digest = hashlib.sha256()
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for module in (layer.input_layernorm, layer.mlp.down_proj):
            weight = getattr(module, "weight", None)
            if weight is None or not weight.is_floating_point() or weight.is_meta:
                return None
            values = weight.detach().flatten()[:64].to("cpu", torch.bfloat16).view(torch.int16)
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)
