"""Several drafters in one tree: what is one node, what stays two, and what each drafter is told of a round."""

from __future__ import annotations

import pytest
import torch
from models import plain, run, small
from toys import RandomTree, Scripted, Toy, oracle

from selfspec.basics.errors import SelfspecError
from selfspec.cli.profile_text import facts
from selfspec.controllers import FixedK, StaticThreshold
from selfspec.drafters import LayerSkipDrafter, LookupDrafter, MergedDrafter, PlainDrafter, RecycleDrafter, make_drafter
from selfspec.drafters.tree_merge import merged, reordered_outcome
from selfspec.profile.draft_spec import parse_draft
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import SkipSet
from selfspec.types.draft_work import DraftCall

VOCABULARY, PROMPT, NEW = 11, [1, 4, 2, 9], 30
Q = torch.eye(VOCABULARY, dtype=torch.float64)


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, seed=2))


def paths(draft):
    return {tuple(draft.tokens[i] for i in draft.path_to(node)) for node in range(len(draft))}


def test_what_is_proposed_twice_is_one_node():
    one = Draft.chain([3, 5, 7], work=((DraftCall("a"), 2),), sources=["a"] * 3)
    other = Draft(
        (3, 4, 5, 9), (-1, -1, 0, 2), None, (-1,) * 4, (), ((DraftCall("a"), 1), (DraftCall("b"), 1)), ("b",) * 4
    )
    both = merged([one, NO_DRAFT, other], drawn=True)
    assert both.tokens == (3, 5, 7, 4, 9)
    assert both.parents == (-1, 0, 1, -1, 1)
    assert both.sources == ("a", "a", "a", "b", "b")
    assert both.work == ((DraftCall("a"), 3), (DraftCall("b"), 1))
    assert paths(both) == paths(one) | paths(other)


def test_a_drawn_token_stays_a_node_and_what_is_below_it_is_tried_below_the_first():
    one, other = Draft.chain([3, 5], q=Q[[3, 5]]), Draft.chain([3, 6], q=Q[[3, 6]])
    both = merged([one, other], drawn=True)
    assert both.tokens == (3, 5, 3, 6)
    assert both.parents == (-1, 0, -1, 0)
    assert both.q_row == (0, 1, 2, 3)
    assert torch.equal(both.q, Q[[3, 5, 3, 6]])
    assert merged([one, other], drawn=False).tokens == (3, 5, 6)  # where q decides nothing


def test_a_guess_that_was_drawn_before_it_adds_nothing():
    assert merged([Draft.chain([3], q=Q[[3]]), Draft.chain([3, 6])], drawn=True).tokens == (3, 6)
    assert merged([Draft.chain([3, 6]), Draft.chain([3], q=Q[[3]])], drawn=True).tokens == (3, 6, 3)


def test_one_draft_stays_what_it_is():
    one = Draft.chain([3], confidence=[0.5])
    assert merged([NO_DRAFT, one], drawn=True) is one
    assert merged([NO_DRAFT, NO_DRAFT], drawn=True) is NO_DRAFT


def test_each_drafter_is_told_of_its_own_nodes_and_of_all_rows():
    one, other = Draft.chain([3, 5], confidence=[0.9, 0.8]), Draft((4, 3, 7), (-1, -1, 1), None, (-1,) * 3)
    both = merged([one, other], drawn=True)
    logits = torch.arange(1.0 + len(both))[None, :, None]
    outcome = Outcome(both, both.path_to(3), (3, 7, 1), ForwardOutput(logits, {2: logits}), logits[0])
    assert [both.tokens[i] for i in outcome.path] == [3, 7]
    for draft in (one, other):
        seen = reordered_outcome(draft, outcome)
        assert seen.draft.tokens[: len(draft)] == draft.tokens
        assert seen.draft.confidence == draft.confidence
        assert paths(seen.draft) == paths(both)
        assert [seen.draft.tokens[i] for i in seen.path] == [3, 7]
        assert seen.tokens == outcome.tokens
        for rows in (seen.step.logits[0, :, 0], seen.step.hidden[2][0, :, 0], seen.p[:, 0]):
            found = [0, *(int(row) for row in rows[1:])]
            assert [both.tokens[row - 1] for row in found[1:]] == list(seen.draft.tokens)
            assert [found[i + 1] for i in seen.path] == [i + 1 for i in outcome.path]


class Told(FixedK):
    """A fixed length that keeps what it observed."""

    seen: list

    def observe(self, confidences, accepted, *, candidates=None, other=False):
        self.seen.append((len(confidences), accepted, candidates, other))

    def start(self):
        return self


