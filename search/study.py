"""Run a search from prompts to profile: preparation, trials, and real measurements of the finalists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Concatenate, ParamSpec

from selfspec.basics.errors import SelfspecError
from selfspec.basics.option import show_signature
from selfspec.llm.llm import LLM
from selfspec.llm.prompt_encoding import encode, fit, takes_messages, warn_if_cut
from selfspec.measure.cost_fitting import fastest_plain, further_paths
from selfspec.measure.cost_sweeps import fit_context
from selfspec.measure.pace import Pace
from selfspec.profile.schema import Calibration, Profile
from selfspec.runtime.worker_group import check_runtime_unsharded
from selfspec.text.prompt_template import Prompt
from selfspec.types.draft_path import DraftPath
from selfspec.types.methods import AUTO_METHOD

from .bridging import with_bridges, with_smaller_head
from .budget import Budget, Deadline
from .callbacks import Logged, Trial
from .context import SearchContext
from .continuations import PromptSet, choose, record
from .finalists import FEWEST_RESCORED, PROMPTS, HeldOut, best_rescored, finish
from .forecast import SearchTask, fit_to_budget, forecast_summary
from .ledger import Ledger
from .objective import Score
from .options import SearchOptions
from .prepare import Preparation, Refinement, prepare_replay, prepare_wallclock
from .quantizing import check_int4
from .replay import check_replayable
from .search_record import initial_profile, profile_without_trials, with_shortfall_note
from .space import Space
from .space_filter import BoundedObjective, MemoryBudget, supported_choices
from .storage import MEMORY
from .strategies import Strategy, cheaper_changes, make_strategy

P = ParamSpec("P")


class AnotherFinishes(SelfspecError):  # noqa: N818 - nothing went wrong
    """The search is over, and another worker of the same study measures the finalists and saves the profile."""


def run_search(llm: LLM, options: SearchOptions) -> Profile:
    """Search for the fastest draft path of `llm`, and measure the best path on held-out prompts.

    `objective` "replay" predicts tokens per second from a parallel replay and a cost model measured at `context` keys
    (None: the mean context length of the texts); "wallclock" decodes for every trial, as Draft & Verify does. The
    trials end when the study has `trials` trials, when time is up, or at an interrupt (Ctrl-C). After an interrupt the
    best path so far is returned without being measured. `minutes` limits the whole search: a short search uses fewer
    prompts, tokens, trials and measurements, and the profile records their numbers. If no path beats plain decoding
    (without drafts), the profile skips nothing and its note says so; with `keep_best` the profile has the best path
    anyway. Raises `SelfspecError` for options that do not fit the model, if there are no prompts, and if
    `max_new_tokens` does not fit the context; `AnotherFinishes` if another worker of the study measures the finalists.
    """
    check_runtime_unsharded(llm.runtime, "a search")
    search, drawn = _begin(llm, options)
    if search.planned is None:
        return profile_without_trials(search, options)
    with ExitStack() as resources:
        prepared = _prepare(search, options, resources, drawn)
        search = prepared.search
        memory = MemoryBudget.from_llm(llm, options.extra_memory)
        bounded = BoundedObjective(prepared.objective, prepared.costs, search.space, options.max_draft_cost, memory)
        propose = partial(make_strategy, options.strategy, prepared.problem)
        interrupted = _run_trials(search, bounded, propose, options.trials, len(prepared.problem.warm))
        if not interrupted and not search.ledger.claim_finish():
            raise AnotherFinishes(
                f"{search.ledger.description}: another worker measures the best and saves the profile"
            )
        base = initial_profile(search, options, interrupted=interrupted, costs=prepared.costs)
        profile = finish(prepared, base, drawn.held_out, keep_best=options.keep_best, others=drawn.others)
        with suppress(SelfspecError):  # the profile is at hand
            search.ledger.mark_finished()
    return with_shortfall_note(search, options, profile)


@dataclass(frozen=True)
class _OtherPrompts:
    """The prompts that are used after the trials.

    `held_out`: prompts to measure the finalists on. `others`: token ids of prompts to rescore the finalists on. `rest`:
    further prompts, to count token frequencies in. `chat`: whether each prompt is a user's message.
    """

    held_out: HeldOut
    others: tuple[list[int], ...]
    rest: tuple[Prompt, ...]
    chat: bool


def _begin(llm: LLM, options: SearchOptions) -> tuple[SearchContext, _OtherPrompts]:
    """Check the options, report the expected duration, and plan how much text fits the time.

    Returns the state of the search, and the prompts that are used after the trials.
    """
    budget = options.budget or Budget(None if options.minutes is None else 60 * options.minutes)
    budget.loaded = budget.spent
    if options.objective == "replay":
        check_replayable(llm.runtime)
    space = _space(llm, options)
    options.decoding.check()
    check_int4(llm, options.int4)
    if options.context is not None and (most := fit_context(llm.runtime, options.context)[0]) < options.context:
        raise SelfspecError(
            f"context {options.context}: expected at most {most}, because the model's context of "
            f"{llm.runtime.skeleton.context} must also hold the tokens of the timed rounds"
        )
    chosen = choose(
        options.prompts,
        source=options.source,
        count=options.count,
        seed=options.seed,
        chat=options.chat,
        takes_messages=takes_messages(llm),
    )
    prompts, measured, others = _fitted(llm, chosen, options)
    if not prompts:
        raise SelfspecError(f"{options.source}: holds no prompts")
    ledger, watch = _ledger(llm, options, record(chosen, prompts)), options.watch or Logged()
    plain_llm = None
    if options.plain_llm is not None:
        watch.stage("loading the model in the weight layout for plain decoding", None)
        plain_llm = options.plain_llm()
        plain_llm = None if fastest_plain((plain_llm, llm)) is llm else plain_llm
    watch.stage("timing the model", None)
    pace = Pace.from_runtime(llm.runtime, max(map(len, (*prompts, *measured))) + options.max_new_tokens, masks=True)
    task = _task(options, space, ledger, prompts, measured, rescored=len(others) >= FEWEST_RESCORED)
    watch.say(forecast_summary(task, pace, budget))
    search = SearchContext(
        llm=llm,
        space=space,
        decoding=options.decoding,
        prompts=prompts,
        seed=options.seed,
        ledger=ledger,
        watch=watch,
        budget=budget,
        pace=pace,
        planned=fit_to_budget(task, pace, budget),
        described=lambda count: record(chosen, prompts[:count]),
        own_keys=options.kv == "own",
        proposers=options.proposers,
        plain_llm=plain_llm,
        controller=options.fixed,
        int4_method=options.int4,
    )
    return search, _OtherPrompts(HeldOut(measured, chosen.held_out), others, chosen.rest[PROMPTS:], chosen.chat)


def _space(llm: LLM, options: SearchOptions) -> Space:
    """Return the search space that `options` describe, limited to the modes that the model supports."""
    choices = supported_choices(
        llm, options.allowed_modes, memory=MemoryBudget.from_llm(llm, options.extra_memory).limit
    )
    return choices.narrow(Space(llm.runtime.layers, options.kept_layers, options.granularity))


def _with_keywords(options: Callable[P, SearchOptions]) -> Callable[Concatenate[LLM, P], Profile]:
    """Return `run_search` as a function that takes the arguments of `options`, with the same types and defaults."""

    def find_profile(llm: LLM, /, *args: P.args, **kwargs: P.kwargs) -> Profile:
        """Search for the fastest draft path of `llm` and return its profile.

        The arguments are the fields of `SearchOptions`; `run_search` describes the search and the errors.
        """
        return run_search(llm, options(*args, **kwargs))

    model = inspect.Parameter("llm", inspect.Parameter.POSITIONAL_ONLY, annotation=LLM)
    show_signature(find_profile, options, model, returns=Profile)
    return find_profile


find_profile = _with_keywords(SearchOptions)


def _task(
    options: SearchOptions,
    space: Space,
    ledger: Ledger,
    prompts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    *,
    rescored: bool,
) -> SearchTask:
    """Return the work that the search still has to do; `others`: token ids of the prompts to measure on."""
    texts = ledger.texts
    lengths = tuple(map(len, prompts))
    return SearchTask(
        prompts=lengths if texts is None else lengths[: texts.prompts],
        eval_prompts=tuple(map(len, others)),
        max_new_tokens=options.max_new_tokens if texts is None else texts.max_new_tokens,
        variables=len([*cheaper_changes(space, space.start)]) if options.warm and ledger.gains is None else 0,
        trials=max(options.trials - len(ledger.scores), 0),
        replayed=options.objective == "replay",
        measured=options.kv == "shared",
        texts_fixed=texts is not None,
        costs_known=ledger.costs is not None,
        quantized_base=space.base != "full",
        further_paths=further_paths((*space.modes, *space.head)),
        quantizes="int4" in space.modes and options.int4 in (AUTO_METHOD, "gptq") and ledger.int4 is None,
        rescored=rescored,
        uniform=len(space.uniform),
    )


def _ledger(llm: LLM, options: SearchOptions, calibration: Calibration) -> Ledger:
    """Open the study's ledger. Raises `SelfspecError` where the study belongs to a search with other settings."""
    model = {
        "name": llm.name,
        "model": llm.identity.model_dump(mode="json", exclude={"name"}),
        "dtype": str(llm.runtime.dtype),
        "held": llm.held,
        "device": llm.runtime.device.type,
        "calibration text": calibration.model_dump(mode="json"),
    }
    where = MEMORY if options.storage is None else options.storage
    return Ledger(where, options.study, model | options.settings())


