"""A draft model: what its own cache holds, what it reads of a text, and how a profile names it."""

from __future__ import annotations

import pytest
import torch
from models import plain, run, small
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import selfspec
from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.controllers.batch_scheduler import BatchDraftScheduler
from selfspec.drafters import CrossVocabularyDrafter, ModelDrafter, PlainDrafter, make_drafter
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.profile.reading import parse_profile, profile_text, write_profile
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.costs import PassCosts
from selfspec.types.draft_path import DraftPath

VOCABULARY, PROMPT, NEW = 11, [1, 4, 2, 9, 3, 3, 3, 0, 5, 10, 8, 7], 24


@pytest.fixture(scope="module")
def target():
    return LeanRuntime(small(VOCABULARY, seed=2))


@pytest.fixture(scope="module")
def other():
    return LeanRuntime(small(VOCABULARY, 1, seed=3), kernel=fake)


@pytest.fixture
def read(monkeypatch):
    """How many tokens each pass of a drafter's model reads, as they come."""

    def watch(drafter):
        widths = []
        forward = drafter.runtime.forward

        def counted(tokens, *args, **options):
            widths.append(tokens.shape[1])
            return forward(tokens, *args, **options)

        monkeypatch.setattr(drafter.runtime, "forward", counted)
        return widths

    return watch


def test_after_a_draft_that_was_accepted_whole_its_last_token_is_read_too(target, read):
    """The model itself drafts: all is accepted, and the cache lacks the last token of each draft but not more."""
    drafter = ModelDrafter(target, target, FixedK(3))
    widths = read(drafter)
    tokens, outcomes = run(target, drafter, PROMPT, NEW)
    assert tokens == plain(target, PROMPT, NEW)
    assert all(outcome.accepted == len(outcome.draft) for outcome in outcomes)
    first, *rest = [len(outcome.draft) for outcome in outcomes]
    expected = [len(PROMPT) - 1, *[1] * first]
    for drafted in rest:
        expected += [2, *[1] * (drafted - 1)][:drafted]
    assert widths == expected


@pytest.mark.parametrize("path", [None, DraftPath.from_modes(["int8", "int8"], head="int8")])
def test_what_is_drafted_has_the_draft_models_own_probabilities(target, other, path):
    """Whatever was accepted before: as a pass of the draft model over the whole text gives them."""
    options = {} if path is None else {"path": path}
    drafter = ModelDrafter(target, other, FixedK(3), **options)
    lone, compiled = other.with_new_cache(), None if path is None else other.compile(path)
    for seed in range(3):
        tokens, outcomes = run(target, drafter, PROMPT, NEW, sampler=Sampler(temperature=1.0, seed=seed))
        at = 0
        for outcome in outcomes:
            text = [*PROMPT, *tokens[:at], *outcome.draft.tokens]
            with lone.session(len(text)):
                logits = lone.forward(torch.tensor([text]), 0, path=compiled).logits[0]
            first = len(PROMPT) + at - 1
            expected = logits[first : first + len(outcome.draft)].softmax(-1)
            if len(outcome.draft):
                torch.testing.assert_close(outcome.draft.q, expected, atol=1e-9, rtol=0)
            at += len(outcome.tokens)


def test_of_a_text_that_begins_as_the_last_only_the_rest_is_read(target, other, read):
    drafter = ModelDrafter(target, other, FixedK(2))
    widths = read(drafter)
    run(target, drafter, PROMPT, 1)
    assert widths == [len(PROMPT) - 1]
    more = [*PROMPT, *range(11)]
    run(target, drafter, more, 1)
    assert widths[1:] == [len(more) - len(PROMPT)]
    run(target, drafter, [2, *more[1:]], 1)
    assert widths[2:] == [len(more) - 1]


def test_a_larger_cache_is_filled_anew(target, other):
    """Also while the text before it is still under way."""
    drafter = ModelDrafter(target, other, FixedK(3))
    for prompt in (PROMPT, [*PROMPT, *[5, 1] * 30], PROMPT):
        assert run(target, drafter, prompt, NEW)[0] == plain(target, prompt, NEW)


def test_nothing_is_drafted_beyond_the_draft_models_context(target):
    model = small(VOCABULARY, 1, seed=3)
    model.config.max_position_embeddings = 20
    drafter = ModelDrafter(target, LeanRuntime(model), FixedK(3))
    tokens, outcomes = run(target, drafter, PROMPT, NEW)
    assert tokens == plain(target, PROMPT, NEW)
    at = len(PROMPT)
    for outcome in outcomes:
        assert at + len(outcome.draft) <= max(20, at)
        at += len(outcome.tokens)
    assert len(outcomes[1].draft) > 0
    assert len(outcomes[-2].draft) == 0
    long = [*PROMPT, *PROMPT]
    assert run(target, drafter, long, 5)[0] == plain(target, long, 5)


