"""Fair timing: every method on the same prompts, interleaved, after a warm-up; ratios, not absolute figures."""

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
from selfspec.llm.llm import LLM
from selfspec.llm.options import DEFAULT_NEW_TOKENS, Options
from selfspec.llm.stream import Generation
from selfspec.profile.schema import Measurement
from selfspec.runtime.forward import Runtime
from selfspec.runtime.worker_group import check_runtime_unsharded
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sequence import SequenceState
from selfspec.text.prompt import Prompt
from selfspec.types.stats import Round, Stats

Method = Callable[[Prompt], Stats]


@dataclass(frozen=True)
class Runs:
    """The statistics of each method's runs: `stats[name][prompt][round]`, up to the drop of a method."""

    stats: Mapping[str, Sequence[Sequence[Stats]]]

    def total(self, name: str) -> Stats:
        """Return the sum of a method's runs."""
        return Stats.total(run for prompt in self.stats[name] for run in prompt)

    def ratios(self, name: str, base: str) -> list[float]:
        """Return, for each prompt, the ratio of tokens per second to `base`'s; the median over rounds."""
        pairs = zip(self.stats[name], self.stats[base], strict=False)
        return [
            statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in zip(mine, theirs, strict=False))
            for mine, theirs in pairs
            if mine and theirs
        ]

    def speedup(self, name: str, base: str) -> tuple[float, tuple[float, float]]:
        """Return the median over prompts of `ratios`, and its 95% bootstrap interval."""
        ratios = self.ratios(name, base)
        return statistics.median(ratios), interval(ratios)

    def mean_speeds(self, name: str) -> list[float]:
        """Return, for each round, the mean over prompts of a method's tokens per second."""
        return [statistics.mean(run.tokens_per_second for run in same) for same in zip(*self.stats[name], strict=True)]

    def for_prompts(self, prompts: Sequence[int]) -> Runs:
        """Return the runs on these prompts, by index."""
        return Runs({name: [done[index] for index in prompts] for name, done in self.stats.items()})


def interleave(
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    *,
    rounds: int = 3,
    on_warm: Callable[[str, Stats], None] = lambda name, stats: None,
    on_run: Callable[[str, int], None] = lambda name, prompt: None,
    go_on: Callable[[Runs], bool] = lambda runs: True,
    drop: Callable[[Runs], Collection[str]] = lambda runs: (),
) -> Runs:
    """Run every method on every prompt, interleaved, `rounds` times; the order of methods rotates with every prompt.

    Every method first runs the first prompt once as a warm-up, which is not counted; `on_warm` receives that run.
    `on_run` receives the method and the prompt's index after every counted run. `go_on` receives the runs so far after
    each prompt that all methods have run, and may stop there; prompts that were not run are left out. `drop` receives
    them too, and returns the methods to run no further.
    """
    names = list(methods)
    for name in names:
        on_warm(name, methods[name](prompts[0]))
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


def method(
    llm: LLM,
    drafter: Drafter,
    options: Options,
    *,
    keep: Callable[[Generation], None] | None = None,
    first_plain: bool = False,
) -> Method:
    """Return decoding with a drafter as a method, timed from prompt to text; `keep` receives every generation.

    `first_plain`: as when streaming, the first round drafts nothing.
    """
    timed = _Timed(drafter)

    def run(prompt: Prompt) -> Stats:
        timed.seconds = 0.0
        begun = time.perf_counter()
        stream = llm.start(prompt, options, drafter=timed, first_plain=first_plain, pieces=False)
        ready = time.perf_counter()
        for _ in stream:
            pass
        generation = stream.result
        synchronise(llm.runtime.device)
        stats = generation.stats
        stats.seconds = time.perf_counter() - begun
        stats.drafting = timed.seconds
        if stats.log:
            first = stats.log[0]
            stats.log[0] = replace(first, seconds=first.seconds + ready - begun)
        if keep is not None:
            keep(generation)
        return stats

    return run


class _Timed:
    """A drafter whose `propose` is timed; on an asynchronous device, until its work is submitted."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.begin, self.observe, self.end, self.max_work = (
            drafter.begin,
            drafter.observe,
            drafter.end,
            drafter.max_work,
        )
        self.seconds = 0.0

    @property
    def hidden(self) -> Sequence[int]:
        return self._drafter.hidden

    @property
    def drafts(self) -> bool:
        return self._drafter.drafts

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        begun = time.perf_counter()
        drafts = self._drafter.propose(seqs, limits)
        self.seconds += time.perf_counter() - begun
        return drafts


class _Clock(BaseStreamer):  # type: ignore[misc]
    """A streamer that records when `transformers`' generate emits tokens; the prompt comes first."""

    def __init__(self) -> None:
        self._prompt, self._last = True, time.perf_counter()
        self.log: list[Round] = []

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then one emission after the other."""
        if self._prompt:
            self._prompt = False
            return
        now, tokens = time.perf_counter(), value.numel()
        self.log.append(Round(drafted=0, accepted=tokens - 1, tokens=tokens, seconds=now - self._last))
        self._last = now

    def end(self) -> None:
        """Do nothing, as the interface requires the method."""


def transformers_generate(
    llm: LLM,
    options: Options,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    assistant: tuple[Any, Any] | None = None,
    keep: Callable[[Sequence[int]], None] | None = None,
) -> Method:
    """Return `transformers`' own `generate` with the same options as a method to time; it has no seed.

    `settings`: further fields of its `GenerationConfig`, such as `prompt_lookup_num_tokens`; `assistant`: a draft model
    of its own, and its tokenizer. `keep` receives every text's token ids.
    """
    check_runtime_unsharded(llm.runtime, "transformers' own generate")
    model, tokenizer = copy.copy(llm.model), llm.tokenizer
    model.generation_config = GenerationConfig()  # else its own defaults would apply where the options set nothing
    aided = {} if assistant is None else {"assistant_model": assistant[0]}
    if assistant is not None and assistant[0].config.vocab_size != model.config.vocab_size:
        aided["assistant_tokenizer"] = assistant[1]

    def run(prompt: Prompt) -> Stats:
        planned = llm.plan(prompt, options)
        planned.config.max_length = None  # max_new_tokens limits the text
        for name, value in settings.items():
            setattr(planned.config, name, value)
        clock = _Clock()
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
    """Return options under which all sampled texts have the same length: they do not end before their last token.

    Each method samples a different text. A text that ends at its first token mostly measures prefill, a longer one
    mostly decoding, so that their speeds are not comparable. Greedy texts are equal and end where they do.
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
    """Measure a drafter against plain decoding, interleaved, and record the conditions.

    `plain_llm`: the same model with the weight layout for plain decoding, which then runs on it. `on_run` and `go_on`:
    as in `interleave`; the result covers the runs that were made.
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
    """Return the conditions to report with every figure: machine, device, dtype and threads."""
    return {
        "machine": machine(runtime.device),
        "device": runtime.device.type,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the median of `values`; a single value is its own interval."""
    import numpy as np
    from scipy.stats import bootstrap

    if len(values) < 2:
        return values[0], values[0]
    result = bootstrap((np.asarray(values),), np.median, method="percentile", rng=np.random.default_rng(seed))
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
