"""Draft models of the sub-layers that a path keeps: they draft as the path does on keys of its own; what to expect."""

from __future__ import annotations

import pytest
import torch
from models import CONFIGS, small, tiny
from pruned import pruned
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText
from selfspec.search.trace import walk
from transformers import AutoModelForCausalLM

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.export.expected import check_tokens, expected_by_rehearsal, expected_from_profile
from selfspec.export.exporter import ExportPlan, ExportResult, with_fixed_length
from selfspec.export.weights import model_of, path_weights, save, weights_of
from selfspec.llm.llm import wrap
from selfspec.profile.draft_spec import LayerSkipSpec, LookupSpec, ProposerSpec, Skip
from selfspec.profile.schema import Prediction, Profile
from selfspec.types.draft_path import FULL, DraftPath

PATH = DraftPath.skipping(attention=[0, 2, 3], mlp=[1, 2])
TOKENS = torch.tensor([[1, 4, 2, 9, 3, 7, 5, 5]])


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2", "mistral"])
def test_layers_that_are_kept_give_what_the_path_gives(name):
    """Layer 2 is left out; of 0, 1 and 3 a half is, whose last matrix is zero."""
    model = tiny(CONFIGS[name])
    if name == "llama-biases":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.bias.zero_()
                layer.mlp.down_proj.bias.zero_()
    weights = path_weights(weights_of(model), PATH)
    assert weights.layers == (0, 1, 3)
    assert weights.zeroed == {
        "model.layers.0.self_attn.o_proj",
        "model.layers.2.self_attn.o_proj",
        "model.layers.1.mlp.down_proj",
    }
    with torch.no_grad():
        found, wanted = model_of(weights)(TOKENS).logits, pruned(model, PATH.skip)(TOKENS).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert model.config.num_hidden_layers == 4


def test_biases_of_what_is_bypassed_are_gone_too():
    model = tiny(CONFIGS["llama-biases"])
    weights = path_weights(weights_of(model), PATH)
    assert not weights.tensors["model.layers.0.self_attn.o_proj.bias"].any()
    assert weights.tensors["model.layers.1.self_attn.o_proj.bias"].any()


def test_a_folder_loads_as_the_model(tmp_path):
    model = tiny(CONFIGS["llama-mqa-tied"], dtype=torch.float32)
    save(tmp_path / "draft", path_weights(weights_of(model), PATH), None, model.generation_config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert (again.config.num_hidden_layers, again.dtype) == (3, torch.float32)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model_of(path_weights(weights_of(model), PATH))(TOKENS).logits)


def test_nothing_left_is_refused():
    model = tiny(CONFIGS["llama"])
    with pytest.raises(SelfspecError, match="skips every layer"):
        path_weights(weights_of(model), DraftPath.skipping(range(4), range(4)))


def text_of(model, new=24):
    with torch.no_grad():
        ids = model.generate(TOKENS, max_new_tokens=new, do_sample=False, eos_token_id=-1)[0].tolist()
    return TargetText(tuple(ids), TOKENS.shape[1], new)


def test_replayed_it_drafts_what_the_path_drafts_on_its_own_keys():
    model = small(11, 4, seed=2)
    text, path = text_of(model), DraftPath.skipping(attention=[1, 2], mlp=[2])
    with Replay(model, [text], depth=4, candidates=1, own_keys=True) as replay:
        along = replay.trace(path, [FixedK(4)])
    with Replay(
        model_of(path_weights(weights_of(model), path)), [text], depth=4, candidates=1, own_keys=True
    ) as replay:
        apart = replay.trace(FULL, [FixedK(4)])
    assert [of.drafted for of in apart] == [of.drafted for of in along]
    assert [of.runs for of in apart] == [of.runs for of in along]


@pytest.fixture(scope="module")
def tiny_llm():
    return wrap(small(11, 4, seed=2), None, profile="none", name="tiny")


def profile_of(llm, draft, **more):
    return Profile(model=llm.identity.model_copy(update={"fingerprint": None}), draft=draft, **more)


def offer(**more):
    return ExportPlan("drafts", lambda folder, tokens: ExportResult(()), **more)


