"""Whole searches: by replay and by the clock, with scores and measurements made predictable where tests need them."""

from __future__ import annotations

import itertools

import pytest
import selfspec.search
import torch
from models import tiny
from selfspec.search import Prompts, callbacks, finalists, find_profile, objective, prepare, quantizing, study
from selfspec.search.continuations import choose, record
from selfspec.search.forecast import FINALISTS
from selfspec.search.ledger import Ledger
from selfspec.search.space_filter import BoundedObjective
from studies import measured_as
from transformers import BloomConfig

import selfspec
from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.measure.pace import Pace
from selfspec.profile.draft_spec import PlainSpec
from selfspec.profile.reading import parse_profile, profile_text
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import SkipSet
from selfspec.types.stats import Stats

COSTS = CostModel(
    context=60, base=1e-4, attention=4e-5, mlp=4e-5, widths=[1, 2, 8], verify=[1.3e-3, 1.35e-3, 1.5e-3], round=4e-5
)
PACE = Pace(step=1e-3, row=1e-4)


@pytest.fixture
def clockless(monkeypatch):
    """Costs and measurements that are no clock's, so that a search is the same every time."""
    monkeypatch.setattr(prepare, "measure_costs", lambda *_, **__: COSTS)
    monkeypatch.setattr(study.Pace, "from_runtime", lambda *_, **__: PACE)
    monkeypatch.setattr(finalists, "measure", measured_as(1.3))
    monkeypatch.setattr(finalists, "_fastest", lambda search, base, scores, *_, **__: scores[0])


@pytest.fixture
def unbridged(monkeypatch):
    """What is found is what was scored in a trial: no bridge betters it."""
    monkeypatch.setattr(study, "with_bridges", lambda *_, **__: None)


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def scored(monkeypatch):
    """Wall clock scores by a formula: each skipped MLP is worth a token a second, each attention costs one."""

    def decode_all(llm, drafter, prompts, decoding):
        skip = drafter.path.skip if drafter.drafts else SkipSet()
        return Stats(tokens=100 + len(skip.mlp) - len(skip.attention), rounds=1, seconds=1.0)

    monkeypatch.setattr(objective, "decode_all", decode_all)
    monkeypatch.setattr(finalists, "_fastest", lambda search, base, scores, *_, **__: scores[0])
    monkeypatch.setattr(finalists, "measure", measured_as(1.3))


class Watched:
    """Notes what it is told."""

    def __init__(self, on_trial=None):
        self.stages, self.steps, self.trials, self.said, self.on_trial = [], [], [], [], on_trial

    def stage(self, name, total):
        self.stages.append((name, total))

    def step(self, done):
        self.steps.append(done)

    def trial(self, trial):
        self.trials.append(trial)
        if self.on_trial is not None:
            self.on_trial(trial)

    def say(self, line):
        self.said.append(line)

    @property
    def skips(self):
        return [t.score.skip for t in self.trials]


def search(llm, **options):
    return find_profile(llm, **{"trials": 12, "count": 3, "max_new_tokens": 12, **options})


