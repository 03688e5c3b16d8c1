"""Honest timing: every method on the same prompts, interleaved, warmed up; ratios, not absolute claims."""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor

from selfspec.api import LLM, Generation
from selfspec.audit import Difference, first_difference
from selfspec.costing import synchronise
from selfspec.drafters import Drafter, PlainDrafter
from selfspec.profile import Measurement
from selfspec.stats import Stats
from selfspec.text import Prompt

Method = Callable[[Prompt], Stats]


@dataclass(frozen=True)
class Runs:
    """What each method did: `stats[name][prompt][round]`."""

    stats: Mapping[str, Sequence[Sequence[Stats]]]

    def total(self, name: str) -> Stats:
        """All runs of a method added up."""
        return Stats.total(run for prompt in self.stats[name] for run in prompt)

    def ratios(self, name: str, base: str) -> list[float]:
        """For each prompt, how many times `base`'s tokens per second; the median over rounds."""
        pairs = zip(self.stats[name], self.stats[base], strict=True)
        return [
            statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in pairs
        ]

    def speedup(self, name: str, base: str) -> tuple[float, tuple[float, float]]:
        """The median over prompts of `ratios`, and its 95% bootstrap interval."""
        ratios = self.ratios(name, base)
        return statistics.median(ratios), interval(ratios)


def interleave(
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    *,
    rounds: int = 3,
) -> Runs:
    """Run every method on every prompt, one after the other, `rounds` times; the order turns with every prompt.

    The first prompt is run once by every method beforehand and not counted.
    """
    names = list(methods)
    for name in names:
        methods[name](prompts[0])
    stats: dict[str, list[list[Stats]]] = {name: [[] for _ in prompts] for name in names}
    for turn in range(rounds):
        for index, prompt in enumerate(prompts):
            shift = (turn + index) % len(names)
            for name in names[shift:] + names[:shift]:
                stats[name][index].append(methods[name](prompt))
    return Runs(stats)


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded plainly, with a drafter, and by `transformers`' generate, interleaved.

    `difference` is set when the greedy texts of the first two differ.
    """

    plain: Generation
    draft: Generation
    plain_tokens_per_second: float
    tokens_per_second: float
    transformers_tokens_per_second: float
    speedup: float
    rounds: int
    greedy: bool
    difference: Difference | None

    @property
    def identical(self) -> bool | None:
        """Whether the tokens are the same; None for sampling, where only the distribution is."""
        return self.plain.tokens == self.draft.tokens if self.greedy else None

    @property
    def verdict(self) -> str:
        """`identical` in words."""
        if not self.greedy:
            return "not comparable (sampling: the same distribution, other draws)"
        return "yes" if self.difference is None else f"no: {self.difference}"

    def as_dict(self) -> dict[str, Any]:
        """Everything but the texts, ready for JSON."""
        return {
            "identical": self.identical,
            "speedup": self.speedup,
            "rounds": self.rounds,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "transformers_tokens_per_second": self.transformers_tokens_per_second,
            "plain": self.plain.stats.as_dict(),
            "difference": None if self.difference is None else dataclasses.asdict(self.difference),
        }


def compare(
    llm: LLM,
    prompt: str,
    drafter: Drafter,
    *,
    rounds: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
) -> Comparison:
    """Decode one prompt plainly, with `drafter`, and by `transformers`, `rounds` times each, and compare."""
    last: dict[str, Generation] = {}
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "stop": stop,
    }
    methods = {
        "plain": method(llm, PlainDrafter(), seed=seed, keep=lambda out: last.update(plain=out), **sampling),
        "draft": method(llm, drafter, seed=seed, keep=lambda out: last.update(draft=out), **sampling),
        "transformers": transformers_generate(llm.model, llm.tokenizer, **sampling),
    }
    runs = interleave(methods, [prompt], rounds=rounds)
    plain, draft = last["plain"], last["draft"]
    greedy = temperature == 0
    difference = first_difference(llm.runtime, llm.encode(prompt), plain.tokens, draft.tokens) if greedy else None
    return Comparison(
        plain=plain,
        draft=draft,
        plain_tokens_per_second=runs.total("plain").tokens_per_second,
        tokens_per_second=runs.total("draft").tokens_per_second,
        transformers_tokens_per_second=runs.total("transformers").tokens_per_second,
        speedup=runs.ratios("draft", "plain")[0],
        rounds=rounds,
        greedy=greedy,
        difference=difference,
    )


def method(
    llm: LLM,
    drafter: Drafter,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    logits_processor: Sequence[LogitsProcessor] = (),
    keep: Callable[[Generation], None] | None = None,
) -> Method:
    """Decoding with a drafter, as a method to be timed; `keep` is shown every generation."""

    def run(prompt: Prompt) -> Stats:
        generation = llm.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            logits_processor=logits_processor,
            drafter=drafter,
        )
        synchronise(llm.runtime.device)
        if keep is not None:
            keep(generation)
        return generation.stats

    return run


def transformers_generate(
    model: Any,
    tokenizer: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[str] = (),
) -> Method:
    """`transformers`' own `generate` with these options and no others, as a method to be timed; it has no seed.

    The checkpoint's `generation_config` gives the end tokens alone, as in selfspec.
    """
    own = model.generation_config
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    if stop:
        options |= {"stop_strings": list(stop)}
    config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id, **options)

    def run(prompt: Prompt) -> Stats:
        start = time.perf_counter()
        given = tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        ids = torch.tensor([given], device=model.device)
        new = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, tokenizer=tokenizer)[
            0, len(given) :
        ]
        tokenizer.decode(new)
        synchronise(model.device)
        return Stats(rounds=len(new), tokens=len(new), seconds=time.perf_counter() - start)

    return run


def measure(
    llm: LLM,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    held_out: bool,
    max_new_tokens: int,
    rounds: int = 3,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
) -> Measurement:
    """Measure a drafter against plain decoding, interleaved, with the conditions written down."""
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    methods = {
        name: method(llm, used, max_new_tokens=max_new_tokens, logits_processor=logits_processor, **sampling)
        for name, used in (("plain", PlainDrafter()), ("draft", drafter))
    }
    runs = interleave(methods, prompts, rounds=rounds)
    speedup, (low, high) = runs.speedup("draft", "plain")
    total = runs.total("draft")
    return Measurement(
        machine=machine(llm.runtime.device),
        device=llm.runtime.device.type,
        dtype=str(llm.runtime.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompts=len(prompts),
        held_out=held_out,
        max_new_tokens=max_new_tokens,
        rounds=rounds,
        **sampling,
        plain_tokens_per_second=round(runs.total("plain").tokens_per_second, 1),
        tokens_per_second=round(total.tokens_per_second, 1),
        speedup=round(speedup, 3),
        interval=[round(low, 3), round(high, 3)],
        acceptance_rate=round(total.acceptance_rate, 3),
        tokens_per_round=round(total.tokens_per_round, 3),
    )


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the median of `values`; a single value is its own interval."""
    import numpy as np
    from scipy.stats import bootstrap

    if len(values) < 2:
        return values[0], values[0]
    result = bootstrap((np.asarray(values),), np.median, method="percentile", rng=np.random.default_rng(seed))
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def machine(device: torch.device) -> str:
    """The name of what computes: the GPU's, or the processor's with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    name = names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {len(names) or 1} cores" if names else name
