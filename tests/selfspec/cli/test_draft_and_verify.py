"""Draft & Verify as published (2309.08168), from the search to the plot: layers skipped, the adaptive threshold.

What a later feature brings must not get in its way: `--modes full,skip` and `--controller adaptive` search skip sets
alone, the profile drafts so, and the notebook on skipped layers plots that study.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from models import drafting_rounds
from selfspec.search.analysis import sweep
from selfspec.search.ledger import Ledger

from selfspec import builtin
from selfspec.controllers import AdaptiveThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.profile.reading import read_profile
from selfspec.types.draft_path import SkipSet

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "speedup_vs_skipped_layers.ipynb"
FIXTURE = Path(__file__).with_name("adaptive_threshold.json")
SKIP = SkipSet((6, 10, 13), (5, 7, 11, 14))
PROMPT = "import os\n\ndef main(args):\n    "
SMALL = {  # in place of what the notebook's first cell says
    "MODEL": "builtin", "DATA": None, "THREADS": 1, "TEMPERATURE": 0.0, "RESTS": ("full",), "PROMPTS": 1,
    "NEW_TOKENS": 8, "COUNTS": (2, 4), "EACH": 1, "TRIALS": 4, "ROUNDS": 1, "PICTURE": "picture.png",
}  # fmt: skip


@pytest.fixture
def searched(cli, tmp_path):
    """A search by the command, in its folder: `found.yaml` and the study in `study.jsonl`."""
    args = (
        "search",
        "--modes",
        "full,skip",
        "--controller",
        "adaptive",
        "--trials",
        4,
        "--num-prompts",
        2,
        "--keep-best",
    )
    args += ("--max-new-tokens", 8, "--storage", "study.jsonl", "--study", "published", "--out", "found.yaml")
    code, _, err = cli(*args)
    assert code == 0, err
    return tmp_path


def test_a_search_of_skip_sets_gives_a_profile_that_generates(cli, searched):
    profile = read_profile(searched / "found.yaml")
    assert profile.draft.kind == "layer-skip"
    assert profile.draft.controller.name == "adaptive"
    assert not profile.path.low_precision
    assert profile.path.head == "full"
    assert profile.path.vocabulary is None
    assert profile.path.skip
    entries = Ledger(searched / "study.jsonl", "published").entries
    assert len(entries) == 4
    assert all(not entry.score.path.low_precision for entry in entries)
    assert {entry.score.controller.name for entry in entries} == {"adaptive"}
    args = ("generate", PROMPT, "--max-new-tokens", 32, "--threads", 1)
    code, drafted, stats = cli(*args, "--profile", "found.yaml", "--stats")
    assert code == 0
    assert "drafted" in stats
    assert (0, drafted) == cli(*args, "--profile", "none")[:2]


def test_the_notebook_plots_that_study(searched, monkeypatch):
    """Its cells as they stand; the search that they would make is the one that the command made."""

    def find_profile(llm, prompts, *, storage, modes, trials, **_):
        assert (modes, trials) == ("full,skip", 4)
        shutil.copy(searched / "study.jsonl", storage)
        return read_profile(searched / "found.yaml")

    monkeypatch.setattr(sweep, "find_profile", find_profile)
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    monkeypatch.chdir(searched)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    first, *others = ["".join(line for line in cell["source"] if not line.startswith("%")) for cell in cells]
    names: dict[str, object] = {}
    exec(first, names)
    assert {name for name in names if name.isupper()} == {*SMALL}
    names.update(SMALL)
    for source in others:
        exec(source, names)
    rows = names["rows"]
    study = Ledger(searched / "study.jsonl", "published").entries
    assert {len(e.score.skip) for e in study} >= {*rows[rows["family"] == sweep.FRONT]["skipped"]} != set()
    (chosen,) = rows[rows["family"] == sweep.CHOSEN]["score"]
    assert chosen.path == read_profile(searched / "found.yaml").path
    assert rows["measured"].notna().any()
    assert (searched / "picture.png").stat().st_size > 10_000


def traced(llm64, prompt):
    """Of each round that may draft: tokens drafted, tokens accepted, and the threshold after it."""
    drafter = LayerSkipDrafter(llm64.runtime, SKIP, AdaptiveThreshold())
    _, rounds = drafting_rounds(llm64.runtime, drafter, llm64.encode(prompt), 96)
    return [[len(outcome.draft), len(outcome.path), drafter.controller.threshold] for outcome in rounds]


def test_the_threshold_and_the_draft_lengths_are_those_of_the_fixture(llm64):
    """In float64, greedily: the same on any processor. The thresholds follow from what was drafted and accepted."""
    expected = json.loads(FIXTURE.read_text())
    for prompt, told in zip(builtin.prompts("heldout")[:2], expected, strict=True):
        found = traced(llm64, prompt)
        assert [row[:2] for row in found] == [row[:2] for row in told]
        assert [row[2] for row in found] == pytest.approx([row[2] for row in told], abs=1e-12)
        threshold, acceptance = 0.6, None
        for drafted, accepted, after in found:
            if drafted:
                rate = accepted / drafted
                acceptance = rate if acceptance is None else 0.5 * acceptance + 0.5 * rate
                moved = threshold + (0.1 if acceptance < 0.9 else -0.1)
                threshold = min(max(0.9 * threshold + 0.1 * moved, 0.05), 0.95)
            assert after == pytest.approx(threshold, abs=1e-12)
    assert len({row[0] for told in expected for row in told}) > 3, "drafts of several lengths"


def test_its_text_is_plain_decodings(llm64):
    for prompt in builtin.prompts("heldout")[:2]:
        drafter = LayerSkipDrafter(llm64.runtime, SKIP, AdaptiveThreshold())
        drafted, plain = (
            llm64.generate(prompt, max_new_tokens=96, drafter=one).tokens for one in (drafter, PlainDrafter())
        )
        assert drafted == plain