def test_a_search_saves_what_it_found(llm, clockless, unbridged):
    watch = Watched()
    profile = search(llm, watch=watch)
    ranked = sorted((t.score for t in watch.trials if not t.score.pruned), key=lambda s: -s.tokens_per_second)
    (best,) = [score for score in ranked[:FINALISTS] if score.skip == profile.skip_set]
    assert profile.draft.controller.name == best.controller.name
    assert profile.costs == COSTS
    assert profile.predicted.draft_cost == pytest.approx(COSTS.draft_share(best.skip, llm.runtime.layers), abs=1e-3)
    assert profile.predicted.acceptance_rate == pytest.approx(best.acceptance_rate, abs=1e-3)
    assert profile.measured[0].held_out
    assert (profile.search.objective, profile.search.trials, profile.search.interrupted) == ("replay", 12, False)
    assert (profile.calibration.source, profile.calibration.prompts) == ("builtin", 3)
    assert profile.versions["torch"]
    assert [t.number for t in watch.trials] == list(range(12))
    assert watch.stages == [
        ("timing the model", None),
        ("continuing prompts", 2 * 12),
        ("measuring costs", None),
        ("prefilling the texts", None),
        ("fitting the confidence of drafted tokens", None),
        ("ranking sub-layers", 2 * llm.runtime.layers + 1),
        ("planning warm starts", None),
        ("searching", 12),
        ("trying bridges over skipped layers", None),
        ("trying smaller draft vocabularies", None),
        ("continuing other prompts", 2 * 12),
        ("choosing among the best few", FINALISTS),
        ("measuring the best on held-out prompts", 2 * 3 * 3),
        ("predicting the speed of the profile", None),
    ]
    assert "this will take about" in watch.said[0]
    assert [line.split(":")[0] for line in watch.said[1:]] == ["finalist"] * FINALISTS
    assert all(line.endswith("x predicted on other texts") for line in watch.said[1:])
    assert parse_profile(profile_text(profile), source="p") == profile


def test_the_log_tells_what_happens_unless_a_watch_is_told(llm, clockless, caplog):
    with caplog.at_level("INFO", logger="selfspec"):
        search(llm, trials=1, count=1, max_new_tokens=8)
        said = [record.message for record in caplog.records]
        assert said[0] == "timing the model"
        assert said[1].startswith("this will take about")
        assert "searching" in said
        assert any(line.startswith("trial 1: ") and "plain decoding predicted" in line for line in said)
        caplog.clear()
        search(llm, trials=1, count=1, max_new_tokens=8, watch=Watched())
        assert not caplog.records


@pytest.mark.parametrize("strategy", ["climb", "tpe"])
def test_a_seeded_search_repeats(llm, clockless, strategy):
    runs = []
    for seed in (5, 5, 6):
        watch = Watched()
        profile = search(llm, seed=seed, watch=watch, strategy=strategy, warm=False, trials=6)
        runs.append((watch.trials, profile.calibration))
    assert runs[0] == runs[1] != runs[2]


def test_scores_are_worth_what_real_decoding_counts(llm64, clockless, unbridged):
    """The best set's predicted tokens a round are those of decoding the same prompts with it."""
    watch = Watched()
    profile = search(llm64, watch=watch, trials=4, controller=ControllerSpec(name="fixed", options={"k": 2}))
    (score,) = [t.score for t in watch.trials if t.score.skip == profile.skip_set]
    drafter = llm64.drafter_for(profile)
    prompts = choose(None, source="", count=3, seed=0).search
    total = Stats.total(llm64.generate(p, max_new_tokens=12, drafter=drafter).stats for p in prompts)
    assert score.tokens_per_round == pytest.approx(total.tokens_per_round)
    assert score.acceptance_rate == pytest.approx(total.acceptance_rate)
    prices = COSTS.call_costs(COSTS.draft(profile.skip_set, llm64.runtime.layers))
    seconds = total.rounds * COSTS.round + sum(calls * prices[part] for part, calls in total.work.items())
    seconds += sum(COSTS.verification(rows) * n for rows, n in rows_of(llm64, drafter).items())
    assert score.tokens_per_second == pytest.approx(total.tokens / seconds)


def rows_of(llm, drafter):
    from collections import Counter

    from models import run

    found = Counter()
    for prompt in choose(None, source="", count=3, seed=0).search:
        ends = llm.runtime.skeleton.ends
        found.update(1 + len(o.draft) for o in run(llm.runtime, drafter, llm.encode(prompt), 12, ends=ends)[1])
    return found


def test_hopeless_sets_are_pruned_on_a_share_of_the_starts(llm, clockless):
    watch = Watched()
    search(llm, watch=watch, trials=30, strategy="random", count=6)
    assert sum(t.score.pruned for t in watch.trials) > 5
    best = max(t.score.tokens_per_second for t in watch.trials if not t.score.pruned)
    assert all(t.score.tokens_per_second < best for t in watch.trials if t.score.pruned)