def _prepare(search: SearchContext, options: SearchOptions, resources: ExitStack, drawn: _OtherPrompts) -> Preparation:
    """Make the objective, whose replay `resources` closes, and the refinements that this model allows.

    Smaller draft vocabularies hold the most frequent tokens of `drawn.rest`.
    """
    if options.objective == "wallclock":
        return prepare_wallclock(search, warm=options.warm)
    prepared = prepare_replay(search, resources, context=options.context, warm=options.warm)
    search, llm = prepared.search, search.llm
    refinements: list[tuple[str, Refinement]] = []
    if options.kv == "shared":
        fitted_to = [*search.prompts, *drawn.others]
        bridges = partial(
            with_bridges,
            prepared.objective,
            runtime=llm.runtime,
            texts=fitted_to,
            seconds=search.pace.prefill,
            allows=lambda seconds: search.budget.deadline("heads").allows(seconds),
        )
        refinements.append(("bridges over skipped layers", bridges))
    if options.kv == "shared" and llm.runtime.skeleton.head_over([0]) is not None:  # the head's weight is accessible
        counted = _encoded(llm, drawn.rest, chat=drawn.chat)
        heads = partial(with_smaller_head, prepared.objective, texts=counted, size=llm.identity.vocabulary or 0)
        refinements.append(("smaller draft vocabularies", heads))
    few = len(drawn.others) < FEWEST_RESCORED
    rescore = None if few else partial(best_rescored, search, prepared.costs, drawn.others)
    return replace(prepared, refinements=tuple(refinements), rescore=rescore)


