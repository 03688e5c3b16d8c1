"""The guard's bound with a clock of our own, and its own drafts through the loop."""

from __future__ import annotations

import pytest
import torch
from amount import examples
from fake_costs import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from models import plain, run, small
from toys import RandomTree

from selfspec.controllers import FixedK, StaticThreshold
from selfspec.drafters import Guard, LayerSkipDrafter, PlainDrafter
from selfspec.drafters.guard import _RoundTimes
from selfspec.models.low_precision import fake
from selfspec.runtime.device_rounds import LENGTHS, RoundPlan
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import Confidence, PayoffModel
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.draft_work import LOOKUP_WORK, NO_WORK, DraftCall, steps_of

STEP = ForwardOutput(None)


class Chain:
    """Drafts as many tokens as it may, `seconds` each."""

    hidden = ()
    drafts = True

    def __init__(self, clock, seconds, longest=12):
        self.clock, self.seconds, self.longest = clock, seconds, longest
        self.made = 0

    def begin(self, seq, prefill):
        pass

    def propose(self, seqs, limits):
        (limit,) = limits
        n = min(self.longest, limit.depth)
        self.clock.now += n * self.seconds
        self.made += n > 0
        return [Draft.chain([0] * n, confidence=[0.5] * n, work=steps_of(n))] if n else [NO_DRAFT]

    def plan_round(self, seqs, limit, *, ahead):
        return RoundPlan(next((n for n in reversed(LENGTHS) if n <= min(limit.depth, self.longest)), 0))

    def max_work(self, limit):
        return steps_of(limit.depth)

    def observe(self, seq, outcome):
        pass

    def end(self, seq):
        pass


def decode(guard, clock, tokens, *, accepted, plain=1.0, wide=1.3, row=0.03, sampler=None, speed=lambda n: 1.0):
    """The loop without a model: `accepted(n)` of a draft made after n tokens; seconds over plain decoding's own."""
    seq = SequenceState([0], tokens, sampler or Sampler())
    guard.begin(seq, STEP)
    usual = start = 0.0
    start = clock.now
    drafter = guard.drafter if isinstance(guard, Guard) else guard
    base, lost = drafter.seconds, []
    while seq.remaining:
        at = len(seq.tokens) - 1
        drafter.seconds = base * speed(at)
        (draft,) = guard.propose([seq], [Limit(seq.remaining - 1)]) if seq.remaining > 1 else (NO_DRAFT,)
        clock.now += speed(at) * (plain if not len(draft) else wide + row * len(draft))
        kept = min(accepted(at), len(draft), seq.remaining - 1)
        emitted = (0,) * (kept + 1)
        usual += plain * speed(at) * len(emitted)
        seq.tokens += emitted
        seq.remaining -= len(emitted)
        guard.observe(seq, Outcome(draft, tuple(range(kept)), emitted, STEP))
        lost.append(clock.now - start - usual)
    guard.end(seq)
    drafter.seconds = base
    return clock.now - start, usual, lost


def test_what_long_texts_took_does_not_keep_the_next_text_from_drafting():
    """At a long context everything takes longer; and wide drafts that would not fit do not rule out narrow ones."""
    clock = Clock()
    guard = Guard(Chain(clock, 0.2, 16), clock=clock)
    decode(guard, clock, 60, accepted=lambda n: 16, row=0.15, speed=lambda n: 3.0)
    took, usual, _ = decode(guard, clock, 60, accepted=lambda n: 16, row=0.15)
    assert took < 0.6 * usual


def decode_ahead(planner, clock, tokens, *, accepted, plain=1.0, wide=1.3, row=0.03, sampler=None):
    """The same on a device, where each round is launched before the last one is read; and the lengths of the rounds."""
    seq, lengths, end = SequenceState([0], tokens, sampler or Sampler()), [], clock.now
    planner.begin(seq, STEP)
    start, drafter = clock.now, planner.drafter if isinstance(planner, Guard) else planner

    def launched(ahead):
        nonlocal end
        n = planner.plan_round([seq], Limit(64), ahead=ahead).length
        lengths.append(n)
        end = max(end, clock.now) + (n * drafter.seconds + wide + row * n if n else plain)
        return n, end

    flight = launched(False)
    while seq.remaining:
        following = launched(True)
        length, clock.now = flight
        drafted = min(length, seq.remaining - 1)
        kept = min(accepted, drafted)
        draft = Draft.chain([0] * drafted, confidence=[0.5] * drafted, work=steps_of(length)) if drafted else NO_DRAFT
        planner.observe(seq, Outcome(draft, tuple(range(kept)), seq.emit([0] * (kept + 1)), STEP))
        flight = following
    planner.end(seq)
    return clock.now - start, plain * tokens, lengths


