"""What rounds take on this runtime, by a clock that is told what passes take."""

from __future__ import annotations

import pytest
from models import small

import selfspec
from selfspec.drafters import Guard
from selfspec.facts.acceptance import Outlook
from selfspec.facts.draft_path import FULL, DraftPath
from selfspec.facts.skip import SkipSet
from selfspec.llm.llm import LLM
from selfspec.profile.draft import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.runtime import here
from selfspec.runtime.forward import Runtime
from selfspec.runtime.here import as_here

PATH = DraftPath(SkipSet((0,), (1,)))
TOLD = Outlook(0.5, tuple(1.0 + 0.05 * max(rows - 1, 0) for rows in range(66)), wider=(0.5, 0.5, 0.5, 0.5, 0.9))


@pytest.fixture
def passes(monkeypatch, tmp_path):
    """A clock that only passes move: one row takes 10 in full, 2 along the path, each further one 1."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    now, ran = [0.0], []
    forward = Runtime.forward

    def timed(self, tokens, positions, *, path=None, **options):
        whole = path is None or path is self.compile(FULL)
        now[0] += (10 if whole else 2) + tokens.shape[1] - 1
        ran.append(tokens.shape[1])
        return forward(self, tokens, positions, path=path, **options)

    monkeypatch.setattr(Runtime, "forward", timed)
    monkeypatch.setattr(here.time, "perf_counter", lambda: now[0])
    return ran


def test_what_is_dearer_here_is_as_dear_as_here(passes):
    found = as_here(TOLD, Runtime(small()), PATH)
    rows = [found.rounds[n] for n in (1, 2, 3, 4, 8, 16, 17, 32)]
    assert rows == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.7, 2.5, 2.6, 4.1])
    assert found.wider == pytest.approx((0.5, 0.5, 0.5, 0.5, 0.9)), "which are cheaper here"
    cheap = Outlook(0.1, TOLD.rounds, wider=(0.1, 0.1))
    assert as_here(cheap, Runtime(small()), PATH).wider == pytest.approx((0.2, 0.2 + 0.3 / 3), abs=0.02)
    assert as_here(Outlook(0.1), Runtime(small()), PATH).draft == pytest.approx(0.2)


def test_what_is_no_draft_path_is_as_dear_as_it_was(passes):
    found = as_here(Outlook(0.1, TOLD.rounds), Runtime(small()), FULL)
    assert (found.draft, found.wider) == (0.1, ())
    assert found.rounds[8] == pytest.approx(1.7)


def test_it_is_measured_once(passes, tmp_path):
    as_here(TOLD, Runtime(small()), PATH)
    (kept,) = (tmp_path / "costs").iterdir()
    passes.clear()
    assert as_here(TOLD, Runtime(small()), PATH).rounds[8] == pytest.approx(1.7)
    assert not passes
    for broken in ("", "[]", '{"full": {"1": 1}}', '{"full": {"1": -1}, "draft": {}}', '{"full": {}, "draft": {}}'):
        kept.write_text(broken)
        assert as_here(TOLD, Runtime(small()), PATH).rounds[8] == pytest.approx(1.7)
        assert passes
        passes.clear()
    as_here(TOLD, Runtime(small()), DraftPath(SkipSet((1,), (1,))))
    assert passes, "another path is measured apart"


def test_a_model_of_a_short_context(passes):
    model = small()
    model.config.max_position_embeddings = 6
    assert as_here(TOLD, Runtime(model), PATH).rounds[4] >= 1.3


def test_it_is_known_before_the_first_text_with_a_seed(passes):
    """By a profile that says that drafts are next to free, where each here costs more than it can bring."""
    model = small()
    llm = LLM(model, selfspec.load(profile="none").tokenizer)
    draft = LayerSkipSpec.of(PATH)
    costs = {"context": 9, "base": 0.01, "attention": 0, "mlp": 0, "widths": [1, 8], "verify": [1, 1.01], "round": 0}
    llm._use(Profile(model=llm.identity, draft=draft, costs=costs))
    assert isinstance(llm.drafter, Guard)
    llm.generate([1, 2, 3], max_new_tokens=4)
    assert llm.drafter.outlook.rounds[8] == pytest.approx(1.01)
    llm.generate([1, 2, 3], max_new_tokens=4, temperature=0.8, seed=1)
    assert llm.drafter.outlook.rounds[8] == pytest.approx(1.7)
    passes.clear()
    llm.generate([1, 2, 3], max_new_tokens=4, temperature=0.8, seed=2)
    assert max(passes) < 16, "it is not measured again"
