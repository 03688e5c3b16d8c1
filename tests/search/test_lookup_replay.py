"""What guesses spare, on a trace: the passes that real decoding takes, work for work, in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from lowering import random_path
from models import run
from selfspec.search.objective import ReplayObjective
from selfspec.search.oracle import spared, with_lookup_tokens
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText
from selfspec.search.trace import Trace, deepest, walk

from selfspec import builtin
from selfspec.controllers import AdaptiveThreshold, FixedK, RateOptimal, StaticThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.models.low_precision import fake
from selfspec.profile.draft_spec import ProposerSpec
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.types.acceptance import PayoffModel
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath

NEW = 24
AHEAD = ProposerChain([Lookup()], (1.0, 1.05, 1.1, 1.15, 1.2))
CONTROLLERS = [
    FixedK(5),
    StaticThreshold(0.5, 6),
    AdaptiveThreshold(threshold=0.6, k_max=8, floor=0.2),
    RateOptimal(k_max=7, floor=0.1, strength=8.0, payoff=PayoffModel(draft=0.3)),
]
COSTS = CostModel(
    context=60,
    base=0.05,
    attention=0.01,
    mlp=0.01,
    widths=[1, 16],
    verify=[1.0, 1.5],
    round=0.02,
    wider=[1.05, 1.1, 1.15, 1.2],
)


@pytest.fixture(scope="module")
def runtime(llm64):
    return LeanRuntime(llm64.model, kernel=fake)


def texts_of(llm64, runtime, seeds):
    made = []
    for prompt, seed in zip(builtin.prompts("calibration"), seeds, strict=False):
        ids = llm64.encode(prompt)
        sampler = Sampler() if seed is None else Sampler(temperature=0.8, seed=seed)
        new, _ = run(runtime, PlainDrafter(), ids, NEW, ends=runtime.skeleton.ends, sampler=sampler)
        made.append(TargetText((*ids, *new), len(ids), NEW, seed))
    return made


@pytest.mark.parametrize("seeds", [(None,) * 3, (1, 2, 3)], ids=["greedy", "match"])
@pytest.mark.parametrize("candidates", [1, 3])
def test_passes_are_those_of_real_decoding(llm64, runtime, seeds, candidates):
    path = random_path(1, llm64.runtime.layers, words=4096)
    texts = texts_of(llm64, runtime, seeds)
    first = Sampler() if seeds[0] is None else Sampler(temperature=0.8)
    rule = "block" if seeds[0] is None else "match"
    with Replay(
        llm64.model, texts, sampler=first, rule=rule, depth=deepest(CONTROLLERS), base_runtime=runtime
    ) as replay:
        traces = with_lookup_tokens(replay, replay.trace(path, CONTROLLERS), AHEAD)
    seen = set()
    for controller in CONTROLLERS:
        walked = walk(traces, controller, candidates=candidates, seeded=seeds[0] is not None)
        drafter = LayerSkipDrafter(runtime, path, controller.start(), candidates=candidates, proposer_chain=AHEAD)
        for text, mine in zip(texts, walked, strict=True):
            sampler = Sampler() if text.seed is None else Sampler(temperature=0.8, seed=text.seed)
            ids = list(text.tokens[: text.prompt_length])
            new, outcomes = run(runtime, drafter, ids, NEW, ends=runtime.skeleton.ends, sampler=sampler)
            assert new == list(text.tokens[text.prompt_length :])
            assert mine.rounds == Counter((o.draft.work, 1 + len(o.draft)) for o in outcomes)
            seen.update(part.name if part.rows == 1 else "wide" for o in outcomes for part, _ in o.draft.work)
    assert {"wide", "draft step", "lookup"} <= seen


def test_what_is_spared():
    """Of four tokens that are right and one that is not, three came from one pass over three tokens."""
    trace = Trace(9, 9, [[0.9] * 5], [4], [0], [False], [[1, 2, 3, 4, 5]], [[(0, 3), (3, 1), (4, 1)]])
    assert spared([trace], COSTS) == pytest.approx(1 - (1.1 + 1 + 1) / 5)
    assert spared([replace(trace, runs=[1])], COSTS) == pytest.approx(1 - 1.1 / 2)
    assert spared([replace(trace, passes=[[(0, 5)]], runs=[0], drafted=[[1]])], COSTS) == 0, "never less than none"


def test_a_search_scores_the_cascade(llm64, runtime):
    """Cheaper drafts of the same tokens are worth more, and the score says by what."""
    path = DraftPath.from_modes(["int8"] * (2 * llm64.runtime.layers))
    texts = texts_of(llm64, runtime, (None,) * 3)
    with Replay(llm64.model, texts, depth=8, base_runtime=runtime) as replay:
        alone = ReplayObjective(replay, COSTS, [FixedK(4)]).score(path)
        together = ReplayObjective(replay, COSTS, [FixedK(4)], proposers=[ProposerSpec()]).score(path)
    assert (alone.proposers, alone.spared) == ((), 0)
    assert together.proposers == (ProposerSpec(),)
    assert together.spared > 0
    assert together.tokens_per_round == alone.tokens_per_round
    assert together.speedup > alone.speedup
