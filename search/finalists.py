"""Measure the best few paths of a search by real decoding, and make the profile of the best path.

The best of many scores is biased, because chance in the texts helped to select it; scores on new texts are not biased.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from selfspec.basics.errors import SelfspecError, reason
from selfspec.controllers import make_controller
from selfspec.measure.timing import Runs, interleave, measure, method
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Measurement, Profile, SearchRecord
from selfspec.types.acceptance import Confidence
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath

from .bridging import attach_bridges
from .budget import Deadline
from .context import SearchContext
from .continuations import FEWEST, continue_prompts
from .forecast import CHOOSING, CONTENDING, FINALISTS
from .objective import ReplayObjective, Score, predict
from .prepare import Preparation, Refinement, replay_of
from .quantizing import INT4
from .space import Space

PROMPTS = 12  # prompts to continue
# The path that the search starts from is kept unless another path is faster by this factor. Scores of paths that differ
# in one sub-layer differ by up to 3.5% on a dozen texts, with a sign that depends on the texts (SmolLM2).
CLEARLY = 1.04
REPLAYING_SHARE = 0.5  # share of the time for choosing that the replays have where finalists are decoded afterwards
FEWEST_RESCORED = 3  # with fewer prompts, rescoring is no better than the scores of the search
TEXTS_SHARE = 0.4  # share of the time for continuing the prompts
RESCORING_SHARE = 1.3  # time reserved for the next rescoring, times the longest rescoring so far


def best_rescored(
    search: SearchContext, costs: CostModel, prompts: Sequence[Sequence[int]], scores: Sequence[Score]
) -> Score:
    """Return the one of `scores` (the best first) that is fastest on the model's own continuations of `prompts`.

    `prompts`: token ids of prompts that no path was selected on. The path that the search starts from, if scored,
    is kept unless another path is clearly faster. If there is too little time to decode and rescore, `scores` decide.
    """
    deadline, watch = search.budget.deadline("choosing"), search.watch
    deadline = deadline.part(REPLAYING_SHARE) if search.space.uniform else deadline
    start = search.space.path(search.space.start)
    if len(scores) < 2 or not deadline.allows(sum(search.pace.prefill(len(ids)) for ids in prompts)):
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
    with replay_of(search, texts) as replay:
        objective = ReplayObjective(replay, costs, search.controllers, proposers=search.proposers)
        watch.stage("choosing among the best few", len(scores))
        longest = 0.0
        for score in scores:
            if not deadline.allows(RESCORING_SHARE * longest):
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


WITHIN_REACH = 0.9  # of the speed of plain decoding: slower paths by prediction are not finalists
ROUNDS = 3  # the most measuring rounds
FEW = 3  # the fewest prompts for a useful interval
NARROW, CLEAR = 0.04, 0.02  # measuring may stop at this width of the speedup's interval, or distance from 1
ENOUGH = 16  # new tokens for each prompt, below which fewer prompts are measured
HELD_BACK = 1.2  # safety factor on the expected time of the next prompt
PACKAGES = ("selfspec", "torch", "transformers", "optuna", "scikit-optimize")


@dataclass(frozen=True)
class HeldOut:
    """Prompts to measure on, as token ids; `held_out`: whether no trial was scored on any of these prompts."""

    prompts: tuple[list[int], ...]
    held_out: bool


def finish(
    prepared: Preparation,
    base: Profile,
    eval_set: HeldOut,
    *,
    keep_best: bool,
    others: Sequence[Sequence[int]] = (),
) -> Profile:
    """Choose among the best few of the ledger's scores, measure the chosen one, and complete the profile `base`.

    The best of many noisy scores is biased. Therefore `prepared.rescore` chooses among the finalists, sorted with the
    best first, by texts that no finalist was scored on. The path that it chooses and the paths with every sub-layer in
    one quantised mode then decode the first `CONTENDING` of `others`, prompts that no path was scored on, and that path
    stays unless another is clearly faster: costs and acceptance rates of different modes are predicted with different
    errors. Without `prepared.rescore`, the finalist that decodes the prompts of `eval_set` fastest is chosen. A better
    result of `prepared.refinements` joins the finalists. The chosen path is then measured against plain decoding
    (without drafts), on as many prompts and tokens as fit the time. The best path of an interrupted search is not
    measured; nor is the best path of a search with `kv` "own", because selfspec does not decode with a separate KV
    cache for drafts. An interrupt here ends the measuring, or the prediction. The speed of the saved profile is
    predicted by `prepared.replay`, if there is one. `keep_best`: save the best path even if plain decoding is faster.
    Raises `SelfspecError` if no path was scored.
    """
    search, record = prepared.search, base.search
    assert record is not None
    finalists = _finalists(search.space, list(search.ledger.scores.values()))
    if not finalists:
        raise SelfspecError("no draft path could be scored: every proposed path exceeds max_draft_cost or extra_memory")
    measured: Measurement | None = None
    best, confidence = finalists[0], search.ledger.confidence
    try:
        if not record.interrupted and record.kv == "shared":
            eligible = _with_refinements(search, finalists, prepared.refinements)
            uniform = [score for score in eligible if score.path in search.space.uniform]
            eligible = [eligible[0], *(s for s in eligible[1:] if s.speedup >= WITHIN_REACH or s in uniform)]
            deadline = search.budget.deadline("choosing")
            if prepared.rescore is None:
                chosen = _fastest(search, base, eligible, eval_set.prompts[:CHOOSING], deadline)
                best = chosen or clearly_best(eligible, eligible, search.space.path(search.space.start))
            else:
                best = prepared.rescore(eligible)
                contenders = [best, *(score for score in uniform if score is not best)]
                best = _fastest(search, base, contenders, others[:CONTENDING], deadline, first=CLEARLY) or best
            measured = _measured(search, profile_from_score(base, best, confidence), eval_set)
    except KeyboardInterrupt:
        record = record.model_copy(update={"interrupted": True})
    use_best = keep_best or (best.speedup if measured is None else measured.speedup) > 1
    profile = profile_from_score(base, best, confidence) if use_best else base.model_copy(update={"parts": {}})
    predicted = None
    if use_best and prepared.replay is not None and base.costs is not None:
        search.watch.stage("predicting the speed of the profile", None)
        try:
            predicted = predict(prepared.replay, profile, trained=best.path.trained)
        except KeyboardInterrupt:
            record = record.model_copy(update={"interrupted": True})
    extra_bytes = search.llm.runtime.extra_bytes(profile.path) if profile.path.low_precision else None
    return profile.model_copy(
        update={
            "search": record.model_copy(update={"extra_bytes": extra_bytes}),
            "predicted": predicted,
            "measured": [measured] if use_best and measured is not None else [],
            "versions": versions(),
            "note": _note(best, measured, record, use_best=use_best),
        }
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that a search depends on; packages that are not installed are left out."""
    installed = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def profile_from_score(base: Profile, score: Score, confidence: Confidence | None) -> Profile:
    """Return `base` with the scored path, controller and candidates; all options of the controller are explicit.

    Int4 weights among the parts of `base` are kept if the path has int4 sub-layers.
    """
    draft = LayerSkipSpec.from_path(
        score.path,
        make_controller(score.controller).spec(),
        candidates=score.candidates,
        confidence=None if confidence is None or confidence.plain else confidence,
        proposers=score.proposers,
        spared=score.spared,
    )
    draft = draft.model_copy(update={"int4_weights": INT4 if INT4 in base.parts and len(score.path.int4) else None})
    parts = {INT4: base.parts[INT4]} if draft.int4_weights else {}
    profile = base.model_copy(update={"draft": draft, "parts": parts, "acceptance": score.acceptance})
    return attach_bridges(profile, score.path)


