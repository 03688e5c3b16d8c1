from __future__ import annotations

import pytest
import torch
from models import CONFIGS, SIZES, plain, tiny
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
)

import selfspec
from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.models.families import FAMILIES
from selfspec.models.families.llama import Llama
from selfspec.models.layout import join_all_
from selfspec.models.skeleton import read_skeleton
from selfspec.runtime.forward import LeanRuntime

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}
PHIS = {name: value for name, value in LONGROPE.items() if name != "original_max_position_embeddings"}
KINDS = ["sliding_attention", "full_attention"] * 2
TWO = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {**LONGROPE, "short_factor": [1.0] * 128, "long_factor": [2.0] * 128},
}


class LlamaLikeConfig(LlamaConfig):
    model_type = "llama-like"


def test_a_family_of_a_known_skeleton_is_a_line_in_the_registry(monkeypatch):
    model = tiny(CONFIGS["llama"])
    like = LlamaForCausalLM(LlamaLikeConfig(**SIZES)).double().eval()
    like.load_state_dict(model.state_dict())
    refusal = r"LlamaForCausalLM \(model_type 'llama-like'\) is not supported; supported: .* llama, .*, gpt_oss$"
    with pytest.raises(UnsupportedModelError, match=refusal):
        read_skeleton(like)
    with pytest.raises(UnsupportedModelError, match=refusal):
        join_all_(like)
    monkeypatch.setitem(FAMILIES, "llama-like", Llama())
    assert plain(LeanRuntime(like), [3, 1, 4], 12) == plain(LeanRuntime(model), [3, 1, 4], 12)
    with pytest.raises(UnsupportedModelError, match="supported: .* llama, .*, llama-like$"):
        read_skeleton(torch.nn.Linear(2, 2))


def test_a_model_that_looks_ahead_is_refused():
    config = Gemma3TextConfig(**SIZES, head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModelError, match="Gemma3ForCausalLM with attention in both directions"):
        read_skeleton(AutoModelForCausalLM.from_config(config))


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
        (Phi3Config(**SIZES, rope_parameters=PHIS, original_max_position_embeddings=32), 32, "of 'longrope' rope"),
        (Gemma3TextConfig(**SIZES, rope_parameters=TWO, layer_types=KINDS), 32, "of 'longrope' rope"),
        (MistralConfig(**SIZES, sliding_window=48), 128, "the model's context"),
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24), 128, "the model's context"),
    ],
    ids=["llama", "dynamic", "longrope", "phi3", "gemma3", "mistral-window", "qwen2-window"],
)
def test_the_context_that_can_be_served(config, context, reason):
    skeleton = read_skeleton(AutoModelForCausalLM.from_config(config))
    assert skeleton.context == context
    assert reason in skeleton.context_reason


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_length_dependent_ropes_are_exact_up_to_their_limit_and_refused_beyond(rope):
    model = tiny(LlamaConfig(**SIZES, rope_parameters=rope), dtype=torch.float32)
    runtime = LeanRuntime(model)
    context = runtime.skeleton.context
    tokens = torch.randint(61, (1, context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(tokens).logits
    with runtime.session(context):
        ours = runtime.forward(tokens, 0).logits
    torch.testing.assert_close(ours / theirs.abs().max(), theirs / theirs.abs().max(), atol=1e-5, rtol=0)
    llm = selfspec.wrap(model, None, profile="none")
    with pytest.raises(SelfspecError, match=f"at most {context - 4} new tokens fit"):
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
