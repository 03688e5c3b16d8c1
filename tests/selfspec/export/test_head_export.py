"""Trained heads as engines have them: written, read back as published heads are, and the same drafts."""

from __future__ import annotations

import json

import pytest
import torch
from families import FAMILY_CONFIGS
from heads import LLAMA3, bfloats, random_part
from models import small, tiny
from safetensors.torch import load_file

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.heads import make_part_file
from selfspec.draft_modules.module_files import PartFile
from selfspec.draft_modules.published_heads import read_published
from selfspec.draft_modules.registry import make_head
from selfspec.export.head_export import form_of, head_files
from selfspec.export.model_folders import save_head
from selfspec.runtime.forward import LeanRuntime

V, D, WIDE, LAYERS, HEAD = 24, 16, 40, 8, 8
SHAPE = {"hidden": D, "intermediate": WIDE, "heads": 2, "kv_heads": 1, "head_dim": HEAD, "eps": 1e-5, "theta": 5e5}


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(V, LAYERS, seed=2))


def layer(inputs, *norms):
    sizes = {
        "q_proj": (2 * HEAD, inputs),
        "k_proj": (HEAD, inputs),
        "v_proj": (HEAD, inputs),
        "o_proj": (D, 2 * HEAD),
        "gate_proj": (WIDE, D),
        "up_proj": (WIDE, D),
        "down_proj": (D, WIDE),
    }
    held = {f"layer.{name}.weight": bfloats(*size) for name, size in sizes.items()}
    return held | {f"layer.{name}.weight": 1 + bfloats(D).float() for name in ("post_attention_layernorm", *norms)}


def eagle(runtime, *, bias=False):
    tensors = layer(D) | {"layer.fc.weight": bfloats(D, 2 * D)}
    tensors |= {"layer.fc.bias": bfloats(D)} if bias else {}
    tensors["layer.given_norm.weight"] = runtime.model.model.norm.weight
    return make_part_file("eagle", {"shape": SHAPE, "layers": [LAYERS]}, tensors, None, runtime)


def eagle_3(runtime, words=(0, 3, 4, 9, 10, 17, 20, 23), layers=(2, 4, 5)):
    tensors = layer(2 * D, "embed_norm", "stream_norm", "norm") | {"layer.fuse.weight": bfloats(D, 3 * D)}
    tensors["head.weight"] = bfloats(len(words), D)
    return make_part_file("eagle", {"shape": SHAPE, "layers": list(layers)}, tensors, words, runtime)


def mlp(runtime, *, tied=False, scaled=False):
    """As published: with tables and heads of its own."""
    net = {"hidden": D, "places": 3, "inner": 12, "tied": tied, "tables": V, "scaled": scaled}
    places = 1 if tied else 3
    tensors = {f"proj.{k}.weight": bfloats(12, 12 if k else D) for k in range(2 if tied else 3)}
    for k in range(places):
        tensors |= {f"emb.{k}.weight": bfloats(V, 12), f"head.{k}.weight": bfloats(V, 12)}
        tensors |= {f"ln.{k}.weight": 1 + bfloats(12).float(), f"ln.{k}.bias": bfloats(12).float()}
    tensors["given_norm.weight"] = runtime.model.model.norm.weight
    return make_part_file("mlp", {"net": net, "eps": 1e-6, "layers": [LAYERS]}, tensors, None, runtime)


PARTS = {
    "eagle": (eagle, "eagle"),
    "eagle with a bias": (lambda runtime: eagle(runtime, bias=True), "eagle"),
    "eagle-3": (eagle_3, "eagle3"),
    "eagle-3 over all tokens": (lambda runtime: eagle_3(runtime, range(V)), "eagle3"),
    "medusa as trained": (lambda runtime: random_part(runtime, [1, 2, 5, 9, 11], "medusa"), "medusa"),
    "medusa over all tokens": (lambda runtime: random_part(runtime, range(V), "medusa"), "medusa"),
    "mlp as published": (mlp, "mlp_speculator"),
    "mlp, tied and scaled": (lambda runtime: mlp(runtime, tied=True, scaled=True), "mlp_speculator"),
}


def drafts(runtime, part, *, low=False):
    """Logits over all tokens after pairs, and after what the head goes on with."""
    head = make_head(runtime, part, low=low)
    head.reserve(32)
    torch.manual_seed(5)
    tokens, streams = torch.randint(0, V, (9,)), torch.randn(9, D * len(head.layers), dtype=torch.float64)
    logits, state = head.read(0, 0, tokens[:6], streams[:6])
    found = [head.to_full_vocabulary(logits)]
    for place in (1, 2):
        logits, state = head.draft_step(0, 6, place, int(tokens[5 + place]), state)
        found.append(head.to_full_vocabulary(logits))
    return torch.stack(found)


@pytest.mark.parametrize("name", PARTS)
def test_written_and_read_again_it_drafts_the_same(runtime, tmp_path, name):
    torch.manual_seed(0)
    make, form = PARTS[name]
    part = make(runtime)
    files = head_files(part, runtime)
    assert (files.form, form_of(part)) == (form, form)
    save_head(tmp_path / "head", dict(files.config), dict(files.tensors))
    again = read_published(tmp_path / "head", runtime)
    head, read = make_head(runtime, part), make_head(runtime, again)
    assert read.layers == head.layers
    assert read.words.tolist() == head.words.tolist()
    # the model's own head is written in 16 bits
    torch.testing.assert_close(drafts(runtime, again), drafts(runtime, part), atol=0.05, rtol=0.01)
    if "trained" not in name and "medusa" not in name:
        assert torch.equal(drafts(runtime, again), drafts(runtime, part))


