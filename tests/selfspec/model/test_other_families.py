"""A family is a class and a line in the registry: what other skeletons have is said in the class, not in the runtime.

The families here are for these tests only, each as `transformers` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from lowering import as_rounded, random_path
from models import CONFIGS, SIZES, plain, run, tiny
from transformers import (
    CohereConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
)

from selfspec.basics.errors import UnsupportedModelError
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.facts.draft_path import DraftPath
from selfspec.facts.skip import SkipSet
from selfspec.model.dispatch import device_of
from selfspec.model.families import FAMILIES
from selfspec.model.families.base import Attention, Block, GatedMlp, Layer, Parts
from selfspec.model.families.llama import Llama
from selfspec.model.layout import lay_out_
from selfspec.model.linears import Group, linear, linear_onto, on_rows, side_by_side
from selfspec.model.low_precision import fake
from selfspec.runtime.forward import Runtime

HEADS, KV_HEADS, D = 4, 2, 8


class LlamaLikeConfig(LlamaConfig):
    model_type = "llama-like"


def test_a_family_of_a_known_skeleton_is_a_line_in_the_registry(monkeypatch, tmp_path):
    model = tiny(CONFIGS["llama"])
    like = LlamaForCausalLM(LlamaLikeConfig(**SIZES)).double().eval()
    like.load_state_dict(model.state_dict())
    refusal = r"LlamaForCausalLM \(model_type 'llama-like'\) is not supported; supported: .* llama, mistral, qwen2$"
    with pytest.raises(UnsupportedModelError, match=refusal):
        Runtime(like)
    with pytest.raises(UnsupportedModelError, match=refusal):
        lay_out_(like, "rows")
    monkeypatch.setitem(FAMILIES, "llama-like", Llama())
    assert plain(Runtime(like), [3, 1, 4], 12) == plain(Runtime(model), [3, 1, 4], 12)
    with pytest.raises(UnsupportedModelError, match="supported: .* llama, mistral, qwen2, llama-like$"):
        Runtime(torch.nn.Linear(2, 2))
    monkeypatch.undo()
    with pytest.raises(UnsupportedModelError, match=refusal):
        Runtime(like)


def of_the_stream(x, longer, out):
    """In place of a norm that is not there."""
    return x


def normed_onto(module, norm):
    """What `module` gives is normed before it is added to the stream."""
    call, after = linear(module), on_rows(norm)
    return lambda base, x: base.add_(after(call(x)))


def times(onto, factor):
    return lambda base, x: onto(base, x * factor)


class Olmo2(Llama):
    """Queries and keys are normed, and what a sub-layer gives; what it reads is not."""

    def layer(self, layer: Any) -> Layer:
        norms = (layer.post_attention_layernorm, layer.post_feedforward_layernorm)
        return Layer(layer, self.groups(layer.self_attn, layer.mlp), norms)

    def block(self, layer, norms):
        (q, k, v), (o,), gate_up, (down,) = (group.modules for group in layer.groups)
        attention = layer.module.self_attn
        q_norm, k_norm = on_rows(attention.q_norm), on_rows(attention.k_norm)

        def qkv(x, out):
            torch.cat([q_norm(q(x)), k_norm(k(x)), v(x)], dim=-1, out=out)

        mlp = GatedMlp(of_the_stream, side_by_side(gate_up), layer.module.mlp.act_fn, normed_onto(down, layer.norms[1]))
        return Block(Attention(of_the_stream, qkv, normed_onto(o, layer.norms[0])), mlp, device_of(q))


class Granite(Llama):
    """Multipliers of the embedding, of what a sub-layer adds and of the logits; attention's is its scaling."""

    embedding, residual, logits = 3.0, 0.5, 4.0

    def block(self, layer, norms):
        block = super().block(layer, norms)
        attention = replace(block.attention, add=times(block.attention.add, self.residual))
        return replace(block, attention=attention, mlp=replace(block.mlp, down=times(block.mlp.down, self.residual)))

    def embed(self, parts):
        embed = super().embed(parts)
        return lambda ids: embed(ids) * self.embedding

    def head(self, parts):
        head = super().head(parts)
        return lambda x: head(x) / self.logits

    def head_over(self, parts, tokens):
        head = super().head_over(parts, tokens)
        return head and (lambda x: head(x) / self.logits)