def test_what_is_expected_is_what_replay_counts(tiny_llm):
    path = DraftPath.skipping(attention=[1], mlp=[1])
    profile = profile_of(tiny_llm, LayerSkipSpec(skip=Skip(attention=[1], mlp=[1])))
    found = expected_by_rehearsal(tiny_llm, profile, offer(path=path), [TOKENS[0].tolist()], new=24, tokens=3)
    with Replay(tiny_llm.model, [text_of(tiny_llm.model)], depth=3, candidates=1, own_keys=True) as replay:
        stats = walk(replay.trace(path, [FixedK(3)]), FixedK(3))[0].stats
    assert (found.tokens, found.acceptance) == (3, round(stats.acceptance_rate, 4))
    assert found.per_pass == round(stats.tokens_per_round, 3)
    assert "replayed here along the path, with a separate KV cache: 1 prompts, 24 greedy tokens" in found.summary
    itself = expected_by_rehearsal(
        tiny_llm, profile, offer(path=path, draft=lambda: tiny_llm.model), [TOKENS[0].tolist()], new=24, tokens=3
    )
    assert itself.acceptance == 1  # the model itself drafts
    assert "replayed here by a model with the written weights" in itself.source


def test_the_best_number_of_tokens_brings_most_in_a_plain_steps_time(tiny_llm):
    """A draft that is always right, and costs nothing, goes as far as is considered."""
    cheap = profile_of(tiny_llm, LookupSpec())
    assert expected_by_rehearsal(tiny_llm, cheap, offer(draft=lambda: tiny_llm.model), [[1, 2]], new=110).tokens == 12
    assert (
        expected_by_rehearsal(tiny_llm, cheap, offer(draft=lambda: tiny_llm.model, most=4), [[1, 2]], new=30).tokens
        == 4
    )


def test_guesses_are_decoded_with(tiny_llm):
    found = expected_by_rehearsal(tiny_llm, profile_of(tiny_llm, LookupSpec()), offer(), [[1, 2, 1, 2, 1, 2]], new=24)
    assert "decoded here with the profile's drafter" in found.source
    assert 1 <= found.per_pass <= 1 + found.tokens


def test_by_the_profiles_word(tiny_llm):
    skip = LayerSkipSpec(skip=Skip(attention=[1], mlp=[1]), candidates=3)
    path = DraftPath.skipping([1], [1])
    silent = expected_from_profile(profile_of(tiny_llm, skip), offer(path=path))
    assert (silent.tokens, silent.acceptance, silent.per_pass) == (3, None, None)
    assert "acceptance is unknown" in silent.summary
    told = Prediction(speedup=1.5, tokens_per_second=9, acceptance_rate=0.75, tokens_per_round=2.5, draft_cost=0.2)
    profile = profile_of(tiny_llm, skip, predicted=told)
    found = expected_from_profile(profile, offer(path=path), tokens=2)
    # 1.5 of 2 drafted tokens are right: p + p^2 = 1.5
    p = (-1 + 7**0.5) / 2
    assert found.acceptance == pytest.approx((p + p * p) / 2, abs=1e-3)
    assert found.per_pass == pytest.approx(2.5, abs=1e-2)
    assert "search, which includes lookup tokens and candidates, on the model's KV cache" in found.source
    itself = expected_from_profile(profile, offer(itself=True))
    assert (itself.tokens, itself.acceptance, itself.per_pass) == (None, 0.75, 2.5)
    assert itself.summary.startswith("drafts ended by a controller, of which 75.0% accepted")


def test_engines_draft_chains_of_one_length(tiny_llm):
    spec = LayerSkipSpec(skip=Skip(attention=[1]), candidates=3, proposers=[ProposerSpec()], vocabulary=[1, 2])
    found = with_fixed_length(profile_of(tiny_llm, spec), 4).draft
    assert (found.candidates, found.proposers, found.vocabulary) == (1, None, None)
    assert (found.controller.name, found.controller.options) == ("fixed", {"k": 4})
    for kind in ("store", "answers"):  # no engine has them, and answers would be added to the user's
        other = LookupSpec(proposers=[ProposerSpec(kind=kind, path="x.store")])
        assert [of.kind for of in with_fixed_length(profile_of(tiny_llm, other), 4).draft.proposers] == ["lookup"]


def test_a_head_drafts_so_many_at_most():
    check_tokens(4, 4)
    with pytest.raises(SelfspecError, match="--tokens 5: this head drafts 4 tokens at most"):
        check_tokens(5, 4)