@pytest.mark.parametrize("seconds", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("tokens", "share"), [(100, 1.05), (500, 1.03)])
@pytest.mark.parametrize("seed", [None, 3], ids=["by clock", "by costs"])
def test_on_a_device_a_draft_that_is_never_right_costs_little(seconds, tokens, share, seed):
    clock, sampler = Clock(), Sampler(temperature=1.0 if seed else 0.0, seed=seed)
    payoff = PayoffModel(seconds, rounds=(0.0, 1.0, *(1.3 + 0.03 * n for n in range(1, 65))))
    guard = Guard(Chain(clock, seconds), payoff=payoff if seed else None, clock=clock)
    took, usual, lengths = decode_ahead(guard, clock, tokens, accepted=0, sampler=sampler)
    assert usual < took <= share * usual
    assert sum(map(bool, lengths)) >= (1 if seconds > 0.5 else 2)  # it is tried, as far as the bound allows
    clock = Clock()
    alone, _, _ = decode_ahead(Chain(clock, seconds), clock, tokens, accepted=0)
    assert alone > 1.3 * usual


def test_a_planned_round_that_another_sequence_discards_is_not_timed():
    clock = Clock()
    guard, (one, other) = Guard(Chain(clock, 0.3), clock=clock), (SequenceState([0], 9, Sampler()) for _ in range(2))
    guard.begin(one, STEP)
    guard.plan_round([one], Limit(64), ahead=False)
    guard.begin(other, STEP)
    clock.now += 5
    guard.observe(other, Outcome(NO_DRAFT, (), other.emit([0]), STEP))  # its first token, without a round
    assert not any(times.plain for times in guard._round_times.values())


def test_on_a_device_a_draft_that_is_right_is_made():
    clock = Clock()
    took, usual, lengths = decode_ahead(Guard(Chain(clock, 0.3, 4), clock=clock), clock, 200, accepted=4)
    alone, _, _ = decode_ahead(Chain(clock, 0.3, 4), clock, 200, accepted=4)
    assert took < 1.1 * alone < 0.7 * usual
    assert lengths[:2] == [0, 0]  # how long a plain round takes is measured first


@pytest.mark.parametrize("seconds", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("tokens", "share"), [(100, 1.05), (500, 1.03)])
def test_a_draft_that_is_never_right_costs_little(seconds, tokens, share):
    clock = Clock()
    drafter = Chain(clock, seconds)
    took, usual, _ = decode(Guard(drafter, clock=clock), clock, tokens, accepted=lambda n: 0)
    assert usual < took <= share * usual
    assert drafter.made >= 2  # it is tried again, as far as the bound allows
    clock = Clock()
    alone, _, _ = decode(Chain(clock, seconds), clock, tokens, accepted=lambda n: 0)
    assert alone > 1.3 * usual


def test_a_draft_that_is_right_is_made():
    clock = Clock()
    took, usual, _ = decode(Guard(Chain(clock, 0.3, 4), clock=clock), clock, 200, accepted=lambda n: 4)
    alone, _, _ = decode(Chain(clock, 0.3, 4), clock, 200, accepted=lambda n: 4)
    assert took < 1.08 * alone < 0.7 * usual


def test_a_draft_that_turns_wrong_never_takes_back_more_than_was_gained():
    clock = Clock()
    took, usual, _ = decode(Guard(Chain(clock, 0.5), clock=clock), clock, 400, accepted=lambda n: 12 * (n < 60))
    assert took <= 1.03 * usual


