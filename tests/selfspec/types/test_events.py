from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import astuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from spans import Read
from toys import Toy, always_wrong, oracle
from transformers import AutoTokenizer, GenerationConfig

from selfspec import SkipSet
from selfspec.builtin import model_folder
from selfspec.drafters import PlainDrafter
from selfspec.llm.options import Options
from selfspec.llm.stream import Stream
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.text.detokenizer import TextStream
from selfspec.types.draft_work import LOOKUP_WORK
from selfspec.types.events import Origin, Rejected, counts, origins
from selfspec.types.stats import Round

PLAIN, DRAFT, CANDIDATE, LOOKUP_CALL, CORRECTED, BONUS = Origin
PROMPT = "import os\n\ndef main(args):\n    "
SKIP = SkipSet(attention=(3, 5, 9), mlp=(7, 11))
TOKENIZER = AutoTokenizer.from_pretrained(model_folder())
VOCABULARY = len(TOKENIZER)


@pytest.fixture(scope="module")
def ids(llm64):
    return llm64.encode(PROMPT)


@pytest.fixture(scope="module")
def text(llm64):
    """The tokens that plain decoding gives."""
    return llm64.generate(PROMPT, max_new_tokens=12).tokens


class Leaves(Toy):
    """A chain with leaves beside it, both by what is left of the text."""

    def __init__(self, start, text, make):
        self.start, self.text, self.make = start, text, make

    def draft(self, seq):
        left = self.text[len(seq.tokens) - self.start :]
        if seq.remaining < len(self.make(left)[0]) + 1:
            return NO_DRAFT
        chain, leaves = self.make(left)
        return Draft.chain(chain, confidence=[0.5] * len(chain)).with_candidates(leaves)


def wrong(token, by=1):
    return (token + by) % VOCABULARY


def of(generation):
    return [event.origin for event in generation.events]


