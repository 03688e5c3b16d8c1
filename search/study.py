"""Run a search from prompts to profile: preparation, trials, and real measurements of the finalists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, ParamSpec

from selfspec.basics.errors import SelfspecError
from selfspec.basics.keywords import show_signature
from selfspec.controllers import make_controller
from selfspec.llm.llm import LLM
from selfspec.llm.prompt_encoding import encode, fit, takes_messages, warn_of_cuts
from selfspec.measure.cost_fitting import fastest_plain
from selfspec.measure.cost_sweeps import room_for
from selfspec.profile.schema import Calibration, Profile
from selfspec.runtime.worker_group import check_alone
from selfspec.text.prompt import Prompt
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath

from .bridging import with_bridges
from .budget import Budget
from .calibration import PromptSet, choose, record
from .callbacks import Logged, Trial
from .climbing import cheaper
from .draft_vocabulary import with_smaller_head
from .finalists import HeldOut, Refinement, finish
from .forecast import Pace, SearchTask, said, time_for
from .ledger import Ledger
from .objective import Objective, Score
from .options import SearchOptions
from .prepare import Search, replayed, timed
from .replay import Replay
from .rescoring import FEWEST, PROMPTS, Again, best_on_others
from .search_record import begun, untried, with_shortage
from .space import Space
from .space_filter import Bounded, MemoryBudget, possible
from .storage import MEMORY
from .strategies import Problem, Strategy, make_strategy

P = ParamSpec("P")


class AnotherFinishes(SelfspecError):  # noqa: N818 - nothing went wrong
    """The search is over, and another worker of the same study measures the finalists and saves the profile."""


def run_search(llm: LLM, options: SearchOptions) -> Profile:
    """Search which sub-layers of `llm` to bypass, and measure the best draft path on held-out prompts.

    `objective` "replay" predicts tokens per second from a parallel replay and a cost model measured at `context` keys
    (None: the mean context length of the texts); "wallclock" decodes for every trial, as the paper does. The trials end
    after `trials` of them, when time is up, or at an interrupt (Ctrl-C). After an interrupt the best path so far is
    returned without being measured. `minutes` bounds the whole search: a short search uses fewer prompts, tokens,
    trials and measurements, and the profile records how many. If nothing beats plain decoding, the profile skips
    nothing and its note says so; with `keep_best` the profile has the best path anyway. Raises `SelfspecError` for
    options that do not fit the model, for no prompts, and where `max_new_tokens` do not fit the context;
    `AnotherFinishes` in a worker whose study another worker completes.
    """
    check_alone(llm.runtime, "a search")
    search, drawn = _begin(llm, options)
    if search.planned is None:
        return untried(search, options)
    with ExitStack() as held:
        known = _known_beforehand(search, options, held, drawn)
        search = known.search
        memory = MemoryBudget.of(llm, options.extra_memory)
        bounded = Bounded(known.worth, known.costs, search.space, options.max_draft_cost, memory)
        propose = partial(make_strategy, options.strategy, known.problem)
        interrupted = _run_trials(search, bounded, propose, options.trials)
        if not interrupted and not search.ledger.finishes():
            raise AnotherFinishes(f"{search.ledger.place}: another worker measures the best and saves the profile")
        profile = finish(
            search,
            begun(search, options, interrupted=interrupted, costs=known.costs),
            list(search.ledger.scores.values()),
            drawn.held_out,
            known.replay,
            options.keep_best,
            known.bettered,
            known.again,
        )
    return with_shortage(search, options, profile)


@dataclass(frozen=True)
class _Drawn:
    """Prompts that are not searched on.

    `held_out`: to measure on. `others`: token ids, to rescore the finalists on. `rest`: to count token frequencies in.
    """

    held_out: HeldOut
    others: tuple[list[int], ...]
    rest: tuple[Prompt, ...]
    chat: bool


def _begin(llm: LLM, options: SearchOptions) -> tuple[Search, _Drawn]:
    """Check the options, report the expected duration, and plan how much text fits the time."""
    budget = options.budget or Budget(None if options.minutes is None else 60 * options.minutes)
    budget.loaded = budget.spent
    space = _space(llm, options)
    options.decoding.check()
    if options.context is not None and (most := room_for(llm.runtime, options.context)[0]) < options.context:
        raise SelfspecError(
            f"context {options.context}: expected at most {most}, to which the model's context of "
            f"{llm.runtime.skeleton.context} has room for the rounds that are timed"
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
    described = partial(_calibration, chosen, prompts)
    ledger, watch = _ledger(llm, options, described(len(prompts))), options.watch or Logged()
    plain_llm = None
    if options.plain_llm is not None:
        watch.stage("loading the model as suits plain decoding", None)
        plain_llm = options.plain_llm()
        plain_llm = None if fastest_plain((plain_llm, llm)) is llm else plain_llm
    watch.stage("timing the model", None)
    pace = Pace.of(llm.runtime, max(map(len, prompts)))
    task = _task(options, space, ledger, prompts, measured)
    watch.say(said(task, pace, budget))
    search = Search(
        llm=llm,
        space=space,
        decoding=options.decoding,
        prompts=prompts,
        seed=options.seed,
        ledger=ledger,
        watch=watch,
        budget=budget,
        pace=pace,
        planned=time_for(task, pace, budget),
        described=described,
        own_keys=options.kv == "own",
        proposers=options.proposers,
        plain_llm=plain_llm,
    )
    return search, _Drawn(HeldOut(measured, chosen.held_out), others, chosen.rest[PROMPTS:], chosen.chat)


def _space(llm: LLM, options: SearchOptions) -> Space:
    """Return the search space: the options' choices, as far as the model allows them."""
    choices = possible(llm, options.allowed_modes, memory=MemoryBudget.of(llm, options.extra_memory).limit)
    return choices.of(Space(llm.runtime.layers, options.kept_layers, options.granularity))