def test_mlp_as_trained_reads_the_models_embeddings(runtime, tmp_path):
    """vLLM's has tables of its own: the map of the model's embeddings is worked out for every token."""
    part = random_part(runtime, range(V), "mlp")
    files = head_files(part, runtime)
    assert files.tensors["emb.1.weight"].shape == (V, D)
    assert files.config | {"torch_dtype": ""} == {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": V,
        "emb_dim": D,
        "inner_dim": D,
        "n_predict": 4,
        "n_candidates": 4,
        "top_k_tokens_per_head": [1, 1, 1, 1],
        "tie_weights": False,
        "scale_input": False,
        "torch_dtype": "",
    }
    save_head(tmp_path / "head", dict(files.config), dict(files.tensors))
    mine, again = drafts(runtime, part), drafts(runtime, read_published(tmp_path / "head", runtime))
    assert (mine.argmax(-1) == again.argmax(-1)).all()
    torch.testing.assert_close(again, mine, atol=0.2, rtol=0.02)
    few = head_files(random_part(runtime, range(16), "mlp"), runtime)
    assert few.lost == ("the head's vocabulary of 16 tokens: an MLPSpeculator drafts all of the model's tokens",)


def test_mlp_of_a_model_that_scales_its_embeddings():
    """Gemma and Granite multiply embeddings by a factor, and the head was trained on the products."""
    runtime = LeanRuntime(tiny(FAMILY_CONFIGS["granite"]))
    assert runtime.skeleton.parts.embedded != 1.0
    part = random_part(runtime, range(runtime.skeleton.identity.vocabulary), "mlp")
    factor, table = runtime.skeleton.parts.embedded, part.tensors["emb.1.weight"].float()
    expected = factor * runtime.model.get_input_embeddings().weight.detach().float() @ table.T
    torch.testing.assert_close(head_files(part, runtime).tensors["emb.1.weight"].float(), expected, atol=0, rtol=0.01)


def test_rope_is_told_as_it_was(runtime, tmp_path):
    torch.manual_seed(0)
    files = head_files(eagle_3(runtime), runtime)
    assert files.config["rope_theta"] == 5e5
    config = {**files.config, "rope_scaling": LLAMA3}
    save_head(tmp_path / "head", config, dict(files.tensors))
    part = read_published(tmp_path / "head", runtime)
    assert "layer.inv_freq" in part.tensors
    assert head_files(part, runtime).config["rope_scaling"] == LLAMA3
    older = PartFile(part.kind, {"shape": SHAPE, "layers": [2, 4, 5]}, part.tensors, part.model)
    with pytest.raises(SelfspecError, match="does not say; convert it again"):
        head_files(older, runtime)


def test_vllms_names(runtime):
    """As vllm/model_executor/models/medusa.py and llama_eagle3.py load them."""
    files = head_files(random_part(runtime, [1, 2, 5], "medusa"), runtime)
    assert {"blocks.3.layers.0.weight", "blocks.3.layers.0.bias", "lm_head.weight", "token_map"} <= set(files.tensors)
    assert files.config["truncated_vocab_size"] == 3
    assert files.config["original_lm_head"]
    assert files.config["medusa_fc_bias"]
    torch.manual_seed(0)
    three = head_files(eagle_3(runtime), runtime)
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "layers.0.hidden_norm.weight"} <= set(
        three.tensors
    )
    assert (three.tensors["d2t"] + torch.arange(8)).tolist() == [0, 3, 4, 9, 10, 17, 20, 23]
    assert three.tensors["t2d"].nonzero().flatten().tolist() == [0, 3, 4, 9, 10, 17, 20, 23]
    assert three.config["draft_vocab_size"] == 8


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("eagle", "an EAGLE head as selfspec train fits it"),
        ("hydra", "heads of kind 'hydra' are run by no engine"),
        ("mtp", "heads of kind 'mtp' are run by no engine"),
        ("chimera", "heads of kind 'chimera' are run by no engine"),
    ],
)
def test_what_no_engine_runs_is_refused_with_what_one_could(runtime, kind, said):
    with pytest.raises(SelfspecError, match=said) as refused:
        head_files(random_part(runtime, range(V), kind), runtime)
    assert "engines could run instead: a head by selfspec train medusa" in str(refused.value)


def test_another_models_head_is_refused(runtime):
    with pytest.raises(SelfspecError, match="of other weights|of another model"):
        head_files(random_part(LeanRuntime(small(V, LAYERS, seed=3)), range(V), "medusa"), runtime)


def test_files_say_what_they_are(runtime, tmp_path):
    files = head_files(random_part(runtime, range(V), "medusa"), runtime)
    save_head(tmp_path / "head", dict(files.config), dict(files.tensors))
    assert json.loads((tmp_path / "head/config.json").read_text())["model_type"] == "medusa"
    assert set(load_file(tmp_path / "head/model.safetensors")) == set(files.tensors)
