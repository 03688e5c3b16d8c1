"""A draft model of another vocabulary: what it drafts, what it reads, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from models import plain, run, run_drafting, small
from toys import Doubled, Renamed

from selfspec.controllers import FixedK
from selfspec.controllers.batch_scheduler import BatchDraftScheduler
from selfspec.drafters import CrossVocabularyDrafter, ModelDrafter
from selfspec.engine.engine import Engine, decode
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.costs import PassCosts

VOCABULARY = 11
PROMPTS = [[1, 4, 2, 9], [3, 3, 3, 0, 5, 10, 8, 1, 1, 2, 9, 9], [6]]
ORDER = [7, 2, 0, 9, 4, 10, 1, 3, 8, 6, 5]


@pytest.fixture(scope="module")
def target():
    return LeanRuntime(small(VOCABULARY, 3, seed=4), rows=3)


def renamed(model, order):
    """The same model with token i called order[i]."""
    with torch.no_grad():
        for table in (model.model.embed_tokens.weight, model.lm_head.weight):
            table[torch.tensor(order)] = table.clone()
    return model


@pytest.mark.parametrize("sampler", [{}, {"temperature": 1.1, "seed": 5}], ids=["greedy", "match"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_other_names_for_the_same_tokens_change_nothing(target, prompt, sampler):
    """Its drafts are those of the same draft model by its own names."""
    same = ModelDrafter(target, LeanRuntime(small(VOCABULARY, 2, seed=3)), FixedK(3))
    other = LeanRuntime(renamed(small(VOCABULARY, 2, seed=3), ORDER))
    translated = CrossVocabularyDrafter(target, other, Renamed(ORDER), FixedK(3))
    texts = [run(target, drafter, prompt, 24, sampler=Sampler(**sampler)) for drafter in (same, translated)]
    assert texts[0][0] == texts[1][0]
    drafts = [[outcome.draft.tokens for outcome in outcomes] for _, outcomes in texts]
    assert drafts[0] == drafts[1]


def test_a_model_that_is_the_target_by_other_names_is_always_right(target):
    other = LeanRuntime(renamed(small(VOCABULARY, 3, seed=4), ORDER))
    drafter = CrossVocabularyDrafter(target, other, Renamed(ORDER), FixedK(4))
    tokens, outcomes = run_drafting(target, drafter, PROMPTS[0], 25)
    assert tokens == plain(target, PROMPTS[0], 25)
    assert all(outcome.accepted == len(outcome.draft) for outcome in outcomes)
    assert len(outcomes) == 5


def test_only_shared_tokens_are_drafted(target):
    words = Renamed(ORDER, shared=(0, 3, 4, 7))
    drafter = CrossVocabularyDrafter(target, LeanRuntime(small(VOCABULARY, 2, seed=3)), words, FixedK(4), candidates=9)
    assert drafter.candidates == 4
    tokens, outcomes = run(target, drafter, PROMPTS[0], 24)
    assert tokens == plain(target, PROMPTS[0], 24)
    drafted = {token for outcome in outcomes for token in outcome.draft.tokens}
    assert drafted <= {0, 3, 4, 7}
    assert drafted


def test_q_is_the_draft_models_own_of_the_shared_tokens(target):
    words, own = Renamed(ORDER, shared=(0, 3, 4, 7)), small(VOCABULARY, 2, seed=3)
    drafter = CrossVocabularyDrafter(target, LeanRuntime(own), words, FixedK(1))
    seq = SequenceState(list(PROMPTS[0]), 5, Sampler(temperature=1.0, seed=3, tied=False))
    for outcome in decode(target, drafter, seq):
        before = seq.tokens[: -len(outcome.tokens)]
        if not len(outcome.draft):
            continue
        with torch.no_grad():
            logits = own(torch.tensor([words.read(before)])).logits[0, -1, words.theirs]
        assert outcome.draft.q is not None
        torch.testing.assert_close(outcome.draft.q[0, words.ours], logits.softmax(-1), rtol=1e-6, atol=1e-9)
        assert float(outcome.draft.q[0].sum()) == pytest.approx(1)


def test_guesses_spare_passes_and_change_no_draft(target, monkeypatch):
    prompt, passes = [3, 9, 3, 9, 3, 9, 3, 9], []
    for ahead in (None, ProposerChain([Lookup()], (1.0,) * 6)):
        own, count = LeanRuntime(renamed(small(VOCABULARY, 3, seed=4), ORDER)), []  # whose text comes to loop
        drafter = CrossVocabularyDrafter(target, own, Renamed(ORDER), FixedK(5), proposer_chain=ahead)
        forward = drafter.runtime.forward
        monkeypatch.setattr(drafter.runtime, "forward", lambda *a, **k: (count.append(1), forward(*a, **k))[1])
        tokens, outcomes = run(target, drafter, prompt, 40)
        assert tokens == plain(target, prompt, 40)
        drafts = [outcome.draft.tokens for outcome in outcomes if set(outcome.draft.sources) != {"lookup"}]
        passes.append((len(count) / sum(map(len, drafts)), {source for o in outcomes for source in o.draft.sources}))
    assert passes[1][0] < passes[0][0]
    assert "lookup" in passes[1][1]


def test_a_text_of_more_tokens_there_than_here(target):
    """Each token is two for the draft model: texts outgrow the cache that is enough for the target's."""
    drafter = CrossVocabularyDrafter(
        target, LeanRuntime(small(2 * VOCABULARY, 2, seed=3)), Doubled(VOCABULARY), FixedK(2)
    )
    for prompt in PROMPTS:
        assert run(target, drafter, prompt, 40)[0] == plain(target, prompt, 40)
    assert drafter.runtime.cache.slots >= 2 * (len(PROMPTS[1]) + 40)