def _fitted(llm: LLM, chosen: PromptSet, options: SearchOptions) -> Iterator[tuple[list[int], ...]]:
    """Yield the token ids of the prompts to search, to measure and to rescore on, cut to leave room for new tokens.

    Raises `SelfspecError` unless `max_new_tokens` is from 1 to one less than the context.
    """
    context, new = llm.runtime.skeleton.context, options.max_new_tokens
    if not 1 <= new < context:
        raise SelfspecError(
            f"max_new_tokens {new}: expected 1 to {context - 1}, to leave room for a prompt in the context"
        )
    parts = chosen.search, chosen.measure, chosen.rest[:PROMPTS]
    encoded = [[encode(llm, prompt, chat=chosen.chat) for prompt in part] for part in parts]
    warn_if_cut((len(ids) for part in encoded for ids in part), context - new)
    framed = chosen.chat or chosen.template is not None
    return (tuple(fit(ids, context - new, framed=framed) for ids in part) for part in encoded)


def _encoded(llm: LLM, prompts: Iterable[Prompt], *, chat: bool) -> Iterator[list[int]]:
    """Yield the token ids of each prompt that can be encoded, to count token frequencies; skip other prompts."""
    for prompt in prompts:
        with suppress(SelfspecError):
            yield encode(llm, prompt, chat=chat)


