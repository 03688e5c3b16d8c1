"""Timing of decoding methods on the same prompts, interleaved after a warm-up, to compare them by ratios of speeds."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from selfspec.basics.machine import machine, synchronise
from selfspec.drafters import PlainDrafter
from selfspec.drafters.batch_policy import teach
from selfspec.llm.llm import LLM
from selfspec.llm.options import DEFAULT_NEW_TOKENS, Options
from selfspec.llm.stream import Generation
from selfspec.profile.schema import Measurement
from selfspec.runtime.base import Runtime
from selfspec.runtime.device_rounds import RoundPlan, RoundPlanner
from selfspec.runtime.worker_group import check_runtime_unsharded
from selfspec.speculation.drafter import DelegatingDrafter, Drafter, Limit
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sequence import SequenceState
from selfspec.text.prompt_template import Prompt
from selfspec.types.stats import Round, Stats

Method = Callable[[Prompt], Stats]


@dataclass(frozen=True)
class Runs:
    """The statistics of each run of each method: `stats[name][prompt][round]`; a dropped method has fewer runs."""

    stats: Mapping[str, Sequence[Sequence[Stats]]]

    def total(self, name: str) -> Stats:
        """Return the sum of the statistics of all runs of method `name`."""
        return Stats.total(run for prompt in self.stats[name] for run in prompt)

    def ratios(self, name: str, base: str) -> list[float]:
        """Return, for each prompt, the tokens per second of method `name` divided by those of `base`.

        Each ratio is the median over the measurement's repetitions. Prompts that either method did not run are left
        out.
        """
        pairs = zip(self.stats[name], self.stats[base], strict=False)
        return [
            statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in zip(mine, theirs, strict=False))
            for mine, theirs in pairs
            if mine and theirs
        ]

    def speedup(self, name: str, base: str) -> tuple[float, tuple[float, float]]:
        """Return the median over prompts of `ratios(name, base)`, and its 95% bootstrap interval (low, high)."""
        ratios = self.ratios(name, base)
        return statistics.median(ratios), interval(ratios)

    def mean_speeds(self, name: str) -> list[float]:
        """Return, for each round, the mean over prompts of the tokens per second of method `name`."""
        return [statistics.mean(run.tokens_per_second for run in same) for same in zip(*self.stats[name], strict=True)]

    def for_prompts(self, prompts: Sequence[int]) -> Runs:
        """Return the runs on the prompts with these indices only."""
        return Runs({name: [done[index] for index in prompts] for name, done in self.stats.items()})


def interleave(
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    *,
    rounds: int = 3,
    warm_prompt: int = 0,
    on_warm: Callable[[str, Stats], None] = lambda name, stats: None,
    on_run: Callable[[str, int], None] = lambda name, prompt: None,
    go_on: Callable[[Runs], bool] = lambda runs: True,
    drop: Callable[[Runs], Collection[str]] = lambda runs: (),
) -> Runs:
    """Run every method on every prompt, interleaved, `rounds` times; the order of methods rotates with every prompt.

    Every method first runs the prompt of index `warm_prompt` once as a warm-up, which is not counted.
    `on_warm(name, stats)` reports each warm-up run, `on_run(name, prompt_index)` each counted run. After each prompt
    that all methods have run, `go_on` and `drop` receive the runs so far. If `go_on` returns False, timing stops, and
    the result leaves out the prompts that were not run. The methods that `drop` returns are not run any further.
    """
    names = list(methods)
    for name in names:
        on_warm(name, methods[name](prompts[warm_prompt]))
    stats: dict[str, list[list[Stats]]] = {name: [[] for _ in prompts] for name in names}
    for turn, (index, prompt) in product(range(rounds), enumerate(prompts)):
        done = Runs({name: [runs for runs in by_prompt if runs] for name, by_prompt in stats.items()})
        if (turn or index) and not go_on(done):
            return done
        dropped = drop(done) if turn or index else ()
        names = [name for name in names if name not in dropped]
        shift = (turn + index) % len(names)
        for name in names[shift:] + names[:shift]:
            stats[name][index].append(methods[name](prompt))
            on_run(name, index)
    return Runs(stats)


def untaught(drafter: Drafter) -> Drafter:
    """Return the drafter, whose proposers learn from no text from now on."""
    teach(drafter, False)
    return drafter


def method(
    llm: LLM,
    drafter: Drafter,
    options: Options,
    *,
    keep: Callable[[Generation], None] | None = None,
) -> Method:
    """Return decoding with `drafter` as a method to time, from the prompt to the text.

    `keep` receives every generation. From then on, the drafter's proposers learn from no text: a run would otherwise
    look up what the last one decoded.
    """
    timed = _TimedPlanner(untaught(drafter)) if isinstance(drafter, RoundPlanner) else _Timed(untaught(drafter))

    def run(prompt: Prompt) -> Stats:
        timed.seconds, timed.planned = 0.0, 0
        begun = time.perf_counter()
        stream = llm.start(prompt, options, drafter=timed, pieces=False)
        ready = time.perf_counter()
        generation = stream.wait()
        synchronise(llm.runtime.device)
        stats = generation.stats
        stats.seconds = time.perf_counter() - begun
        stats.drafting = 0.0 if timed.planned else timed.seconds
        if stats.log:
            first = stats.log[0]
            stats.log[0] = replace(first, seconds=first.seconds + ready - begun)
        if keep is not None:
            keep(generation)
        return stats

    return run


class _Timed(DelegatingDrafter):
    """A drafter whose calls of `propose` are timed; on a GPU, only until the kernels are launched.

    `planned`: the number of rounds on the device, whose drafting cannot be timed apart.
    """

    seconds, planned = 0.0, 0

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        begun = time.perf_counter()
        drafts = super().propose(seqs, limits)
        self.seconds += time.perf_counter() - begun
        return drafts


class _TimedPlanner(_Timed):
    """A timed drafter that also plans rounds on the device."""

    def plan_round(self, seqs: Sequence[SequenceState], limit: Limit, *, ahead: bool) -> RoundPlan | None:
        assert isinstance(self.drafter, RoundPlanner)
        plan = self.drafter.plan_round(seqs, limit, ahead=ahead)
        self.planned += plan is not None
        return plan


class _Clock(BaseStreamer):  # type: ignore[misc]
    """A streamer that records a `Round` each time `transformers`' generate emits tokens."""

    def __init__(self) -> None:
        self._prompt, self._last = True, time.perf_counter()
        self.log: list[Round] = []

    def put(self, value: torch.Tensor) -> None:
        """Record the emission of the token ids `value`; the first call brings the prompt and is not recorded."""
        if self._prompt:
            self._prompt = False
            return
        now, tokens = time.perf_counter(), value.numel()
        self.log.append(Round(drafted=0, accepted=tokens - 1, tokens=tokens, seconds=now - self._last))
        self._last = now

    def end(self) -> None:
        """Do nothing; `BaseStreamer` requires this method."""


