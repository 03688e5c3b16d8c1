"""Score the best few paths of a search again, on texts that they were not selected on.

The best of many scores is biased, because chance in the texts helped to select it; scores on new texts are not biased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from selfspec.controllers import Controller
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath

from .continuations import continue_prompts
from .objective import ReplayObjective, Score
from .prepare import Search, replay_of

PROMPTS = 12  # prompts to continue
# The path that the search starts from is kept unless another path is faster by this factor. Scores of paths that differ
# in one sub-layer differ by up to 3.5% on a dozen texts, with a sign that depends on the texts (SmolLM2).
CLEARLY = 1.04
FEWEST = 3  # with fewer prompts, rescoring is no better than the scores of the search
TEXTS_SHARE = 0.4  # share of the time for continuing the prompts
HELD_BACK = 1.3  # time reserved for the next rescoring, times the longest rescoring so far

Rescore = Callable[[Sequence[Score]], Score]


def best_rescored(
    search: Search,
    costs: CostModel,
    fixed: Controller | None,
    prompts: Sequence[Sequence[int]],
    scores: Sequence[Score],
) -> Score:
    """Return the one of `scores` (the best first) that is fastest on the model's own continuations of `prompts`.

    `prompts`: token ids of prompts that no path was selected on. The path that the search starts from, if scored,
    is kept unless another path is clearly faster. If there is too little time to decode and rescore, `scores` decide.
    `fixed`: the controller (None: tuned).
    """
    deadline, watch = search.budget.deadline("choosing"), search.watch
    start = search.space.path(search.space.start)
    if len(scores) < 2 or not deadline.allows(search.pace.rows(sum(map(len, prompts)))):
        return clearly_best(scores, scores, start)
    first = (start, *search.space.uniform)
    scores = sorted(scores, key=lambda score: score is not scores[0] and score.path not in first)
    watch.stage("continuing other prompts", 2 * search.decoding.max_new_tokens)
    texts = continue_prompts(
        search.llm,
        prompts,
        replace(search.decoding, max_new_tokens=search.plan().max_new_tokens),
        seed=search.seed,
        on_token=watch.step,
        deadline=deadline.part(TEXTS_SHARE),
    )
    rescored: list[Score] = []
    with replay_of(search, texts, fixed) as replay:
        objective = ReplayObjective(replay, costs, None if fixed is None else [fixed], proposers=search.proposers)
        watch.stage("choosing among the best few", len(scores))
        longest = 0.0
        for score in scores:
            if not deadline.allows(HELD_BACK * longest):
                break
            begun = deadline.clock()
            rescored.append(objective.score(score.path))
            longest = max(longest, deadline.clock() - begun)
            watch.step(len(rescored))
            watch.say(f"finalist: {score.path.summary}: {rescored[-1].speedup:.2f}x predicted on other texts")
    return clearly_best(scores, rescored if len(rescored) > 1 else scores, start)


def clearly_best(scores: Sequence[Score], rescored: Sequence[Score], start: DraftPath) -> Score:
    """Return the one of `scores` whose path is fastest by `rescored`; the speed of `start` counts `CLEARLY` times.

    `rescored` holds newer scores of the paths of `scores`, in the same order; the last paths may have no newer score.
    """
    speeds = [score.tokens_per_second * (CLEARLY if score.path == start else 1.0) for score in rescored]
    return scores[speeds.index(max(speeds))]
