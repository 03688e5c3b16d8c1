"""Many prompts at once: each gives what it gives alone, and nothing is lost or held when one ends, fails or leaves."""

from __future__ import annotations

import pytest
import torch
from models import small
from transformers import LogitsProcessor

import selfspec
from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK, StaticThreshold
from selfspec.drafters import LayerSkipDrafter, LookupDrafter, ModelDrafter, PlainDrafter, RecycleDrafter
from selfspec.llm.batch import Batch
from selfspec.llm.batch_memory import runtime_for, slot_bytes
from selfspec.llm.options import Options
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import SkipSet
from selfspec.types.events import Origin

SKIP = SkipSet((3, 5), (7,))
PROMPTS = [prompt[-160:] for prompt in builtin.prompts("heldout")[:5]]
GREEDY, SEEDED = Options(max_new_tokens=14), Options(max_new_tokens=14, temperature=0.8, seed=5)
MAKERS = {
    "plain": lambda runtime: PlainDrafter(),
    "path": lambda runtime: LayerSkipDrafter(runtime, SKIP, FixedK(3)),
    "path and guesses": lambda runtime: LayerSkipDrafter(
        runtime, SKIP, StaticThreshold(0.2, 4), candidates=2, proposer_chain=ProposerChain([Lookup()], (1.0, 1.1, 1.2))
    ),
    "lookup": lambda runtime: LookupDrafter([Lookup()], StaticThreshold(0.1, 5)),
    "recycle": lambda runtime: RecycleDrafter(StaticThreshold(0.1, 5), candidates=3),
}


@pytest.fixture(scope="module")
def llm():
    """The built-in model in float64, where passes of any width give the same tokens."""
    return selfspec.load("builtin", dtype="float64", layout="rows", profile="none")


@pytest.fixture(scope="module")
def alone(llm):
    return {how.seed: [llm.run(prompt, how) for prompt in PROMPTS] for how in (GREEDY, SEEDED)}


def finished(batch):
    while not batch.idle:
        batch.step()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "match"])
@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "fixed"])
def test_each_gives_what_it_gives_alone(llm, alone, name, how, adaptive):
    with Batch(llm, rows=3, adaptive=adaptive, make=MAKERS[name]) as batch:
        requests = [batch.add(prompt, how) for prompt in PROMPTS]
        finished(batch)
    for request, expected in zip(requests, alone[how.seed], strict=True):
        assert request.tokens == expected.tokens
        assert request.text == expected.text
        assert request.finish == expected.finish
        assert request.stats.tokens == 14
    assert batch.counters.tokens == 14 * len(PROMPTS)
    assert batch.free == batch.num_slots


def test_rows_that_end_are_taken_at_once(llm):
    with Batch(llm, rows=2, make=MAKERS["plain"]) as batch:
        short, long, last = (batch.add(PROMPTS[0], Options(max_new_tokens=n)) for n in (2, 9, 3))
        while not short.done:
            assert last in batch.waiting
            batch.step()
        batch.step()
        assert last in batch.running
        finished(batch)
    assert [len(request.tokens) for request in (short, long, last)] == [2, 9, 3]


