from __future__ import annotations

import pytest
import selfspec.search
from selfspec.search import find_profile, study

from selfspec.errors import SelfspecError
from selfspec.profile import ControllerSpec, Measurement, parse_profile, profile_text
from selfspec.skip import SkipSet
from selfspec.stats import Stats


@pytest.fixture
def scored(monkeypatch):
    """Scores by a formula in place of a clock: each skipped MLP is worth a token a second, each attention costs one."""

    def wallclock(llm, drafter, prompts, *, max_new_tokens):
        skip = getattr(drafter, "skip", SkipSet())
        return Stats(tokens=100 + len(skip.mlp) - len(skip.attention), rounds=1, seconds=1.0)

    monkeypatch.setattr(study, "wallclock", wallclock)


def fixed_measure(speedup):
    def measure(llm, drafter, prompts, **options):
        return Measurement(
            machine="test",
            device="cpu",
            dtype="float32",
            threads=1,
            prompts=len(prompts),
            held_out=options["held_out"],
            max_new_tokens=options["max_new_tokens"],
            rounds=3,
            temperature=0,
            plain_tokens_per_second=100,
            tokens_per_second=100 * speedup,
            speedup=speedup,
            interval=[speedup, speedup],
            acceptance_rate=0.5,
            tokens_per_round=2,
        )

    return measure


def search(llm, **options):
    return find_profile(llm, **{"trials": 20, "count": 2, "max_new_tokens": 4, **options})


@pytest.mark.parametrize("strategy", ["tpe", "skopt"])
def test_a_search_saves_what_it_found(llm, scored, monkeypatch, strategy):
    monkeypatch.setattr(study, "measure", fixed_measure(1.3))
    trials, stages = [], []
    profile = search(llm, strategy=strategy, on_trial=trials.append, on_stage=stages.append)
    assert [t.number for t in trials] == list(range(20))
    top = sorted(trials, key=lambda t: -t.tokens_per_second)[:3]
    assert profile.skip_set in [t.skip for t in top]
    assert profile.measured[0].speedup == 1.3
    assert profile.measured[0].held_out
    assert profile.model.name == "builtin"
    assert profile.search.strategy == strategy
    assert (profile.search.trials, profile.search.objective) == (20, "wallclock")
    assert (profile.calibration.source, profile.calibration.prompts) == ("builtin", 2)
    assert profile.controller.name == "adaptive"
    assert profile.versions["torch"]
    assert len(stages) == 5
    assert parse_profile(profile_text(profile), source="p") == profile


def test_a_seeded_search_repeats(llm, scored, monkeypatch):
    monkeypatch.setattr(study, "measure", fixed_measure(1.3))
    runs = []
    for seed in (5, 5, 6):
        trials = []
        profile = search(llm, seed=seed, on_trial=trials.append)
        runs.append(([t.skip for t in trials], profile.calibration))
    assert runs[0] == runs[1] != runs[2]


def test_when_nothing_beats_plain_decoding_the_profile_says_so(llm, scored, monkeypatch):
    monkeypatch.setattr(study, "measure", fixed_measure(0.9))
    profile = search(llm, trials=3)
    assert len(profile.skip_set) == 0
    assert profile.measured == []
    assert "nothing beat plain decoding" in profile.note
    assert "0.9 times" in profile.note


def test_the_best_can_be_kept_all_the_same(llm, scored, monkeypatch):
    monkeypatch.setattr(study, "measure", fixed_measure(0.9))
    profile = search(llm, trials=3, keep_best=True)
    assert len(profile.skip_set) > 0
    assert profile.slower
    assert "plain decoding was faster" in profile.note


def test_warm_starts_are_tried_first(llm, scored, monkeypatch):
    monkeypatch.setattr(study, "measure", fixed_measure(1.3))
    warm, cold = [], []
    search(llm, on_trial=warm.append)
    search(llm, on_trial=cold.append, warm=False)
    assert [len(t.skip) for t in warm[:5]] == [8, 12, 16, 20, 14]
    assert [len(t.skip) for t in cold[:5]] != [8, 12, 16, 20, 14]


def test_an_interrupt_keeps_the_best_so_far(llm, scored, monkeypatch):
    monkeypatch.setattr(study, "measure", fixed_measure(1.3))

    def interrupt(trial):
        if trial.number == 4:
            raise KeyboardInterrupt

    profile = search(llm, on_trial=interrupt)
    assert profile.search.trials == 5


def test_a_real_search_end_to_end(llm):
    """Real decoding and real clocks; the profile fits the model it was found on."""
    profile = search(llm, trials=4, controller=ControllerSpec(name="fixed", options={"k": 2}))
    wrapped = selfspec.wrap(llm.model, llm.tokenizer, profile=profile)
    assert wrapped.generate("import os\n", max_new_tokens=3).tokens
    assert profile.controller.options["k"] == 2


def test_own_prompts_are_cut_to_the_context(llm):
    long = "import os\n" * 2000
    profile = search(llm, prompts=[long, "def f():\n"], source="mine.txt", trials=1)
    assert profile.calibration.source == "mine.txt"
    assert profile.calibration.tokens <= 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "at least 1 trial"),
        ({"count": 0}, "1 prompt"),
        ({"prompts": "abc"}, "prompts is one text; want a list"),
        ({"seed": 2**40}, "seed 1099511627776: want 0 to"),
        ({"strategy": "oracle"}, "strategy 'oracle' is not known"),
        ({"max_new_tokens": 0}, "max_new_tokens 0: want 1 to"),
        ({"max_new_tokens": 5000}, "max_new_tokens 5000: want 1 to"),
        ({"prompts": [], "source": "x.jsonl"}, "x.jsonl: holds no prompts"),
        ({"controller": ControllerSpec(name="fixed", options={"k": 0})}, "want a whole number"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(llm, options, message):
    with pytest.raises(SelfspecError, match=message):
        search(llm, **options)


def test_the_package_knows_its_names():
    assert selfspec.search.Trial is study.Trial
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = selfspec.search.nothing
