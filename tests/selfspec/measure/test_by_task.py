"""Figures by task on numbers written by hand, and what is said of texts that differ."""

from __future__ import annotations

import pytest
from layouts import fastest

from selfspec.cli.bench_command import by_task_notes, by_task_tables, texts_line
from selfspec.measure import summary
from selfspec.measure.audit import Difference
from selfspec.measure.bench import Benchmark, BenchTask
from selfspec.measure.model_copies import load_model_copies
from selfspec.measure.summary import by_task, count_verdicts, verdict
from selfspec.measure.timing import Runs
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import SkipSet
from selfspec.types.stats import Stats


def runs(*tokens_rounds_seconds):
    return [Stats(tokens=tokens, rounds=rounds, seconds=seconds) for tokens, rounds, seconds in tokens_rounds_seconds]


# Three prompts, two rounds each: of one task the first and the third.
RUNS = Runs(
    {
        "plain": [
            runs((10, 10, 1.0), (10, 10, 2.0)),
            runs((20, 20, 4.0), (20, 20, 4.0)),
            runs((30, 30, 1.0), (30, 30, 1.0)),
        ],
        "profile": [
            runs((10, 5, 0.5), (10, 5, 0.5)),
            runs((20, 4, 2.0), (20, 4, 8.0)),
            runs((30, 10, 2.0), (30, 10, 1.5)),
        ],
    }
)
TASKS = ("qa", "code", "qa")


def test_figures_of_each_task():
    """Speeds of qa: plain 10 and 30 tokens/s, then 5 and 30; profile 20 and 15, then 20 and 20."""
    found = by_task(RUNS, "profile", TASKS, bases=["plain"], verdicts=["same", "bug", "near_tie"])
    qa, code = found["tasks"]
    assert (qa["task"], qa["prompts"], code["task"], code["prompts"]) == ("qa", 2, "code", 1)
    assert qa["mean_accepted_tokens"] == pytest.approx(80 / 30)
    assert qa["mean_tokens_per_second"] == pytest.approx((17.5 + 20) / 2)
    assert qa["speedup"]["plain"] == pytest.approx((17.5 / 20 + 20 / 17.5) / 2)  # of means, a round at a time
    assert qa["ratio"]["plain"]["median"] == pytest.approx(((2 + 4) / 2 + (0.5 + 2 / 3) / 2) / 2)
    assert qa["same_text"] == {"same": 1, "near_ties": 1, "bugs": 0}
    assert code["speedup"]["plain"] == pytest.approx((10 / 5 + 2.5 / 5) / 2)
    assert code["same_text"] == {"same": 0, "near_ties": 0, "bugs": 1}


def test_sources_are_shares_of_what_came_out():
    one = Stats(tokens=10, rounds=4, seconds=1.0)
    one.sources.update({"lookup": 2, "draft path": 4})
    other = Stats(tokens=30, rounds=20, seconds=1.0)
    other.sources.update({"draft path": 10})
    runs = Runs({"plain": [[Stats(tokens=10, rounds=10, seconds=1.0)]] * 2, "profile": [[one], [other]]})
    found = by_task(runs, "profile", ("qa", "code"), bases=["plain"], verdicts=None)
    assert [task["sources"] for task in found["tasks"]] == [{"draft path": 0.4, "lookup": 0.2}, {"draft path": 1 / 3}]
    assert found["overall"]["sources"] == {"draft path": 14 / 40, "lookup": 2 / 40}


def test_all_prompts_together_are_not_the_mean_of_the_tasks():
    found = by_task(RUNS, "profile", TASKS, bases=["plain"], verdicts=None)["overall"]
    assert found["prompts"] == 3
    assert found["mean_accepted_tokens"] == pytest.approx(120 / 38)
    assert found["mean_tokens_per_second"] == pytest.approx(((20 + 10 + 15) / 3 + (20 + 2.5 + 20) / 3) / 2)
    assert found["speedup"]["plain"] == pytest.approx((45 / 45 + 42.5 / 40) / 2)
    assert found["ratio"]["plain"]["low"] <= found["ratio"]["plain"]["median"] <= found["ratio"]["plain"]["high"]
    assert found["same_text"] is None
    itself = by_task(RUNS, "plain", TASKS, bases=["plain"], verdicts=None)["overall"]
    assert (itself["mean_accepted_tokens"], itself["speedup"]["plain"]) == (1, 1)


