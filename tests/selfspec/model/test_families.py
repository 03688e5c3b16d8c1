from __future__ import annotations

import pytest
import torch
from models import CONFIGS, SIZES, tiny
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

import selfspec
from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.model.skeleton import read_skeleton
from selfspec.runtime.forward import Runtime

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "config", [Qwen3Config(**SIZES, head_dim=8), GemmaConfig(**SIZES, head_dim=8)], ids=lambda c: c.model_type
)
def test_other_families_are_refused_by_name(config):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=f"'{config.model_type}'.* is not supported; supported: .*llama"):
        read_skeleton(model)


def test_what_is_no_language_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no language-model head"):
        read_skeleton(AutoModel.from_config(CONFIGS["llama"]))
    with pytest.raises(UnsupportedModelError, match=r"Linear \(model_type None\) is not supported; supported: .*llama"):
        read_skeleton(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("place", ["", "model", "model.layers.1", "model.layers.1.self_attn", "model.layers.2.mlp"])
def test_a_hook_that_would_be_ignored_is_refused(place):
    model = tiny(CONFIGS["llama"])
    handle = model.get_submodule(place).register_forward_hook(lambda module, args, out: out)
    with pytest.raises(UnsupportedModelError, match="which would be ignored"):
        read_skeleton(model)
    handle.remove()
    read_skeleton(model)


def test_an_unknown_rope_is_refused():
    model = tiny(CONFIGS["llama"])
    model.config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModelError, match="rope type 'spiral' is not supported; supported: default, linear"):
        read_skeleton(model)


@pytest.mark.parametrize(
    ("config", "context", "reason"),
    [
        (CONFIGS["llama"], 128, "the model's context"),
        (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), 128, "the model's context"),
        (LlamaConfig(**SIZES, rope_parameters=LONGROPE), 32, "original length of 'longrope' rope"),
        (MistralConfig(**SIZES, sliding_window=48), 48, "sliding window"),
        (MistralConfig(**SIZES, sliding_window=None), 128, "the model's context"),
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=2), 24, "sliding window"),
        (Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=24), 128, "the model's context"),
    ],
    ids=["llama", "dynamic", "longrope", "mistral-window", "mistral", "qwen2-window", "qwen2"],
)
def test_the_context_that_can_be_served(config, context, reason):
    skeleton = read_skeleton(AutoModelForCausalLM.from_config(config))
    assert skeleton.context == context
    assert reason in skeleton.limit


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_length_dependent_ropes_are_exact_up_to_their_limit_and_refused_beyond(rope):
    model = tiny(LlamaConfig(**SIZES, rope_parameters=rope), dtype=torch.float32)
    runtime = Runtime(model)
    context = runtime.skeleton.context
    tokens = torch.randint(61, (1, context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(tokens).logits
    with runtime.session(context):
        ours = runtime.forward(tokens, 0).logits
    torch.testing.assert_close(ours / theirs.abs().max(), theirs / theirs.abs().max(), atol=1e-5, rtol=0)
    llm = selfspec.wrap(model, None, profile="none")
    with pytest.raises(SelfspecError, match=f"at most {context - 5} new tokens fit"):
        llm.generate([1, 2, 3, 4, 5], max_new_tokens=context)


def test_the_fingerprint_knows_the_weights_in_any_wider_dtype():
    model = tiny(CONFIGS["llama"]).to(torch.bfloat16)
    mine = read_skeleton(model).identity.fingerprint
    assert (
        mine == read_skeleton(model.float()).identity.fingerprint == read_skeleton(model.double()).identity.fingerprint
    )
    assert mine != read_skeleton(tiny(CONFIGS["llama"], seed=1)).identity.fingerprint


def test_end_tokens_come_from_the_generation_config():
    model = tiny(CONFIGS["llama"])
    assert read_skeleton(model).ends == frozenset()
    model.generation_config.eos_token_id = [3, 4]
    assert read_skeleton(model).ends == {3, 4}
    model.generation_config.eos_token_id = 5
    assert read_skeleton(model).ends == {5}
