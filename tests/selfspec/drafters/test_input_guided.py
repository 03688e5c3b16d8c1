"""Input-guided drafts: the rest of the prompt, anchored again after a divergence."""

from __future__ import annotations

import pytest
import torch

from selfspec.controllers import FixedK
from selfspec.drafters import InputDrafter, Limit
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

ENDS = frozenset([99])


def follow(prompt, answer, most=8):
    """The drafts for an answer that is known; none is verified by a model."""
    drafter = InputDrafter(FixedK(most))
    seq = SequenceState(list(prompt), len(answer), Sampler(), ENDS)
    drafter.begin(seq, ForwardOutput(None, torch.empty(1, 0, 1)))
    drafts, done = [], 0
    while seq.remaining:
        limit = Limit(min(most, seq.remaining - 1))
        (draft,) = drafter.propose([seq], [limit]) if limit.depth else [type(drafts[0])()]
        right = 0
        while right < len(draft) and draft.tokens[right] == answer[done + right]:
            right += 1
        tokens = seq.emit(answer[done : done + right + 1])
        drafter.observe(seq, Outcome(draft, tuple(range(right)), tokens, ForwardOutput(None, torch.empty(1, 0, 1))))
        drafts.append(draft)
        done += len(tokens)
    drafter.end(seq)
    return drafts


def test_a_copy_takes_a_pass_for_each_draft():
    text = list(range(10, 40))
    drafts = follow(text, text)
    assert [len(draft) for draft in drafts] == [8, 8, 8, 2]
    assert drafts[1].tokens == tuple(text[9:17])


@pytest.mark.parametrize(
    ("change", "drafted"),
    [
        (lambda text: [*text[:12], 50, *text[13:]], [8, 8, 0, 8, 6]),  # a token exchanged, and one to find the anchor
        (lambda text: [*text[:12], *text[14:]], [8, 8, 8, 5]),  # two left out: what comes instead is an anchor itself
        (lambda text: [*text[:12], 50, 51, *text[12:]], [8, 8, 0, 0, 8, 7]),  # two put in
    ],
)
def test_after_a_divergence_it_is_anchored_again(change, drafted):
    text = list(range(10, 40))
    assert [len(draft) for draft in follow(text, change(text))] == drafted


def test_of_several_places_the_longer_match_and_then_the_next_one_is_taken():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3, 6]
    assert follow(text, [9, 2, 3, 5, 9, 2, 3, 6])[1].tokens[:3] == (2, 3, 5)
    drafts = follow(text, [1, 2, 3, 4, 7, 2, 3, 5, 9, 2, 3, 6])
    assert any(draft.tokens[:4] == (3, 5, 9, 2) for draft in drafts)


def test_nothing_is_drafted_where_the_answer_left_the_input():
    assert [len(draft) for draft in follow([1, 2, 3], [7, 8, 7, 8])] == [3, 0, 0, 0]


def test_an_end_of_sequence_in_the_input_ends_the_draft():
    assert follow([1, 2, 99, 4, 5], [1, 2, 4, 5])[0].tokens == (1, 2, 99)