def test_a_profile_s_drafter_is_used_and_its_load_counted(llm):
    profile = Profile(model=llm.identity, draft=LayerSkipSpec.from_path(SKIP))
    own = selfspec.wrap(llm.model, llm.tokenizer, profile=profile)
    with Batch(own, rows=2, adaptive=False) as batch:
        requests = [batch.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
        finished(batch)
    assert [request.tokens for request in requests] == [llm.run(prompt, GREEDY).tokens for prompt in PROMPTS[:3]]
    assert batch.counters.drafted == sum(batch.counters.drafted_by_load.values())


def test_a_long_prompt_is_read_in_pieces_between_rounds(llm):
    text = "x = 1\n" * 150
    with Batch(llm, rows=2, make=MAKERS["plain"]) as batch:
        first = batch.add(PROMPTS[0], Options(max_new_tokens=40))
        batch.step()
        long, before = batch.add(text, GREEDY), len(first.tokens)
        while not long.tokens:
            batch.step()
        assert len(first.tokens) > before + 2
        finished(batch)
    assert long.tokens == llm.run(text, GREEDY).tokens


def test_a_common_beginning_is_read_once(llm):
    system = "def shared(beginning):\n    return 'of all of them, and rather long'\n\n" * 4
    texts = [system + f"def number_{i}(" for i in range(3)]
    with Batch(llm, rows=3, make=MAKERS["plain"]) as batch:
        first = batch.add(texts[0], GREEDY)
        batch.step()
        requests = [first, *(batch.add(text, GREEDY) for text in texts[1:])]
        finished(batch)
    assert batch.counters.reused > len(llm.encode(system)) // 2
    assert [request.tokens for request in requests] == [llm.run(text, GREEDY).tokens for text in texts]


def test_who_is_cancelled_leaves_at_once(llm):
    with Batch(llm, rows=2, make=MAKERS["path"]) as batch:
        requests = [batch.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
        batch.step()
        batch.cancel(requests[2])  # which waits
        batch.cancel(requests[0])
        batch.cancel(requests[0])
        assert batch.free == batch.num_slots // 2
        finished(batch)
    assert requests[0].done
    assert requests[0].finish is None
    assert not requests[2].tokens
    assert requests[1].tokens == llm.run(PROMPTS[1], GREEDY).tokens


class Failing(LogitsProcessor):
    """Fails once the text is so long."""

    def __init__(self, length):
        self.length = length

    def __call__(self, ids, scores):
        if ids.shape[1] > self.length:
            raise ValueError("as planned")
        return scores


def test_who_fails_ends_alone(llm):
    wrong = Options(max_new_tokens=14, logits_processor=[Failing(len(llm.encode(PROMPTS[1])) + 4)])
    with Batch(llm, rows=3, make=MAKERS["path"]) as batch:
        requests = [batch.add(p, wrong if i == 1 else GREEDY) for i, p in enumerate(PROMPTS[:4])]
        finished(batch)
    assert "ValueError: as planned" in str(requests[1].error)
    assert len(requests[1].tokens) <= 5
    for i in (0, 2, 3):
        assert requests[i].error is None
        assert requests[i].tokens == llm.run(PROMPTS[i], GREEDY).tokens
    assert batch.free == batch.num_slots


def test_who_fails_at_the_first_token_ends_alone(llm):
    """The others are not read again."""
    wrong = Options(max_new_tokens=14, logits_processor=[Failing(0)])
    with Batch(llm, rows=3, make=MAKERS["path"]) as batch:
        requests = [batch.add(p, wrong if i == 1 else GREEDY) for i, p in enumerate(PROMPTS[:3])]
        finished(batch)
    assert "ValueError: as planned" in str(requests[1].error)
    assert not requests[1].tokens
    assert batch.counters.evicted == 0
    for i in (0, 2):
        assert requests[i].tokens == llm.run(PROMPTS[i], GREEDY).tokens


def test_first_tokens_do_not_hold_up_the_others(llm):
    """However many prompts are read, those that decode have a round after each."""
    with Batch(llm, rows=2, make=MAKERS["plain"]) as batch:
        first = batch.add(PROMPTS[0], Options(max_new_tokens=12))
        batch.step()
        others = [batch.add(prompt, Options(max_new_tokens=1)) for prompt in PROMPTS]
        for done in range(len(others)):
            assert [other.done for other in others] == [True] * done + [False] * (len(others) - done)
            assert len(first.tokens) == 1 + done
            batch.step()
            batch.step()
        finished(batch)
    assert first.tokens == llm.run(PROMPTS[0], Options(max_new_tokens=12)).tokens


def test_text_comes_in_pieces_with_where_it_came_from(llm, alone):
    with Batch(llm, rows=2, make=MAKERS["path"]) as batch:
        by_piece, by_span = batch.add(PROMPTS[0], GREEDY), batch.add(PROMPTS[1], GREEDY)
        pieces, spans = [], []
        while not batch.idle:
            batch.step()
            pieces.append(by_piece.take())
            spans += by_span.spans()
    assert "".join(pieces) == alone[None][0].text
    assert "".join(text for _, text in spans) == alone[None][1].text
    assert {origin for origin, _ in spans} & {Origin.ACCEPTED_DRAFT, Origin.CORRECTED, Origin.BONUS}
    assert by_span.result.events[0].text


def test_log_probabilities_are_the_model_s_own(llm):
    with Batch(llm, rows=2, make=MAKERS["path"]) as batch:
        request = batch.add(PROMPTS[0], GREEDY, top=3)
        finished(batch)
    ids = torch.tensor([request.prompt + request.tokens])
    with torch.no_grad():
        own = llm.model(ids).logits[0].log_softmax(-1)
    for i, told in enumerate(request.logprobs):
        row = own[len(request.prompt) - 1 + i]
        assert told.token == request.tokens[i]
        assert told.logprob == pytest.approx(float(row[told.token]), abs=1e-4)
        assert [token for token, _ in told.top] == row.topk(3).indices.tolist()
    assert len(request.logprobs) == 14


def test_what_can_never_be_held_is_refused(llm):
    memory = 400 * slot_bytes(llm.runtime) / 2**30
    with Batch(llm, rows=4, memory=memory, make=MAKERS["plain"]) as batch:
        assert batch.rows == 1
        with pytest.raises(SelfspecError, match=r"need \d+ slots of the KV cache, and one sequence may have \d+"):
            batch.add("x = 1\n" * 120, GREEDY)
        with pytest.raises(SelfspecError, match="the prompt is empty"):
            batch.add("", GREEDY)
        with pytest.raises(SelfspecError, match="rule 'token' with a seed"):
            batch.add("x", Options(temperature=1.0, seed=1, rule="token"))
        assert batch.idle
    with pytest.raises(SelfspecError, match="give more memory"):
        Batch(llm, rows=4, memory=memory / 10)
    with pytest.raises(SelfspecError, match="rows 0: expected at least 1"):
        Batch(llm, rows=0)
    with pytest.raises(SelfspecError, match="memory -1 GiB"):
        runtime_for(llm.runtime, rows=1, memory=-1)


def test_a_draft_model_shares_the_memory(llm):
    """Its keys are counted, and it drafts the same for each as alone."""
    own = small(llm.identity.vocabulary, 1, seed=3).to(torch.float64)

    def make(runtime):
        return ModelDrafter(runtime, LeanRuntime(own), FixedK(3))

    with Batch(llm, rows=2, make=make) as batch:
        requests = [batch.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
        finished(batch)
    assert [request.tokens for request in requests] == [llm.run(prompt, GREEDY).tokens for prompt in PROMPTS[:3]]


def test_the_longest_request_fits_the_rows_as_they_are(llm):
    memory = 2 * 400 * slot_bytes(llm.runtime) / 2**30
    with Batch(llm, rows=2, memory=memory, make=MAKERS["plain"]) as batch:
        slots = batch.num_slots
        assert batch.max_seq_len < llm.runtime.skeleton.context
        prompt = llm.encode("x = 1\n" * 100)[:100]
        request = batch.add(prompt, Options(max_new_tokens=batch.max_seq_len + 1 - len(prompt)))
        finished(batch)
        assert batch.num_slots == slots
    assert request.error is None


def test_who_cannot_be_held_ends_alone(llm, monkeypatch):
    with Batch(llm, rows=2, make=MAKERS["plain"]) as batch:
        admit, requests = batch._engine.admit, [batch.add(prompt, GREEDY) for prompt in PROMPTS[:3]]

        def refusing(seq):
            if seq is requests[1].seq:
                raise SelfspecError("no memory")
            return admit(seq)

        monkeypatch.setattr(batch._engine, "admit", refusing)
        finished(batch)
    assert str(requests[1].error) == "no memory"
    assert [len(request.tokens) for request in requests] == [14, 0, 14]


def test_who_cannot_be_recorded_ends_alone(llm):
    with Batch(llm, rows=2, make=MAKERS["plain"]) as batch:
        wrong = batch.add(PROMPTS[0], Options(max_new_tokens=1), top=10**6)  # more than there are tokens
        other = batch.add(PROMPTS[1], GREEDY)
        for _ in range(40):
            batch.step()
        assert batch.idle
    assert wrong.error is not None
    assert other.tokens == llm.run(PROMPTS[1], GREEDY).tokens


def test_what_a_round_emitted_before_it_failed_is_not_lost(llm):
    """Not where a drafter fails to learn from it, and not at a text's end."""
    for failing in (3, 13):  # the last is the round that ends the texts
        rounds = iter(range(100))

        class Forgetful(PlainDrafter):
            def observe(self, seq, outcome, rounds=rounds, failing=failing):
                if seq is requests[1].seq and next(rounds) == failing:
                    raise RuntimeError("forgot")

        with Batch(llm, rows=3, adaptive=False, make=lambda runtime, made=Forgetful: made()) as batch:
            requests = [batch.add(prompt, GREEDY, top=1) for prompt in PROMPTS[:3]]
            finished(batch)
        for request, prompt in zip(requests, PROMPTS, strict=False):
            expected = llm.run(prompt, GREEDY)
            assert (request.error, request.tokens, request.text) == (None, expected.tokens, expected.text)
            assert (request.finish, request.stats.tokens) == (expected.finish, 14)
            assert [one.token for one in request.logprobs] == request.tokens
        assert sum(one.logprob is None for one in requests[1].logprobs) == 1