@pytest.mark.parametrize("slower", [0.5, 2.0, 5.0])
def test_a_machine_that_changes_its_speed_halfway(slower):
    """Drafts that lose a little, and then a machine on which everything takes longer, or shorter."""
    for accepted in (0, 1):
        clock = Clock()
        guard = Guard(Chain(clock, 0.5, 4), clock=clock)
        took, usual, _ = decode(
            guard, clock, 500, accepted=lambda n, a=accepted: a, speed=lambda n: 1.0 if n < 250 else slower
        )
        assert took <= usual + 2.5 * max(1, slower) + 0.025 * usual
        assert slower < 1 or took <= 1.03 * usual


@settings(max_examples=examples(150), deadline=None)
@given(
    st.floats(0.05, 1.0),
    st.floats(1.0, 1.8),
    st.floats(0.0, 0.05),
    st.integers(1, 12),
    st.lists(st.integers(0, 12), min_size=1, max_size=30),
    st.integers(20, 300),
)
def test_the_bound_holds_after_every_round(seconds, wide, row, longest, pattern, tokens):
    """Whatever the costs (verification at most twice a plain step) and whatever is accepted when."""
    clock = Clock()
    guard = Guard(Chain(clock, seconds, longest), clock=clock)
    wide = min(wide, 2.0 - row)
    _, _, lost = decode(guard, clock, tokens, accepted=lambda n: pattern[n % len(pattern)], wide=wide, row=row)
    assert all(over <= 2.5 + 0.025 * (tokens + 1) + 1e-9 for over in lost)


def test_a_machine_that_is_faster_when_the_next_sequence_begins():
    """What a plain round took before is too much to credit drafts with now; the first verification shows it."""
    clock = Clock()
    guard = Guard(Chain(clock, 0.5, 4), clock=clock)
    for number in range(6):
        took, usual, _ = decode(
            guard, clock, 100, accepted=lambda n: 0, speed=lambda n, m=number: 2.0 if n >= 50 and m < 5 else 1.0
        )
        assert took <= usual + 2.5 * 2 + 0.025 * usual  # plain steps of the slower half


class Changing(Chain):
    """Two tokens for eight rounds, then twelve for eight, by turns."""

    def propose(self, seqs, limits):
        self.longest = 12 if self.made % 16 >= 8 else 2
        return super().propose(seqs, limits)


def test_longer_drafts_are_no_slower_machine():
    """Verifying twelve tokens takes half as long again as two: no reason for further plain rounds."""
    clock = Clock()
    guard = Guard(Changing(clock, 0.1), clock=clock)
    plain = []
    see = _RoundTimes.see_plain
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_RoundTimes, "see_plain", lambda self, seconds: (plain.append(seconds), see(self, seconds)))
        decode(guard, clock, 600, accepted=lambda n: 12, wide=1.2, row=0.06)
    assert len(plain) <= 2 + 600 / 128 + 1


def test_after_128_drafted_tokens_a_plain_round_is_due():
    """Drafts that are all right leave no other reason for one, so that what a plain round takes stays known."""
    clock = Clock()
    drafter = Chain(clock, 0.1, 4)
    guard, plain = Guard(drafter, clock=clock), []
    see = _RoundTimes.see_plain
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_RoundTimes, "see_plain", lambda self, seconds: (plain.append(clock.now), see(self, seconds)))
        decode(guard, clock, 1000, accepted=lambda n: 4)
    first, later = plain[:2], plain[2:]
    assert len(first) == 2
    assert 1000 // (128 + 5 + 1) <= len(later) <= 1000 // 128 + 1


def test_verifying_that_takes_less_than_a_plain_round_tells_what_one_takes():
    """The first two rounds were disturbed: drafts are not credited with that for long, nor held back."""
    clock = Clock()
    guard = Guard(Chain(clock, 0.1, 4), clock=clock)
    decode(guard, clock, 60, accepted=lambda n: 4, speed=lambda n: 5.0 if n < 2 else 1.0)
    assert guard.round_times.step <= 1.5
    assert guard.drafter.made >= 10


def test_one_disturbed_round_does_not_end_drafting():
    clock = Clock()
    drafter = Chain(clock, 0.3, 4)
    decode(Guard(drafter, clock=clock), clock, 300, accepted=lambda n: 4, speed=lambda n: 30.0 if n == 52 else 1.0)
    assert drafter.made > 30