def reordered(parts: Parts, order: list[int]) -> Parts:
    """With rope's cosines and sines in another order of a head's dimensions, 1 and 0 for those that are not turned."""

    def rotary(x, positions):
        cos, sin = parts.rotary(x, positions)
        rest = cos.new_zeros((*cos.shape[:-1], D - cos.shape[-1]))
        return torch.cat((cos, rest + 1), -1)[..., order], torch.cat((sin, rest), -1)[..., order]

    return replace(parts, rotary=rotary)


def in_order(into, order):
    """Queries and keys in that order too."""

    def qkv(x, out):
        into(x, out)
        turned = out.view(len(out), -1, D)[:, : HEADS + KV_HEADS]
        turned.copy_(turned[..., order])

    return qkv


class Cohere(Llama):
    """Both sub-layers read the stream as it enters the layer; rope turns pairs of neighbours; logits are scaled."""

    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def parts(self, model):
        body = model.model
        attention = body.layers[0].self_attn
        layers = tuple(
            Layer(layer, self.groups(layer.self_attn, layer.mlp), (layer.input_layernorm,)) for layer in body.layers
        )
        parts = Parts(
            embedding=body.embed_tokens,
            layers=layers,
            norm=body.norm,
            head=Group(model, ("lm_head",)),
            rotary=body.rotary_emb,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            eps=model.config.layer_norm_eps,
        )
        return reordered(parts, self.order)

    def block(self, layer, norms):
        qkv, o, gate_up, down = layer.groups
        read = norms.read(layer.norms[0], device_of(o.module))

        def norm(x, longer, out):
            return out.copy_(read(x, longer, out))

        mlp = GatedMlp(norm, side_by_side(gate_up.modules), layer.module.mlp.act_fn, linear_onto(down.module))
        into = in_order(side_by_side(qkv.modules), self.order)
        return ParallelBlock(Attention(norm, into, linear_onto(o.module)), mlp, device_of(o.module))

    def head(self, parts):
        head = super().head(parts)
        return lambda x: head(x) * 0.0625


class ParallelBlock(Block):
    """The MLP reads what attention has read, which is still in the workspace."""

    def running(self, *, attention, mlp):
        if attention and mlp:
            return self.attention, replace(self.mlp, norm=lambda x, longer, out: out)
        return super().running(attention=attention, mlp=mlp)


class Phi3(Llama):
    """Fused projections, rope over half of a head."""

    order = (0, 1, 4, 5, 2, 3, 6, 7)

    def parts(self, model):
        return reordered(super().parts(model), self.order)

    def groups(self, attention, mlp):
        return (
            Group(attention, ("qkv_proj",)),
            Group(attention, ("o_proj",), writes=True),
            Group(mlp, ("gate_up_proj",)),
            Group(mlp, ("down_proj",), writes=True),
        )

    def block(self, layer, norms):
        qkv, o, gate_up, down = layer.groups
        first, second = (norms.read(norm, device_of(norm)) for norm in layer.norms)
        attention = Attention(first, in_order(side_by_side(qkv.modules), self.order), linear_onto(o.module))
        act = layer.module.mlp.activation_fn
        mlp = GatedMlp(second, side_by_side(gate_up.modules), act, linear_onto(down.module))
        return Block(attention, mlp, device_of(o.module))


@dataclass(frozen=True)
class Experts:
    """An MLP that is called as a whole."""

    norm: Any
    module: Any

    def run(self, work):
        work.stream.add_(on_rows(self.module)(self.norm(work.stream, work.longer, work.normed)))


