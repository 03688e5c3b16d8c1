"""What runs are expected to take: arithmetic on speeds and runs that the tests make up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from selfspec.measure import pace
from selfspec.measure.bench import BenchTask, expected_runs, typical
from selfspec.measure.cost_fitting import further_paths, path_costs_seconds
from selfspec.measure.pace import Pace
from selfspec.profile.schema import Profile
from selfspec.types.identity import Identity
from selfspec.types.stats import Round, Stats

PACE = Pace(step=0.01, row=0.001, step_per_key=1e-6, row_per_key=4e-7)
NEW = 33


def run(prompt: int, *, pace: Pace = PACE, new: int = NEW, faster: float = 1.0) -> Stats:
    """A run that takes exactly what `pace` says, the tokens after the first `faster` times as fast."""
    first = pace.prefill(prompt)
    rest = (pace.decode(prompt, new) - first) / faster
    log = [Round(0, 0, 1, first), *(Round(0, 0, 1, rest / (new - 1)) for _ in range(new - 1))]
    return Stats(rounds=new, tokens=new, seconds=first + rest, log=log)


def task(rounds: int = 1, patience: int | None = None) -> BenchTask:
    return BenchTask(("plain",), ["x"] * 4, NEW, rounds, Profile(model=Identity(layers=2)), patience=patience)


def test_a_speed_is_a_line_through_two_timings():
    line = Pace.through((1, 0.010, 0.001), (1001, 0.012, 0.0015))
    assert (line.at(1).step, line.at(1001).step) == (pytest.approx(0.010), pytest.approx(0.012))
    assert (line.at(1).row, line.at(501).row) == (pytest.approx(0.001), pytest.approx(0.00125))
    disturbed = Pace.through((1, 0.010, 0.001), (1001, 0.009, 0.0009))
    assert disturbed.at(5000) == disturbed.at(0) == Pace(0.010, 0.001), "more keys never make a pass faster"
    assert Pace.through((1, 0.010, 0.001), (1, 0.010, 0.001)) == Pace(0.010, 0.001)


def test_a_prefill_reads_for_each_token_those_before_it():
    length = 2000
    by_token = PACE.step + sum(PACE.at(position).row for position in range(1, length))
    assert PACE.prefill(length) == pytest.approx(by_token, rel=1e-3)
    assert PACE.prefill(2 * length) > 2.2 * PACE.prefill(length)
    assert PACE.prefill(1) == pytest.approx(PACE.step, rel=1e-3)


@pytest.mark.parametrize("faster", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("prompt", "other"), [(40, 4000), (4000, 40), (700, 700)])
def test_a_run_is_foretold_from_one_on_another_prompt(prompt, other, faster):
    expected = run(other, faster=faster).seconds
    assert PACE.like(run(prompt, faster=faster), prompt, other, NEW) == pytest.approx(expected)


def test_a_text_that_ended_early_counts_as_one_of_full_length():
    assert PACE.like(run(100, new=9), 100, 100, NEW) == pytest.approx(run(100).seconds, rel=1e-3)
    at_once = Stats(rounds=1, tokens=1, seconds=0.3, log=[Round(0, 0, 1, 0.3)])
    assert PACE.like(at_once, 100, 100, NEW) == pytest.approx(0.3 + 32 * PACE.at(100 + NEW / 2).step)


def test_prompts_of_all_lengths_count_at_their_length():
    """A short first prompt does not stand for the long ones after it."""
    lengths = [40, 4000, 2000, 90]
    warm = {"plain": run(2000), "profile": run(2000, faster=2.0)}
    seconds, runs = expected_runs(warm, 2000, lengths, task(rounds=3), PACE)
    taken = 3 * sum(run(length, faster=faster).seconds for length in lengths for faster in (1.0, 2.0))
    assert (seconds, runs) == (pytest.approx(taken), 24)
    assert taken > 7 * 24 * run(40).seconds, "what the shortest prompt alone would foretell"


def test_a_slower_method_is_expected_to_be_dropped():
    lengths = [100, 200, 300, 400]
    warm = {"plain": run(100), "slow": run(100, faster=0.5), "fast": run(100, faster=2.0)}
    seconds, runs = expected_runs(warm, 100, lengths, task(rounds=2, patience=2), PACE)
    assert runs == 8 + 2 + 8
    slow = sum(run(length, faster=0.5).seconds for length in lengths[:2])
    others = 2 * sum(run(length, faster=faster).seconds for length in lengths for faster in (1.0, 2.0))
    assert seconds == pytest.approx(slow + others)
    assert expected_runs(warm, 100, lengths, task(rounds=2), PACE)[1] == 24


def test_the_prompt_to_warm_up_on_is_neither_short_nor_long():
    assert typical([40, 4000, 2000, 90], PACE) == 2
    assert typical([10], PACE) == 0
    assert typical([40, 40, 40, 400], PACE) == 0


def test_costs_take_longer_after_long_prompts_and_with_more_modes():
    short, long = (path_costs_seconds(PACE.at(keys).step, PACE.prefill(keys)) for keys in (100, 4000))
    assert long - short > 11 * (PACE.prefill(4000) - PACE.prefill(100))
    assert path_costs_seconds(0.02, 0.0) == pytest.approx(2 * path_costs_seconds(0.01, 0.0))
    assert [further_paths(modes) for modes in (("full", "skip"), ("full", "int8"), ("int8", "int4"))] == [0, 3, 6]


def test_masks_make_replays_slower_and_nothing_else():
    masked = replace(PACE, masked=(2.0, 3.0))
    assert masked.prefill(500) == PACE.prefill(500)
    assert masked.rows(64) == PACE.rows(64)
    local = PACE.at(1000)
    assert masked.replay(1000).rows(5) == pytest.approx(2 * local.step + 4 * 3 * local.row)
    assert PACE.replay(1000) == local


def test_factors_of_masks_are_those_of_passes_of_two_widths(monkeypatch):
    """With the context of the model and the prompts, and made-up times of passes."""

    def seconds(runtime, context, rows=1, repeats=1):
        return PACE.at(context).rows(rows)

    masked = replace(PACE, masked=(2.0, 3.0))
    monkeypatch.setattr(pace, "forward_seconds", seconds)
    monkeypatch.setattr(pace, "masked_seconds", lambda runtime, context, rows: masked.replay(context).rows(rows))
    runtime = SimpleNamespace(skeleton=SimpleNamespace(context=8192), trees=True)
    timed = Pace.from_runtime(runtime, 3000, masks=True)
    assert timed.masked == (pytest.approx(2.0), pytest.approx(3.0))
    assert timed.prefill(2000) == pytest.approx(PACE.prefill(2000))
    assert Pace.from_runtime(runtime, 3000).masked == (1.0, 1.0)