def test_sampled_searches(llm, clockless):
    profile = search(llm, temperature=0.8, top_p=0.95, trials=3)
    assert profile.search.temperature == 0.8
    assert 0 < profile.predicted.acceptance_rate <= 1


def test_what_may_be_skipped(llm, clockless):
    watch = Watched()
    search(llm, keep=(0, 5), granularity="layer", watch=watch)
    for skip in watch.skips:
        assert skip.attention == skip.mlp
        assert not {0, 5} & {*skip.attention}


def test_draft_cost_is_bounded(llm, clockless):
    watch = Watched()
    search(llm, max_draft_cost=0.5, watch=watch, trials=20)
    assert len(watch.trials) == 20
    assert all(COSTS.draft_share(skip, llm.runtime.layers) <= 0.5 for skip in watch.skips)
    with pytest.raises(SelfspecError, match="no draft path could be scored"):
        search(llm, max_draft_cost=1e-6, trials=3)


def test_without_warm_starts(llm, clockless):
    watch = Watched()
    search(llm, warm=False, watch=watch, trials=3)
    assert "ranking sub-layers" not in [stage for stage, _ in watch.stages]


@pytest.mark.parametrize("strategy", ["tpe", "skopt"])
def test_the_papers_objective(llm, scored, strategy):
    watch = Watched()
    profile = search(llm, objective="wallclock", strategy=strategy, watch=watch, trials=20)
    top = max(watch.trials, key=lambda t: t.score.tokens_per_second)
    worth = 100 + len(profile.skip_set.mlp) - len(profile.skip_set.attention)
    assert worth == top.score.tokens_per_second == max(t.score.tokens_per_second for t in watch.trials)
    assert (profile.search.objective, profile.draft.controller.name) == ("wallclock", "adaptive")
    assert (profile.costs, profile.predicted) == (None, None)
    assert [len(skip) for skip in watch.skips[:5]] == [
        3,
        4,
        6,
        8,
        4,
    ]  # shares of 12, then every second layer but the last


def test_a_model_without_tree_masks_is_refused_before_anything_is_decoded(llm, scored, monkeypatch):
    monkeypatch.setattr(llm.runtime, "trees", False)
    watch = Watched()
    with pytest.raises(UnsupportedModelError, match="takes no attention mask per token.*or objective wallclock"):
        search(llm, trials=2, watch=watch)
    assert not watch.stages
    search(llm, trials=2, watch=watch, objective="wallclock")
    assert "ranking sub-layers" not in [stage for stage, _ in watch.stages]
    assert watch.trials


def test_quantising_refuses_a_model_without_such_weights_before_anything_is_decoded(llm, tmp_path):
    config = BloomConfig(hidden_size=24, n_head=2, n_layer=2, vocab_size=61)  # 24 inputs are no whole group
    other, watch = selfspec.wrap(tiny(config, dtype=torch.float32), llm.tokenizer, profile="none"), Watched()
    with pytest.raises(SelfspecError, match="the model has no weights that can be quantised to int4"):
        quantizing.quantize(other, tmp_path / "w.safetensors", quantizing.QuantizeOptions(), watch)
    assert not watch.stages


def test_when_nothing_beats_plain_decoding_the_profile_says_so(llm, clockless, monkeypatch):
    monkeypatch.setattr(finalists, "measure", measured_as(0.9))
    profile = search(llm, trials=3)
    assert profile.draft == PlainSpec()
    assert (profile.measured, profile.predicted) == ([], None)
    assert "nothing beat plain decoding" in profile.note
    assert "0.9 times" in profile.note
    kept = search(llm, trials=3, keep_best=True)
    assert len(kept.skip_set) > 0
    assert kept.slower
    assert "plain decoding was faster" in kept.note


class Interrupting(Watched):
    def __init__(self, after):
        super().__init__(self.interrupt)
        self.after = after

    def interrupt(self, trial):
        if trial.number == self.after:
            raise KeyboardInterrupt


