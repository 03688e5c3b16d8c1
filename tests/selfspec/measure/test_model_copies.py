"""Widening: the same logits from a larger model."""

from __future__ import annotations

import pytest
import torch
from families import FAMILY_CONFIGS
from models import CONFIGS, exact_norms, plain, tiny
from transformers import GPT2Config, GPT2LMHeadModel

from selfspec.basics.errors import SelfspecError
from selfspec.measure.model_copies import widen
from selfspec.runtime.forward import LeanRuntime

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


@pytest.mark.parametrize("factor", [1, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_stay(name, factor):
    model = tiny(CONFIGS[name])
    wide = exact_norms(widen(model, factor))
    with torch.no_grad():
        torch.testing.assert_close(wide(IDS).logits, exact_norms(model)(IDS).logits, atol=1e-10, rtol=1e-10)


def test_sizes_grow_and_what_is_added_is_at_work():
    """Every added unit that reads the stream has weights; only what would write to it has none."""
    model = tiny(CONFIGS["llama"])
    wide = widen(model, 4)
    old, new = model.config, wide.config
    assert (new.hidden_size, new.intermediate_size) == (4 * old.hidden_size, 4 * old.intermediate_size)
    assert (new.num_attention_heads, new.num_key_value_heads, new.head_dim) == (16, 8, 8)
    layer = wide.model.layers[1]
    assert layer.self_attn.q_proj.weight[32:].abs().min(dim=1).values.max() > 0
    assert layer.mlp.up_proj.weight[48:].count_nonzero(dim=1).min() > 100
    assert layer.self_attn.o_proj.weight.count_nonzero() == 32 * 32
    assert layer.mlp.down_proj.weight.count_nonzero() == 32 * 48
    # Only the small model's own weights decide: a random unit's do not.
    before = wide(IDS).logits
    with torch.no_grad():
        layer.mlp.up_proj.weight[48:] *= 5
        torch.testing.assert_close(wide(IDS).logits, before)
        layer.mlp.up_proj.weight[:48] *= 5
        assert not torch.allclose(wide(IDS).logits, before)


def test_the_runtime_serves_it_and_the_original_is_unchanged():
    model = tiny(CONFIGS["llama"])
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    text = plain(LeanRuntime(model), [3, 1, 4], 20)
    assert plain(LeanRuntime(widen(model, 2)), [3, 1, 4], 20) == text
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_a_seed_repeats():
    model = tiny(CONFIGS["llama"])
    a, b, c = (widen(model, 2, seed=seed).model.layers[0].mlp.up_proj.weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_what_cannot_be_widened_is_refused():
    with pytest.raises(SelfspecError, match="widening factor 0: expected at least 1"):
        widen(tiny(CONFIGS["llama"]), 0)
    with pytest.raises(
        SelfspecError, match="Qwen3ForCausalLM cannot be widened; expected a model of the Llama skeleton"
    ):
        widen(tiny(FAMILY_CONFIGS["qwen3"]), 2)
    small = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(SelfspecError, match="not supported"):
        widen(small, 2)