class Cold(Chain):
    """Drafts of which the first one takes longer, as its weights are in no cache."""

    def propose(self, seqs, limits):
        usual = self.seconds
        self.seconds = usual if self.made else 1.7
        drafts = super().propose(seqs, limits)
        self.seconds = usual
        return drafts


def test_a_first_draft_that_is_slow_and_wrong_does_not_end_those_of_the_next_text():
    clock = Clock()
    drafter = Cold(clock, 0.3, 1)
    guard = Guard(drafter, clock=clock)
    decode(guard, clock, 4, accepted=lambda n: 0)
    assert drafter.made == 1
    decode(guard, clock, 32, accepted=lambda n: 1)
    assert drafter.made > 10


@pytest.mark.parametrize("stall", [10.0, 1000.0])
def test_a_machine_that_stalls_does_not_end_the_drafts_of_a_short_text(stall):
    """Plain decoding would have stalled as well, so the stall is not what drafting lost."""
    clock = Clock()
    drafter = Chain(clock, 0.3, 4)
    decode(Guard(drafter, clock=clock), clock, 64, accepted=lambda n: 4, speed=lambda n: stall if 30 <= n < 35 else 1.0)
    undisturbed = Chain(Clock(), 0.3, 4)
    decode(Guard(undisturbed, clock=undisturbed.clock), undisturbed.clock, 64, accepted=lambda n: 4)
    assert drafter.made >= undisturbed.made - 1


@pytest.mark.parametrize("slower", [3.0, 20.0])
def test_drafts_that_get_slower_for_good_are_charged_from_the_second_round_on(slower):
    """Only drafts take longer, not plain rounds: no stall of the machine."""
    clock = Clock()
    drafter = Chain(clock, 0.2, 4)
    guard = Guard(drafter, clock=clock)
    decode(guard, clock, 60, accepted=lambda n: 0)
    drafter.seconds = 0.2 * slower
    took, usual, _ = decode(guard, clock, 300, accepted=lambda n: 0)
    rounds = 2 * (4 * drafter.seconds + 1.5)  # seconds of two rounds that were charged less
    assert took <= 1.025 * usual + 2.5 + rounds


class BusyAtFirst(Chain):
    """The first drafts take 40 times as long, as if other programs had run or weights had been prepared."""

    def propose(self, seqs, limits):
        drafts = super().propose(seqs, limits)
        self.clock.now += 40.0 * (bool(len(drafts[0])) and self.made <= 3)
        return drafts


def test_drafts_timed_on_a_busy_machine_do_not_end_drafting_for_good():
    """In short texts too, none of which saves up the time that such a draft would need."""
    clock = Clock()
    guard = Guard(BusyAtFirst(clock, 0.2), clock=clock)
    for _ in range(8):
        decode(guard, clock, 48, accepted=lambda n: 12)
    took, usual, _ = decode(guard, clock, 48, accepted=lambda n: 12)
    assert took < 0.6 * usual


def test_drafts_timed_on_a_busy_machine_do_not_end_rounds_on_a_device_for_good():
    clock = Clock()
    guard = Guard(Chain(clock, 0.2, 4), clock=clock)
    decode_ahead(guard, clock, 48, accepted=4)
    for known in guard._round_times[1].parts.values():
        known.extend([40.0] * known.maxlen)
    for _ in range(8):
        decode_ahead(guard, clock, 48, accepted=4)
    took, usual, _ = decode_ahead(guard, clock, 48, accepted=4)
    assert took < 0.8 * usual


def test_drafts_that_stay_slow_are_tried_again_ever_more_rarely():
    clock = Clock()
    chain = Chain(clock, 5.0)
    guard = Guard(chain, clock=clock)
    for _ in range(100):
        decode(guard, clock, 48, accepted=lambda n: 0)
    assert chain.made <= 1 + 7  # 4,800 tokens: after 32, 64, ... denied rounds