def _with_keywords(options: Callable[P, SearchOptions]) -> Callable[Concatenate[LLM, P], Profile]:
    """Return `run_search` with the fields of `SearchOptions` as arguments, with the types and defaults of `options`."""

    def find_profile(llm: LLM, /, *given: P.args, **named: P.kwargs) -> Profile:
        """`run_search`, with the fields of `SearchOptions` as arguments."""
        return run_search(llm, options(*given, **named))

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
) -> SearchTask:
    """Return the work that is still to be done."""
    texts = ledger.texts
    lengths = tuple(map(len, prompts))
    return SearchTask(
        prompts=lengths if texts is None else lengths[: texts.prompts],
        others=tuple(map(len, others)),
        new=options.max_new_tokens if texts is None else texts.max_new_tokens,
        variables=len([*cheaper(space, space.start)]) if options.warm and ledger.gains is None else 0,
        trials=max(options.trials - len(ledger.scores), 0),
        replayed=options.objective == "replay",
        measured=options.kv == "shared",
        decided=texts is not None,
        priced=ledger.costs is not None,
        in_few_bits=space.base != "full",
    )


def _calibration(chosen: PromptSet, texts: Sequence[Sequence[int]], count: int) -> Calibration:
    """Return the profile's record of the first `count` prompts, which were searched on."""
    return record(
        chosen.source,
        texts[:count],
        column=chosen.column,
        template=chosen.template,
        chat=chosen.chat,
        drawn_from=chosen.available,
    )


def _ledger(llm: LLM, options: SearchOptions, calibration: Calibration) -> Ledger:
    """Open the study's ledger. Raises `SelfspecError` where the study belongs to a search with other settings."""
    model = {
        "name": llm.name,
        "model": llm.identity.model_dump(mode="json", exclude={"name"}),
        "dtype": str(llm.runtime.dtype),
        "calibration text": calibration.model_dump(mode="json"),
    }
    where = MEMORY if options.storage is None else options.storage
    return Ledger(where, options.study, model | options.settings())


@dataclass(frozen=True)
class _Known:
    """The results of the preparation before the first trial: the objective and, with replay, the cost model.

    `bettered`: named refinements to try on the best path, where they can pay. `again` picks a finalist by other texts.
    """

    search: Search
    worth: Objective
    problem: Problem
    costs: CostModel | None = None
    replay: Replay | None = None
    bettered: tuple[tuple[str, Refinement], ...] = ()
    again: Again | None = None


