"""Prepare a search before its first trial: continuations, costs, the gain of every sub-layer, warm starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from selfspec.controllers import Controller
from selfspec.llm.llm import LLM
from selfspec.measure.cost_fitting import forward_seconds, measure_costs
from selfspec.profile.draft_spec import ProposerSpec
from selfspec.profile.module_files_spec import ModuleFile
from selfspec.profile.schema import Calibration
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath
from selfspec.types.methods import INT4_CHOICES

from .budget import Budget, Deadline
from .callbacks import SearchCallbacks, SilentSearch
from .continuations import DecodingSettings, continue_prompts
from .fits import fit_confidence
from .forecast import CONFIDENCE_SHARE, CONFIDENT, STREAM_POSITIONS, Pace, SearchTask
from .ledger import Ledger, ScoredTexts
from .objective import RANKING_SHARE, Objective, ReplayObjective, WallClockObjective
from .quantizing import int4_for_search, using_int4
from .replay import CANDIDATES, Replay
from .replay_state import TargetText
from .space import Space
from .space_filter import Choices, cheaper_choices
from .strategies import Gains, Problem, changed, cheaper_changes
from .trace import LONGEST_DRAFT, deepest
from .warm_starts import BUDGETS, by_cosines, every_fourth, every_second, first_k, likely, programme

LEAST_RANKING = 1 / 64  # share of each text's draft positions, below which the gain of one sub-layer is too uncertain


@dataclass(frozen=True)
class Search:
    """The state that the parts of one search share.

    `prompts`: token ids of all prompts that the search may use. `decoding`: the settings as requested. `pace`: the
    measured speed of the model. `planned`: the work of the search, with as many prompts and new tokens as fit the time
    (None: all prompts and tokens). `described(n)` returns the profile's record of the first n prompts. `own_keys`:
    whether drafts have a separate KV cache. `plain_llm`: the same model in the weight layout for plain decoding (None:
    `llm` itself is fastest). `int4_method`: the quantiser of int4 weights, as in `SearchOptions`. `int4`: the file of
    int4 weights that draft paths use, once it is made.
    """

    llm: LLM
    space: Space
    decoding: DecodingSettings
    prompts: tuple[list[int], ...]
    seed: int
    ledger: Ledger
    watch: SearchCallbacks = field(default_factory=SilentSearch)
    budget: Budget = field(default_factory=Budget)
    pace: Pace = field(default_factory=lambda: Pace(0.0, 0.0))
    planned: SearchTask | None = None
    described: Callable[[int], Calibration] | None = None
    own_keys: bool = False
    proposers: tuple[ProposerSpec, ...] = ()
    plain_llm: LLM | None = None
    int4_method: str = "auto"
    int4: ModuleFile | None = None

    def plan(self, max_new_tokens: int | None = None) -> ScoredTexts:
        """Return the amount of text that fits the time; `max_new_tokens`: the length of the decoded texts, if known."""
        count = len(self.prompts if self.planned is None else self.planned.prompts)
        new = self.decoding.max_new_tokens if self.planned is None else self.planned.max_new_tokens
        described = None if self.described is None else self.described(count)
        return ScoredTexts(prompts=count, max_new_tokens=max_new_tokens or new, calibration=described)

    def chosen(self, texts: ScoredTexts) -> tuple[tuple[list[int], ...], DecodingSettings]:
        """Return the prompts that `texts` covers, and the settings for decoding their continuations."""
        return self.prompts[: texts.prompts], replace(self.decoding, max_new_tokens=texts.max_new_tokens)


def prepare_replay(
    search: Search, resources: ExitStack, fixed: Controller | None, context: int | None, warm: bool
) -> tuple[Search, ReplayObjective, Problem, CostModel, Replay]:
    """Return the search in its narrowed space, the replay objective, the strategies' problem, the costs, the replay.

    `resources` closes the replay. `fixed`: the controller (None: tuned). `context`: the number of keys at which costs
    are measured (None: the mean of the texts). Only with `warm` are sub-layers ranked and warm starts planned.
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
    replay = resources.enter_context(replay_of(search, texts, fixed))
    replay.pin_weights(space.path(space.start))
    _confidence(search, replay)
    objective = ReplayObjective(replay, costs, None if fixed is None else [fixed], proposers=search.proposers)
    if not warm:
        return search, objective, Problem(space, search.seed), costs, replay
    planning = BUDGETS * search.pace.rows(STREAM_POSITIONS * len(texts))
    gains = ledger.gains or _gains(search, objective, Deadline(deadline.end_time - planning, deadline.clock))
    watch.stage("planning warm starts", None)
    streams = replay.streams(STREAM_POSITIONS)
    planned = programme(space, streams, costs) if deadline.allows(planning) else ()
    cosine_gains = by_cosines(space, streams)
    known = gains or cosine_gains
    near = first_k(space, cosine_gains)
    first = dict.fromkeys((*likely(space, known), *planned[:3], *near[1:3], every_second(space)))
    return search, objective, Problem(space, search.seed, tuple(first), known, planned), costs, replay


