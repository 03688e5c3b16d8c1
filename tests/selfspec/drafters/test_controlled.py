"""Drafters with a controller: what they keep of each sequence."""

from __future__ import annotations

import pytest
import torch

from selfspec.controllers import FixedK
from selfspec.controllers.batch_scheduler import PRIOR_DRAFTS
from selfspec.drafters.controlled import ControlledDrafter
from selfspec.proposers.base import NO_PROPOSAL, ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

OUTPUT = ForwardOutput(None, torch.empty(1, 0, 1))


def test_the_first_token_of_a_draft_is_judged_by_its_own_sequences_drafts():
    drafter = ControlledDrafter(FixedK(2), ProposerChain())
    one, other = (SequenceState([0, 1], 9, Sampler()) for _ in range(2))
    for seq in one, other:
        drafter.begin(seq, OUTPUT)
    drafter.observe(one, Outcome(Draft.chain([3, 4], confidence=[0.9, 0.9]), (), (5,), OUTPUT))
    drafter.observe(other, Outcome(NO_DRAFT, (), (5,), OUTPUT))
    assert drafter.first_chance(one, 0.8) == pytest.approx(0.8 * PRIOR_DRAFTS / (PRIOR_DRAFTS + 1))
    assert drafter.first_chance(other, 0.8) == pytest.approx(0.8)
    drafter.observe(other, Outcome(Draft.chain([3, 4], confidence=[0.9, 0.9]), (0,), (3, 5), OUTPUT))
    assert drafter.first_chance(other, 0.8) == pytest.approx((0.8 * PRIOR_DRAFTS + 1) / (PRIOR_DRAFTS + 1))
    drafter.end(one)
    assert drafter.first_chance(one, 0.8) == 0.8


def test_proposers_have_read_the_prompt_before_the_first_draft():
    """Reading a long one takes as long as a pass, which the first draft would be charged with."""
    read = []

    class Reader:
        def append(self, token):
            read.append(token)

        def look_up(self, drafted, most):
            return NO_PROPOSAL

    class Reading:
        name = "reading"

        def reader(self):
            return Reader()

    drafter = ControlledDrafter(FixedK(2), ProposerChain([Reading()]))
    seq = SequenceState([3, 1, 4], 8, Sampler())
    drafter.begin(seq, ForwardOutput(None))
    assert read == [3, 1, 4]
    seq.tokens += (1,)
    drafter.look_up(seq, 2)
    assert read == [3, 1, 4, 1]


def test_a_text_that_was_interrupted_is_one_answer_once_it_ends():
    """A batch that is short of memory ends a sequence, and begins it again later."""
    learnt = []

    class Learning:
        name = "learning"
        learn = staticmethod(lambda prompt, answer: learnt.append((list(prompt), list(answer))))
        reader = staticmethod(lambda: Lookup().reader())

    drafter = ControlledDrafter(FixedK(2), ProposerChain([Learning()]))
    seq = SequenceState([0, 1], 3, Sampler())
    for token in (5, 6, 7):
        drafter.begin(seq, OUTPUT)
        seq.emit([token])
        drafter.end(seq)
    assert learnt == [([0, 1], [5, 6, 7])]
