from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import plain, small
from overlapping import device

import selfspec
from selfspec.basics.machine import machine
from selfspec.controllers import FixedK
from selfspec.drafters import Guard, LayerSkipDrafter, LookupDrafter, MergedDrafter, PlainDrafter, calibrate
from selfspec.drafters.batch_policy import teach
from selfspec.engine.engine import decode
from selfspec.llm.options import Options
from selfspec.measure import timing
from selfspec.measure.audit import compare
from selfspec.measure.timing import interleave, interval, measure, method, same_length
from selfspec.proposers.history import AnswerHistory
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.device_rounds import RoundPlanner
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import SkipSet
from selfspec.types.stats import Stats


def test_interleaving_and_ratios():
    """Every method on every prompt in every round, after one warm-up each; ratios are medians over rounds."""
    calls = []
    seconds = {
        "a": {"x": [9.0, 1.0, 2.0, 3.0], "y": [4.0, 4.0, 4.0]},
        "b": {"x": [9.0, 2.0, 2.0, 9.0], "y": [8.0, 2.0, 4.0]},
    }

    def make(name):
        def run(prompt):
            calls.append((name, prompt))
            return Stats(tokens=10, rounds=1, seconds=seconds[name][prompt].pop(0))

        return run

    runs = interleave({"a": make("a"), "b": make("b")}, ["x", "y"], rounds=3)
    assert calls[:2] == [("a", "x"), ("b", "x")]
    assert calls[2:6] == [("a", "x"), ("b", "x"), ("b", "y"), ("a", "y")]
    assert runs.ratios("a", "b") == [2.0, 1.0]
    assert runs.speedup("a", "b")[0] == 1.5
    assert runs.total("a").seconds == 18.0
    assert all(not rest for prompts in seconds.values() for rest in prompts.values())


def test_the_prompt_to_warm_up_on_may_be_chosen():
    calls, warm = [], []

    def run(prompt):
        calls.append(prompt)
        return Stats(tokens=10, rounds=1, seconds=1.0)

    interleave({"a": run}, ["x", "y"], rounds=1, warm_prompt=1, on_warm=lambda name, stats: warm.append(name))
    assert (calls, warm) == (["y", "x", "y"], ["a"])


def test_a_method_may_be_dropped():
    """It goes no further; its ratios are of the prompts that it ran on."""

    def make(seconds):
        return lambda prompt: Stats(tokens=10, rounds=1, seconds=seconds)

    def drop(runs):
        return ["slow"] if len(runs.stats["plain"]) == 2 else []

    runs = interleave({"plain": make(1.0), "slow": make(2.0)}, ["x", "y", "z"], rounds=2, drop=drop)
    assert [len(done) for done in runs.stats["plain"]] == [2, 2, 2]
    assert [len(done) for done in runs.stats["slow"]] == [1, 1, 0]
    assert runs.ratios("slow", "plain") == [0.5, 0.5]
    assert runs.ratios("plain", "slow") == [2, 2]


def test_drafting_is_timed_by_itself(llm, held_out):
    drafter = llm.layer_skip(SkipSet((3,), (5,)))
    timed = method(llm, drafter, Options(max_new_tokens=8))(held_out[0])
    assert 0 < timed.drafting < timed.seconds
    again = method(llm, PlainDrafter(), Options(max_new_tokens=8))(held_out[0])
    assert again.drafting < timed.drafting


def test_runs_may_be_ended_when_all_methods_have_run_on_a_prompt():
    """Prompts that were not run are left out; what was run in a round that was not finished counts."""

    def run(prompt):
        return Stats(tokens=10, rounds=1, seconds=1.0)

    for groups, shape in ((1, [1]), (2, [1, 1]), (3, [2, 1])):
        asked = []

        def go_on(runs, groups=groups, asked=asked):
            asked.append(sum(map(len, runs.stats["a"])))
            return len(asked) < groups

        runs = interleave({"a": run, "b": run}, ["x", "y"], rounds=2, go_on=go_on)
        assert [len(prompt) for prompt in runs.stats["a"]] == [len(prompt) for prompt in runs.stats["b"]] == shape
        assert asked == list(range(1, groups + 1))
        assert runs.speedup("a", "b")[0] == 1


def measured_skipping(llm, prompts, tokens, **options):
    drafter = llm.layer_skip(SkipSet((3,), (5,)))
    return measure(llm, drafter, prompts, Options(max_new_tokens=tokens), held_out=True, **options)


def test_a_measurement_that_was_ended_says_what_was_run(llm, held_out):
    measured = measured_skipping(
        llm, held_out[:3], 4, rounds=3, go_on=lambda runs: sum(map(len, runs.stats["plain"])) < 5
    )
    assert (measured.prompts, measured.rounds) == (3, 1)