def _finalists(space: Space, scores: Sequence[Score]) -> list[Score]:
    """Return the best score, then the scores of paths that chance did not select, then the others of the best few.

    Chance did not select the path that every search starts from, which is left out if it was pruned, and the paths with
    every sub-layer in one quantised mode, which are always finalists.
    """
    known = {score.path: score for score in scores}
    ranked = sorted((s for s in known.values() if not s.pruned), key=lambda s: -s.tokens_per_second)
    fixed = [known[path] for path in space.uniform if path in known]
    fixed += [score for score in ranked if score.path == space.path(space.start)]
    best = ranked[:FINALISTS]
    return [*{score.path: score for score in (*best[:1], *fixed, *best[1:])}.values()]


def _with_refinements(
    search: SearchContext, finalists: Sequence[Score], refinements: Sequence[tuple[str, Refinement]]
) -> list[Score]:
    """Return the finalists and the refinements of the best finalist that fit the time, the best first.

    A refinement that cannot be written, as on a full disk, is left out, and the search says so.
    """
    eligible = [*finalists]
    for name, refine in refinements:
        if search.budget.deadline("heads").left > 2 * search.ledger.longest:
            search.watch.stage(f"trying {name}", None)
            try:
                refined = refine(eligible[0])
            except (SelfspecError, OSError) as error:
                search.watch.say(f"without {name}: {reason(error)}")
                continue
            if refined is not None:
                eligible.insert(0, refined)
    return eligible


def _fastest(
    search: SearchContext,
    base: Profile,
    finalists: Sequence[Score],
    prompts: Sequence[Sequence[int]],
    deadline: Deadline,
    *,
    first: float = 1.0,
) -> Score | None:
    """Return the finalist that decodes `prompts` fastest in interleaved runs; None without time for runs of two.

    `first`: the factor by which another must be faster than the first one.
    """
    eligible, most = [*finalists], len(prompts)
    while len(eligible) > 1 and not (new := _tokens(search, deadline, prompts, methods=len(eligible), most=most)):
        eligible.pop()
    if len(eligible) < 2:
        return None
    options = replace(search.decoding, max_new_tokens=new).timed()
    llm, watch = search.llm, search.watch
    methods = {
        str(i): method(llm, llm.drafter_for(profile_from_score(base, score, search.ledger.confidence)), options)
        for i, score in enumerate(eligible)
    }
    watch.stage("choosing among the best few", len(eligible) * len(prompts))
    runs = interleave(methods, prompts, rounds=1, on_run=_counted(search), go_on=_in_time(deadline))
    ratios = [runs.speedup(str(i), "0")[0] for i in range(len(eligible))]
    for score, ratio in zip(eligible, ratios, strict=True):
        watch.say(f"finalist: {score.path.summary}: {ratio:.2f}x the first one's speed, measured")
    ratios[0] *= first
    return eligible[ratios.index(max(ratios))]