class TestVerdicts:
    PROMPT = "import os\n"

    @pytest.fixture
    def text(self, llm64):
        return tuple(llm64.generate(self.PROMPT, max_new_tokens=8).tokens)

    def test_the_same(self, llm64, text):
        assert verdict(llm64, llm64, self.PROMPT, {text}, {text}) == "same"

    def test_another_token_is_a_bug(self, llm64, text):
        wrong = (*text[:5], (text[5] + 1) % 4096, *text[6:])
        assert verdict(llm64, llm64, self.PROMPT, {text}, {text, wrong}) == "bug"
        assert verdict(llm64, llm64, self.PROMPT, {text}, {text[:5]}) == "bug", "it ends too early"

    def test_the_worst_run_counts(self, llm64, text, monkeypatch):
        one, other = (*text[:-1], text[-1] + 1), (*text[:-1], text[-1] + 2)
        near = Difference(7, 0, 1, gap=1e-6, noise=1e-6)
        bug = Difference(7, 0, 2, gap=1.0, noise=1e-6)
        judged = {one: near, other: bug}
        monkeypatch.setattr(summary, "copies_difference", lambda plain, llm, prompt, text, its: judged[its])
        assert verdict(llm64, llm64, self.PROMPT, {text}, {text, one}) == "near_tie"
        assert verdict(llm64, llm64, self.PROMPT, {text}, {other, text, one}) == "bug"

    def test_counts(self):
        assert count_verdicts(["same", "bug", "same"]) == {"same": 2, "near_ties": 0, "bugs": 1}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A small benchmark with tasks, greedy and sampled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSPEC_CACHE", str(tmp_path_factory.mktemp("told")))
        patch.setattr("selfspec.models.layout.measure_layouts", lambda model: fastest("rows"))
        patch.setattr("selfspec.measure.cost_fitting.DISTURBED_FACTOR", 1)
        methods = ("plain", "profile", "hf-prompt-lookup")
        subjects = load_model_copies("builtin", methods, device="cpu", dtype="float64")
        profile = Profile(model=subjects.identity, draft=LayerSkipSpec.from_path(SkipSet((3,), (5,))))
        prompts = ["def f(x):\n", "class A:\n", "import os\n", "x = 1\n"]
        bench = Benchmark(subjects, BenchTask(methods, prompts, 6, 1, profile, ("def", "class", "def", "class")))
        return {temperature: bench.run_temperature(temperature) for temperature in (0.0, 0.8)}


def test_greedy_texts_are_compared(measured):
    for method in measured[0.0]["methods"].values():
        assert method["same_text"] == {"same": 4, "near_ties": 0, "bugs": 0}
        assert [(row["task"], row["prompts"]) for row in method["by_task"]["tasks"]] == [("def", 2), ("class", 2)]
        assert all(row["same_text"]["same"] == 2 for row in method["by_task"]["tasks"])
    assert texts_line(measured[0.0]) == [
        "texts identical to plain decoding's, by token ids: plain 4 of 4; profile 4 of 4; hf-prompt-lookup 4 of 4"
    ]


def test_sampled_ones_are_not(measured):
    assert all(method["same_text"] is None for method in measured[0.8]["methods"].values())
    assert texts_line(measured[0.8]) == []


def test_bugs_and_near_ties_are_said():
    same = {"profile": {"same_text": {"same": 1, "near_ties": 2, "bugs": 3}}}
    assert texts_line({"methods": same})[0].endswith("profile 1 of 6 (2 near-ties, 3 BUGS, please report)")


def test_tables_by_task_fit_80_columns(measured):
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    tables = by_task_tables(measured[0.0])
    assert [str(table.title) for table in tables] == ["profile, temperature 0", "hf-prompt-lookup, temperature 0"]
    for table in tables:
        console.print(table)
    shown = console.export_text()
    assert [line.split()[0] for line in shown.splitlines()[1:5]] == ["task", "def", "class", "overall"]
    assert len(by_task_notes(measured[0.0])) == 2
    row = {
        "task": "multi-turn conversation",
        "prompts": 480,
        "mean_tokens_per_second": 1234.5,
        "mean_accepted_tokens": 12.345,
        "speedup": {"plain": 12.34},
        "ratio": {"plain": {"median": 10.10, "low": 10.05, "high": 12.10}},
        "same_text": {"same": 480, "near_ties": 0, "bugs": 0},
    }
    long = {"tasks": [row, {**row, "task": "a task with a name that is far too long"}], "overall": row}
    at = {"temperature": 0.8, "methods": {"hf-prompt-lookup": {"by_task": long}}}
    (table,) = by_task_tables(at)
    console.print(table)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("multi-turn conversation  480" in line and line.rstrip().endswith("480") for line in lines)


def test_few_prompts_have_no_table(measured):
    at = {"temperature": 0, "methods": {"profile": {"by_task": {"tasks": [{}, {}, {}], "overall": {"prompts": 5}}}}}
    assert by_task_tables(at) == by_task_notes(at) == []