def test_interval_covers_the_median():
    low, high = interval([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    assert 1.0 <= low < 1.25 < high <= 1.5
    assert interval([1.1]) == (1.1, 1.1)
    assert interval([1.1, 1.1]) == (1.1, 1.1)


def test_a_measurement_says_how_it_was_made(llm, held_out):
    measured = measured_skipping(llm, held_out[:2], 6, rounds=1)
    assert (measured.prompts, measured.rounds, measured.max_new_tokens) == (2, 1, 6)
    assert (measured.device, measured.dtype, measured.threads) == ("cpu", "float32", 1)
    assert measured.interval[0] <= measured.speedup <= measured.interval[1]
    assert measured.machine == machine(torch.device("cpu")) != ""


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (0.7, 1), (0.7, None)])
def test_comparing_one_prompt(each_layout, held_out, temperature, seed):
    """In each layout that the drafting model may have; plain decoding and `transformers` have a model as it came."""
    llm = selfspec.load("builtin", profile="none", drafting=True)
    assert llm.layout == each_layout
    as_loaded = selfspec.load("builtin", profile="none", layout="rows")
    options = Options(max_new_tokens=8, temperature=temperature, seed=seed)
    result = compare(llm, held_out[0], llm.layer_skip(SkipSet((3,), (5,))), options, rounds=1, as_loaded=as_loaded)
    if temperature == 0 or seed is not None:
        assert result.identical == (result.difference is None)
        assert result.identical or result.difference.near_tie
    else:
        assert result.identical is None
        assert not result.comparable
    assert result.plain.stats.drafted == 0
    assert result.draft.stats.drafted > 0
    assert result.as_dict()["rounds"] == 1


def test_the_plain_drafter_compared_with_itself_is_identical(llm, held_out):
    assert compare(llm, held_out[0], PlainDrafter(), Options(max_new_tokens=8), rounds=1).identical


def test_sampled_texts_that_are_timed_are_all_as_long(llm, held_out):
    """However early a method's own text would end; greedy ones, which are the same, end where they do."""
    greedy, sampled = Options(max_new_tokens=9, temperature=0.0), Options(max_new_tokens=9, temperature=1.5)
    assert same_length(greedy) is greedy
    ends = {"eos_token_id": [*range(llm.identity.vocabulary // 2)]}  # every second token, or so
    short = [method(llm, PlainDrafter(), replace(sampled, settings=ends))(held_out[0]).tokens for _ in range(5)]
    assert min(short) < 9
    long = same_length(replace(sampled, settings=ends))
    assert [method(llm, PlainDrafter(), long)(held_out[0]).tokens for _ in range(5)] == [9] * 5


def test_rounds_run_where_generate_runs_them(monkeypatch):
    """On the device too, where what drafting takes is not known."""
    monkeypatch.setenv("SELFSPEC_DEVICE_ROUND", "1")
    runtime = device(small(11, seed=2))
    drafter = LayerSkipDrafter(runtime, SkipSet((1,)), FixedK(2))
    timed = timing._TimedPlanner(drafter)
    assert isinstance(timed, RoundPlanner)
    assert not isinstance(timing._Timed(LookupDrafter([Lookup()], FixedK(2))), RoundPlanner)
    seq = SequenceState([1, 4, 2, 9], 16, Sampler())
    rounds = list(decode(runtime, timed, seq))
    assert timed.planned >= len(rounds) - 2 > 0
    assert seq.tokens == [1, 4, 2, 9, *plain(runtime, [1, 4, 2, 9], 16)]


def test_what_is_measured_teaches_nothing(llm, held_out, tmp_path):
    """Else the next run on the same prompt would look up its whole answer, and the user's file would keep it."""
    path = tmp_path / "mine.answers"
    drafter = LookupDrafter([AnswerHistory(path, llm.identity.vocabulary)], FixedK(8))
    merged = MergedDrafter([drafter, PlainDrafter()])
    method(llm, merged, Options(max_new_tokens=24))
    assert not drafter.teaches
    teach(merged, True)
    run = method(llm, drafter, Options(max_new_tokens=24))
    stats = [run(held_out[0]) for _ in range(2)]
    assert stats[0].accepted == stats[1].accepted
    assert not path.exists()
    teach(drafter, True)
    llm.generate(held_out[0], max_new_tokens=24, drafter=drafter)
    assert path.exists()


def test_the_guard_of_a_drafter_that_is_timed_is_calibrated():
    measured = []
    guard = Guard(PlainDrafter(), measure_payoff=lambda: measured.append(1))
    calibrate(timing._Timed(guard))
    assert measured == [1]