class TestOrigins:
    def test_plain_decoding(self, llm64):
        out = llm64.generate(PROMPT, max_new_tokens=3)
        assert [(event.origin, event.round, event.place) for event in out.events] == [
            (PLAIN, 1, None),
            (PLAIN, 2, None),
            (PLAIN, 3, None),
        ]

    def test_a_draft_that_is_the_target(self, llm64, ids, text):
        out = llm64.generate(PROMPT, max_new_tokens=7, drafter=oracle(ids, text, k=2))
        assert of(out) == [PLAIN, *[DRAFT, DRAFT, BONUS] * 2]
        assert [(event.round, event.place) for event in out.events[1:]] == [
            (round_, place) for round_ in (2, 3) for place in (1, 2, None)
        ]
        assert [event.token for event in out.events] == out.tokens == text[:7]

    def test_the_first_round_drafts_nothing(self, llm64, ids, text):
        stream = llm64.stream(PROMPT, max_new_tokens=6, drafter=oracle(ids, text, k=2))
        assert "".join(stream) == stream.result.text
        assert of(stream.result) == [PLAIN, DRAFT, DRAFT, BONUS, DRAFT, BONUS]

    def test_a_draft_that_is_always_wrong(self, llm64, ids, text):
        out = llm64.generate(PROMPT, max_new_tokens=5, drafter=always_wrong(ids, text, VOCABULARY, k=3))
        assert of(out) == [PLAIN] + [CORRECTED] * 3 + [PLAIN]  # no room for a draft is left
        for event in out.events[1:4]:
            (rejected,) = event.rejected
            assert rejected.token == wrong(event.token)
            assert rejected.text == TOKENIZER.decode([rejected.token])
            assert event.place is event.confidence is event.probability is None

    def test_right_up_to_a_token(self, llm64, ids, text):
        class Third(Toy):
            def draft(self, seq):
                a, b, c, d = text[len(seq.tokens) - len(ids) :][:4]
                return Draft.chain(
                    [a, b, wrong(c), d][: seq.remaining - 1], confidence=[0.9, 0.8, 0.7, 0.6][: seq.remaining - 1]
                )

        out = llm64.generate(PROMPT, max_new_tokens=6, drafter=Third())
        assert of(out)[1:4] == [DRAFT, DRAFT, CORRECTED]
        assert [event.confidence for event in out.events[1:4]] == [0.9, 0.8, None]
        rejected = wrong(text[3])
        assert out.events[3].rejected == (Rejected(rejected, TOKENIZER.decode([rejected]), 0.7),)

    def test_a_candidate_is_followed_by_a_bonus(self, llm64, ids, text):
        """The chain's first token is right, and of its second place the second leaf."""
        drafter = Leaves(
            len(ids), text, lambda left: ([left[0], wrong(left[1])], [[wrong(left[0])], [wrong(left[1], 2), left[1]]])
        )
        out = llm64.generate(PROMPT, max_new_tokens=7, drafter=drafter)
        assert of(out) == [PLAIN, *[DRAFT, CANDIDATE, BONUS] * 2]
        drafted, candidate, bonus = out.events[1:4]
        assert (drafted.place, drafted.confidence, drafted.rejected) == (1, 0.5, ())
        assert (candidate.place, candidate.confidence) == (2, None)
        assert [(one.token, one.confidence) for one in candidate.rejected] == [
            (wrong(text[2]), 0.5),
            (wrong(text[2], 2), None),
        ]
        assert (bonus.place, bonus.rejected) == (None, ())

    def test_the_chain_and_its_candidates_rejected(self, llm64, ids, text):
        drafter = Leaves(
            len(ids),
            text,
            lambda left: ([left[0], wrong(left[1]), left[2]], [[], [wrong(left[1], 2), wrong(left[1], 3)], [7]]),
        )
        out = llm64.generate(PROMPT, max_new_tokens=5, drafter=drafter)
        assert of(out)[1:3] == [DRAFT, CORRECTED]
        assert [one.token for one in out.events[2].rejected] == [wrong(text[2], by) for by in (1, 2, 3)]

    def test_an_end_inside_a_draft(self, llm64, ids, text):
        config = GenerationConfig(eos_token_id=text[2], max_new_tokens=9)
        out = llm64.generate(PROMPT, config, drafter=oracle(ids, text, k=4))
        assert out.tokens == text[:3]
        assert of(out) == [PLAIN, DRAFT, DRAFT]

    def test_the_rounds_alone_tell(self):
        tree = {"proposed": (5, 6, 7), "parents": (-1, 0, 0)}
        assert origins(Round(2, 2, 3, 0.1, 3, **tree, path=(0, 1))) == [DRAFT, DRAFT, BONUS]
        assert origins(Round(2, 2, 3, 0.1, 3, **tree, path=(0, 2))) == [DRAFT, CANDIDATE, BONUS]
        assert origins(Round(2, 1, 2, 0.1, 3, **tree, path=(0,))) == [DRAFT, CORRECTED]
        assert origins(Round(2, 1, 1, 0.1, 3, **tree, path=(0, 2))) == [DRAFT]  # ended within the draft
        assert origins(Round(2, 2, 3, 0.1, 3, **tree, path=(0, 1), work=LOOKUP_WORK)) == [
            LOOKUP_CALL,
            LOOKUP_CALL,
            BONUS,
        ]
        assert origins(Round(0, 0, 1, 0.1)) == [PLAIN]


