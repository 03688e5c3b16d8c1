"""What a search knows before its first trial: continuations, costs, the gain of every sub-layer, warm starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from selfspec.controllers import Controller
from selfspec.facts.controller import ControllerSpec
from selfspec.facts.costs import CostModel
from selfspec.facts.skip import SkipSet
from selfspec.llm.llm import LLM
from selfspec.measure.cost_fitting import measure_costs

from .continuations import Decoding, continue_prompts
from .ledger import Ledger
from .objective import Objective, Replayed, WallClock
from .replay import CANDIDATES, Replay, deepest
from .space import Space
from .strategies import Problem
from .target_text import Text
from .warm import cosines, every_second, first_k, programme
from .watch import Watch

PLACES = 6  # of each text, whose streams are looked at


@dataclass(frozen=True)
class Search:
    """What the parts of one search share."""

    llm: LLM
    space: Space
    decoding: Decoding
    texts: tuple[list[int], ...]
    seed: int
    ledger: Ledger
    watch: Watch
    deadline: float
    own_keys: bool = False


def replayed(
    search: Search, held: ExitStack, controllers: Sequence[Controller], context: int | None, warm: bool
) -> tuple[Replayed, Problem, CostModel, Replay]:
    """The replay objective, and what is known before the first trial."""
    llm, space, ledger, watch = search.llm, search.space, search.ledger, search.watch
    watch.stage("continuing prompts", len(search.texts))
    texts = continue_prompts(llm, search.texts, search.decoding, seed=search.seed, on_prompt=watch.step)
    watch.stage("measuring costs", None)
    sampler = search.decoding.sampler()
    if ledger.costs is None:
        keys = round(sum(text.prompt + text.new / 2 for text in texts) / len(texts))
        ledger.keep_costs(measure_costs(llm.runtime, context=context or keys, sampler=sampler, seed=search.seed))
    costs = ledger.costs
    assert costs is not None
    depth = deepest(controllers)
    replay = held.enter_context(
        Replay(
            llm.model,
            texts,
            sampler=sampler,
            rule=search.decoding.verified_by,
            depth=depth,
            candidates=1 if search.own_keys else CANDIDATES,  # engines' draft models draft chains
            seed=search.seed,
            own_keys=search.own_keys,
        )
    )
    worth = Replayed(replay, costs, controllers)
    if not warm:
        return worth, Problem(space, search.seed), costs, replay
    watch.stage("ranking sub-layers", len(space))
    if ledger.gains is None:
        ledger.keep_gains(_gains(search, worth))
    gains = ledger.gains or ()
    streams = replay.streams(PLACES)
    planned = programme(space, streams, costs)
    near = first_k(space, cosines(space, streams))
    first = dict.fromkeys((*first_k(space, gains), *planned[:3], *near[1:3], every_second(space)))
    return worth, Problem(space, search.seed, tuple(first), gains, planned), costs, replay


def _gains(search: Search, worth: Replayed) -> list[float]:
    """What skipping each variable alone brings; nothing for those that time did not allow."""
    gains = []
    for number, part in enumerate(search.space.variables):
        late = time.perf_counter() > search.deadline
        gains.append(0.0 if late else worth.gain(part))
        search.watch.step(number + 1)
    return gains


def timed(search: Search, controller: ControllerSpec | None, warm: bool) -> tuple[Objective, Problem]:
    """The paper's objective, with warm starts by the cosine of what enters and leaves each sub-layer."""
    space = search.space
    starts: tuple[SkipSet, ...] = ()
    texts = [Text(tuple(ids), max(1, len(ids) - PLACES), PLACES + 1) for ids in search.texts if len(ids) > 1]
    if warm and texts:
        search.watch.stage("ranking sub-layers", None)
        with Replay(search.llm.model, texts, depth=1) as replay:
            starts = (*first_k(space, cosines(space, replay.streams(PLACES))), every_second(space))
    search.watch.stage("measuring plain decoding", None)
    worth = WallClock(search.llm, search.texts, search.decoding, controller)
    return worth, Problem(space, search.seed, tuple(dict.fromkeys(starts)))