def test_nothing_is_drafted_beyond_its_context_or_within_a_character(target):
    words = Doubled(VOCABULARY)
    short = LeanRuntime(small(2 * VOCABULARY, 2, seed=3))
    object.__setattr__(short.skeleton, "context", 40)
    tokens, outcomes = run(target, CrossVocabularyDrafter(target, short, words, FixedK(3)), PROMPTS[0], 40)
    assert tokens == plain(target, PROMPTS[0], 40)
    assert outcomes[1].draft.tokens
    assert not outcomes[-1].draft.tokens
    words.read = lambda tokens: None
    _, outcomes = run(target, CrossVocabularyDrafter(target, short, words, FixedK(3)), PROMPTS[0], 6)
    assert [outcome.draft.tokens for outcome in outcomes] == [()] * 6


def test_only_what_is_new_is_read(target, monkeypatch):
    own = LeanRuntime(small(VOCABULARY, 2, seed=3))
    drafter, read = CrossVocabularyDrafter(target, own, Renamed(ORDER), FixedK(3)), []
    forward = drafter.runtime.forward
    monkeypatch.setattr(
        drafter.runtime, "forward", lambda tokens, *a, **k: (read.append(tokens.shape[1]), forward(tokens, *a, **k))[1]
    )
    _, outcomes = run(target, drafter, PROMPTS[1], 30)
    assert read[0] == len(PROMPTS[1])  # when it first drafts, after the first token
    emitted = sum(len(outcome.tokens) for outcome in outcomes)
    assert sum(read[1:]) <= 2 * emitted + sum(len(outcome.draft) for outcome in outcomes)


def test_sequences_together_draft_what_they_draft_alone(target):
    own, words = LeanRuntime(small(VOCABULARY, 2, seed=3)), Renamed(ORDER)
    alone = [run(target, CrossVocabularyDrafter(target, own, words, FixedK(3)), prompt, 12) for prompt in PROMPTS]
    drafter = CrossVocabularyDrafter(target, own, words, FixedK(3))
    seqs = [SequenceState(list(prompt), 12, Sampler()) for prompt in PROMPTS]
    drafts = {id(seq): [] for seq in seqs}
    with Engine(target, drafter) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            for seq, outcome in engine.step():
                drafts[id(seq)].append(outcome.draft.tokens)
    for seq, prompt, (tokens, outcomes) in zip(seqs, PROMPTS, alone, strict=True):
        assert seq.tokens[len(prompt) :] == tokens
        assert drafts[id(seq)] == [outcome.draft.tokens for outcome in outcomes]


def test_sequences_that_decide_together_draft_too(target):
    drafter = CrossVocabularyDrafter(
        target, LeanRuntime(renamed(small(VOCABULARY, 3, seed=4), ORDER)), Renamed(ORDER), FixedK(3)
    )
    free = (0.0, 1.0, *[1.0 + n / 1e6 for n in range(1, 64)])
    drafter.load = BatchDraftScheduler(PassCosts(free, tuple(second / 10 for second in free)))
    seqs, accepted = [SequenceState(list(prompt), 12, Sampler()) for prompt in PROMPTS], 0
    with Engine(target, drafter) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            drafter.load.begin(len(engine.running))
            accepted += sum(outcome.accepted for _, outcome in engine.step())
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        assert seq.tokens[len(prompt) :] == plain(target, prompt, 12)
    assert accepted > 12