def test_what_it_knows_of_the_machine_outlasts_a_sequence():
    clock = Clock()
    drafter = Chain(clock, 0.3, 4)
    guard = Guard(drafter, clock=clock)
    for _ in range(3):
        decode(guard, clock, 3, accepted=lambda n: 4)
    assert drafter.made == 2  # the first two rounds ever are plain


def test_with_a_seed_the_clock_is_not_read():
    clock = Clock()

    def broken():
        raise AssertionError("read")

    guard = Guard(Chain(clock, 0.3, 4), clock=broken)
    seeded = Sampler(temperature=1.0, seed=1)
    for payoff in (None, PayoffModel(0.3)):
        guard.payoff = payoff
        guard._clock = clock
        decode(guard, clock, 50, accepted=lambda n: 4, sampler=seeded)
    results = []
    for speed in (1.0, 7.0):
        drafter = Chain(clock, 0.3, 4)
        guard = Guard(drafter, payoff=PayoffModel(0.3), clock=clock)
        decode(guard, clock, 100, accepted=lambda n: n % 3, sampler=seeded, speed=lambda n, s=speed: s)
        results.append(drafter.made)
    assert results[0] == results[1] > 0


def test_with_a_seed_a_wrong_draft_is_bounded_by_the_outlook():
    clock = Clock()
    payoff = PayoffModel(0.5, tuple(1.3 + 0.03 * (w - 1) if w > 1 else 1.0 for w in range(66)))
    guard = Guard(Chain(clock, 0.5), payoff=payoff, clock=clock)
    took, usual, _ = decode(guard, clock, 100, accepted=lambda n: 0, sampler=Sampler(temperature=1.0, seed=1))
    assert took <= 1.05 * usual


def test_it_changes_no_text():
    """Through the real loop and clock: layer skip and a random tree, guarded."""
    torch.set_num_threads(1)
    runtime = LeanRuntime(small(), kernel=fake)
    low = DraftPath(SkipSet((1,)), int8=SkipSet((0,), (1, 2)), head="int8")
    quantized_drafts = LayerSkipDrafter(runtime, low, StaticThreshold(0.3, 5), confidence=Confidence(gap=1.0))
    for drafter in (LayerSkipDrafter(runtime, SkipSet((1,), (2,)), FixedK(3)), quantized_drafts, RandomTree(11)):
        for prompt in ([1, 2, 3], [4]):
            new, outcomes = run(runtime, Guard(drafter), prompt, 40)
            assert new == plain(runtime, prompt, 40)
            assert len(outcomes) <= 40
    seeded = [
        run(runtime, guarded, [1, 2], 30, sampler=Sampler(temperature=1.0, seed=3))[0]
        for guarded in (
            PlainDrafter(),
            Guard(LayerSkipDrafter(runtime, SkipSet((1,)), FixedK(2))),
            Guard(quantized_drafts),
        )
    ]
    assert seeded[0] == seeded[1] == seeded[2]


def test_room_is_given_back():
    """Also where drafting fails."""

    class Broken(Chain):
        def propose(self, seqs, limits):
            raise RuntimeError("broken")

    clock = Clock()
    guard = Guard(Broken(clock, 0.1), clock=clock)
    seq = SequenceState([0], 50, Sampler())
    guard.begin(seq, STEP)
    for _ in range(2):
        guard.round_times.see_plain(1.0)
    with pytest.raises(RuntimeError, match="broken"):
        guard.propose([seq], [Limit(49)])
    assert seq.remaining == 50


def test_rounds_that_ask_for_no_draft_are_not_counted():
    """The loop's own plain rounds: the first and the last."""
    runtime = LeanRuntime(small())
    guard = Guard(LayerSkipDrafter(runtime, SkipSet((1,), (2,)), FixedK(3)))
    for room in (1, 2, 3, 20):
        assert run(runtime, guard, [1, 2, 3], room)[0] == plain(runtime, [1, 2, 3], room)


def test_a_round_that_failed_is_not_timed_by_the_first_round_of_a_sequence_that_begins_again():
    clock = Clock()
    guard = Guard(Chain(clock, 1.0), clock=clock)
    seq = SequenceState([0], 50, Sampler())
    guard.begin(seq, STEP)
    guard.propose([seq], [Limit(49)])  # and what follows in this round fails
    guard.end(seq)
    guard.begin(seq, STEP)
    clock.now += 100.0
    guard.observe(seq, Outcome(NO_DRAFT, (), seq.emit([0]), STEP))  # the first round asks for no draft
    assert not guard.round_times.plain