def _run_trials(
    search: SearchContext, objective: BoundedObjective, strategy: Callable[[], Strategy], trials: int, warm: int
) -> bool:
    """Ask, score and tell until the study has `trials` trials by all workers; return whether an interrupt ended it.

    `warm`: the number of paths that the strategy proposes first, all of which may exceed a bound of the objective.

    Then the paths with every sub-layer in one quantised mode are scored, if no trial has scored them.
    """
    ledger, deadline = search.ledger, search.budget.deadline("trials")
    search.watch.stage("searching", trials)
    try:
        _ask_and_tell(search, objective, strategy(), trials, warm + trials, deadline)
        _score_uniform(search, objective)
    except KeyboardInterrupt:
        if not ledger.scores:
            raise
        return True
    finally:
        ledger.claim(None)
    return False


def _ask_and_tell(
    search: SearchContext,
    objective: BoundedObjective,
    proposer: Strategy,
    trials: int,
    patience: int,
    deadline: Deadline,
) -> None:
    """Run the trials of `_run_trials`, until `patience` proposals in a row have brought no new trial.

    A resumed search proposes the same paths as before, whose scores are known. A path that another worker is scoring
    counts as the worst score so far (constant liar) until its true score is known; if that worker dies, this one scores
    the path.
    """
    ledger, reported, idle, longest = search.ledger, set[DraftPath](), 0, 0.0
    timed = objective.costs is None
    assumed: list[DraftPath] = []  # paths that others were scoring when they were proposed

    def take(score: Score, *, known: bool) -> None:
        if score.path not in reported:
            search.watch.trial(Trial(len(reported), score, known, timed))
            reported.add(score.path)

    if ledger.scores and not timed:  # makes the best path the incumbent, with which later paths are compared
        objective.score(max(ledger.scores.values(), key=lambda score: score.tokens_per_second).path)
    while len(reported) < trials and idle < patience and (not reported or deadline.allows(longest)):
        begun = deadline.clock()
        ledger.refresh()
        dropped = _dropped(ledger, assumed)
        path, idle = dropped or proposer.ask(), idle + 1
        tell = proposer.tell if dropped is None else proposer.learn
        if (known := ledger.scores.get(path)) is not None:
            idle = idle if path in reported else 0
            tell(path, known.tokens_per_second)
            take(known, known=True)
            continue
        if (excess := objective.excess(path)) > 0:  # such paths are not scored
            tell(path, -excess)
            continue
        for other in [score for score in ledger.scores.values() if score.path not in reported]:
            proposer.learn(other.path, other.tokens_per_second)
            take(other, known=True)
        if path in ledger.claimed():
            tell(path, min((s.tokens_per_second for s in ledger.scores.values()), default=0.0))
            assumed.append(path)
        elif len(reported) < trials and (score := _scored(search, objective, path)) is not None:
            tell(path, score.tokens_per_second)
            take(score, known=False)
            idle, longest = 0, max(longest, deadline.clock() - begun)


def _dropped(ledger: Ledger, assumed: Sequence[DraftPath]) -> DraftPath | None:
    """Return the first of the paths that has no score, and which no worker is scoring any more; None: there is none."""
    unscored = [path for path in assumed if path not in ledger.scores]
    claimed = ledger.claimed() if unscored else set()
    return next((path for path in unscored if path not in claimed), None)


def _score_uniform(search: SearchContext, objective: BoundedObjective) -> None:
    """Score the paths with every sub-layer in one quantised mode, which are always finalists, if no trial did."""
    for path in search.space.uniform:
        search.ledger.refresh()
        if path not in search.ledger.scores and search.budget.deadline("heads").allows(search.ledger.longest):
            _scored(search, objective, path)


def _scored(search: SearchContext, objective: BoundedObjective, path: DraftPath) -> Score | None:
    """Claim a path, score it and keep the score; return None for a path over its cost or memory bound."""
    search.ledger.claim(path)
    begun = search.budget.spent
    score = objective.score(path)
    if score is not None:
        seconds = search.budget.spent - begun
        search.ledger.keep_score(score, search.space, draft_cost=objective.draft_cost(path), seconds=seconds)
    return score
