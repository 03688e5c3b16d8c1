"""What the runtime needs of a `transformers` model: its leaf modules, sizes and limits, read and checked once.

Supported is the Llama skeleton (pre-norm, separate projections, RMSNorm, rotary positions): Llama 2/3.x, Mistral
and Qwen2. Everything else is refused by name. Knows nothing of caches, prompts and profiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from selfspec.basics.errors import UnsupportedModelError
from selfspec.facts.identity import Identity
from selfspec.model.dispatch import check_hooks, check_places, device_of, weight_of
from selfspec.model.linears import Call, Into, Onto, embedding, is_plain, linear, linear_onto, on_rows, side_by_side
from selfspec.model.sizes import Sizes

FAMILIES = ("llama", "mistral", "qwen2")
ROPES = ("default", "linear", "llama3", "yarn")
# These recompute their frequencies from each call's longest position: fixed only up to the original length.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


class Norm(Protocol):
    """RMSNorm of the rows of a stream `x` `[N, D]`, of which `longer` is the scratch's `[N, D + 1]`.

    May write to `out` `[N, D]` and return it.
    """

    def __call__(self, x: Tensor, longer: Tensor, out: Tensor) -> Tensor:
        """The normed rows `[N, D]`."""

    def refresh(self) -> None:
        """Take over weights that have been changed in place."""


@dataclass(frozen=True, slots=True)
class Block:
    """The leaf modules of one decoder layer, each a callable on rows `[N, in]`; `o` and `down` add to the stream."""

    input_norm: Norm
    qkv: Into  # query, key and value side by side
    o: Onto
    post_norm: Norm
    gate_up: Into  # gate and up side by side
    down: Onto
    act: Call
    device: torch.device


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model as the runtime sees it. `scaling` is attention's.

    `context` is the number of positions that can be served, `limit` says why.
    """

    embed: Call
    blocks: tuple[Block, ...]
    norm: Norm
    head: Call
    lm_head: nn.Module
    rotary: nn.Module
    scaling: float
    identity: Identity
    sizes: Sizes
    context: int
    limit: str
    ends: frozenset[int]
    device: torch.device

    def refresh(self) -> None:
        """Take over norms' weights that have been changed in place."""
        for norm in (self.norm, *(n for block in self.blocks for n in (block.input_norm, block.post_norm))):
            norm.refresh()


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
    check_hooks(model)
    check_places(model)
    sizes = Sizes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=body.layers[0].self_attn.head_dim,
        eps=config.rms_norm_eps,
        dtype=body.norm.weight.dtype,
    )
    last = device_of(body.layers[-1].input_layernorm)
    return Skeleton(
        embed=embedding(body.embed_tokens),
        blocks=tuple(_block(layer, sizes.eps) for layer in body.layers),
        norm=_norm(body.norm, sizes.eps, last),
        head=_head(model, last),
        lm_head=model.lm_head,
        rotary=body.rotary_emb,
        scaling=body.layers[0].self_attn.scaling,
        identity=read_identity(config).model_copy(update={"fingerprint": _fingerprint(model)}),
        sizes=sizes,
        context=context,
        limit=limit,
        ends=_ends(model),
        device=device_of(body.embed_tokens),
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


def _block(layer: Any, eps: float) -> Block:
    attention, mlp, device = layer.self_attn, layer.mlp, device_of(layer.input_layernorm)
    return Block(
        input_norm=_norm(layer.input_layernorm, eps, device),
        qkv=side_by_side([attention.q_proj, attention.k_proj, attention.v_proj]),
        o=linear_onto(attention.o_proj),
        post_norm=_norm(layer.post_attention_layernorm, eps, device),
        gate_up=side_by_side([mlp.gate_proj, mlp.up_proj]),
        down=linear_onto(mlp.down_proj),
        act=F.silu if type(mlp.act_fn) in (nn.SiLU, SiLUActivation) and is_plain(mlp.act_fn) else mlp.act_fn,
        device=device,
    )


class _PlainNorm:
    """In float32 and float64: the same formula in fewer and cheaper calls.

    x * weight / sqrt(mean(x^2) + eps) = x * (weight * sqrt(D)) / |(x, sqrt(D * eps))|. transformers' own computes in
    float32 whatever comes in; this keeps float64 exact.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        with torch.inference_mode(False):
            self._scaled = torch.empty_like(weight)
        self.refresh()

    @torch.inference_mode(False)  # it is written to again later, wherever this is called
    @torch.no_grad()
    def refresh(self) -> None:
        torch.mul(self._weight, len(self._weight) ** 0.5, out=self._scaled)

    def __call__(self, x: Tensor, longer: Tensor, out: Tensor) -> Tensor:
        return torch.mul(x, self._scaled, out=out).div_(torch.linalg.vector_norm(longer, dim=-1, keepdim=True))


class _NormModule:
    """The module itself: half precision rounds in another order there, and hooks run."""

    def __init__(self, module: nn.Module) -> None:
        self._call = on_rows(module)

    def refresh(self) -> None:
        pass

    def __call__(self, x: Tensor, longer: Tensor, out: Tensor) -> Tensor:
        return self._call(x)


def _norm(module: Any, eps: float, device: torch.device) -> Norm:
    """A norm as a callable on a stream on `device`; `eps` is the one that the scratch is made for.

    An offloaded norm's weight, which is small, is kept at hand.
    """
    plain = type(module).__name__.endswith("RMSNorm") and is_plain(module, offloaded=True)
    plain = plain and getattr(module, "variance_epsilon", None) == eps and device_of(module) == device
    if plain and module.weight.dtype in (torch.float32, torch.float64) and (weight := weight_of(module)) is not None:
        return _PlainNorm(weight.detach().to(device))
    return _NormModule(module)


def _head(model: Any, stream: torch.device) -> Call:
    """The head, as a callable on what the final norm gives of a stream on the device `stream`."""
    call, device = linear(model.lm_head), device_of(model.lm_head)
    if device == stream == device_of(model.model.norm):
        return call
    return lambda x: call(x.to(device))


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

    None when a weight is quantised. Equal for a bfloat16 checkpoint loaded in any wider dtype.
    """
    layers = model.model.layers
    digest = hashlib.sha256()
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for module in (layer.input_layernorm, layer.mlp.down_proj):
            weight = weight_of(module)
            if weight is None or not weight.is_floating_point():
                return None
            values = weight.detach().flatten()[:64].to("cpu", torch.bfloat16).view(torch.int16)
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)
