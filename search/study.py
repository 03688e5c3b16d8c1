"""A search from prompts to profile: trials, the best few measured again, and the best of them measured honestly."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from selfspec.api import LLM
from selfspec.bench import Runs, interleave, measure, method
from selfspec.controllers import make_controller
from selfspec.drafters import PlainDrafter
from selfspec.errors import SelfspecError
from selfspec.profile import ControllerSpec, Measurement, Profile, SearchRecord, Skip
from selfspec.skip import SkipSet
from selfspec.text import Prompt

from .calibration import choose, record
from .objective import wallclock
from .strategies import Strategy, check_strategy, make_strategy
from .warm import warm_starts

FINALISTS = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """One skip set tried: its score in tokens per second, and that as a multiple of plain decoding's."""

    number: int
    skip: SkipSet
    tokens_per_second: float
    speedup: float
    acceptance_rate: float


def find_profile(
    llm: LLM,
    prompts: Sequence[str] | None = None,
    *,
    source: str = "prompts",
    strategy: str = "tpe",
    trials: int = 60,
    seed: int = 0,
    count: int = 8,
    max_new_tokens: int = 32,
    controller: ControllerSpec | None = None,
    warm: bool = True,
    keep_best: bool = False,
    on_trial: Callable[[Trial], None] | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> Profile:
    """Search which sub-layers of `llm` to bypass, the paper's recipe, and measure what was found.

    `prompts`: calibration text, None for the built-in model's; `count` of them, drawn by `seed`, are searched on
    and as many others are measured on. Each trial decodes `max_new_tokens` for each prompt. `on_trial` is told of
    every trial, `on_stage` of what happens next. `warm`: try a few likely sets first;
    without, this is the paper's recipe as published. An interrupt (Ctrl-C) during the trials ends them, and the best
    so far is measured. If nothing beats plain decoding, the profile skips nothing and its note says so; with
    `keep_best` it holds the best set all the same, its measurement with it.

    Raises `SelfspecError` for a wrong option, no prompts, or a model without room for `max_new_tokens`.
    """
    if isinstance(prompts, str):
        raise SelfspecError("prompts is one text; want a list of them")
    trials, count, seed, max_new_tokens = map(operator.index, (trials, count, seed, max_new_tokens))
    if trials < 1 or count < 1:
        raise SelfspecError(f"want at least 1 trial and 1 prompt, got {trials} and {count}")
    if not 0 <= seed < 2**32:
        raise SelfspecError(f"seed {seed}: want 0 to {2**32 - 1}")
    chosen = choose(prompts, source=source, count=count, seed=seed)
    texts, others = (_fit(llm, part, max_new_tokens) for part in (chosen.search, chosen.measure))
    if not texts:
        raise SelfspecError(f"{source}: holds no prompts")
    controller = controller or ControllerSpec(name="adaptive")
    check_strategy(strategy)
    make_controller(controller)
    say = on_stage or (lambda stage: None)
    start = time.perf_counter()
    say("ranking sub-layers" if warm else "starting")
    starts = warm_starts(llm.runtime, texts) if warm else ()
    proposer = make_strategy(strategy, llm.runtime.layers, seed=seed, warm=starts)
    say("measuring plain decoding")
    plain = _plain_speed(llm, texts, max_new_tokens)
    say("searching")
    done = _run_trials(llm, proposer, texts, trials, controller, plain, max_new_tokens, on_trial)
    seconds = time.perf_counter() - start
    say("measuring the best again")
    best = _best(llm, done, texts, controller, max_new_tokens)
    say("measuring on held-out prompts" if chosen.held_out else "measuring")
    drafter = llm.layer_skip(best, controller)
    measured = measure(llm, drafter, others, held_out=chosen.held_out, max_new_tokens=max_new_tokens)
    kept = keep_best or measured.speedup > 1
    return Profile(
        model=llm.identity,
        skip=Skip(attention=list(best.attention), mlp=list(best.mlp)) if kept else Skip(),
        controller=drafter.controller.fresh().spec(),
        calibration=record(chosen.source, texts),
        search=SearchRecord(
            strategy=strategy,
            objective="wallclock",
            trials=len(done),
            seed=seed,
            seconds=round(seconds, 1),
            max_new_tokens=max_new_tokens,
        ),
        measured=[measured] if kept else [],
        versions={name: version(name) for name in ("selfspec", "torch", "transformers", "optuna", "scikit-optimize")},
        note=_note(best, measured, kept=kept),
    )


def _fit(llm: LLM, prompts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
    """The prompts as token ids, cut at their end where they would not leave room for the new tokens."""
    room = llm.runtime.skeleton.context - max_new_tokens
    if max_new_tokens < 1 or room < 1:
        raise SelfspecError(
            f"max_new_tokens {max_new_tokens}: want 1 to {llm.runtime.skeleton.context - 1}, "
            "what the context leaves beside a prompt"
        )
    return [llm.encode(prompt)[:room] for prompt in prompts]


def _plain_speed(llm: LLM, texts: Sequence[Prompt], max_new_tokens: int) -> float:
    wallclock(llm, PlainDrafter(), texts[:1], max_new_tokens=max_new_tokens)  # warm up
    return wallclock(llm, PlainDrafter(), texts, max_new_tokens=max_new_tokens).tokens_per_second


def _run_trials(
    llm: LLM,
    proposer: Strategy,
    texts: Sequence[Prompt],
    trials: int,
    controller: ControllerSpec,
    plain: float,
    max_new_tokens: int,
    on_trial: Callable[[Trial], None] | None,
) -> list[Trial]:
    done: list[Trial] = []
    try:
        for number in range(trials):
            skip = proposer.ask()
            drafter = llm.layer_skip(skip, controller)
            stats = wallclock(llm, drafter, texts, max_new_tokens=max_new_tokens)
            speed = stats.tokens_per_second
            proposer.tell(skip, speed)
            done.append(Trial(number, skip, speed, speed / plain, stats.acceptance_rate))
            if on_trial is not None:
                on_trial(done[-1])
    except KeyboardInterrupt:
        if not done:
            raise
    return done


def _best(
    llm: LLM, done: Sequence[Trial], texts: Sequence[Prompt], controller: ControllerSpec, max_new_tokens: int
) -> SkipSet:
    """The best of the best few when measured again, interleaved: the best of many noisy scores is biased."""
    ranked = dict.fromkeys(t.skip for t in sorted(done, key=lambda t: -t.tokens_per_second))
    finalists = list(ranked)[:FINALISTS]
    methods = {
        str(i): method(llm, llm.layer_skip(skip, controller), max_new_tokens=max_new_tokens)
        for i, skip in enumerate(finalists)
    }
    runs: Runs = interleave(methods, texts, rounds=2)
    return finalists[max(range(len(finalists)), key=lambda i: runs.total(str(i)).tokens_per_second)]


def _note(best: SkipSet, measured: Measurement, *, kept: bool) -> str | None:
    if measured.speedup > 1:
        return None if measured.interval[0] > 1 else "not certain: the measured speedup's interval includes 1"
    if kept:
        return f"plain decoding was faster: this set ran at {measured.speedup} times its speed where it was measured"
    attention, mlp = list(best.attention), list(best.mlp)
    return (
        f"nothing beat plain decoding: the best set found (attention {attention}, mlp {mlp}) ran at "
        f"{measured.speedup} times its speed, so this profile skips nothing"
    )
