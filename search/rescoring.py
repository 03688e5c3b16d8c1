"""Score the best few paths of a search again, on texts that they were not selected on.

The best of many scores owes something to chance in the texts that it was selected on; other texts are free of this
bias.
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
# The search's starting path stays unless another path has this many times its speed. Scores of paths that differ in one
# sub-layer differ by up to 3.5% on a dozen texts, in either direction on different texts (SmolLM2).
CLEARLY = 1.04
FEWEST = 3  # prompts, below which rescoring is no better than the scores of the search
TEXTS_SHARE = 0.4  # share of the time for continuing the prompts
HELD_BACK = 1.3  # times the longest rescoring so far, the time reserved for the next

Rescore = Callable[[Sequence[Score]], Score]


def best_rescored(
    search: Search,
    costs: CostModel,
    fixed: Controller | None,
    prompts: Sequence[Sequence[int]],
    scores: Sequence[Score],
) -> Score:
    """Return the one of `scores` (the best first) that is fastest on the model's own continuations of `prompts`.

    The path that the search starts from, if among them, stays unless another is clearly faster. The given scores decide
    where there is too little time for other texts.
    """
    deadline, watch = search.budget.deadline("choosing"), search.watch
    start = search.space.path(search.space.start)
    if len(scores) < 2 or not deadline.allows(search.pace.rows(sum(map(len, prompts)))):
        return clearly_best(scores, scores, start)
    scores = sorted(scores, key=lambda score: score is not scores[0] and score.path != start)  # these two come first
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
    return clearly_best(scores, rescored if len(rescored) > 1 else scores, start)


def clearly_best(scores: Sequence[Score], rescored: Sequence[Score], start: DraftPath) -> Score:
    """Return the score of the fastest path by `rescored`, or of `start` unless another path is faster by `CLEARLY`.

    `rescored` holds newer scores of the same paths in the same order, of all `scores` or of the first few.
    """
    speeds = [score.tokens_per_second * (CLEARLY if score.path == start else 1.0) for score in rescored]
    return scores[speeds.index(max(speeds))]
