"""The best few of a search, scored again on texts that none of them was chosen by.

The best of many scores owes something to chance: to the texts that it was scored on. Other texts do not know that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from selfspec.controllers import Controller
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath

from .continuations import continue_prompts
from .objective import Replayed, Score
from .prepare import Search, replay_of

PROMPTS = 12  # that are to be continued
# Times the speed of what every search starts from, which stays unless another one has so much. Paths that differ in one
# sub-layer differed by up to 3.5% on a dozen texts, either way on different ones (SmolLM2).
CLEARLY = 1.04
FEWEST = 3  # prompts, below which texts tell no more than those that were searched on
TEXTS_SHARE = 0.4  # of the time: continuing the prompts
HELD_BACK = 1.3  # times what the longest took is kept for the next

Again = Callable[[Sequence[Score]], Score]


def best_on_others(
    search: Search,
    costs: CostModel,
    fixed: Controller | None,
    prompts: Sequence[Sequence[int]],
    scores: Sequence[Score],
) -> Score:
    """The one of `scores`, the best of which is the first, that is fastest on the model's own answers to `prompts`.

    What the search starts from, if it is among them, stays where none is clearly faster. Where there is too little time
    for other texts, the scores as they are decide so.
    """
    deadline, watch = search.budget.deadline("choosing"), search.watch
    start = search.space.path(search.space.start)
    if len(scores) < 2 or not deadline.allows(search.pace.rows(sum(map(len, prompts)))):
        return clearly_best(scores, scores, start)
    scores = sorted(scores, key=lambda score: score is not scores[0] and score.path != start)  # these two above all
    watch.stage("continuing other prompts", 2 * search.decoding.max_new_tokens)
    texts = continue_prompts(
        search.llm,
        prompts,
        replace(search.decoding, max_new_tokens=search.plan().max_new_tokens),
        seed=search.seed,
        on_token=watch.step,
        deadline=deadline.part(TEXTS_SHARE),
    )
    again: list[Score] = []
    with replay_of(search, texts, fixed) as replay:
        worth = Replayed(replay, costs, None if fixed is None else [fixed], proposers=search.proposers)
        watch.stage("choosing among the best few", len(scores))
        longest = 0.0
        for score in scores:
            if not deadline.allows(HELD_BACK * longest):
                break
            begun = deadline.clock()
            again.append(worth.score(score.path))
            longest = max(longest, deadline.clock() - begun)
            watch.step(len(again))
    return clearly_best(scores, again if len(again) > 1 else scores, start)


def clearly_best(scores: Sequence[Score], told: Sequence[Score], start: DraftPath) -> Score:
    """The one of `scores` whose score in `told`, which may be of the first few, is best; `start` if none clearly is."""
    speeds = [score.tokens_per_second * (CLEARLY if score.path == start else 1.0) for score in told]
    return scores[speeds.index(max(speeds))]