class Mixtral(Llama):
    """Experts in place of an MLP."""

    def groups(self, attention, mlp):
        return super().groups(attention, mlp)[:2]

    def block(self, layer, norms):
        qkv, o = layer.groups
        device = device_of(layer.norms[0])
        first, second = (norms.read(norm, device) for norm in layer.norms)
        attention = Attention(first, side_by_side(qkv.modules), linear_onto(o.module))
        return Block(attention, Experts(second, layer.module.mlp), device)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MULTIPLIERS = {
    "embedding_multiplier": Granite.embedding,
    "residual_multiplier": Granite.residual,
    "logits_scaling": Granite.logits,
    "attention_multiplier": 0.2,
}
OTHERS = {
    "olmo2": (Olmo2(), Olmo2Config(**SIZES)),
    "granite": (Granite(), GraniteConfig(**SIZES, **MULTIPLIERS)),
    "cohere": (Cohere(), CohereConfig(**SIZES, tie_word_embeddings=False)),
    "phi3": (Phi3(), Phi3Config(**SIZES, rope_parameters={**ROPE, "partial_rotary_factor": 0.5})),
    "mixtral": (
        Mixtral(),
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"),
    ),
}


@pytest.fixture(params=OTHERS)
def other(request, monkeypatch):
    """A model of a family that is registered for one test."""
    family, config = OTHERS[request.param]
    assert config.model_type not in FAMILIES
    monkeypatch.setitem(FAMILIES, config.model_type, family)
    return tiny(config, dtype=torch.float32)


def without(model, skip):
    """The same model, whose skipped sub-layers give nothing."""
    for index in skip.attention:
        model.model.layers[index].self_attn.o_proj.weight.data.zero_()
    for index in skip.mlp:
        mlp = model.model.layers[index].mlp
        (mlp.experts.down_proj if hasattr(mlp, "experts") else mlp.down_proj.weight).data.zero_()
    return model


@pytest.mark.parametrize("skip", [SkipSet(), SkipSet((1, 3), (2, 3))], ids=str)
@torch.no_grad()
def test_another_skeleton_runs_in_the_same_loop(other, skip):
    tokens = torch.randint(other.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
    runtime = Runtime(other)
    with runtime.session(40):
        path = runtime.compile(DraftPath(skip))
        whole = runtime.forward(tokens, 0, path=path).logits
        single = [runtime.forward(tokens[:, i : i + 1], i, path=path).logits for i in range(40)]
    theirs = without(other, skip)(tokens, use_cache=False).logits
    for ours in (whole, torch.cat(single, 1)):
        torch.testing.assert_close(ours / theirs.abs().max(), theirs / theirs.abs().max(), atol=1e-5, rtol=0)


def test_another_skeleton_is_drafted_with_and_laid_out(other):
    other.double()
    lay_out_(other, "columns")
    runtime = Runtime(other)
    drafter = LayerSkipDrafter(runtime, SkipSet((1,), (2,)), FixedK(3))
    tokens, _ = run(runtime, drafter, [3, 1, 4], 16)
    assert tokens == plain(runtime, [3, 1, 4], 16)
    layer = other.model.layers[1]
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"module 'model.layers.1' has a hook"):
        Runtime(other)


@pytest.mark.parametrize("seed", range(4))
def test_another_skeleton_in_few_bits_is_the_model_with_rounded_weights(other, seed):
    """Of what is called as a whole, such as experts, nothing is."""
    path = random_path(seed, 4, words=other.config.vocab_size)
    tokens = torch.randint(other.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(1))
    runtime = Runtime(other.double(), kernel=fake)
    way = runtime.compile(path)
    theirs = Runtime(as_rounded(other, path, way.in_full))
    assert {name.split()[0] for name in way.in_full} <= {"mlp"}
    with runtime.session(12), theirs.session(12):
        expected = theirs.forward(tokens, 0, path=theirs.compile(DraftPath(path.skip, path.vocabulary))).logits
        whole = runtime.forward(tokens, 0, path=way).logits
        single = [runtime.forward(tokens[:, i : i + 1], i, path=way).logits for i in range(12)]
    for ours in (whole, torch.cat(single, 1)):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)
