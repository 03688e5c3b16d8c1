"""A search from prompts to profile: what is known beforehand, the trials, and the best few measured for real."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from transformers import LogitsProcessor

from selfspec.api import LLM
from selfspec.controllers import make_controller
from selfspec.costs import CostModel
from selfspec.errors import SelfspecError
from selfspec.linears import linear_over
from selfspec.profile import ControllerSpec, Profile, SearchRecord
from selfspec.prompts import encode, fit
from selfspec.skip import SkipSet

from .calibration import Prompts, choose, record
from .continuations import Decoding
from .finalists import finish
from .heads import with_smaller_heads
from .journal import Journal
from .objective import Objective, Score, controllers_in_play
from .prepare import Search, Trial, Watch, replayed, timed
from .replay import Replay
from .space import GRANULARITIES, Space
from .strategies import Strategy, check_strategy, make_strategy

OBJECTIVES = ("replay", "wallclock")
STRATEGY = "climb"
LONGEST_DRAFT = 12  # tokens that the controllers in play may draft


class _Silent:
    def stage(self, name: str, total: int | None) -> None:
        pass

    def step(self, done: int) -> None:
        pass

    def trial(self, trial: Trial) -> None:
        pass


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
    journal: Path | None = None,
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
    `minutes`, or at an interrupt (Ctrl-C), after which the best so far is returned without being measured. With
    `journal`, trials are kept in that file as they are made, and a search with the same options resumes from it; delete
    it when the profile is saved.

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
    kept = Journal(
        journal,
        {
            "model": llm.identity.model_dump(mode="json"),
            "dtype": str(llm.runtime.dtype),
            "calibration": calibration.model_dump(mode="json"),
            "decoding": [
                max_new_tokens,
                temperature,
                top_k,
                top_p,
                len(decoding.logits_processor),
                decoding.verified_by,
            ],
            "search": [objective, strategy, seed, context, max_draft_cost, warm, list(space.keep), granularity],
            "controller": None if controller is None else controller.model_dump(mode="json"),
        },
    )
    start = time.perf_counter()
    deadline = float("inf") if minutes is None else start + 60 * minutes
    search = Search(llm, space, decoding, texts, seed, kept, watch or _Silent(), deadline)
    costs: CostModel | None = None
    replay: Replay | None = None
    smaller_heads: Callable[[Sequence[Score]], list[Score]] | None = None
    with ExitStack() as held:
        if objective == "replay":
            controllers = [fixed] if fixed is not None else controllers_in_play(LONGEST_DRAFT)
            priced, problem, costs, replay = replayed(search, held, controllers, context, warm)
            worth: Objective = priced
            if linear_over(llm.runtime.skeleton.lm_head, [0]) is not None:  # whose weight is at hand
                seen = chain((text.tokens for text in replay.texts), _encoded(llm, chosen.rest, chat=chat))
                smaller_heads = partial(with_smaller_heads, priced, texts=seen, size=llm.identity.vocabulary or 0)
        else:
            worth, problem = timed(search, controller, warm)
        bounded = _Bounded(worth, costs, space, max_draft_cost)
        done, interrupted = _run_trials(search, bounded, lambda: make_strategy(strategy, problem), trials)
        searched = SearchRecord(
            strategy=strategy,
            objective=objective,
            trials=len(done),
            seed=seed,
            seconds=round(time.perf_counter() - start, 1),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            interrupted=interrupted,
        )
        base = Profile(model=llm.identity, calibration=calibration, search=searched, costs=costs)
        return finish(
            llm,
            base,
            [t.score for t in done],
            others,
            decoding,
            chosen.held_out,
            replay,
            keep_best,
            search.watch.stage,
            smaller_heads,
            usual,
        )


def check_options(
    *,
    objective: str,
    strategy: str,
    granularity: str,
    trials: int,
    count: int,
    seed: int,
    minutes: float | None,
    context: int | None,
    max_draft_cost: float | None,
) -> None:
    """Raise `SelfspecError` for a wrong option of `find_profile`, as far as no model is needed to tell."""
    if objective not in OBJECTIVES:
        raise SelfspecError(f"objective '{objective}' is not known; known: {', '.join(OBJECTIVES)}")
    check_strategy(strategy)
    if granularity not in GRANULARITIES:
        raise SelfspecError(f"granularity '{granularity}' is not known; known: {', '.join(GRANULARITIES)}")
    if trials < 1 or count < 1:
        raise SelfspecError(f"want at least 1 trial and 1 prompt, got {trials} and {count}")
    if not 0 <= seed < 2**32:
        raise SelfspecError(f"seed {seed}: want 0 to {2**32 - 1}")
    if minutes is not None and not 0 < minutes < math.inf:
        raise SelfspecError(f"minutes {minutes}: want more than 0, and finite")
    if context is not None and context < 1:
        raise SelfspecError(f"context {context}: want at least 1 key")
    if max_draft_cost is not None and not 0 < max_draft_cost < math.inf:
        raise SelfspecError(f"max_draft_cost {max_draft_cost}: want more than 0 and finite, as a share of a plain step")
    if objective == "wallclock" and (context is not None or max_draft_cost is not None):
        raise SelfspecError("context and max_draft_cost need the cost model of the replay objective")


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
        if self.max_draft_cost is None or self.costs is None:
            return 0.0
        return self.costs.draft_share(skip, self.space.layers) - self.max_draft_cost


def _run_trials(
    search: Search, worth: _Bounded, strategy: Callable[[], Strategy], trials: int
) -> tuple[list[Trial], bool]:
    """Ask, score, tell; whether an interrupt ended it."""
    journal, done = search.journal, list[Trial]()
    search.watch.stage("searching", trials)
    try:
        proposer = strategy()
        if journal.scores:  # what later sets are compared with
            worth.score(max(journal.scores.values(), key=lambda score: score.tokens_per_second).skip)
        for number in range(trials):
            if time.perf_counter() > search.deadline and done:
                break
            skip = proposer.ask()
            known = skip in journal.scores
            score = journal.scores[skip] if known else worth.score(skip)
            if score is None:
                proposer.tell(skip, -worth.excess(skip))
                continue
            proposer.tell(skip, score.tokens_per_second)
            if not known:
                journal.keep_score(score)
            done.append(Trial(number, score, known))
            search.watch.trial(done[-1])
    except KeyboardInterrupt:
        if not done:
            raise
        return done, True
    return done, False