@pytest.mark.long("searches that were cut short")
def test_an_interrupt_keeps_the_best_so_far_and_the_search_resumes(llm, clockless, tmp_path):
    journal = tmp_path / "trials.jsonl"
    whole = Watched()
    expected = search(llm, watch=whole)
    stopped = search(llm, watch=Interrupting(4), storage=journal, keep_best=True)
    assert stopped.search.interrupted
    assert stopped.search.trials == 5
    assert stopped.note == "interrupted after 5 trials; not measured"
    assert stopped.skip_set in whole.skips[:5]
    assert journal.exists()
    resumed = Watched()
    profile = search(llm, watch=resumed, storage=journal)
    assert [t.known for t in resumed.trials] == [True] * 5 + [False] * 7
    assert resumed.skips[:5] == whole.skips[:5]
    assert resumed.trials[4].score == whole.trials[4].score
    assert profile.search.trials == expected.search.trials
    over = Watched()
    assert search(llm, watch=over, storage=journal).skip_set == profile.skip_set
    assert all(t.known for t in over.trials)


def test_an_interrupt_while_measuring_keeps_what_was_found(llm, clockless, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for part in ("measure", "_fastest"):
        monkeypatch.setattr(finalists, part, interrupted)
        profile = search(llm, trials=3, keep_best=True)
        assert profile.search.interrupted
        assert len(profile.skip_set) > 0
        assert profile.note == "interrupted after 3 trials; not measured"


def test_an_interrupt_before_the_first_trial_is_an_interrupt(llm, clockless, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "prepare_replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(llm)


@pytest.mark.measured_costs
def test_a_real_search_end_to_end(llm):
    """Real decoding and real clocks; the profile fits the model it was found on."""
    for kind in ("replay", "wallclock"):
        profile = search(llm, objective=kind, trials=3, count=2, max_new_tokens=6, keep_best=True)
        wrapped = selfspec.wrap(llm.model, llm.tokenizer, profile=profile)
        assert wrapped.generate("import os\n", max_new_tokens=3).tokens
        assert profile.measured[0].max_new_tokens == 6


def test_own_prompts_are_cut_to_the_context(llm, clockless):
    long = "import os\n" * 2000
    profile = search(llm, prompts=[long, "def f():\n"], source="mine.txt", trials=1)
    assert profile.calibration.source == "mine.txt"
    assert profile.calibration.tokens <= 1024


def test_the_profile_says_what_was_drawn(llm, clockless):
    given = Prompts("mine.parquet", tuple(f"# code\ndef f{i % 9}():\n" for i in range(10)), None, "# code\n{code}")
    found = search(llm, prompts=given, trials=1, count=2).calibration
    assert (found.source, found.column, found.template, found.chat) == (given.source, None, given.template, False)
    assert (found.prompts, found.drawn_from) == (2, 9)


def test_a_template_stays_whole_where_a_prompt_is_cut(llm, clockless, monkeypatch):
    seen = []
    monkeypatch.setattr(study, "record", lambda chosen, texts: seen.extend(texts) or record(chosen, texts))
    given = Prompts("mine.jsonl", ("Code: " + "import os\n" * 2000 + "Docstring:",), None, "Code: {code}Docstring:")
    search(llm, prompts=given, trials=1)
    text = llm.tokenizer.decode(seen[0])
    assert (text.startswith("Code: import"), text.endswith("Docstring:"), len(seen[0])) == (True, True, 1024 - 12)


def test_prompts_as_chat_messages(llm, clockless, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "User: {{ messages[0]['content'] }}\nYou:")
    prompts = ["def f():\n", "class A:\n"]
    found, plain = (search(llm, prompts=prompts, trials=1, chat=chat).calibration for chat in (True, False))
    assert (found.chat, plain.chat) == (True, False)
    chosen = choose(prompts, source="", count=3, seed=0)
    texts = [llm.encode(f"User: {prompt}\nYou:") for prompt in chosen.search]
    assert found.sha256 == record(chosen, texts).sha256 != plain.sha256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat": True}, "the tokenizer has no chat template"),
        ({"trials": 0}, "at least 1 trial"),
        ({"count": 0}, "1 prompt"),
        ({"prompts": "abc"}, "prompts is one text; expected a list"),
        ({"seed": 2**40}, "seed 1099511627776: expected 0 to"),
        ({"strategy": "oracle"}, "strategy 'oracle' is not known"),
        ({"objective": "guess"}, "objective 'guess' is not known; known: replay, wallclock"),
        ({"granularity": "block"}, "granularity 'block' is not known; known: sublayer, layer"),
        ({"minutes": 0.0}, "minutes 0.0: expected more than 0"),
        ({"minutes": float("nan")}, "minutes nan: expected more than 0"),
        ({"context": 0}, "context 0: expected at least 1 key"),
        ({"max_draft_cost": 0.0}, "max_draft_cost 0.0: expected more than 0"),
        ({"objective": "wallclock", "context": 5}, "need the cost model of the replay objective"),
        ({"keep": (16,)}, "keep: layer 16 does not exist"),
        ({"temperature": -1.0}, "temperature -1.0: expected 0"),
        ({"max_new_tokens": 0}, "max_new_tokens 0: expected 1 to"),
        ({"max_new_tokens": 5000}, "max_new_tokens 5000: expected 1 to"),
        ({"prompts": [], "source": "x.jsonl"}, "x.jsonl: holds no prompts"),
        ({"controller": ControllerSpec(name="fixed", options={"k": 0})}, "expected a whole number"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(llm, options, message):
    with pytest.raises(SelfspecError, match=message):
        search(llm, **options)


def test_the_package_knows_its_names():
    assert selfspec.search.Trial is callbacks.Trial
    assert selfspec.search.find_profile is study.find_profile
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = selfspec.search.nothing


@pytest.mark.parametrize("options", [{}, {"max_draft_cost": 0.55}], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("at", [2, 5])
def test_an_interrupt_within_a_trial_loses_no_path(llm, clockless, monkeypatch, tmp_path, options, at):
    """The search that resumes has the trials of one that was never interrupted, paths over a bound among them."""
    whole, resumed, journal = Watched(), Watched(), tmp_path / "trials.jsonl"
    options = {"trials": 8, "keep_best": True, **options}
    search(llm, watch=whole, **options)
    score, calls = BoundedObjective.score, itertools.count()

    def interrupted(self, path):
        if self.excess(path) <= 0 and next(calls) == at:
            raise KeyboardInterrupt
        return score(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(BoundedObjective, "score", interrupted)
        assert search(llm, storage=journal, **options).search.interrupted
    search(llm, watch=resumed, storage=journal, **options)
    assert [trial.known for trial in resumed.trials] == [True] * at + [False] * (8 - at)
    assert resumed.skips == whole.skips


def test_a_path_that_another_worker_drops_is_scored(llm, clockless, monkeypatch, tmp_path):
    whole, watch, journal = Watched(), Watched(), tmp_path / "trials.jsonl"
    search(llm, watch=whole, trials=8)
    dropped, claimed = whole.trials[3].score.path, Ledger.claimed
    monkeypatch.setattr(Ledger, "claimed", lambda ledger: {dropped} if len(ledger.scores) < 5 else claimed(ledger))
    search(llm, watch=watch, storage=journal, trials=8)
    paths = [trial.score.path for trial in watch.trials]
    assert paths[:3] == [trial.score.path for trial in whole.trials[:3]]
    assert paths.count(dropped) == 1


def test_a_study_is_of_one_kind_of_device(llm, clockless, tmp_path, monkeypatch):
    journal = tmp_path / "trials.jsonl"
    search(llm, trials=1, storage=journal)
    journal.write_text(journal.read_text().replace('"device":"cpu"', '"device":"cuda"'))
    with pytest.raises(SelfspecError, match="device"):
        search(llm, trials=1, storage=journal)
