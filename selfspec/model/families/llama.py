"""The Llama skeleton, which Llama 2 and 3.x, Mistral and Qwen2 share.

RMSNorm before each sub-layer, separate projections (Qwen2's with biases), rope over whole heads, a gated MLP. Knows
nothing of caches, prompts and drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation

from selfspec.basics.errors import UnsupportedModelError
from selfspec.model.dispatch import device_of
from selfspec.model.families.base import Attention, Block, GatedMlp, Layer, Parts
from selfspec.model.linears import Call, Group, embedding, is_plain, linear, linear_onto, linear_over, side_by_side
from selfspec.model.norms import Norms


class Llama:
    """The `Family` of models with the module tree of `LlamaForCausalLM`."""

    def parts(self, model: Any) -> Parts:
        """Where a model keeps its modules."""
        name = type(model).__name__
        if not hasattr(model, "lm_head"):
            raise UnsupportedModelError(f"{name} has no language-model head; want a causal language model")
        body = model.model
        if not len(body.layers):
            raise UnsupportedModelError(f"{name} has no layers")
        first = body.layers[0]
        return Parts(
            embedding=body.embed_tokens,
            layers=tuple(self.layer(layer) for layer in body.layers),
            norm=body.norm,
            head=Group(model, ("lm_head",)),
            rotary=body.rotary_emb,
            head_dim=first.self_attn.head_dim,
            scaling=first.self_attn.scaling,
            eps=model.config.rms_norm_eps,
        )

    def layer(self, layer: Any) -> Layer:
        """Where one decoder layer keeps its modules."""
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        return Layer(layer, self.groups(layer.self_attn, layer.mlp), norms)

    def groups(self, attention: Any, mlp: Any) -> tuple[Group, ...]:
        """The linears of a layer's attention and MLP."""
        return (
            Group(attention, ("q_proj", "k_proj", "v_proj")),
            Group(attention, ("o_proj",), writes=True),
            Group(mlp, ("gate_proj", "up_proj")),
            Group(mlp, ("down_proj",), writes=True),
        )

    def block(self, layer: Layer, norms: Norms) -> Block:
        """How a layer computes."""
        qkv, o, gate_up, down = layer.groups
        before_attention, before_mlp = layer.norms
        device = device_of(before_attention)
        act = layer.module.mlp.act_fn
        silu = type(act) in (nn.SiLU, SiLUActivation) and is_plain(act)
        return Block(
            attention=Attention(
                norm=norms.read(before_attention, device),
                qkv=side_by_side(qkv.modules),
                add=linear_onto(o.module),
                plain=(qkv.modules, o.modules),
            ),
            mlp=GatedMlp(
                norm=norms.read(before_mlp, device),
                gate_up=side_by_side(gate_up.modules),
                act=partial(F.silu, inplace=True) if silu else act,
                down=linear_onto(down.module),
                plain=(gate_up.modules, down.modules) if silu else None,
            ),
            device=device,
        )

    def embed(self, parts: Parts) -> Call:
        """The embedding as it is."""
        return embedding(parts.embedding)

    def head(self, parts: Parts) -> Call:
        """The head as it is."""
        return linear(parts.head.module)

    def head_over(self, parts: Parts, tokens: Sequence[int]) -> Call | None:
        """The head's rows for `tokens`."""
        return linear_over(parts.head.module, tokens)
