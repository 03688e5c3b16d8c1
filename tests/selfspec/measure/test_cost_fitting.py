"""Costs measured: on a machine of known speed (a fake clock), and for real, where only what must hold is tested."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from model_types import tiny_model
from models import small

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.llm import local_costs
from selfspec.llm.llm import LLM
from selfspec.measure import cost_fitting as costing
from selfspec.measure.cost_fitting import measure_costs
from selfspec.measure.cost_sweeps import EFFORTS, GOOD, LENGTHS, LONG, effort_within, lower_quartile
from selfspec.runtime import open_runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.types.draft_path import FULL, LOW, MODES, DraftPath, SkipSet

BASE, ATTENTION, MLP, ROW, LOOP = 5.0, 2.0, 1.0, 3.0, 0.5


@pytest.fixture
def clock(monkeypatch):
    """A clock that only forwards and rounds move: by what runs, and by the rows of a full pass."""
    now = [0.0]
    forward = LeanRuntime.forward

    def timed(self, tokens, positions, *, path=None, **options):
        n, runs = tokens.shape[1], (path or self.compile(FULL)).blocks
        attention, mlp = (sum(block[part] is not None for block in runs) for part in (2, 3))
        now[0] += BASE + attention * ATTENTION + mlp * MLP + ROW * (n - 1)
        return forward(self, tokens, positions, path=path, **options)

    def commit(self, row, path):
        now[0] += LOOP
        start = self.length[row] + 1
        self.length[row] = start + len(path)

    monkeypatch.setattr(LeanRuntime, "forward", timed)
    monkeypatch.setattr("selfspec.runtime.cache.Cache.commit", commit)
    monkeypatch.setattr(costing.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture(scope="module")
def model():
    model = small(layers=6)
    model.config.max_position_embeddings = 1024
    return model


def test_plain_decoding_runs_where_its_step_takes_least(monkeypatch):
    """Each is timed several times, in turn, and its least time counts."""
    slow, fast = (LLM(small(layers=2), None) for _ in range(2))
    times = {slow.runtime: [0.3, 0.3, 0.3], fast.runtime: [0.9, 0.2, 0.9]}
    monkeypatch.setattr(costing, "forward_seconds", lambda runtime, *_, **__: times[runtime].pop())
    assert costing.fastest_plain([slow, fast]) is fast
    assert costing.fastest_plain([slow]) is slow


@pytest.mark.parametrize("path", [FULL, DraftPath(SkipSet((1,), ()))], ids=["full", "draft"])
def test_a_timed_pass_reads_its_own_tokens_alone(path):
    """A model with recurrent layers reads the context once, before the timed passes."""
    runtime = open_runtime(tiny_model("qwen3_5_text"))
    assert runtime.stateful
    runtime.compile(path)
    lengths = []
    hook = runtime.model.get_input_embeddings().register_forward_hook(lambda _, args, out: lengths.append(out.shape[1]))
    costing.forward_seconds(runtime, 20, rows=2, repeats=4, path=path)
    hook.remove()
    assert lengths[:1] == [20]
    assert set(lengths[1:]) == {2}


def test_a_machine_of_known_speed_is_found_out(model, clock):
    costs = measure_costs(LeanRuntime(model), context=40, seconds=0.0)
    plain = BASE + 6 * (ATTENTION + MLP)
    assert costs.context == 40
    assert (costs.base, costs.attention, costs.mlp) == pytest.approx((BASE, ATTENTION, MLP), rel=1e-3)
    assert costs.error == pytest.approx(0, abs=1e-3)
    assert costs.round == pytest.approx(LOOP)
    assert costs.plain == pytest.approx(plain + LOOP)
    assert costs.widths == [1, 2, 3, 4, 5, 6, 8, 12, 16]
    for rows in (1, 2, 5, 16):
        assert costs.verification(rows) == pytest.approx(plain + ROW * (rows - 1), rel=1e-3)
    assert costs.prefill == pytest.approx((plain + 39 * ROW) / 40)
    assert costs.attention_per_key == 0
    assert costs.wider == pytest.approx([1 + rows * ROW / plain for rows in range(1, 8)], abs=1e-3)


@pytest.mark.parametrize("within", [1e9, 1e5, 5e4, 2e4, 1.0])
def test_less_time_is_kept_to_and_tells_the_same_on_a_quiet_machine(model, clock, within):
    """A sweep that takes what it is expected to; where nothing disturbs it, a few rounds tell as much as many."""
    begun, told = clock[0], []
    costs = measure_costs(
        LeanRuntime(model), context=40, within=within, on_decoding=lambda *counts: told.append(counts)
    )
    plain = BASE + 6 * (ATTENTION + MLP) + LOOP
    least = EFFORTS[-1].seconds(plain, plain + 39 * ROW)
    assert clock[0] - begun <= max(within, 1.3 * least)
    assert costs.draft(SkipSet((1, 2), (3,)), 6) == pytest.approx(BASE + 4 * ATTENTION + 5 * MLP, rel=0.05)
    assert costs.verification(4) == pytest.approx(plain - LOOP + 3 * ROW, rel=0.02)
    assert costs.widths[0] == 1
    assert costs.widths[-1] == 16
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert told[-1] == (len(told), len(told))


def test_how_thoroughly_costs_are_measured():
    """What takes no longer than a quick sweep is done in full; where that takes long, a good one, if there is time."""
    assert effort_within(math.inf, 1e-3, 1e-3) == EFFORTS[0]
    assert effort_within(math.inf, 10.0, 10.0) == EFFORTS[GOOD]
    efforts = [effort_within(seconds, 0.03, 0.1) for seconds in (1e3, LONG + 5, 15, 10, 5, 0)]
    assert [EFFORTS.index(effort) for effort in efforts] == sorted(EFFORTS.index(effort) for effort in efforts)
    assert (efforts[0], efforts[-1]) == (EFFORTS[GOOD], EFFORTS[-1])
    for effort in EFFORTS:
        assert effort.fitted * effort.rounds >= len(LENGTHS), "every length is seen"
        assert effort.fresh >= 1
    seconds = [effort.seconds(1.0, 1.0) for effort in EFFORTS]
    assert seconds == sorted(seconds, reverse=True)


def test_timed_rounds_reserve_no_more_cache_than_they_can_fill(model):
    runtime = LeanRuntime(model)
    drafter = LayerSkipDrafter(runtime, SkipSet(), FixedK(1))
    local_costs.timed_rounds(runtime, 10, Sampler(temperature=1.0, seed=0), drafter, [0, 3, 5], random.Random(0))
    assert 10 + 14 <= runtime.cache.slots < runtime.skeleton.context


def test_a_model_of_one_layer_has_no_other_skip_set_to_test_the_fit_on():
    model = small(layers=1)
    costs = measure_costs(LeanRuntime(model), context=10, seconds=0.0, within=0.0)
    assert costs.error is None
    assert all(math.isfinite(t) for t in costs.verify)


def test_disturbances_do_not_count(model, clock, monkeypatch):
    """A machine that is three times slower in every third draft is measured for longer, and found out all the same."""
    draw, tick = random.Random(0), local_costs.Probe.propose
    turns = itertools.count()

    def disturbed(self, seqs, limits):
        before = clock[0]
        drafts = tick(self, seqs, limits)
        if next(turns) % 3 == 0 and self.length:
            slow = 2 * (clock[0] - before) * draw.uniform(0.9, 1.1)
            clock[0] += slow
            self.seconds += slow
        return drafts

    monkeypatch.setattr(local_costs.Probe, "propose", disturbed)
    costs = measure_costs(LeanRuntime(model), context=40, seconds=2e5)
    assert (costs.attention, costs.mlp) == pytest.approx((ATTENTION, MLP), rel=0.15)
    assert costs.draft(SkipSet((1, 2), (3,)), 6) == pytest.approx(BASE + 4 * ATTENTION + 5 * MLP, rel=0.1)


def test_verifying_more_rows_never_costs_less_than_one(model, clock, monkeypatch):
    """Where something else used the machine during plain steps, and only then, they seem to cost more beside a pass."""
    tick = local_costs.Probe.propose

    def disturbed(self, seqs, limits):
        drafts = tick(self, seqs, limits)
        clock[0] += 0 if self.length else 100.0
        return drafts

    monkeypatch.setattr(local_costs.Probe, "propose", disturbed)
    costs = measure_costs(LeanRuntime(model), context=40, seconds=0.0)
    assert costs.round == pytest.approx(100 + LOOP)
    assert costs.verify == pytest.approx([BASE + 6 * (ATTENTION + MLP)] * len(costs.widths))


def test_verifying_more_rows_never_costs_less_than_fewer(model, clock, monkeypatch):
    """Where something else used the machine during rounds of 12 rows, and only then: 16 share it."""
    tick = local_costs.Probe.propose

    def disturbed(self, seqs, limits):
        drafts = tick(self, seqs, limits)
        clock[0] += 100.0 if self.length == 11 else 0
        return drafts

    monkeypatch.setattr(local_costs.Probe, "propose", disturbed)
    costs = measure_costs(LeanRuntime(model), context=40, seconds=0.0)
    plain = BASE + 6 * (ATTENTION + MLP)
    assert costs.widths[-3:] == [8, 12, 16]
    assert costs.verify[-3:] == pytest.approx([plain + 7 * ROW, *[plain + 13 * ROW + 50] * 2], rel=1e-3)
    assert costs.verification(29) >= costs.verification(16)


IN_MODES = {"full": (8.0, 24.0), "int8": (3.0, 3.0), "int4": (2.0, 1.5), "skip": (0.0, 0.0)}  # attention, MLP


@pytest.mark.parametrize("seed", range(3))
def test_each_mode_has_its_price_though_decodings_are_disturbed(model, monkeypatch, seed):
    """Each path's decoding is up to 8% slower or faster than it should be, but for those with one mode a part."""
    now, compiled, draw = [0.0], {}, random.Random(seed)
    compile_path, timeless = LeanRuntime.compile, LeanRuntime.forward

    def compile_and_note(self, path):
        made = compile_path(self, path)
        modes = path.modes(6)
        uniform = path.low_precision and len({*modes[:6]}) == len({*modes[6:]}) == 1
        seconds = BASE + sum(IN_MODES[mode][i >= 6] for i, mode in enumerate(modes))
        compiled[id(made)] = made, seconds * (1 if uniform or path == FULL else draw.uniform(0.92, 1.08))
        return made

    def forward(self, tokens, positions, *, path=None, **options):
        now[0] += compiled[id(path or self.compile(FULL))][1]
        return timeless(self, tokens, positions, path=path, **options)

    monkeypatch.setattr(costing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(LeanRuntime, "compile", compile_and_note)
    monkeypatch.setattr(LeanRuntime, "forward", forward)
    costs = measure_costs(LeanRuntime(model), context=40, seconds=0.0, seed=seed, modes=MODES)
    for attention, mlp in itertools.product(LOW, LOW):
        path = DraftPath.from_modes([attention] * 6 + [mlp] * 6)
        step = BASE + 6 * (IN_MODES[attention][0] + IN_MODES[mlp][1])
        assert costs.draft(path, 6) == pytest.approx(step, rel=0.02), (attention, mlp)


def test_quiet_is_the_lower_quartile():
    assert lower_quartile([5.0]) == 5.0
    assert lower_quartile([9.0, 1.0, 2.0, 3.0]) == pytest.approx(1.25)


@pytest.mark.parametrize("times", [[1.0, 9.0], [9.0, 1.0, 2.0]])
def test_quiet_is_never_less_than_was_seen(times):
    assert lower_quartile(times) == 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_real_costs(llm, temperature):
    """On real clocks, whatever they say: every figure is there, and none is negative."""
    costs = measure_costs(llm.runtime, context=50, sampler=Sampler(temperature=temperature), seconds=0.0)
    assert costs.context == 50
    assert costs.widths == [1, 2, 3, 4, 5, 6, 8, 12, 16]
    assert all(math.isfinite(t) and t > 0 for t in costs.verify)
    assert costs.wider == sorted(costs.wider)
    assert costs.wider[0] >= 1
    figures = (costs.base, costs.attention, costs.mlp, costs.round, costs.prefill, costs.head, costs.error)
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures)


def test_short_contexts_are_served():
    """Where the model's context leaves little room, fewer widths are measured."""
    model = small()
    model.config.max_position_embeddings = 90
    costs = measure_costs(LeanRuntime(model), context=200, seconds=0.0)
    assert costs.context < 90
    assert costs.widths[0] == 1
    assert all(math.isfinite(t) for t in costs.verify)
    assert len(costs.wider) <= 7
