"""Prepare a search before its first trial: continuations, costs, the gain of every sub-layer, warm starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from selfspec.basics.errors import SelfspecError
from selfspec.measure.cost_fitting import forward_seconds, measure_costs
from selfspec.profile.module_files_spec import ModuleFile
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath
from selfspec.types.methods import INT4_CHOICES

from .budget import Deadline
from .context import SearchContext
from .continuations import DecodingSettings, continue_prompts
from .fits import fit_confidence
from .forecast import CONFIDENCE_SHARE, CONFIDENT, STREAM_POSITIONS
from .objective import RANKING_SHARE, Objective, ReplayObjective, Score, WallClockObjective
from .quantizing import int4_for_search, using_int4
from .replay import CANDIDATES, Replay
from .replay_state import TargetText
from .space import Space
from .space_filter import Choices, cheaper_choices
from .strategies import Gains, Problem, changed, cheaper_changes
from .trace import LONGEST_DRAFT, deepest
from .warm_starts import BUDGETS, by_cosines, every_fourth, every_second, first_k, likely, programme

LEAST_RANKING = 1 / 64  # share of each text's draft positions, below which the gain of one sub-layer is too uncertain


Refinement = Callable[[Score], Score | None]
"""A function that changes a scored path further and returns the new score, or None if it is no better."""
Rescore = Callable[[Sequence[Score]], Score]
"""A function that picks the best of scored paths by new scores of them."""


@dataclass(frozen=True)
class Preparation:
    """The results of the preparation before the first trial.

    `search`: the context in its narrowed space. `problem`: what strategies know. `costs` and `replay` are None for the
    wall-clock objective. `refinements`: names and functions of further changes to try on the best path. `rescore` picks
    a finalist by scores on texts that no trial was scored on; None if there are too few such prompts.
    """

    search: SearchContext
    objective: Objective
    problem: Problem
    costs: CostModel | None = None
    replay: Replay | None = None
    refinements: tuple[tuple[str, Refinement], ...] = ()
    rescore: Rescore | None = None


@dataclass(frozen=True)
class ReplayPreparation(Preparation):
    """The results of the preparation for the replay objective."""

    objective: ReplayObjective
    costs: CostModel
    replay: Replay


def prepare_replay(
    search: SearchContext, resources: ExitStack, *, context: int | None = None, warm: bool = True
) -> ReplayPreparation:
    """Prepare a search with the replay objective, whose replay `resources` closes.

    `context`: the number of keys at which costs are measured (None: the mean of the texts). Only with `warm` are
    sub-layers ranked and warm starts planned.
    """
    ledger, watch = search.ledger, search.watch
    texts = _continued(search)
    if search.int4_method not in INT4_CHOICES:  # costs depend on the size of the groups in the file
        search = _with_int4(search, texts, resources)
    costs = _costs(search, texts, context)
    search = replace(search, space=_narrowed(search, costs))
    if search.int4 is None:
        search = _with_int4(search, texts, resources)
    space = search.space
    deadline = search.budget.deadline("ranking")
    watch.stage("prefilling the texts", None)
    replay = resources.enter_context(replay_of(search, texts))
    replay.pin_weights(space.path(space.start))
    _confidence(search, replay)
    objective = ReplayObjective(replay, costs, search.controllers, proposers=search.proposers)
    if not warm:
        return ReplayPreparation(search, objective, Problem(space, search.seed), costs, replay)
    planning = BUDGETS * search.pace.at(len(texts[0].tokens)).rows(STREAM_POSITIONS * len(texts))
    gains = ledger.gains or _gains(search, objective, Deadline(deadline.end_time - planning, deadline.clock))
    watch.stage("planning warm starts", None)
    streams = replay.streams(STREAM_POSITIONS)
    planned = programme(space, streams, costs) if deadline.allows(planning) else ()
    cosine_gains = by_cosines(space, streams)
    known = gains or cosine_gains
    near = first_k(space, cosine_gains)
    first = dict.fromkeys((*likely(space, known), *planned[:3], *near[1:3], every_second(space)))
    problem = Problem(space, search.seed, tuple(first), known, planned)
    return ReplayPreparation(search, objective, problem, costs, replay)


def replay_of(search: SearchContext, texts: Sequence[TargetText]) -> Replay:
    """Make a replay of `texts` with the search's settings and confidence."""
    controllers = search.controllers
    replay = Replay(
        search.llm.model,
        texts,
        sampler=search.decoding.sampler(),
        rule=search.decoding.verified_by,
        depth=LONGEST_DRAFT if controllers is None else deepest(controllers),
        candidates=1 if search.own_keys else CANDIDATES,  # other engines' draft models draft one candidate
        seed=search.seed,
        own_keys=search.own_keys,
        base_runtime=search.llm.runtime,
    )
    replay.confidence = search.ledger.confidence or replay.confidence
    return replay