class Wide(Chain):
    """Drafts one token with as many other candidates as it may."""

    def propose(self, seqs, limits):
        return [Draft((0,) * limit.nodes, (-1,) * limit.nodes, None, (-1,) * limit.nodes) for limit in limits]

    def max_work(self, limit):
        return NO_WORK


def test_with_a_seed_every_row_that_is_verified_is_budgeted():
    """A round costs a plain step and a tenth more for each row: candidates that bring nothing stay within the bound."""
    payoff = PayoffModel(0.0, tuple(1 + 0.1 * max(rows - 1, 0) for rows in range(66)))
    guard = Guard(Wide(Clock(), 0.0), payoff=payoff)
    seq = SequenceState([0], 200, Sampler(temperature=1.0, seed=1))
    guard.begin(seq, STEP)
    lost, rows = 0.0, []
    while seq.remaining:
        (draft,) = guard.propose([seq], [Limit(seq.remaining - 1)]) if seq.remaining > 1 else (NO_DRAFT,)
        rows.append(len(draft))
        lost += payoff.rounds[1 + len(draft)] - 1  # nothing is accepted
        guard.observe(seq, Outcome(draft, (), seq.emit([0]), STEP))
        assert lost <= 1.65 + 0.015 * len(seq.tokens) + 1e-9
    assert rows[0] == 16  # 1.665 plain steps may be lost in the first round
    assert sum(rows) > 20


class Parts(Chain):
    """Looks up for next to nothing, then drafts three tokens at once; says what it took."""

    LOOKUP, WIDE = DraftCall("lookup"), DraftCall("draft step", 3)

    def propose(self, seqs, limits):
        self.clock.now += 0.01 + 2 * self.seconds
        self.made += 1
        return [Draft.chain([0] * min(2, limits[0].depth), work=((self.LOOKUP, 1), (self.WIDE, 2)))]

    def max_work(self, limit):
        return ((self.LOOKUP, 1), (self.WIDE, limit.depth))


@pytest.mark.parametrize("tokens", [100, 500])
def test_the_bound_holds_for_work_of_several_parts(tokens):
    clock = Clock()
    drafter = Parts(clock, 0.4)
    took, usual, _ = decode(Guard(drafter, clock=clock), clock, tokens, accepted=lambda n: 0)
    assert usual < took <= (1.05 if tokens == 100 else 1.03) * usual
    assert drafter.made >= 2


def test_several_parts_are_priced_apart_by_what_they_were_known_to_take():
    prices = _RoundTimes(step=1.0)
    lookup, step = DraftCall("lookup"), DraftCall("draft step")
    prices.see_drafted(((step, 2),), 0.8, 1.2)
    assert prices.part(step) == pytest.approx(0.4)
    prices.see_drafted(((lookup, 1), (step, 2)), 0.9, 1.2)  # a lookup: 0.25 of a plain step at first
    assert (prices.part(lookup), prices.part(step)) == (pytest.approx(0.9 * 5 / 21), pytest.approx(0.9 * 8 / 21))
    for _ in range(8):
        prices.see_drafted(((lookup, 1),), 0.01, 1.2)
        prices.see_drafted(((step, 1),), 0.4, 1.2)
    assert prices.draft(((lookup, 1), (step, 3))) == pytest.approx(0.01 + 1.2)


class Lookups(Chain):
    """Drafts tokens, and looks up tokens, which takes `lookup` seconds and finds `found` tokens."""

    looked_up, lookup, found = 0, 0.0, 4

    def propose(self, seqs, limits):
        (limit,) = limits
        if limit.depth or not limit.lookup:
            return super().propose(seqs, limits)
        self.looked_up += 1
        self.clock.now += self.lookup
        if not self.found:
            return [NO_DRAFT]
        return [Draft.chain([1] * min(4, limit.lookup), work=LOOKUP_WORK)]

    def max_work(self, limit):
        return LOOKUP_WORK if limit.lookup and not limit.depth else super().max_work(limit)


