"""What a search is expected to take, and how much text there is time for: numbers alone, on a clock that stands."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from models import small
from selfspec.search.budget import SHARES, Budget
from selfspec.search.continuations import FEWEST
from selfspec.search.forecast import (
    CHOOSING,
    CONTENDING,
    FINALISTS,
    GPTQ,
    ROWS,
    TEXTS,
    TRIALS,
    SearchTask,
    fit_to_budget,
    forecast_summary,
    oracle_seconds,
)

from selfspec.measure.pace import Pace
from selfspec.runtime.forward import LeanRuntime

PACE = Pace(step=0.03, row=0.0016)
TASK = SearchTask(prompts=(70,) * 8, eval_prompts=(70,) * 8, max_new_tokens=64, variables=60, trials=40)


def budget(seconds):
    return Budget(seconds, clock=lambda: 0.0)


def test_any_time_is_time_for_everything():
    assert fit_to_budget(TASK, PACE, Budget()) == TASK
    assert fit_to_budget(TASK, PACE, budget(3600)) == TASK


@pytest.mark.parametrize("seconds", [300, 120, 60, 45, 30])
def test_less_time_is_time_for_less_text(seconds):
    planned = fit_to_budget(TASK, PACE, budget(seconds))
    assert planned.fits(PACE, budget(seconds))
    assert TEXTS <= len(planned.prompts) <= 8
    assert FEWEST <= planned.max_new_tokens <= 64
    more = fit_to_budget(TASK, PACE, budget(2 * seconds))
    assert len(planned.prompts) * planned.max_new_tokens <= len(more.prompts) * more.max_new_tokens


def test_there_is_time_for_several_trials_on_the_texts_that_are_left():
    for seconds in (300, 60, 30):
        planned = fit_to_budget(TASK, PACE, budget(seconds))
        assert TRIALS * planned.trial(PACE) <= seconds * SHARES["trials"] / sum(SHARES.values())


def test_with_next_to_no_time_it_is_one_short_text_and_with_none_nothing():
    assert fit_to_budget(TASK, PACE, budget(12)) == TASK.least()
    assert (len(TASK.least().prompts), TASK.least().max_new_tokens) == (1, FEWEST)
    assert fit_to_budget(TASK, PACE, budget(2)) is None
    assert fit_to_budget(replace(TASK, replayed=False), PACE, budget(0.2)) is None


def test_texts_that_were_decided_on_stay():
    """A search that goes on has the same texts, whatever time there is."""
    begun = replace(TASK, texts_fixed=True, costs_known=True)
    assert fit_to_budget(begun, PACE, budget(1)) == begun
    assert begun.least() == begun


def test_what_is_known_takes_no_time():
    needs, known = (
        TASK.needs(PACE),
        replace(TASK, texts_fixed=True, costs_known=True, variables=0, trials=0).needs(PACE),
    )
    assert list(needs) == list(known) == list(SHARES)
    assert all(needs[phase] > 0 for phase in SHARES)
    assert (known["costs"], known["trials"]) == (0, 0)
    assert known["texts"] < needs["texts"]
    assert known["ranking"] < needs["ranking"]
    assert replace(TASK, measured=False).needs(PACE)["measuring"] == 0


def test_trials_that_decode_take_what_decoding_takes():
    timed = replace(TASK, replayed=False)
    decoding = 8 * (PACE.rows(70) + 63 * PACE.step)  # a prefill gives the first token
    assert timed.trial(PACE) == pytest.approx(decoding)
    assert timed.needs(PACE)["trials"] == pytest.approx(40 * decoding)


def test_drafts_in_few_bits_take_longer_to_replay():
    """As they are hardly ever wrong; so there is time for less text."""
    low = replace(TASK, quantized_base=True)
    assert low.trial(PACE) > 2 * TASK.trial(PACE)
    planned, usual = (fit_to_budget(task, PACE, budget(120)) for task in (low, TASK))
    assert planned.fits(PACE, budget(120))
    assert len(planned.prompts) * planned.max_new_tokens < len(usual.prompts) * usual.max_new_tokens


def test_the_texts_can_be_read_in_the_time_that_ranking_has():
    """What drafts are sure of is read with them, unless it is known."""
    for seconds in (300, 60, 30):
        planned = fit_to_budget(TASK, PACE, budget(seconds))
        assert planned.reading(PACE) <= seconds * SHARES["ranking"] / sum(SHARES.values())
        assert replace(planned, texts_fixed=True).reading(PACE) < planned.reading(PACE)


def test_what_is_said():
    """In seconds, or minutes; whether there is a limit, and whether all of it fits in."""
    told = forecast_summary(TASK, PACE, Budget(clock=lambda: 0.0))
    assert told.startswith("this will take about ")
    assert " minutes, by a plain step of 30 ms and 1.6 ms a row; `minutes` limits it" in told
    assert forecast_summary(TASK, PACE, budget(60)).endswith("; it is shortened to the limit of 60 s")
    assert forecast_summary(TASK, PACE, budget(150)).endswith("; it is shortened to the limit of 2.5 minutes")
    assert forecast_summary(TASK, PACE, budget(36000)).endswith("1.6 ms a row")
    quick = Pace(1e-3, 1e-5)
    assert " s, by a plain step of 1 ms" in forecast_summary(TASK, quick, Budget(clock=lambda: 0.0))


@pytest.mark.parametrize("context", [1, 40, 10**6])
def test_a_pace_is_timed(context):
    """On a real clock, whatever it says; also where the model's context leaves little room."""
    model = small()
    model.config.max_position_embeddings = 48
    pace = Pace.from_runtime(LeanRuntime(model), context, masks=True)
    assert math.isfinite(pace.step)
    assert pace.step > 0
    assert pace.row >= 0
    assert pace.rows(1) == pace.step
    assert min(pace.masked) >= 1