def transformers_generate(
    llm: LLM,
    options: Options,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    assistant: tuple[Any, Any] | None = None,
    keep: Callable[[Sequence[int]], None] | None = None,
) -> Method:
    """Return `transformers`' own `generate` with the same options as a method to time.

    `settings`: further fields of the `GenerationConfig`, such as `prompt_lookup_num_tokens`. `assistant`: an assistant
    model and its tokenizer (None: no assistant). `keep` receives the token ids of every text. Raises `SelfspecError` if
    the model is sharded.
    """
    check_runtime_unsharded(llm.runtime, "transformers' own generate")
    model, tokenizer = copy.copy(llm.model), llm.tokenizer
    model.generation_config = GenerationConfig()  # the model's defaults must not apply where the options set nothing
    aided = {} if assistant is None else {"assistant_model": assistant[0]}
    if assistant is not None and assistant[0].config.vocab_size != model.config.vocab_size:
        aided["assistant_tokenizer"] = assistant[1]

    def run(prompt: Prompt) -> Stats:
        planned = llm.plan(prompt, options)
        planned.config.max_length = None  # max_new_tokens limits the text
        for name, value in settings.items():
            setattr(planned.config, name, value)
        clock = _Clock()
        if options.seed is not None:
            torch.manual_seed(options.seed % 2**64)  # the largest seed that PyTorch takes
        start = time.perf_counter()
        prompt_ids = llm.encode(prompt)
        ids = torch.tensor([prompt_ids], device=llm.runtime.device)
        extra = [*options.logits_processor]
        extra += [options.guide.processor(len(prompt_ids), planned.ends)] if options.guide is not None else []
        new = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=planned.config,
            logits_processor=extra,
            tokenizer=tokenizer,
            streamer=clock,
            **aided,
        )[0, len(prompt_ids) :]
        tokenizer.decode(new)
        synchronise(llm.runtime.device)
        seconds = time.perf_counter() - start
        if keep is not None:
            keep(new.tolist())
        accepted = sum(done.accepted for done in clock.log)
        return Stats(rounds=len(clock.log), accepted=accepted, tokens=len(new), seconds=seconds, log=clock.log)

    return run


