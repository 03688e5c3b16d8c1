"""Fine-tuning for early exits: the recipe's numbers, and a model that drafts by its own early layers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from models import CONFIGS, tiny
from transformers import AutoModelForCausalLM

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.drafters import PlainDrafter
from selfspec.runtime.forward import LeanRuntime
from selfspec.training.fit import fit
from selfspec.training.layerskip import LayerSkipLearner, dropped, early_exit, perplexity, weights
from selfspec.training.options import TrainOptions
from selfspec.training.state import folder_of
from selfspec.training.texts import TextStore, TrainingText
from selfspec.types.draft_path import DraftPath

FEW = {"max_new_tokens": 24, "batch_size": 8, "texts": 34, "steps": 24, "layers": 4}


def test_layers_are_dropped_the_likelier_the_later():
    chances = dropped(5, 0.2)
    assert chances[0] == 0
    assert chances[-1] == pytest.approx(0.2)
    assert chances[2] == pytest.approx(0.2 * (2 ** (2 / 4) - 1))
    assert dropped(1) == [0.0]


def test_what_exits_count_for():
    """By hand: of 4 layers, e = 0, .2, .6 and 3 + .2 (0 + 1 + 2) = 3.6; the one that drafts take 3 more."""
    raw = [0.0, 0.2 + 3, 0.6, 3.6]
    assert weights(4, [0, 1, 2, 3], 1) == pytest.approx([of / sum(raw) for of in raw])
    assert weights(4, [1, 3], 1) == pytest.approx([3.2 / 6.8, 3.6 / 6.8])
    assert weights(4, [3], 3) == [1.0]


@pytest.fixture
def runtime():
    return LeanRuntime(tiny(CONFIGS["llama"]))


IDS = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])


def test_streams_are_the_models_own(runtime):
    learner = LayerSkipLearner(runtime, layers=2, loss="forward-kl", seed=0)
    streams = learner._streams(IDS)
    assert len(streams) == runtime.layers
    torch.testing.assert_close(learner._logits(streams[-1]), runtime.model(IDS).logits.float())
    with runtime.session(len(IDS[0])):
        path = runtime.compile(early_exit(runtime.layers, 2, "full"))
        early = runtime.forward(IDS[:1], 0, path=path, logits="all").logits
    torch.testing.assert_close(learner._logits(streams[1])[:1], early.float())


def test_a_text_that_goes_around_a_layer_has_what_left_the_one_before(runtime):
    learner = LayerSkipLearner(runtime, layers=2, loss="forward-kl", seed=0)
    whole = learner._streams(IDS)
    around = learner._streams(IDS, [0.0, 1.0, 0.0, 0.0])
    assert torch.equal(around[0], whole[0])
    assert torch.equal(around[1], whole[0])
    assert not torch.equal(around[2], whole[2])
    torch.manual_seed(1)
    some = learner._streams(IDS, [0.0, 0.5, 0.0, 0.0])[1]
    assert {torch.equal(some[i], whole[0][i]) for i in range(2)} == {True, False}  # each text by its own


def test_the_loss_is_of_the_last_exit_the_drafts_and_those_by_turns(runtime):
    """At the beginning the last layer's is nothing: the distributions are the model's own."""
    learner = LayerSkipLearner(runtime, layers=runtime.layers, loss="forward-kl", seed=0)
    learner._chances = [0.0] * runtime.layers
    windows = [TrainingText(ids, torch.zeros(0), 0) for ids in IDS]
    learner.steps = runtime.layers - 1  # whose turn it is: none but the last
    assert learner.loss(windows).item() == pytest.approx(0, abs=1e-5)
    learner.exit = 1
    learner.steps = runtime.layers - 1
    early = learner._logits(learner._streams(IDS)[0]).log_softmax(-1)
    log_p = runtime.model(IDS).logits.float().log_softmax(-1)
    share = weights(runtime.layers, [0, runtime.layers - 1], 0)[0]
    expected = share * (log_p.exp() * (log_p - early)).sum(-1).mean().item()
    assert learner.loss(windows).item() == pytest.approx(expected, rel=1e-4)


def test_perplexity_of_answers():
    model = tiny(CONFIGS["llama"])
    text = TrainingText(torch.tensor([3, 1, 4, 1, 5]), torch.zeros(0), 2)
    log_p = model(text.tokens[None]).logits[0].float().log_softmax(-1)
    expected = math.exp(-sum(log_p[i - 1, int(text.tokens[i])].item() for i in (2, 3, 4)) / 3)
    assert perplexity(model, [text]) == pytest.approx(expected)


def test_more_layers_than_there_are(runtime):
    with pytest.raises(SelfspecError, match="layers 9: the model has 4, so 1 to 4"):
        LayerSkipLearner(runtime, layers=9, loss="forward-kl", seed=0)


@pytest.fixture(scope="module")
def fitted(llm, held_out, tmp_path_factory):
    options = TrainOptions(**FEW)
    return fit(llm, part="layerskip", out=tmp_path_factory.mktemp("parts"), prompts=held_out, options=options)


@pytest.mark.long("training")
def test_it_is_another_model_and_says_so(llm, fitted):
    assert fitted.changed
    before, after = fitted.record["perplexity"]
    assert 1 < before != after > 1
    told = json.loads((fitted.part.parent / "layerskip.json").read_text())
    assert told["perplexity"] == [before, after]
    assert told["exit"] == 4
    saved = AutoModelForCausalLM.from_pretrained(fitted.part)
    assert not torch.equal(saved.model.layers[0].mlp.up_proj.weight, llm.model.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(saved.model.embed_tokens.weight, llm.model.model.embed_tokens.weight)


@pytest.mark.long("training")
def test_it_drafts_by_its_early_layers_and_its_text_is_its_own(fitted, held_out):
    drafted = selfspec.load(str(fitted.part), profile=fitted.profiles[0])
    skipped = tuple(range(4, 16))
    assert drafted.profile.path.skip.attention == drafted.profile.path.skip.mlp == skipped
    for prompt in held_out[:3]:
        plain = drafted.generate(prompt, max_new_tokens=32, drafter=PlainDrafter())
        assert drafted.generate(prompt, max_new_tokens=32).tokens == plain.tokens


@pytest.mark.long("training")
def test_it_is_no_profile_of_the_model_it_began_as(fitted):
    with pytest.warns(UserWarning, match="made for other weights"):
        selfspec.load("builtin", profile=fitted.profiles[0])


@pytest.mark.long("training")
def test_its_early_layers_have_learnt_to_draft(llm, held_out, fitted):
    learner = LayerSkipLearner(llm.runtime, layers=4, loss="forward-kl", seed=0)
    made = TextStore(folder_of(llm, held_out, False, TrainOptions(**FEW)))
    texts = [made.read(number) for number in made.numbers(held_out=False)]
    before = learner.acceptance(texts)
    learner.student.load_state_dict(AutoModelForCausalLM.from_pretrained(fitted.part).state_dict())
    after = learner.acceptance(texts)
    assert after[0] > before[0] + 0.03


def test_an_early_exit():
    path = early_exit(3, 1, "int8")
    assert path == DraftPath.from_modes(["int8", "skip", "skip", "int8", "skip", "skip"], head="int8")
