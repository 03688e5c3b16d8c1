"""A search from prompts to profile: what is known beforehand, the trials, and the best few measured for real."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from transformers import LogitsProcessor

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import make_controller
from selfspec.facts.controller import ControllerSpec
from selfspec.facts.costs import CostModel
from selfspec.facts.skip import SkipSet
from selfspec.llm.llm import LLM
from selfspec.llm.prompts import encode, fit
from selfspec.profile.schema import Profile, SearchRecord
from selfspec.text.prompt_files import Prompts

from .calibration import choose, record
from .checks import check_options
from .continuations import Decoding
from .finalists import finish
from .heads import with_smaller_heads
from .ledger import STUDY, Ledger
from .objective import Objective, Score, controllers_in_play
from .prepare import Search, Silent, Trial, Watch, replayed, timed
from .replay import Replay
from .space import Space
from .storage import MEMORY
from .strategies import Strategy, make_strategy

STRATEGY = "climb"
LONGEST_DRAFT = 12  # tokens that the controllers in play may draft


class AnotherFinishes(SelfspecError):  # noqa: N818 - nothing went wrong
    """The search is over, and another of the workers that share it measures what was found."""


def find_profile(
    llm: LLM,
    prompts: Sequence[str] | Prompts | None = None,
    *,
    source: str = "prompts",
    chat: bool = False,
    objective: str = "replay",
    strategy: str = STRATEGY,
    trials: int = 60,
    minutes: float | None = None,
    seed: int = 0,
    count: int = 8,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
    rule: str | None = None,
    context: int | None = None,
    controller: ControllerSpec | None = None,
    keep: Sequence[int] = (),
    granularity: str = "sublayer",
    max_draft_cost: float | None = None,
    warm: bool = True,
    keep_best: bool = False,
    kv: str = "shared",
    storage: str | Path = MEMORY,
    study: str = STUDY,
    watch: Watch | None = None,
    usual: Callable[[], LLM] | None = None,
) -> Profile:
    """Search which sub-layers of `llm` to bypass, and measure what was found on prompts not searched on.

    `prompts`: calibration text, None for the built-in model's, or what `read_prompts` read; with `chat`, each becomes a
    user's message by the tokenizer's chat template. `count` of them, drawn by `seed`, are searched on and as many
    others are measured on, `max_new_tokens` for each, chosen as `temperature`, `top_k`, `top_p` and
    `logits_processor` say, drafts verified by `rule` (None: as without a seed). `objective` "replay" predicts tokens
    per second from a parallel replay and a cost model measured at `context` keys (None: what the prompts come to);
    "wallclock" decodes for every trial, as the paper does. The controller is tuned with the skip set, unless one is
    given, and so are further candidates beside drafted tokens. Where the head is a tenth or more of a draft step,
    heads over the most frequent quarter and sixteenth of the vocabulary are tried too (replay only).

    `keep`: layers never skipped; `granularity` "layer" skips whole layers only; `max_draft_cost`: the most that a
    draft step may cost as a share of a plain one. `warm`: try likely sets first. The search ends after `trials`, or
    `minutes`, or at an interrupt (Ctrl-C), after which the best so far is returned without being measured.

    `storage` keeps every trial in a `study` as soon as it is made: a file (Optuna's journal), the URL of a PostgreSQL
    or MySQL database, or `memory`. A search with the same options resumes from it, also after a kill. Several workers
    with the same options share a study: each scores what no other does, the trials of all are counted, and the first
    to end measures the best; the others raise `AnotherFinishes`.

    `kv`: whose keys and values drafts read of what is committed. "shared": the target's, as selfspec's drafts do.
    "own": the draft's, prompt included, as in an engine that runs what is left of the model as a draft model; each
    trial costs one more pass of that model over the texts (replay only). What is then found is for export: chains over
    the whole vocabulary, predicted at the costs of selfspec's own steps, and not measured, as no decoding here is such.

    `usual` gives the same model with weights that lie as suits plain decoding, where those of `llm` suit drafting; it
    is called once, and what was found is measured against it. If nothing beats plain decoding, the profile skips
    nothing and its note says so; with `keep_best` it holds the best set all the same. Raises `SelfspecError` for a
    wrong option, no prompts, or a model without room for `max_new_tokens`.
    """
    if isinstance(prompts, str):
        raise SelfspecError("prompts is one text; want a list of them")
    trials, count, seed, max_new_tokens = map(operator.index, (trials, count, seed, max_new_tokens))
    check_options(
        objective=objective,
        strategy=strategy,
        granularity=granularity,
        kv=kv,
        trials=trials,
        count=count,
        seed=seed,
        minutes=minutes,
        context=context,
        max_draft_cost=max_draft_cost,
    )
    fixed = None if controller is None else make_controller(controller)
    space = Space(llm.runtime.layers, tuple(sorted({operator.index(layer) for layer in keep})), granularity)
    decoding = Decoding(max_new_tokens, temperature, top_k, top_p, tuple(logits_processor), rule)
    decoding.check()
    chosen = choose(prompts, source=source, count=count, seed=seed)
    framed = chat or chosen.template is not None
    texts, others = (
        tuple(_fit(llm, part, max_new_tokens, chat=chat, framed=framed)) for part in (chosen.search, chosen.measure)
    )
    if not texts:
        raise SelfspecError(f"{source}: holds no prompts")
    calibration = record(
        chosen.source,
        texts,
        column=chosen.column,
        template=chosen.template,
        chat=chat,
        drawn_from=chosen.available,
    )
    ledger = Ledger(
        storage,
        study,
        {
            "name": llm.name,
            "model": llm.identity.model_dump(mode="json", exclude={"name"}),
            "dtype": str(llm.runtime.dtype),
            "calibration text": calibration.model_dump(mode="json"),
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "logits processors": len(decoding.logits_processor),
            "rule": decoding.verified_by,
            "objective": objective,
            "strategy": strategy,
            "seed": seed,
            "context": context,
            "max_draft_cost": max_draft_cost,
            "warm starts": warm,
            "keep": list(space.keep),
            "granularity": granularity,
            "kv": kv,
            "controller": None if controller is None else controller.model_dump(mode="json"),
        },
    )
    start = time.perf_counter()
    deadline = float("inf") if minutes is None else start + 60 * minutes
    search = Search(llm, space, decoding, texts, seed, ledger, watch or Silent(), deadline, own_keys=kv == "own")
    costs: CostModel | None = None
    replay: Replay | None = None
    smaller_heads: Callable[[Sequence[Score]], list[Score]] | None = None
    with ExitStack() as held:
        if objective == "replay":
            controllers = [fixed] if fixed is not None else controllers_in_play(LONGEST_DRAFT)
            priced, problem, costs, replay = replayed(search, held, controllers, context, warm)
            worth: Objective = priced
            if kv == "shared" and llm.runtime.skeleton.head_over([0]) is not None:  # whose weight is at hand
                seen = chain((text.tokens for text in replay.texts), _encoded(llm, chosen.rest, chat=chat))
                smaller_heads = partial(with_smaller_heads, priced, texts=seen, size=llm.identity.vocabulary or 0)
        else:
            worth, problem = timed(search, controller, warm)
        bounded = _Bounded(worth, costs, space, max_draft_cost)
        interrupted = _run_trials(search, bounded, lambda: make_strategy(strategy, problem), trials)
        if not interrupted and not ledger.finishes():
            raise AnotherFinishes(f"{ledger.place}: another worker measures the best and saves the profile")
        searched = SearchRecord(
            strategy=strategy,
            objective=objective,
            trials=len(ledger.scores),
            seed=seed,
            seconds=round(time.perf_counter() - start, 1),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            kv=kv,
            interrupted=interrupted,
        )
        base = Profile(model=llm.identity, calibration=calibration, search=searched, costs=costs)
        return finish(
            llm,
            base,
            list(ledger.scores.values()),
            others,
            decoding,
            chosen.held_out,
            replay,
            keep_best,
            search.watch.stage,
            smaller_heads,
            usual,
        )


def _fit(llm: LLM, prompts: Sequence[str], max_new_tokens: int, *, chat: bool, framed: bool) -> list[list[int]]:
    """The prompts as token ids, cut where they would not leave room for the new tokens."""
    room = llm.runtime.skeleton.context - max_new_tokens
    if max_new_tokens < 1 or room < 1:
        raise SelfspecError(
            f"max_new_tokens {max_new_tokens}: want 1 to {llm.runtime.skeleton.context - 1}, "
            "what the context leaves beside a prompt"
        )
    return [fit(encode(llm, prompt, chat=chat), room, framed=framed) for prompt in prompts]


def _encoded(llm: LLM, prompts: Iterable[str], *, chat: bool) -> Iterator[list[int]]:
    """The prompts that can be encoded, as token ids: they are only counted."""
    for prompt in prompts:
        with suppress(SelfspecError):
            yield encode(llm, prompt, chat=chat)


@dataclass(frozen=True)
class _Bounded:
    """An objective within the space and its bound on the draft's cost."""

    worth: Objective
    costs: CostModel | None
    space: Space
    max_draft_cost: float | None

    def score(self, skip: SkipSet) -> Score | None:
        """The worth of a set; None for one whose draft is too dear."""
        if self.excess(skip) > 0:
            return None
        return self.worth.score(skip)

    def excess(self, skip: SkipSet) -> float:
        """By how much a draft step is dearer than allowed, as a share of a plain step."""
        cost = self.draft_cost(skip)
        return 0.0 if self.max_draft_cost is None or cost is None else cost - self.max_draft_cost

    def draft_cost(self, skip: SkipSet) -> float | None:
        """A draft step as a share of a plain one; None where no cost model is known."""
        return None if self.costs is None else self.costs.draft_share(skip, self.space.layers)


def _run_trials(search: Search, worth: _Bounded, strategy: Callable[[], Strategy], trials: int) -> bool:
    """Ask, score, tell, until the study has so many trials, by whichever worker; whether an interrupt ended it.

    A resumed search asks for what it asked for before, which is known. What other workers score now is taken to be
    worth as little as anything, until it is known.
    """
    ledger, told, idle = search.ledger, set[SkipSet](), 0
    search.watch.stage("searching", trials)

    def take(score: Score, *, known: bool) -> None:
        if score.skip not in told:
            search.watch.trial(Trial(len(told), score, known))
            told.add(score.skip)

    try:
        proposer = strategy()
        if ledger.scores:  # what later sets are compared with
            worth.score(max(ledger.scores.values(), key=lambda score: score.tokens_per_second).skip)
        while len(told) < trials and idle < trials and not (told and time.perf_counter() > search.deadline):
            ledger.refresh()
            skip, idle = proposer.ask(), idle + 1
            if (known := ledger.scores.get(skip)) is not None:
                idle = idle if skip in told else 0
                proposer.tell(skip, known.tokens_per_second)
                take(known, known=True)
                continue
            for other in [score for score in ledger.scores.values() if score.skip not in told]:
                proposer.learn(other.skip, other.tokens_per_second)
                take(other, known=True)
            if skip in ledger.claimed():
                proposer.tell(skip, min((s.tokens_per_second for s in ledger.scores.values()), default=0.0))
            elif len(told) < trials:
                score = _scored(search, worth, skip)
                proposer.tell(skip, -worth.excess(skip) if score is None else score.tokens_per_second)
                if score is not None:
                    take(score, known=False)
                    idle = 0
        ledger.claim(None)
    except KeyboardInterrupt:
        if not ledger.scores:
            raise
        return True
    return False


def _scored(search: Search, worth: _Bounded, skip: SkipSet) -> Score | None:
    """The worth of a set, claimed while it is scored and then kept; None for one whose draft is too dear."""
    search.ledger.claim(skip)
    begun = time.perf_counter()
    score = worth.score(skip)
    if score is not None:
        seconds = time.perf_counter() - begun
        search.ledger.keep_score(score, search.space, draft_cost=worth.draft_cost(skip), seconds=seconds)
    return score