class TestCounts:
    @pytest.mark.parametrize(
        "how",
        [
            {},
            {"temperature": 1.0, "seed": 3},
            {"temperature": 1.0, "rule": "block"},
            {"temperature": 1.0, "rule": "token"},
        ],
    )
    def test_they_agree_with_the_stats(self, llm, how):
        drafter = llm.layer_skip(SKIP, "fixed:k=3", candidates=3)
        out = llm.generate(PROMPT, max_new_tokens=24, drafter=drafter, **how)
        found = counts(out.events)
        accepted = found.get(DRAFT, 0) + found.get(CANDIDATE, 0)
        assert accepted == out.stats.accepted > 0
        assert sum(found.values()) == out.stats.tokens == len(out.tokens)
        assert Counter(event.round for event in out.events) == Counter(
            {number: done.tokens for number, done in enumerate(out.stats.log, 1)}
        )
        assert all(event.confidence is not None for event in out.events if event.origin == DRAFT)
        assert all(event.rejected for event in out.events if event.origin in (CORRECTED, CANDIDATE))
        assert "".join(event.text for event in out.events) == out.text

    def test_no_tensor_is_kept(self, llm):
        out = llm.generate(PROMPT, max_new_tokens=12, drafter=llm.layer_skip(SKIP, "fixed:k=2", candidates=2))

        def plain(value):
            return itertools.chain.from_iterable(map(plain, value)) if isinstance(value, tuple) else (value,)

        kept = plain(tuple(astuple(done) for done in out.stats.log))
        assert {type(value) for value in kept} == {int, float, str}


class TestProbabilities:
    def test_the_models_own(self, llm64, ids):
        """Temperature and processors are left out; the rows are those of the path, candidates' too."""
        drafter = llm64.layer_skip(SKIP, "fixed:k=3", candidates=3)
        how = {"temperature": 0.7, "top_k": 3, "seed": 2, "max_new_tokens": 24, "drafter": drafter}
        out = llm64.generate(PROMPT, probabilities=True, **how)
        assert {DRAFT, CANDIDATE, BONUS} <= {*of(out)}
        with torch.inference_mode():
            p = llm64.model(torch.tensor([ids + out.tokens])).logits[0].softmax(-1)
        own = [float(p[len(ids) - 1 + i, token]) for i, token in enumerate(out.tokens)]
        assert [event.probability for event in out.events] == pytest.approx(own, rel=1e-4)
        assert llm64.generate(PROMPT, **how).tokens == out.tokens

    def test_plain_and_streamed(self, llm):
        stream = llm.stream(PROMPT, max_new_tokens=3, probabilities=True, drafter=PlainDrafter())
        assert all(0 < event.probability < 1 for event in stream.wait().events)

    def test_never_computed_unless_asked_for(self, llm, monkeypatch):
        monkeypatch.setattr(Outcome, "probabilities", lambda self: 1 / 0)
        assert {event.probability for event in llm.generate(PROMPT, max_new_tokens=3).events} == {None}
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPT, max_new_tokens=3, probabilities=True)


@st.composite
def scripts(draw):
    """New tokens by rounds, each with what was drafted and accepted, and stop strings.

    Tokens of characters of several bytes, special ones (0), and any others.
    """
    parts = st.one_of(
        st.text("aé€😀\n ", max_size=6).map(lambda text: TOKENIZER(text).input_ids),
        st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
    )
    tokens = list(itertools.chain.from_iterable(draw(st.lists(parts, max_size=6))))
    rounds = []
    while tokens:
        n = draw(st.integers(1, 4))
        rounds.append((tokens[:n], draw(st.booleans())))
        tokens = tokens[n:]
    return rounds, draw(st.lists(st.text("aé\n ", min_size=1, max_size=3), max_size=2))


def played(script, *, pieces):
    """A stream that emits what the script says: a round's last token is the model's own, the others were drafted."""
    rounds, stops = script
    text = TextStream(TOKENIZER, TOKENIZER(PROMPT).input_ids, stops)

    def outcomes():
        for tokens, whole in rounds:
            emitted = []
            for token in tokens:
                emitted.append(token)
                if text.push(token):
                    break
            drafted = Draft.chain([*tokens[:-1], *([] if whole else [0])])
            yield Outcome(drafted, tuple(range(len(tokens) - 1)), tuple(emitted), ForwardOutput(None))
            if text.stopped:
                break

    return Stream(outcomes(), SequenceState([], 0, Sampler()), text, pieces=pieces)