def _known_beforehand(search: Search, options: SearchOptions, held: ExitStack, drawn: _Drawn) -> _Known:
    """Make the objective, kept open in `held`, and the refinements that this model allows.

    Smaller draft vocabularies are chosen by token frequencies in further prompts.
    """
    llm, fixed = search.llm, options.fixed
    if options.objective == "wallclock":
        return _Known(search, *timed(search, fixed, options.warm))
    controller = None if fixed is None else make_controller(fixed)
    search, worth, problem, costs, replay = replayed(search, held, controller, options.context, options.warm)
    bettered: list[tuple[str, Refinement]] = []
    if options.kv == "shared":
        fitted_to = [*search.prompts, *drawn.others]
        bridges = partial(
            with_bridges,
            worth,
            runtime=llm.runtime,
            texts=fitted_to,
            seconds=search.pace.rows,
            allows=lambda seconds: search.budget.deadline("heads").allows(seconds),
        )
        bettered.append(("bridges over bypassed layers", bridges))
    if options.kv == "shared" and llm.runtime.skeleton.head_over([0]) is not None:  # the head's weight is accessible
        counted = _encoded(llm, drawn.rest, chat=drawn.chat)
        heads = partial(with_smaller_head, worth, texts=counted, size=llm.identity.vocabulary or 0)
        bettered.append(("smaller draft vocabularies", heads))
    again = partial(best_on_others, search, costs, controller, drawn.others) if len(drawn.others) >= FEWEST else None
    return _Known(search, worth, problem, costs, replay, tuple(bettered), again)


def _fitted(llm: LLM, chosen: PromptSet, options: SearchOptions) -> Iterator[tuple[list[int], ...]]:
    """Yield three lists of token ids, cut to leave room for new tokens: prompts to search, measure and rescore on.

    Raises `SelfspecError` where `max_new_tokens` is not from 1 to one less than the context.
    """
    context, new = llm.runtime.skeleton.context, options.max_new_tokens
    if not 1 <= new < context:
        raise SelfspecError(
            f"max_new_tokens {new}: expected 1 to {context - 1}, what the context leaves beside a prompt"
        )
    parts = chosen.search, chosen.measure, chosen.rest[:PROMPTS]
    encoded = [[encode(llm, prompt, chat=chosen.chat) for prompt in part] for part in parts]
    warn_of_cuts((len(ids) for part in encoded for ids in part), context - new)
    framed = chosen.chat or chosen.template is not None
    return (tuple(fit(ids, context - new, framed=framed) for ids in part) for part in encoded)


def _encoded(llm: LLM, prompts: Iterable[Prompt], *, chat: bool) -> Iterator[list[int]]:
    """Yield the token ids of the prompts that can be encoded; they are only used to count tokens."""
    for prompt in prompts:
        with suppress(SelfspecError):
            yield encode(llm, prompt, chat=chat)


def _run_trials(search: Search, worth: Bounded, strategy: Callable[[], Strategy], trials: int) -> bool:
    """Ask, score and tell until the study has `trials` trials by all workers; return whether an interrupt ended it.

    A resumed search proposes the same paths as before, whose scores are known. Paths that other workers score now count
    as the worst score so far (constant liar), until the true score is known.
    """
    ledger, told, idle = search.ledger, set[DraftPath](), 0
    deadline, longest = search.budget.deadline("trials"), 0.0
    search.watch.stage("searching", trials)

    def take(score: Score, *, known: bool) -> None:
        if score.path not in told:
            search.watch.trial(Trial(len(told), score, known))
            told.add(score.path)

    try:
        proposer = strategy()
        if ledger.scores:  # makes the best one the incumbent that later paths are compared with
            worth.score(max(ledger.scores.values(), key=lambda score: score.tokens_per_second).path)
        while len(told) < trials and idle < trials and (not told or deadline.allows(longest)):
            begun = deadline.clock()
            ledger.refresh()
            path, idle = proposer.ask(), idle + 1
            if (known := ledger.scores.get(path)) is not None:
                idle = idle if path in told else 0
                proposer.tell(path, known.tokens_per_second)
                take(known, known=True)
                continue
            for other in [score for score in ledger.scores.values() if score.path not in told]:
                proposer.learn(other.path, other.tokens_per_second)
                take(other, known=True)
            if path in ledger.claimed():
                proposer.tell(path, min((s.tokens_per_second for s in ledger.scores.values()), default=0.0))
            elif len(told) < trials:
                score = _scored(search, worth, path)
                proposer.tell(path, -worth.excess(path) if score is None else score.tokens_per_second)
                if score is not None:
                    take(score, known=False)
                    idle = 0
                longest = max(longest, deadline.clock() - begun)
        ledger.claim(None)
    except KeyboardInterrupt:
        if not ledger.scores:
            raise
        return True
    return False


def _scored(search: Search, worth: Bounded, path: DraftPath) -> Score | None:
    """Score a path, claimed meanwhile, and keep the score; return None for a path over a cost or memory bound."""
    search.ledger.claim(path)
    begun = search.budget.spent
    score = worth.score(path)
    if score is not None:
        seconds = search.budget.spent - begun
        search.ledger.keep_score(score, search.space, draft_cost=worth.draft_cost(path), seconds=seconds)
    return score