def replay_of(search: Search, texts: Sequence[TargetText], fixed: Controller | None) -> Replay:
    """Make a replay of `texts` with the search's settings and confidence; `fixed`: the controller (None: tuned)."""
    replay = Replay(
        search.llm.model,
        texts,
        sampler=search.decoding.sampler(),
        rule=search.decoding.verified_by,
        depth=LONGEST_DRAFT if fixed is None else deepest([fixed]),
        candidates=1 if search.own_keys else CANDIDATES,  # other engines' draft models draft one candidate
        seed=search.seed,
        own_keys=search.own_keys,
        base_runtime=search.llm.runtime,
    )
    replay.confidence = search.ledger.confidence or replay.confidence
    return replay


def _narrowed(search: Search, costs: CostModel) -> Space:
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


def _with_int4(search: Search, texts: Sequence[TargetText], resources: ExitStack) -> Search:
    """Return the search with a file of int4 weights, which all its paths use until `resources` are closed."""
    ledger = search.ledger
    if "int4" not in search.space.modes or (ledger.int4 is None and ledger.confidence is not None):
        return search  # in the second case the study's paths were scored with weights rounded to nearest
    part = int4_for_search(
        search.llm,
        [text.tokens for text in texts],
        search.int4_method,
        deadline=search.budget.deadline("ranking"),
        watch=search.watch,
    )
    if part is not None:
        ledger.keep_int4(part)
        resources.enter_context(using_int4(search.llm, part))
    return replace(search, int4=part)


def _confidence(search: Search, replay: Replay) -> None:
    """Fit the confidence (the estimated chance that a drafted token is right), unless the study has it, for `replay`.

    It is fitted on drafts in the base mode of the space, or with every fourth layer skipped if the base mode is full.
    """
    if search.ledger.confidence is None:
        search.watch.stage("fitting the confidence of drafted tokens", None)
        space = search.space
        path = space.path(space.start) if space.base != "full" else every_fourth(space)
        confidence = fit_confidence(replay, path, draft=CONFIDENT, share=CONFIDENCE_SHARE)
        replay.confidence = search.ledger.keep_confidence(confidence)


def _continued(search: Search) -> list[TargetText]:
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


def _costs(search: Search, texts: Sequence[TargetText], context: int | None) -> CostModel:
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


def _gains(search: Search, objective: ReplayObjective, deadline: Deadline) -> Gains:
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


def prepare_wallclock(search: Search, controller: ControllerSpec | None, warm: bool) -> tuple[Objective, Problem]:
    """Return the wall-clock objective and the strategies' problem.

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
    objective = WallClockObjective(search.llm, prompts, decoding, controller, on_prompt=search.watch.step)
    return objective, Problem(space, search.seed, tuple(dict.fromkeys(starts)))