@pytest.mark.parametrize("seed", [None, 3], ids=["by clock", "by costs"])
def test_without_time_for_a_draft_pass_tokens_are_looked_up(seed):
    clock, sampler = Clock(), Sampler(temperature=1.0 if seed else 0.0, seed=seed)
    rounds = (0.0, 1.0, *(1.2 + 0.03 * n for n in range(1, 65)))
    drafter = Lookups(clock, 1.4)
    guard = Guard(drafter, payoff=PayoffModel(1.4, rounds=rounds) if seed else None, clock=clock)
    took, usual, _ = decode(guard, clock, 100, accepted=lambda n: 0, wide=1.2, sampler=sampler)
    assert usual < took <= 1.05 * usual
    assert drafter.looked_up


def test_rounds_of_lookup_tokens_alone_do_not_keep_drafting_denied():
    """A draft pass that was slow when it was timed is tried again, although lookups fit all the time."""
    clock = Clock()
    drafter, made = Lookups(clock, 9.0), []
    guard = Guard(drafter, clock=clock)
    decode(guard, clock, 40, accepted=lambda n: 4, speed=lambda n: 1.0)
    made.append(drafter.made)
    drafter.seconds = 0.1
    decode(guard, clock, 400, accepted=lambda n: 4)
    made.append(drafter.made)
    assert 0 < made[0] < made[1] - 10
    assert drafter.looked_up


@pytest.mark.parametrize("seconds", [0.01, 0.05, 0.3])
@pytest.mark.parametrize(("tokens", "share"), [(100, 1.05), (500, 1.03)])
def test_lookups_that_find_nothing_are_charged(seconds, tokens, share):
    clock = Clock()
    drafter = Lookups(clock, 1.4)
    drafter.lookup, drafter.found = seconds, 0
    took, usual, _ = decode(Guard(drafter, clock=clock), clock, tokens, accepted=lambda n: 0)
    assert usual < took <= share * usual
    assert drafter.looked_up


class Lockstep(Chain):
    def propose(self, seqs, limits):
        deepest = max(min(4, limit.depth) for limit in limits)
        self.clock.now += deepest * self.seconds
        self.made += 1
        return [Draft.chain([0] * min(4, limit.depth), work=steps_of(min(4, limit.depth))) for limit in limits]


def rounds_of_three(guard, clock, right):
    """A hundred rounds of three sequences, some of which are always right; tokens of each, after each round."""
    seqs = [SequenceState([0], 1000, Sampler()) for _ in range(3)]
    for seq in seqs:
        guard.begin(seq, STEP)
    for _ in range(100):
        drafts = guard.propose(seqs, [Limit(seq.remaining - 1) for seq in seqs])
        widest = max(map(len, drafts))
        clock.now += 1.0 if not widest else 1.3 + 0.03 * widest
        for seq, draft, always in zip(seqs, drafts, right, strict=True):
            kept = len(draft) if always else 0
            guard.observe(seq, Outcome(draft, tuple(range(kept)), seq.emit([0] * (kept + 1)), STEP))
        yield [len(seq.tokens) - 1 for seq in seqs]


def test_of_sequences_that_take_rounds_together_each_keeps_the_bound():
    """Three of them, one always right and two never: against plain rounds of three, none is later than the bound."""
    clock = Clock()
    guard = Guard(Lockstep(clock, 0.3), clock=clock)
    for tokens in rounds_of_three(guard, clock, (True, False, False)):
        assert clock.now <= 1.05 * min(tokens) + 2.5  # each token is worth a plain round of three
    assert guard.drafter.made >= 2


@pytest.mark.parametrize("right", [(False, False, False), (True, False, False), (True, True, True)])
def test_bound_together_what_one_gains_pays_for_the_others(right):
    """All tokens together are never later than the bound; where drafts pay on the whole, they go on."""
    clock = Clock()
    guard = Guard(Lockstep(clock, 0.1), clock=clock)
    guard.bound_together(True)
    for tokens in rounds_of_three(guard, clock, right):
        assert clock.now <= 1.05 * sum(tokens) / 3 + 2.5
    assert (guard.drafter.made > 80) == any(right)
    alone = Guard(Lockstep(clock, 0.1), clock=clock)
    assert len([*rounds_of_three(alone, clock, right)]) == 100
    assert (alone.drafter.made > 80) == all(right)


