"""A head below a draft path, where what it knows is not to be said."""

from __future__ import annotations

import pytest
import torch
from heads import random_head
from models import run, small
from transformers import SuppressTokensLogitsProcessor

from selfspec.controllers import FixedK, RateOptimal
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.drafters.head_drafter import HeadBelow, HeadDrafter
from selfspec.models.low_precision import fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler, best_and_share
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.methods import WIDEST_DRAFT

VOCABULARY, KNOWN, PROMPT = 11, list(range(8)), [1, 4, 2]
PATH = DraftPath(SkipSet((1,), (0,)), int8=SkipSet((0, 2), (1, 2)), head="int8")
HOWS = {"greedy": {}, "match": {"temperature": 1.2, "seed": 3}, "drawn": {"temperature": 1.2, "seed": 3, "tied": False}}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_it_guesses_nothing_where_processors_leave_none_of_its_words(how):
    runtime = LeanRuntime(small(VOCABULARY, seed=2), kernel=fake)
    below = HeadBelow(random_head(runtime, KNOWN), (1.0,) * 5, 0.01)

    def decoded(drafter):
        processors = [SuppressTokensLogitsProcessor(KNOWN, device="cpu")]
        return run(runtime, drafter, PROMPT, 12, sampler=Sampler(**how, processors=processors))

    tokens, outcomes = decoded(LayerSkipDrafter(runtime, PATH, FixedK(5), below=below))
    assert set(tokens).isdisjoint(KNOWN)
    assert {source for outcome in outcomes for source in outcome.draft.sources} == {"draft path"}
    if how.get("tied", True):
        assert tokens == decoded(PlainDrafter())[0]


class Overflowing(LayerSkipDrafter):
    """Its passes give no numbers."""

    def _pass(self, chains):
        super()._pass(chains)
        for chain in chains:
            chain.logits = [torch.full_like(logits, torch.nan) for logits in chain.logits]


def test_no_share_where_nothing_is_finite():
    _, share = best_and_share(torch.full((4,), -torch.inf))
    assert not share > 0


def test_a_head_reads_the_prompt_before_any_draft_and_keeps_no_more_than_the_text_may_fill():
    runtime = LeanRuntime(small(VOCABULARY, seed=2))
    head = random_head(runtime, KNOWN)
    read, reserved = [], []
    reads, reserves = head.read, head.reserve
    head.read = lambda row, start, tokens, streams: (read.append(len(tokens)), reads(row, start, tokens, streams))[1]
    head.reserve = lambda slots: (reserved.append(slots), reserves(slots))[1]
    drafter = HeadDrafter(head, FixedK(3))
    begin = drafter.begin

    def begun(seq, prefill):
        begin(seq, prefill)
        assert read == [len(PROMPT) - 1]

    drafter.begin = begun
    run(runtime, drafter, PROMPT, 12)
    assert reserved[0] <= len(PROMPT) + 12 + WIDEST_DRAFT


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_drafts_whose_logits_are_no_numbers_end_and_the_text_goes_on(how):
    """As of a path that overflows in float16."""
    runtime = LeanRuntime(small(VOCABULARY, seed=2))
    drafter = Overflowing(runtime, SkipSet((1,), (0,)), RateOptimal())
    tokens, outcomes = run(runtime, drafter, PROMPT, 12, sampler=Sampler(**how))
    assert len(tokens) == 12
    assert not any(len(outcome.draft) for outcome in outcomes)
    if how.get("tied", True):
        assert tokens == run(runtime, PlainDrafter(), PROMPT, 12, sampler=Sampler(**how))[0]