LONG = Pace(step=0.01, row=0.001, step_per_key=1e-6, row_per_key=4e-7)


def test_long_texts_count_at_their_length():
    short, long = TASK, replace(TASK, prompts=(4000,) * 8, eval_prompts=(4000,) * 8)
    assert long.prompt(LONG) == LONG.prefill(4000)
    assert long.trial(LONG) / short.trial(LONG) == pytest.approx(
        LONG.at(4032).rows(QUARTER) / LONG.at(102).rows(QUARTER), rel=1e-6
    )
    needs = {phase: seconds - short.needs(LONG)[phase] for phase, seconds in long.needs(LONG).items()}
    assert all(seconds > 0 for seconds in needs.values())
    mixed = replace(TASK, prompts=(40, 4000))
    assert mixed.prompt(LONG) == pytest.approx((LONG.prefill(40) + LONG.prefill(4000)) / 2)


QUARTER = ROWS * 8 * 64  # rows of a draft step in a trial


def test_replays_take_longer_where_masks_do():
    masked = replace(LONG, masked=(2.0, 3.0))
    assert TASK.trial(masked) > 2 * TASK.trial(LONG)
    assert TASK.needs(masked)["texts"] == TASK.needs(LONG)["texts"]
    assert TASK.needs(masked)["measuring"] == TASK.needs(LONG)["measuring"]


def test_quantising_and_costs_of_quantised_modes_count():
    quantised, slow = replace(TASK, further_paths=6, quantizes=True), replace(LONG, step=0.03)
    assert quantised.costs(slow) > TASK.costs(slow), "where both have the same effort"
    steps, rows = GPTQ
    seconds = steps * LONG.step + rows * 8 * (70 + 64) * LONG.row
    assert quantised.needs(LONG)["ranking"] - TASK.needs(LONG)["ranking"] == pytest.approx(seconds)


def test_the_oracle_takes_texts_a_replay_of_them_and_their_reading():
    lengths = (40, 4000)
    seconds = oracle_seconds(lengths, 32, LONG)
    assert seconds > 2 * sum(map(LONG.prefill, lengths)) + 32 * LONG.step
    assert oracle_seconds((40, 40), 32, LONG) < seconds / 4


def test_paths_in_one_quantised_mode_are_decoded_beside_the_one_that_replays_chose():
    more = replace(TASK, uniform=2).needs(LONG)["choosing"] - TASK.needs(LONG)["choosing"]
    assert more == pytest.approx(3 * (1 + CONTENDING) * LONG.decode(70, 64))


def test_finalists_are_decoded_where_there_are_no_other_texts():
    decoded = replace(TASK, rescored=False)
    run = LONG.decode(70, 64)
    assert decoded.needs(LONG)["choosing"] == pytest.approx((1 + FINALISTS) * (1 + CHOOSING) * run)
    two = replace(decoded, eval_prompts=(70,) * 2)
    assert two.needs(LONG)["choosing"] == pytest.approx((1 + FINALISTS) * 3 * run)