class OneByOne(Chain):
    """Drafts for one sequence after the other, so that what each may spend adds up."""

    def propose(self, seqs, limits):
        lengths = [min(self.longest, limit.depth) for limit in limits]
        self.clock.now += sum(lengths) * self.seconds
        self.made += 1
        return [Draft.chain([0] * n, confidence=[0.5] * n, work=steps_of(n)) if n else NO_DRAFT for n in lengths]


@pytest.mark.parametrize("seconds", [0.1, 0.3])
def test_sequences_that_draft_together_share_what_may_be_spent(seconds):
    """None of three is ever right: all of them together cost no more than one may."""
    clock = Clock()
    guard = Guard(OneByOne(clock, seconds), clock=clock)
    for tokens in rounds_of_three(guard, clock, (False, False, False)):
        assert clock.now <= 1.05 * min(tokens) + 2.5
    assert guard.drafter.made >= 2


class Forcing:
    """A guide that forces two tokens after every second token."""

    def propose(self, tokens, most):
        return [0, 0][:most] if len(tokens) % 2 else []


def test_rounds_that_a_guide_makes_wider_tell_nothing_of_plain_ones():
    clock = Clock()
    guard = Guard(Chain(clock, 0.1), clock=clock)
    seqs = [SequenceState([0], 50, Sampler()), SequenceState([0], 50, Sampler(), continuation=Forcing())]
    for seq in seqs:
        guard.begin(seq, STEP)
    for seconds, tokens in ((1.0, 2), (9.0, 2), (1.0, 2)):  # the second is asked of the first sequence alone
        guided = len(seqs[1].tokens) % 2 == 1
        seqs[1].tokens += [0] * (0 if guided else 1)
        guard.propose(seqs[:1], [Limit(49)])
        clock.now += seconds
        for seq in seqs:
            guard.observe(seq, Outcome(NO_DRAFT, (), (0,), STEP))
            seq.tokens += [0] * tokens
    assert 9.0 not in guard.round_times.plain


def test_no_width_is_expected_to_take_more_than_a_wider_one_that_was_timed():
    """Else drafts that fit are denied, until the bound has room for what is assumed of the first."""
    clock = Clock()
    guard = Guard(Chain(clock, 0.3), clock=clock)
    decode(guard, clock, 3, accepted=lambda n: 0)
    times = guard.round_times
    assert times.step == 1.0
    assert times.seconds_besides_drafting(4) == 1.6
    times.see_drafted(steps_of(8), 2.4, 1.05, 8)
    assert (times.seconds_besides_drafting(4), times.seconds_besides_drafting(8)) == (1.05, 1.05)
    assert times.seconds_besides_drafting(16) == 1.6
    for _ in range(2):  # a single one may be of a first call
        times.see_drafted(steps_of(2), 0.6, 1.3, 2)
        times.see_drafted(steps_of(15), 2.4, 1.2, 15)
    widths = [times.seconds_besides_drafting(nodes) for nodes in (4, 8, 16, 64)]
    assert widths == pytest.approx([1.3, 1.3, 1.3, 1.95])
    times.estimates.clear()
    times.rest.pop(8)
    assert times.seconds_besides_drafting(8) == 1.3  # no less than a narrower one
    times.rest.clear()
    times.estimates.clear()
    times.see_drafted(steps_of(8), 2.4, 1.05, 8)
    seconds = 1.05 + 2 * 0.3 + 1e-9
    assert guard._by_clock(seconds, Limit(8)).depth == 2


def test_a_guided_round_is_not_planned_for_the_device():
    """It would be taken for the round on the host that comes in its place."""
    clock = Clock()
    guard = Guard(Chain(clock, 0.1), clock=clock)
    seq = SequenceState([0], 20, Sampler(), continuation=object())
    guard.begin(seq, STEP)
    assert guard.plan_round([seq], Limit(8), ahead=False) is None
    assert not guard._planned
