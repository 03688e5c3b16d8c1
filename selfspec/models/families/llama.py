"""The Llama skeleton, shared by Llama 2 and 3.x, Mistral and Qwen2, and the base of most other families.

It has RMSNorm before each sub-layer, separate projections (Qwen2's with biases), RoPE over whole heads, a gated MLP,
and optionally sliding windows in some or all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

from selfspec.basics.errors import UnsupportedModelError
from selfspec.models.dispatch import device_of
from selfspec.models.families.base import (
    Activation,
    Attention,
    AttentionSpec,
    Block,
    DenseMlp,
    GatedMlp,
    Layer,
    Mlp,
    NativeAttention,
    NativeMlp,
    Parts,
    Rope,
    Rotary,
)
from selfspec.models.families.common import windows_of
from selfspec.models.linears import (
    Call,
    Group,
    Mapped,
    embedding,
    gated,
    is_plain,
    linear_onto,
    linear_over,
    logits_linear,
    side_by_side,
)
from selfspec.models.norms import LLAMAS, Formula, Norms


class Llama:
    """The `Family` of models with the module tree of `LlamaForCausalLM`."""

    formula: ClassVar[Formula] = LLAMAS
    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """A layer's norms: first those before sub-layers, then those after them."""
    linear_names: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
    )
    """The linears that read the input of attention, write its output, read that of the MLP, and write its output."""

    def parts(self, model: Any) -> Parts:
        """Return the model's modules. Raises `UnsupportedModelError` for a model without a head or layers."""
        body = body_of(model, "model")
        of_layers = self.attention_specs(body, model.config)
        attention_specs = tuple(dict.fromkeys(of_layers))
        first = body.layers[0]
        return Parts(
            embedding=body.embed_tokens,
            layers=tuple(
                replace(self.layer(layer, attention_specs.index(attention_spec)), rotary=self.rotary(body, i))
                for i, (layer, attention_spec) in enumerate(zip(body.layers, of_layers, strict=True))
            ),
            norm=body.norm,
            head=Group(model, ("lm_head",)),
            attention_specs=attention_specs,
            head_dim=first.self_attn.head_dim,
            scaling=first.self_attn.scaling,
            eps=getattr(body.norm, "variance_epsilon", None) or body.norm.eps,
            formula=self.formula,
            logits=self.logits(model.config),
        )

    def rotary(self, body: Any, index: int) -> Rotary:
        """Return the `Rotary` of layer `index` of `body`, the model without its head."""
        rotary: Rotary = body.rotary_emb
        return rotary

    def attention_specs(self, body: Any, config: Any) -> list[AttentionSpec]:
        """Return the attention spec of each layer of `body`, the model without its head."""
        rope = Rope(body.rotary_emb)
        return [AttentionSpec(rope, window) for window in windows_of(config, len(body.layers))]

    def logits(self, config: Any) -> Call | None:
        """Return the map from the head's output to logits; None if the head's output is the logits."""
        return None

    def layer(self, layer: Any, attention_spec: int) -> Layer:
        """Return a decoder layer's modules."""
        norms = tuple(getattr(layer, name) for name in self.norm_names)
        return Layer(layer, self.groups(layer.self_attn, layer.mlp), norms, attention_spec)

    def groups(self, attention: Any, mlp: Any) -> tuple[Group, ...]:
        """Return the linears of a layer's attention and MLP, grouped by common input."""
        qkv, o, up, down = self.linear_names
        return Group(attention, qkv), Group(attention, o, writes=True), Group(mlp, up), Group(mlp, down, writes=True)

    def block(self, layer: Layer, norms: Norms) -> Block:
        """Return a layer's block."""
        return Block(self.attention(layer, norms), self.mlp(layer, norms), device_of(layer.norms[0]))

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention."""
        qkv, o = layer.groups[:2]
        return Attention(
            norm=norms.read(layer.norms[0], device_of(layer.norms[0])),
            qkv=side_by_side(qkv.modules),
            add=linear_onto(o.module),
            native=NativeAttention(into=qkv.modules, onto=o.module, before=norms.data(layer.norms[0])),
            attention_spec=layer.attention_spec,
        )

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP."""
        return gated_mlp(layer, norms, layer.module.mlp.act_fn)

    def embed(self, parts: Parts) -> Call:
        """Return the embedding, with the family's multiplier."""
        call, factor = embedding(parts.embedding), parts.embedded
        return call if factor == 1.0 else lambda ids: call(ids) * factor

    def head(self, parts: Parts) -> Call:
        """Return the head, including the family's map to logits."""
        return _then(logits_linear(parts.head.module), parts.logits)

    def head_over(self, parts: Parts, tokens: Sequence[int]) -> Call | None:
        """Return a head that computes only the logits of `tokens`; None if the head's weight cannot be read."""
        call = linear_over(parts.head.module, tokens)
        return None if call is None else _then(call, parts.logits)


def body_of(model: Any, name: str) -> Any:
    """Return the attribute `name` of a model: the model without its head.

    Raises `UnsupportedModelError` for a model without a head or layers.
    """
    if not hasattr(model, "lm_head"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; expected a causal language model"
        )
    body = getattr(model, name)
    if not len(body.layers):
        raise UnsupportedModelError(f"{type(model).__name__} has no layers")
    return body


def gated_mlp(layer: Layer, norms: Norms, act_fn: Any) -> GatedMlp:
    """Return a layer's MLP with `act_fn` as the activation of its gate."""
    mlp = dense_mlp(layer, norms, act_fn, gate=True)
    fused = gated(layer.groups[2].modules) if activation(act_fn)[1] == "silu" else None
    return GatedMlp(mlp.norm, mlp.into, mlp.act, mlp.down, mlp.native, fused)


def dense_mlp(layer: Layer, norms: Norms, act_fn: Any, *, gate: bool = False) -> DenseMlp:
    """Return a layer's MLP as if without a gate, with `act_fn` between its linears; `gate`: whether it has a gate."""
    into, down = layer.groups[2:]
    act, kind = activation(act_fn)
    return DenseMlp(
        norms.read(layer.norms[1], device_of(layer.norms[0])),
        side_by_side(into.modules),
        act,
        linear_onto(down.module),
        NativeMlp(into=into.modules, onto=down.module, before=norms.data(layer.norms[1]), activation=kind, gated=gate),
    )


_ACTIVATIONS: Mapping[type, Activation] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUActivation: "gelu",
    GELUTanh: "gelu_tanh",
    NewGELUActivation: "gelu_tanh",
}


def activation(module: Any) -> tuple[Call, Activation | None]:
    """Return an activation function, and its kind if native passes compute it; SiLU is computed in place."""
    kind = _ACTIVATIONS.get(type(module)) if is_plain(module) else None
    return (partial(F.silu, inplace=True) if kind == "silu" else module), kind


def _then(first: Call, second: Call | None) -> Call:
    return first if second is None else Mapped(first, second)