def test_a_controller_counts_its_own_tokens_that_were_right(runtime):
    """What another drafter got right beyond them is not theirs."""
    controller = Told(2)
    controller.seen = []
    text = [*PROMPT, *plain(runtime, PROMPT, NEW)]
    path = LayerSkipDrafter(runtime, SkipSet(), controller)  # the model itself: always right
    run(runtime, MergedDrafter([path, oracle(PROMPT, text[len(PROMPT) :])]), PROMPT, NEW)
    assert controller.seen[0][:2] == (2, 2)
    assert controller.seen[0][3]  # the third token was the other's
    assert all(drafted == accepted for drafted, accepted, _, _ in controller.seen)


def test_it_accepts_what_the_better_of_its_drafters_would(runtime):
    text = plain(runtime, PROMPT, NEW)
    right, wrong = oracle(PROMPT, text), Scripted(lambda tokens: [0, 0, 0], 3)
    tokens, outcomes = run(runtime, MergedDrafter([wrong, right]), PROMPT, NEW)
    assert tokens == text
    assert len(outcomes) == len(run(runtime, right, PROMPT, NEW)[1])


def test_the_first_leave_less_room_for_the_others(runtime):
    limits = []

    class Asked(Toy):
        def __init__(self, tokens):
            self.tokens = tokens

        def within(self, seq, limit):
            limits.append(limit)
            return Draft.chain([1] * self.tokens)

    seq = SequenceState(list(PROMPT), NEW, Sampler())
    MergedDrafter([Asked(2), Asked(3), Asked(2), Asked(1)]).propose([seq], [Limit(4, 7)])
    assert limits == [Limit(4, 7), Limit(4, 5), Limit(4, 2)]


def test_it_learns_as_each_would_alone(runtime):
    """Recycling reads the model's own logits, wherever its nodes stand in the tree."""
    alone, beside = (RecycleDrafter(FixedK(3), candidates=3) for _ in range(2))
    run(runtime, MergedDrafter([RandomTree(VOCABULARY, (2, 1)), beside]), PROMPT, NEW)
    run(runtime, alone, PROMPT, NEW)
    assert beside._shared.after == alone._shared.after


def test_no_drafter_and_drafters_that_draft_nothing(runtime):
    with pytest.raises(ValueError, match="at least one"):
        MergedDrafter([])
    none = MergedDrafter([PlainDrafter(), PlainDrafter()])
    assert not none.drafts
    assert none.max_work(Limit(4)) == ()


MERGED = {
    "kind": "merged",
    "drafters": [
        {"kind": "lookup"},
        {"kind": "layer-skip", "skip": {"attention": [1], "mlp": [0]}, "controller": {"name": "static"}},
    ],
}


def test_a_profile_describes_it(runtime):
    profile = Profile(model=runtime.skeleton.identity, draft=MERGED)
    assert Profile.model_validate(profile.model_dump(mode="json")) == profile
    assert profile.path.skip == SkipSet((1,), (0,))
    assert profile.drafts
    assert profile.draft.summary.startswith("one tree of several: lookup alone; proposers: lookup; ")
    drafter = make_drafter(runtime, profile)
    assert [type(of) for of in drafter.drafters] == [LookupDrafter, LayerSkipDrafter]
    assert isinstance(drafter.drafters[1].controller, StaticThreshold)
    assert run(runtime, drafter, PROMPT, NEW)[0] == plain(runtime, PROMPT, NEW)


def test_a_person_reads_what_is_merged(runtime):
    draft = {**MERGED, "drafters": [{"kind": "lookup"}, {"kind": "recycle"}]}
    told = facts(Profile(model=runtime.skeleton.identity, draft=draft))
    assert told["draft.drafters"] == ["lookup alone; proposers: lookup; drafts by recycle"]
    told = facts(Profile(model=runtime.skeleton.identity, draft={"kind": "lookup"}))
    assert told["draft.proposers"] == ["lookup"]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({**MERGED, "drafters": MERGED["drafters"][:1]}, "at least 2"),
        ({**MERGED, "drafters": [{"kind": "lookup"}, {"kind": "gueses"}]}, "'gueses' is not known"),
        (
            {**MERGED, "drafters": [{"kind": "lookup"}, {"kind": "layer-skip", "skip": {"attention": [99]}}]},
            "layer 99|attention.*99",
        ),
    ],
)
def test_a_wrong_one_is_refused(runtime, draft, message):
    with pytest.raises((SelfspecError, ValueError), match=message):
        Profile(model=runtime.skeleton.identity, draft=parse_draft(draft))