def _measured(search: SearchContext, profile: Profile, eval_set: HeldOut) -> Measurement | None:
    """Measure the best path against plain decoding; return None if there is no time."""
    deadline, watch = search.budget.deadline("measuring"), search.watch
    new = _tokens(search, deadline, eval_set.prompts, methods=2)
    if not new:
        return None
    on_time = _in_time(deadline)
    watch.stage(
        "measuring the best on held-out prompts" if eval_set.held_out else "measuring the best",
        2 * ROUNDS * len(eval_set.prompts),
    )
    return measure(
        search.llm,
        search.llm.drafter_for(profile),
        eval_set.prompts,
        replace(search.decoding, max_new_tokens=new).timed(),
        held_out=eval_set.held_out,
        rounds=ROUNDS,
        plain_llm=search.plain_llm,
        on_run=_counted(search),
        go_on=lambda runs: on_time(runs) and not _settled(runs, len(eval_set.prompts)),
    )


def _tokens(
    search: SearchContext,
    deadline: Deadline,
    prompts: Sequence[Sequence[int]],
    *,
    methods: int,
    most: int = CHOOSING,
) -> int:
    """Return how many new tokens per prompt fit the time with `methods` methods; 0 if fewer than `FEWEST` fit.

    `most`: the most prompts that the time must suffice for. Their number is reduced before the number of tokens falls
    below `ENOUGH`. The time includes a warm-up run.
    """
    longest = search.decoding.max_new_tokens
    if math.isinf(deadline.left):
        return longest
    prompt, new = statistics.mean(search.pace.prefill(len(ids)) for ids in prompts), 0.0
    step = search.pace.at(statistics.mean(map(len, prompts))).step
    for count in range(min(most, len(prompts)), 0, -1):
        new = (deadline.left / methods / (1 + count) - prompt) / step
        if new >= min(ENOUGH, longest):
            return min(longest, int(new))
    return min(longest, int(new)) if new >= min(FEWEST, longest) else 0


def _counted(search: SearchContext) -> Callable[[str, int], None]:
    """Return a callback that, after every run, reports the number of runs done as the search's progress."""
    done = 0

    def on_run(_name: str, _prompt: int) -> None:
        nonlocal done
        done += 1
        search.watch.step(done)

    return on_run


def _in_time(deadline: Deadline) -> Callable[[Runs], bool]:
    """Return a test of whether every method can run another prompt in time, judged by the mean time of a run."""

    def go_on(runs: Runs) -> bool:
        each = [run.seconds for prompts in runs.stats.values() for prompt in prompts for run in prompt]
        return deadline.allows(HELD_BACK * len(runs.stats) * statistics.mean(each))

    return go_on


def _settled(runs: Runs, prompts: int) -> bool:
    """Return whether all prompts ran equally often, and the speedup's interval is narrow or clearly excludes 1."""
    done = runs.stats["draft"]
    if len(done) < max(prompts, FEW) or len({*map(len, done)}) > 1:
        return False
    low, high = runs.speedup("draft", "plain")[1]
    return high - low <= NARROW or low >= 1 + CLEAR or high <= 1 - CLEAR


def _note(best: Score, measured: Measurement | None, search: SearchRecord, *, use_best: bool) -> str | None:
    attention, mlp = list(best.skip.attention), list(best.skip.mlp)
    description = f"the best skip set found (attention {attention}, mlp {mlp})"
    if best.path.low_precision:
        description = f"the best draft path found ({best.path.summary})"
    if search.kv == "own":
        ended = f"interrupted after {search.trials} trials; " if search.interrupted else ""
        if use_best:
            return f"{ended}for a draft model with a separate KV cache; its speed is predicted, not measured"
        return (
            f"{ended}nothing is predicted to beat plain decoding: {description}, as a draft model with a separate "
            f"KV cache, reaches {best.speedup:.3g} times the speed of plain decoding, so this profile skips nothing"
        )
    if measured is None:
        ended = f"interrupted after {search.trials} trials" if search.interrupted else "too little time was left"
        return f"{ended}; not measured"
    if measured.speedup > 1:
        return None if measured.interval[0] > 1 else "not certain: the measured speedup's interval includes 1"
    if use_best:
        return f"plain decoding was faster: this draft path reached {measured.speedup} times its speed when measured"
    return (
        f"nothing beat plain decoding: {description} reached {measured.speedup} times its speed, "
        "so this profile skips nothing"
    )