def same_length(options: Options) -> Options:
    """Return options under which all sampled texts have `max_new_tokens` tokens; greedy options are returned unchanged.

    Each method samples a different text, and the speeds of a short text, which is mostly prefill, and of a long text,
    which is mostly decoding, are not comparable. Greedy texts of all methods are equal and have the same length.
    """
    if not options.temperature:
        return options
    least = {"min_new_tokens": options.max_new_tokens or DEFAULT_NEW_TOKENS}
    return replace(options, settings={**options.settings, **least})


def measure(
    llm: LLM,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    options: Options,
    *,
    held_out: bool,
    rounds: int = 3,
    plain_llm: LLM | None = None,
    on_run: Callable[[str, int], None] = lambda name, prompt: None,
    go_on: Callable[[Runs], bool] = lambda runs: True,
) -> Measurement:
    """Return the measured speed of `drafter` against plain decoding, with the conditions of the measurement.

    The two methods run interleaved. `held_out`: whether the prompts were not used to search for the profile, for the
    record. `plain_llm`: a copy of the model in the weight layout for plain decoding, which runs on it (None: `llm`).
    `on_run` and `go_on`: as in `interleave`; if `go_on` stops the timing, the result covers the runs made until then.
    """
    methods = {"plain": method(plain_llm or llm, PlainDrafter(), options), "draft": method(llm, drafter, options)}
    runs = interleave(methods, prompts, rounds=rounds, on_run=on_run, go_on=go_on)
    done = runs.stats["draft"]
    speedup, (low, high) = runs.speedup("draft", "plain")
    total = runs.total("draft")
    return Measurement(
        **conditions(llm.runtime),
        prompts=len(done),
        held_out=held_out,
        max_new_tokens=options.max_new_tokens or DEFAULT_NEW_TOKENS,
        rounds=min(map(len, done)),
        temperature=options.temperature or 0.0,
        top_k=options.top_k,
        top_p=options.top_p,
        plain_tokens_per_second=round(runs.total("plain").tokens_per_second, 1),
        tokens_per_second=round(total.tokens_per_second, 1),
        speedup=round(speedup, 3),
        interval=[round(low, 3), round(high, 3)],
        acceptance_rate=round(total.acceptance_rate, 3),
        tokens_per_round=round(total.tokens_per_round, 3),
    )


def conditions(runtime: Runtime) -> dict[str, Any]:
    """Return the conditions of a measurement: machine, device, dtype and number of threads."""
    return {
        "machine": machine(runtime.device),
        "device": runtime.device.type,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval (low, high) of the median; of a single value x, (x, x)."""
    import numpy as np
    from scipy.stats import bootstrap

    if len(values) < 2:
        return values[0], values[0]
    result = bootstrap((np.asarray(values),), np.median, method="percentile", rng=np.random.default_rng(0))
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