@pytest.mark.parametrize("context", [20, 64])
def test_sequences_that_decide_together_end_at_the_draft_models_context(context):
    target = LeanRuntime(small(VOCABULARY, seed=2), rows=2)
    model = small(VOCABULARY, 1, seed=3)
    model.config.max_position_embeddings = context
    drafter = ModelDrafter(target, LeanRuntime(model), FixedK(3))
    prompts, ends = (PROMPT, PROMPT[::-1]), []
    free = (0.0, 1.0, *[1.0 + n / 1e6 for n in range(1, 64)])
    drafter.load = BatchDraftScheduler(PassCosts(free, tuple(second / 10 for second in free)))
    seqs = [SequenceState(list(prompt), NEW, Sampler()) for prompt in prompts]
    with Engine(target, drafter) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            drafter.load.begin(len(engine.running))
            lengths = {seq: len(seq.tokens) for seq in engine.running}
            ends += [lengths[seq] + outcome.draft.depth for seq, outcome in engine.step() if outcome.draft.depth]
    assert [seq.tokens for seq in seqs] == [[*prompt, *plain(target, prompt, NEW)] for prompt in prompts]
    assert max(ends) == min(context, len(PROMPT) + NEW - 1)


def test_another_vocabulary_is_refused(target):
    with pytest.raises(SelfspecError, match="draft model: vocabulary size 7; expected 11"):
        ModelDrafter(target, LeanRuntime(small(7, 1)), FixedK(2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A draft model of the built-in model's tokens, in a folder."""
    folder = tmp_path_factory.mktemp("beside") / "tiny"
    small(4096, 1).float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(
        str(selfspec.load("builtin", profile="none").model.config._name_or_path)
    ).save_pretrained(folder)
    return folder


def test_a_profile_names_a_folder_beside_it(saved, llm):
    spec = ModelSpec(model="tiny", bits="int8", controller={"name": "fixed", "options": {"k": 2}}, candidates=2)
    path = saved.parent / "drafted.yaml"
    write_profile(Profile(model=llm.identity, draft=spec), path)
    drafted = selfspec.load("builtin", profile=path)
    assert drafted.profile.draft == spec
    assert drafted.profile.draft.summary == "drafts by the model tiny in int8"
    out = drafted.generate("def read(", max_new_tokens=12)
    assert out.text == llm.generate("def read(", max_new_tokens=12).text
    assert set(out.stats.sources) <= {"draft model"}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A draft model with a tokenizer of its own, in a folder."""
    folder = tmp_path_factory.mktemp("foreign") / "other"
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    own.train_from_iterator(builtin.prompts("calibration"), trainer)
    small(own.get_vocab_size(), 1).float().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(folder)
    return folder


def test_a_draft_model_of_another_tokenizer(foreign, llm, held_out):
    drafted = selfspec.load("builtin", profile="none", method=f"model:{foreign}")
    for text in held_out[:3]:
        out = drafted.generate(text, max_new_tokens=24)
        assert out.text == llm.generate(text, max_new_tokens=24).text
    drafter = make_drafter(llm.runtime, drafted.profile)
    assert isinstance(drafter, CrossVocabularyDrafter)
    seeded = {"temperature": 0.9, "seed": 4, "max_new_tokens": 24, "drafter": drafter}
    staged = selfspec.load("builtin", profile="none", method=f"staged:{foreign}").profile
    guessing = llm.generate("import os\nimport os\n", max_new_tokens=24, drafter=make_drafter(llm.runtime, staged))
    assert guessing.text == llm.generate("import os\nimport os\n", max_new_tokens=24).text
    plainly = llm.generate(held_out[0], **{**seeded, "drafter": PlainDrafter()})
    assert llm.generate(held_out[0], **seeded).text == plainly.text


def test_what_another_tokenizer_wants(foreign, llm):
    spec = ModelSpec(model=str(foreign))
    nameless = llm.identity.model_copy(update={"name": None})
    with pytest.raises(SelfspecError, match="expected `model.name` in the profile"):
        make_drafter(llm.runtime, Profile(model=nameless, draft=spec))
    elsewhere = llm.identity.model_copy(update={"name": "no-such/model"})
    with pytest.raises(SelfspecError, match="the tokenizer of no-such/model is needed"):
        make_drafter(llm.runtime, Profile(model=elsewhere, draft=spec))


def test_it_comes_back_from_a_file_as_it_was(llm):
    profile = Profile(model=llm.identity, draft=ModelSpec(model="someone/small", dtype="bfloat16", step=0.1))
    assert parse_profile(profile_text(profile), source="here") == profile
    with pytest.raises(SelfspecError, match="model"):
        parse_profile(profile_text(profile).replace("someone/small", '""'), source="here")


def test_a_draft_model_that_is_not_there_is_said(llm):
    profile = Profile(model=llm.identity, draft=ModelSpec(model="./no-such-folder"))
    with pytest.raises(SelfspecError, match="no-such-folder"):
        make_drafter(llm.runtime, profile)