def _narrowed(search: SearchContext, costs: CostModel) -> Space:
    """Return the space without the modes that are no cheaper than full precision on this machine."""
    space, ledger = search.space, search.ledger
    choices = ledger.choices
    if choices is None:
        all_choices = Choices(
            modes=list(space.modes),
            head=list(space.head),
            attention=list(space.fixed.attention),
            mlp=list(space.fixed.mlp),
        )
        choices = ledger.keep_choices(cheaper_choices(all_choices, costs))
    return choices.narrow(space)


def _with_int4(search: SearchContext, texts: Sequence[TargetText], resources: ExitStack) -> SearchContext:
    """Return the search with a file of int4 weights, which all its paths use until `resources` are closed."""
    ledger = search.ledger
    if "int4" not in search.space.modes or (ledger.int4 is None and ledger.confidence is not None):
        return search  # in the second case the study's paths were scored with weights rounded to nearest
    known = ledger.int4
    part = _int4(search, texts, known)
    if known is None and part is not None:
        ledger.keep_int4(part)
        if (known := ledger.int4) is not None and known.file != part.file:  # another worker's became the study's
            part = _int4(search, texts, known)
    if known is not None and part is None:
        raise SelfspecError(
            f"{ledger.description}: its paths were scored with the int4 weights {known.file}, which the cache has no "
            "more, and which cannot be made again with these options in this time"
        )
    if part is not None:
        resources.enter_context(using_int4(search.llm, part))
    return replace(search, int4=part)


def _int4(search: SearchContext, texts: Sequence[TargetText], known: ModuleFile | None) -> ModuleFile | None:
    """Return the file of int4 weights to search with, which is `known` if that is not None; None: it cannot be had."""
    return int4_for_search(
        search.llm,
        [text.tokens for text in texts],
        search.int4_method,
        deadline=search.budget.deadline("ranking"),
        watch=search.watch,
        known=None if known is None else known.file,
    )


def _confidence(search: SearchContext, replay: Replay) -> None:
    """Fit the confidence (the estimated chance that a drafted token is right), unless the study has it, for `replay`.

    It is fitted on drafts in the base mode of the space, or with every fourth layer skipped if the base mode is full.
    """
    if search.ledger.confidence is None:
        search.watch.stage("fitting the confidence of drafted tokens", None)
        space = search.space
        path = space.path(space.start) if space.base != "full" else every_fourth(space)
        confidence = fit_confidence(replay, path, draft=CONFIDENT, share=CONFIDENCE_SHARE)
        replay.confidence = search.ledger.keep_confidence(confidence)


def _continued(search: SearchContext) -> list[TargetText]:
    """Return the texts that trials are scored on: the amount that the study has stored, else the amount that fits."""
    watch, known = search.watch, search.ledger.texts

    def continued(
        prompts: Sequence[list[int]], decoding: DecodingSettings, deadline: Deadline | None
    ) -> list[TargetText]:
        watch.stage("continuing prompts", 2 * decoding.max_new_tokens)
        return continue_prompts(search.llm, prompts, decoding, seed=search.seed, on_token=watch.step, deadline=deadline)

    if known is not None:
        return continued(*search.chosen(known), None)
    texts = continued(*search.chosen(search.plan()), search.budget.deadline("texts"))
    mine = search.plan(texts[0].remaining)
    decided = search.ledger.keep_texts(mine)
    return texts if decided == mine else continued(*search.chosen(decided), None)  # another worker was first


