"""A search from prompts to profile: what is known beforehand, the trials, and the best few measured for real."""

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
    """The search is over, and another of the workers that share it measures what was found."""


def run_search(llm: LLM, options: SearchOptions) -> Profile:
    """Search which sub-layers of `llm` to bypass, and measure what was found on prompts not searched on.

    `objective` "replay" predicts tokens per second from a parallel replay and a cost model measured at `context` keys
    (None: what the prompts come to); "wallclock" decodes for every trial, as the paper does. The trials end after
    `trials`, or when time is up, or at an interrupt (Ctrl-C), after which the best so far is returned without being
    measured. `minutes` bounds everything: where they are few, prompts, tokens, trials and measurements are fewer, and
    the profile says how many there were. If nothing beats plain decoding, the profile skips nothing and its note says
    so; with `keep_best` it holds the best set all the same. Raises `SelfspecError` for options that do not fit the
    model, no prompts, or no room for `max_new_tokens`; `AnotherFinishes` in a worker whose study another completes.
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
    """Prompts that are not searched on: to measure on, to choose among the best by, and more, to count tokens in."""

    held_out: HeldOut
    others: tuple[list[int], ...]
    rest: tuple[Prompt, ...]
    chat: bool


def _begin(llm: LLM, options: SearchOptions) -> tuple[Search, _Drawn]:
    """Check everything, say how long it will take, and plan how much text there is time for."""
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
    """What the model allows of what was asked for."""
    choices = possible(llm, options.allowed_modes, memory=MemoryBudget.of(llm, options.extra_memory).limit)
    return choices.of(Space(llm.runtime.layers, options.kept_layers, options.granularity))


def _with_keywords(options: Callable[P, SearchOptions]) -> Callable[Concatenate[LLM, P], Profile]:
    """`run_search` whose options are arguments: those that `options` takes, with its types and defaults."""

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
    """What is still to be done."""
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
    """What the profile says of the first `count` prompts, which were searched on."""
    return record(
        chosen.source,
        texts[:count],
        column=chosen.column,
        template=chosen.template,
        chat=chosen.chat,
        drawn_from=chosen.available,
    )


def _ledger(llm: LLM, options: SearchOptions, calibration: Calibration) -> Ledger:
    """The study's trials. Raises `SelfspecError` where they are another search's."""
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
    """What is known before the first trial: what sets are worth, what strategies start from, and, by replay, costs.

    `bettered`: what can be tried upon the best, where that can pay; `again` chooses one of the best by other texts.
    """

    search: Search
    worth: Objective
    problem: Problem
    costs: CostModel | None = None
    replay: Replay | None = None
    bettered: tuple[tuple[str, Refinement], ...] = ()
    again: Again | None = None


def _known_beforehand(search: Search, options: SearchOptions, held: ExitStack, drawn: _Drawn) -> _Known:
    """Make the objective, kept open in `held`; tokens of further prompts are counted for smaller heads."""
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
    if options.kv == "shared" and llm.runtime.skeleton.head_over([0]) is not None:  # whose weight is at hand
        counted = _encoded(llm, drawn.rest, chat=drawn.chat)
        heads = partial(with_smaller_head, worth, texts=counted, size=llm.identity.vocabulary or 0)
        bettered.append(("smaller draft vocabularies", heads))
    again = partial(best_on_others, search, costs, controller, drawn.others) if len(drawn.others) >= FEWEST else None
    return _Known(search, worth, problem, costs, replay, tuple(bettered), again)


def _fitted(llm: LLM, chosen: PromptSet, options: SearchOptions) -> Iterator[tuple[list[int], ...]]:
    """The prompts to search on, to measure on, and others, as token ids, cut where they leave the new ones no room."""
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
    """The prompts that can be encoded, as token ids: they are only counted."""
    for prompt in prompts:
        with suppress(SelfspecError):
            yield encode(llm, prompt, chat=chat)


def _run_trials(search: Search, worth: Bounded, strategy: Callable[[], Strategy], trials: int) -> bool:
    """Ask, score, tell, until the study has so many trials, by whichever worker; whether an interrupt ended it.

    A resumed search asks for what it asked for before, which is known. What other workers score now is taken to be
    worth as little as anything, until it is known.
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
        if ledger.scores:  # what later sets are compared with
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
    """The worth of a path, claimed while it is scored and then kept; None for one that is too dear."""
    search.ledger.claim(path)
    begun = search.budget.spent
    score = worth.score(path)
    if score is not None:
        seconds = search.budget.spent - begun
        search.ledger.keep_score(score, search.space, draft_cost=worth.draft_cost(path), seconds=seconds)
    return score