class TestTexts:
    @given(scripts(), st.booleans())
    def test_they_make_the_text(self, script, pieces):
        stream = played(script, pieces=pieces)
        for _ in stream:
            so_far = stream.result
            assert "".join(event.text for event in so_far.events) == so_far.text
        out = stream.result
        assert len(out.events) == len(out.tokens) == out.stats.tokens
        assert "".join(event.text for event in out.events) == out.text
        assert all(not event.text for event in out.events if event.token in TOKENIZER.all_special_ids)

    @given(scripts(), st.booleans())
    def test_spans_are_the_events_as_they_come(self, script, pieces):
        stream = played(script, pieces=pieces)
        spans = list(stream.spans())
        assert all(text for _, text in spans)
        shown = [(event.origin, event.text) for event in stream.result.events if event.text]

        def by_character(parts):
            return [(origin, char) for origin, text in parts for char in text]

        assert by_character(spans) == by_character(shown)

    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20))
    @example(" —")  # whose first token is the space and the first bytes of the dash
    def test_of_tokens_that_share_a_character_the_last_has_it(self, text):
        tokens = TOKENIZER(text).input_ids
        stream = TextStream(TOKENIZER, TOKENIZER("x = ").input_ids)
        for token in tokens:
            stream.push(token)
        stream.finish()
        texts = stream.texts(len(tokens), stream.text)
        for n in range(1, len(tokens) + 1):
            assert "".join(texts[:n]) == TOKENIZER.decode(tokens[:n]).rstrip("\ufffd")

    def test_a_character_that_is_never_completed(self):
        tokens = [*TOKENIZER("a😀").input_ids[:-1], 0]
        stream = TextStream(TOKENIZER, [])
        for token in tokens:
            stream.push(token)
        stream.finish()
        assert stream.texts(len(tokens), stream.text) == ["a", *[""] * (len(tokens) - 3), "\ufffd", ""]

    def test_a_stop_string_ends_it(self, llm64, ids, text):
        whole = llm64.generate(PROMPT, max_new_tokens=12)
        texts = [event.text for event in whole.events]
        out = llm64.generate(PROMPT, max_new_tokens=12, stop=texts[2][3:] + texts[3], drafter=oracle(ids, text, k=4))
        assert [event.text for event in out.events] == [*texts[:2], texts[2][:3], ""]
        assert of(out) == [PLAIN] + [DRAFT] * 3  # the bonus is not emitted

    def test_what_was_rejected_is_told_as_it_would_have_read(self):
        stream = TextStream(TOKENIZER, TOKENIZER("x = ").input_ids)
        first, *rest = TOKENIZER("é").input_ids
        stream.push(first)
        (last,) = rest
        assert stream.text_of(1, last) == "é"
        assert stream.text_of(0, *TOKENIZER(" y").input_ids) == " y"
        assert stream.text_of(0, 0) == ""


class TestStreaming:
    def test_the_first_token_comes_when_it_is_known(self, llm64, ids, text):
        stream = llm64.stream(PROMPT, max_new_tokens=9, drafter=oracle(ids, text, k=2))
        spans = stream.spans()
        first = next(spans)
        assert stream.result.stats.rounds == 1
        rest = list(spans)
        assert [first, *rest] == [(event.origin, event.text) for event in stream.result.events]

    def test_an_interrupted_one(self, llm64, ids, text):
        stream = llm64.start(PROMPT, Options(max_new_tokens=9), drafter=oracle(ids, text, k=2))
        next(stream)
        next(stream)
        stream.close()
        assert of(stream.result) == [PLAIN, DRAFT, DRAFT, BONUS]
        assert "".join(event.text for event in stream.result.events) == stream.result.text


def test_html_has_the_text(llm, ids):
    out = llm.generate(PROMPT, max_new_tokens=24, drafter=llm.layer_skip(SKIP, "fixed:k=3", candidates=2))
    page = Read(out._repr_html_())
    legend = " · ".join(f"{origin} {n} ({n / 24:.0%})" for origin, n in counts(out.events).items())
    accepted = f"{out.stats.accepted} of {out.stats.drafted} drafted"
    assert page.text == f"{out.text}{legend} · acceptance {out.stats.acceptance_rate:.0%} ({accepted})"
