"""Guides draft: what a grammar forces is proposed in front of every drafter, and no drafter changes a guided text."""

from __future__ import annotations

import json

import pytest
import torch
from every_drafter import table
from models import small
from transformers import LogitsProcessor
from wants import needs

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.text.guided import schema_literals
from selfspec.types.draft_path import SkipSet
from selfspec.types.draft_work import DRAFT_STEP, GUIDE

pytestmark = needs("llguidance", "llguidance")
VOCABULARY, END, ROWS = 262, 261, 3  # of llguidance's tokenizer over bytes
DRAFTERS = table(VOCABULARY)
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["amber", "azure", "black"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
        "sold": {"type": "boolean"},
    },
    "required": ["colour", "sizes", "sold"],
    "additionalProperties": False,
}
PROMPTS, ROOMS = [[1, 4, 2], [7], [33, 90, 91, 5]], [70, 40, 70]


class OneSpace(LogitsProcessor):
    """Lets no space follow a space, which is all that a random model would write."""

    def __call__(self, input_ids, scores):
        spaces = [9, 10, 13, 32]
        if int(input_ids[0, -1]) in spaces:
            scores[:, spaces] = -torch.inf
        return scores


class ByteGuide:
    """What `Guide` gives for a tokenizer whose tokens are bytes."""

    def __init__(self, schema):
        from llguidance import LLMatcher, LLTokenizer

        self.tokenizer = LLTokenizer("byte")
        self.matcher = LLMatcher(self.tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        self.literals = list(" ".join(schema_literals(schema)).encode())

    def sequence(self, prompt, room, seed=None, guided=True, literals=True):
        from selfspec.text.guided import Continuation, _Guided

        ends = frozenset([END])
        processor = _Guided(self.matcher.deep_copy(), ends, frozenset(), len(prompt))
        sampler = Sampler(temperature=0.0 if seed is None else 0.7, seed=seed, processors=[processor, OneSpace()])
        proposer = Continuation(
            self.matcher.deep_copy(),
            self.tokenizer,
            prompt=len(prompt),
            end=END,
            json=True,
            literals=self.literals if literals else (),
        )
        return SequenceState(list(prompt), room, sampler, ends, continuation=proposer if guided else None)


@pytest.fixture(scope="module")
def guide():
    return ByteGuide(SCHEMA)


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, seed=4), rows=ROWS, kernel=fake)


class CountedPasses(LayerSkipDrafter):
    """Counts its draft passes."""

    passes = 0

    def observe(self, seq, outcome):
        super().observe(seq, outcome)
        self.passes += sum(calls for call, calls in outcome.draft.work if call.name == DRAFT_STEP.name)


def serve(runtime, drafter, seqs):
    """New tokens of sequences that join one after the other, and the sources of the drafted tokens accepted."""
    sources, waiting, prompts = [], list(seqs), [len(seq.tokens) for seq in seqs]
    with Engine(runtime, drafter) as engine:
        while waiting or engine.running:
            if waiting:
                engine.join(waiting.pop(0))
            for _, outcome in engine.step():
                sources += [outcome.draft.sources[node] for node in outcome.path if outcome.draft.sources]
    return [seq.tokens[prompt:] for seq, prompt in zip(seqs, prompts, strict=True)], sources


def sequences(guide, seed, guided=True):
    return [
        guide.sequence(prompt, room, None if seed is None else seed + i, guided)
        for i, (prompt, room) in enumerate(zip(PROMPTS, ROOMS, strict=True))
    ]


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "match"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_gives_the_guided_text(runtime, guide, name, seed):
    """Alone, and in a batch whose sequences join one after the other."""
    expected = [serve(runtime, PlainDrafter(), [seq])[0][0] for seq in sequences(guide, seed, guided=False)]
    drafter = DRAFTERS[name](runtime)
    together, sources = serve(runtime, drafter, sequences(guide, seed))
    assert together == expected
    assert GUIDE in sources or not drafter.drafts
    first, _ = serve(runtime, drafter, sequences(guide, seed)[:1])
    assert first == expected[:1]


def test_literals_of_the_schema_save_draft_passes(runtime, guide):
    """A draft that goes on to the next key finds it looked up, before the text has had it; the text is the same."""
    texts, found, passes = [], [], []
    for literals in (False, True):
        chain = ProposerChain([Lookup()], (1.0, 1.01, 1.02, 1.03, 1.04))
        drafter = CountedPasses(runtime, SkipSet(), FixedK(12), proposer_chain=chain)
        text, sources = serve(runtime, drafter, [guide.sequence(PROMPTS[0], ROOMS[0], literals=literals)])
        texts.append(text)
        found.append(sources.count("lookup"))
        passes.append(drafter.passes)
    assert texts[0] == texts[1]
    assert found[1] > found[0]
    assert passes[1] < passes[0]
