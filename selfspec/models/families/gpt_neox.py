"""GPT-NeoX (Pythia): parallel sub-layers with a LayerNorm each, and a fused linear with q, k, v interleaved by head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from selfspec.models.dispatch import device_of
from selfspec.models.families.base import Attention, AttentionSpec, Block, Layer, Mlp, NativeAttention, Parts, Rope
from selfspec.models.families.cohere2 import parallel
from selfspec.models.families.llama import Llama, body_of, dense_mlp
from selfspec.models.linears import Group, Into, linear, linear_onto
from selfspec.models.norms import Norms


class GptNeoX(Llama):
    """The `Family` of models with the module tree of `GPTNeoXForCausalLM`."""

    linear_names = (("query_key_value",), ("dense",), ("dense_h_to_4h",), ("dense_4h_to_h",))

    def parts(self, model: Any) -> Parts:
        """Return the model's modules. Raises `UnsupportedModelError` for a model without a head or layers."""
        body = body_of(model, "gpt_neox")
        attention = body.layers[0].attention
        return Parts(
            embedding=body.embed_in,
            layers=tuple(replace(self.layer(layer, 0), rotary=body.rotary_emb) for layer in body.layers),
            norm=body.final_layer_norm,
            head=Group(model, ("lm_head",)),
            attention_specs=(AttentionSpec(Rope(body.rotary_emb)),),
            head_dim=attention.head_size,
            scaling=attention.scaling,
            eps=body.final_layer_norm.eps,
        )

    def layer(self, layer: Any, attention_spec: int) -> Layer:
        """Return a layer's modules."""
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        return Layer(layer, self.groups(layer.attention, layer.mlp), norms, attention_spec, ("attention", "mlp"))

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention, which reorders the fused linear's output to queries, keys and values."""
        qkv, o = layer.groups[:2]
        norm = norms.read(layer.norms[0], device_of(layer.norms[0]))
        native = NativeAttention(into=qkv.modules, onto=o.module, before=norms.data(layer.norms[0]), by_head=True)
        return Attention(norm, _apart(qkv.module, layer.module.attention.head_size), linear_onto(o.module), native)

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP, without a gate."""
        return dense_mlp(layer, norms, layer.module.mlp.act)

    def block(self, layer: Layer, norms: Norms) -> Block:
        """Return a layer's block, parallel or sequential by its `use_parallel_residual`."""
        block = super().block(layer, norms)
        return parallel(block) if layer.module.use_parallel_residual else block


def _apart(module: Any, d: int) -> Into:
    """Return a fused linear whose output, (q, k, v) for each head, is reordered to queries, keys and values."""
    call = linear(module)

    def qkv(x: Tensor, out: Tensor) -> None:
        by_head = call(x).view(len(x), -1, 3, d)
        out.view(len(x), 3, -1, d).copy_(by_head.transpose(1, 2))

    return qkv
