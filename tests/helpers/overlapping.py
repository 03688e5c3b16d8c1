"""Rounds on the device, which a tape replays on a CPU, and the host's rounds that draft as these do."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from models import run
from tape import Tape, Waits, noted_reads, rounds_to_end

from selfspec.controllers import AdaptiveThreshold, FixedK, RateOptimal, StaticThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.drafters.tree_merge import merged
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.proposers.base import NO_PROPOSAL
from selfspec.runtime.device_rounds import LENGTHS
from selfspec.runtime.device_trees import MATCHED
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PROBABILITY, Confidence
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.draft_work import passes_of

PROMPT = [1, 4, 2, 9]
PATH = DraftPath(SkipSet((), (1,)), int8=SkipSet((0, 1, 2), (0, 2)), head="int8")
WORDS = DraftPath(SkipSet((), (1,)), (1, 2, 4, 5, 8, 9))
GAP = Confidence(bias=3.5, probability=0.4, gap=0.8)
CONTROLLERS = {
    **{f"{k} tokens": FixedK(k) for k in (*LENGTHS, 3, 7)},
    "static": StaticThreshold(0.6, 9),
    "adaptive": AdaptiveThreshold(0.4, target=0.5, step=0.9),
    "rate": RateOptimal(memory=0.8, strength=2.0),
}


def device(model, **options):
    """A runtime whose rounds are replayed by a tape."""
    return LeanRuntime(model, kernel=fake, recorder=Tape(), **options)


def host(model):
    """A runtime of passes without captures, so that rounds run on the host."""
    return LeanRuntime(model, kernel=fake)


class Lagging(LayerSkipDrafter):
    """Drafts on the host what a round on the device drafts: as planned before the last round was read."""

    plan = as_planned = None
    proposing = False

    def _plan(self, seq):
        self.plan = self.plan_round([seq], Limit(64), ahead=False)
        self.as_planned = copy.deepcopy(self.controller_of(seq))

    def controller_of(self, seq):
        return self.as_planned if self.proposing else super().controller_of(seq)

    def propose(self, seqs, limits):
        self.proposing = True
        drafts = super().propose(seqs, [Limit(min(limit.depth, self.plan.length), limit.nodes) for limit in limits])
        self.proposing = False
        return drafts

    def observe(self, seq, outcome):
        if self.plan is not None:  # not the first token, which comes with the prompt's pass
            work = passes_of([1] * self.plan.length)
            outcome = replace(outcome, draft=replace(outcome.draft, work=work))
        self._plan(seq)
        super().observe(seq, outcome)


def looked_up(text):
    """Return the tokens that followed an earlier occurrence of the text's end, repeated without end; none if none did.

    Of all ends of at most `MATCHED` tokens that occur earlier, the longest counts; of its occurrences, the latest.
    """
    for n in range(min(MATCHED, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return itertools.cycle(text[end:])
    return iter(())


class LaggingTree(Lagging):
    """Drafts the trees of rounds on the device, too: further candidates, and lookup tokens below the root."""

    def look_up(self, seq, max_tokens):
        return NO_PROPOSAL

    def _look_up(self, chain):
        return NO_PROPOSAL

    def propose(self, seqs, limits):
        drafts, plan, asked = [], self.plan, self.candidates
        self.candidates = plan.candidates
        chains = super().propose(seqs, limits)
        for seq, limit, chain in zip(seqs, limits, chains, strict=True):
            tokens = list(itertools.islice(looked_up(seq.tokens), min(plan.lookup or 0, limit.depth)))
            end = next((i for i, token in enumerate(tokens) if token in seq.ends), len(tokens))
            branch = Draft.chain(tokens[: end + 1], sources=["lookup"] * len(tokens[: end + 1]))
            tree = merged([replace(chain, q=None, q_row=(-1,) * len(chain)), branch], drawn=False)
            drafts.append(replace(tree, confidence=chain.confidence))
        self.candidates = asked
        return drafts


def compared(
    model,
    controller,
    sampler,
    *,
    path=PATH,
    room=24,
    prompt=PROMPT,
    confidence=PROBABILITY,
    on_host=Lagging,
    drafting=None,
    **options,
):
    """Decode both ways; return the runtime, the text and the outcomes of the device. `drafting`: of both drafters."""
    runtime, other = device(model), host(model)
    drafters = [
        kind(one, path, copy.deepcopy(controller), confidence=confidence, **(drafting or {}))
        for kind, one in ((LayerSkipDrafter, runtime), (on_host, other))
    ]
    (ours, rounds), (theirs, expected) = (
        run(one, drafter, prompt, room, sampler=sampler(), **options)
        for one, drafter in zip((runtime, other), drafters, strict=True)
    )
    assert ours == theirs
    if sampler().greedy or sampler().tied:  # else the text depends on the drafts
        assert ours == run(other, PlainDrafter(), prompt, room, sampler=sampler(), **options)[0]
    assert [one.draft.tokens for one in rounds] == [one.draft.tokens for one in expected]
    assert [(one.path, one.tokens) for one in rounds] == [(one.path, one.tokens) for one in expected]
    for one, its in zip(rounds, expected, strict=True):
        assert one.draft.confidence == pytest.approx(its.draft.confidence, rel=1e-9)
        assert (one.draft.sources, one.draft.parents) == (its.draft.sources, its.draft.parents)
        torch.testing.assert_close(one.step.logits, its.step.logits, atol=1e-9, rtol=1e-9)
        assert (one.p is None) == (its.p is None)
        if one.p is not None:
            torch.testing.assert_close(one.p, its.p, atol=1e-9, rtol=1e-9)
    states = [vars(drafter.controller_of(SequenceState([], 1, Sampler()))) for drafter in drafters]
    assert {name: repr(value) for name, value in states[0].items() if name[0] != "_"} == {
        name: repr(value) for name, value in states[1].items() if name[0] != "_"
    }
    assert len(rounds[0].draft) == 0  # the first token comes with the prompt's pass
    later = len(rounds) - 1
    assert runtime._recorder.replayed in (later, later + 1)  # one is discarded where the text ended early
    return runtime, ours, rounds


def assert_one_read_a_round(monkeypatch, runtime, drafter, prompt, sampler, rule=None):
    """Each round on the device transfers to the host once, and no operation waits for the device.

    `sampler` makes a sampler for each of two texts of 40 tokens; while the first is decoded, rounds are captured.
    """
    waits = Waits()
    run(runtime, drafter, prompt, 40, sampler=sampler(), rule=rule)  # captures, which read what they like
    reads = noted_reads(monkeypatch)
    seq = SequenceState(list(prompt), 40, sampler(), rule=rule)
    with Engine(runtime, drafter) as engine:
        engine.join(seq)
        engine.step()  # the first token, which the host chooses
        rounds = rounds_to_end(engine, reads, waits)
    assert waits.count == 0
    assert reads == ["tolist"] * rounds