def _costs(search: SearchContext, texts: Sequence[TargetText], context: int | None) -> CostModel:
    """Return the study's cost model; measure it first if the study has none."""
    ledger, watch = search.ledger, search.watch
    shown = 0

    def show(done: int, total: int) -> None:
        nonlocal shown
        if total != shown:
            watch.stage("measuring costs" if not shown else "measuring costs again, as they vary", total)
            shown = total
        watch.step(done)

    if ledger.costs is None:
        keys = round(sum(text.prompt_length + text.num_new_tokens / 2 for text in texts) / len(texts))
        watch.stage("measuring costs", None)
        measured = measure_costs(
            search.llm.runtime,
            context=context or keys,
            sampler=search.decoding.sampler(),
            within=search.budget.share("costs"),
            seed=search.seed,
            modes=(*search.space.modes, *search.space.head),
            on_decoding=show,
        )
        if search.plain_llm is not None:
            alone = forward_seconds(search.plain_llm.runtime, measured.context, repeats=24)
            measured = measured.model_copy(update={"fastest": min(measured.plain, measured.round + alone)})
        ledger.keep_costs(measured)
    costs = ledger.costs
    assert costs is not None
    return costs


def _gains(search: SearchContext, objective: ReplayObjective, deadline: Deadline) -> Gains:
    """Return the speedup of each single change to a cheaper mode; empty if there is no time to measure all changes.

    All changes are compared on the same share of the starts, the largest share that fits the time. A change that is not
    tried has gain 0, which is below every speedup.
    """
    space, share = search.space, RANKING_SHARE
    changes = [*cheaper_changes(space, space.start)]
    points = [space.start, *(changed(space.start, change) for change in changes)]
    search.watch.stage("ranking sub-layers", len(points))
    begun = deadline.clock()
    measured = [objective.gain(space.path(points[0]), share=share)]
    needed = (deadline.clock() - begun) * len(points)
    if needed > deadline.left:
        share *= deadline.left / needed
        measured = []
    for number, point in enumerate(points):
        if share < LEAST_RANKING or not deadline.allows():
            return ()
        if number >= len(measured):
            measured.append(objective.gain(space.path(point), share=share))
        search.watch.step(number + 1)
    gains = [[0.0] * len(modes) for modes in space.choices]
    for i, now in enumerate(space.start):
        gains[i][now] = measured[0]
    for (i, choice), gain in zip(changes, measured[1:], strict=True):
        gains[i][choice] = gain
    search.ledger.keep_gains(tuple(map(tuple, gains)))
    return search.ledger.gains or ()


def prepare_wallclock(search: SearchContext, *, warm: bool) -> Preparation:
    """Prepare a search with the wall-clock objective.

    With `warm`, sub-layers are ranked by the cosine of their input and output hidden states, to find warm starts;
    not for a model that takes no attention mask per token.
    """
    space = search.space
    starts: tuple[DraftPath, ...] = ()
    prompts, decoding = search.chosen(search.ledger.texts or search.ledger.keep_texts(search.plan()))
    texts = [
        TargetText(tuple(ids), max(1, len(ids) - STREAM_POSITIONS), STREAM_POSITIONS + 1)
        for ids in prompts
        if len(ids) > 1
    ]
    if warm and texts and search.llm.runtime.trees:
        search.watch.stage("ranking sub-layers", None)
        with Replay(search.llm.model, texts, depth=1) as replay:
            starts = (*likely(space, by_cosines(space, replay.streams(STREAM_POSITIONS))), every_second(space))
    search.watch.stage("measuring plain decoding", 1 + len(prompts))
    objective = WallClockObjective(
        search.llm, prompts, decoding, search.controller, plain_llm=search.plain_llm, on_prompt=search.watch.step
    )
    return Preparation(search, objective, Problem(space, search.seed, tuple(dict.fromkeys(starts))))
