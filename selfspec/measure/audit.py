"""Audit of losslessness against plain decoding, which tells near-ties from bugs, and one prompt side by side.

Forward passes over different numbers of tokens use different kernels, and below float64 these may round a near-tie
differently. The noise after a prefix is the largest difference between the logits that passes of different widths
compute there. The first difference between two outputs is a near-tie if the logits of both tokens lie at most
`TOLERANCE` times the noise below the best logit. Any other difference is a bug. Passes are made until they
tell a near-tie.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.drafters import PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.llm.stream import Generation
from selfspec.measure.timing import Runs, interleave, method, transformers_generate, untaught
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.sampling import Sampler
from selfspec.text.prompt_template import Prompt
from selfspec.types.stats import Stats

TOLERANCE = 4.0
_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 13)  # tokens per pass, as in verification passes


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two outputs, and how close the logits of the two tokens are.

    `index`: the number of equal new tokens before the difference. `plain` and `other`: the token of each output there;
    None if that output has ended. `gap`: the best logit minus the lower logit of the two tokens, in passes of one
    token; None if one output has ended. `noise`: the largest difference, after the same prefix, between the logits of
    passes of one token and those of wider passes or of another implementation, of as many passes as it takes to tell
    a near-tie, or of all. `gap` and `noise` are in processed logits; when sampling with a seed, in log probabilities
    plus the Gumbel noise of the position.
    """

    index: int
    plain: int | None
    other: int | None
    gap: float | None
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference: `gap` is at most `TOLERANCE` times `noise`."""
        return self.gap is not None and self.gap <= TOLERANCE * self.noise

    def __str__(self) -> str:
        """Return one human-readable line."""
        if self.gap is None:
            return f"one output ends after {self.index} tokens, a BUG, please report it"
        what = "a near-tie" if self.near_tie else "a BUG, please report it"
        return (
            f"a difference after {self.index} tokens, {what} "
            f"(the logits are {self.gap:.2g} apart, rounding moves them by {self.noise:.2g})"
        )


def first_difference(
    runtime: Runtime,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    *,
    sampler: Sampler | None = None,
    reference: Tensor | None = None,
) -> Difference | None:
    """Return the first difference of `other` from `plain` (new token ids after `prompt`), or None if they are equal.

    `sampler`: the sampler that chose the tokens of both outputs (None: greedy); if it samples, its noise must be tied
    to the position. `reference`: if one of the texts was not produced by `runtime`, the logits `[V]` of the other
    implementation after the common prefix. Raises `BusyError` while the runtime has a stream.
    """
    if list(plain) == list(other):
        return None
    index = in_common(plain, other)
    if index >= min(len(plain), len(other)):
        ends = (plain[index] if index < len(plain) else None, other[index] if index < len(other) else None)
        return Difference(index, *ends, gap=None, noise=0.0)
    sampler = sampler or Sampler()
    prefix = [*prompt, *plain[:index]]

    def merits(logits: Tensor) -> Tensor:
        return sampler.noisy_scores(sampler.scores(logits[None], [prefix])[0], len(prefix))

    narrow = merits(_logits(runtime, prompt, plain[:index], 1))
    gap = float(narrow.max() - torch.minimum(narrow[plain[index]], narrow[other[index]]))
    widths = [width for width in (1, *_WIDTHS) if width <= len(prefix)]
    others = chain(
        [] if reference is None else [reference.to(narrow)],
        (_logits(runtime, prompt, plain[:index], width) for width in _WIDTHS if width <= index + 1),
        (_logits(runtime, prefix, (), width) for width in widths),
    )
    difference = Difference(index, plain[index], other[index], gap, noise=0.0)
    for logits in others:  # each reads the prompt
        noise = max(difference.noise, _apart(narrow, merits(logits), other[index]))
        difference = dataclasses.replace(difference, noise=noise)
        if difference.near_tie:
            break
    return difference


def copies_difference(
    plain: LLM,
    other: LLM,
    prompt: Sequence[int],
    text: Sequence[int],
    its: Sequence[int],
    *,
    sampler: Sampler | None = None,
) -> Difference | None:
    """Return the first difference of the text `its` from `text`, both after `prompt` (token ids); None if equal.

    The rounding noise is measured by passes of `other`, whose text is `its`, and, if `plain` is a separate copy of the
    model, by a pass of `plain`: their weight layouts may differ. `sampler`: as in `first_difference`.
    """
    reference = None
    if other is not plain and list(text) != list(its):
        prefix = torch.tensor([[*prompt, *text[: in_common(text, its)]]], device=plain.runtime.device)
        with torch.no_grad():
            reference = plain.model(prefix, logits_to_keep=1).logits[0, -1]
    return first_difference(other.runtime, prompt, text, its, sampler=sampler, reference=reference)


def in_common(plain: Sequence[int], other: Sequence[int]) -> int:
    """Return the length in tokens of the common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))


def _apart(a: Tensor, b: Tensor, token: int) -> float:
    """Return the largest difference between logits `a` and `b` `[V]` over the tokens that are finite in both.

    Returns infinity if `token` is finite in only one of `a` and `b`.
    """
    if a[token].isfinite() != b[token].isfinite():
        return math.inf
    both = a.isfinite() & b.isfinite()
    return float((a - b)[both].abs().max())


def _logits(runtime: Runtime, prompt: Sequence[int], new: Sequence[int], width: int) -> Tensor:
    """Return the logits `[V]`, at least float32, after `prompt` and `new`, computed in passes of `width` tokens.

    As in decoding, a prefill reads the prompt except for its last tokens, which are read together with `new`. The last
    pass has exactly `width` tokens; the pass after the prefill may be narrower.
    """
    tokens = torch.tensor([[*prompt, *new]], device=runtime.device)
    end = tokens.shape[1]
    first = min(len(prompt) - 1, end - width)
    starts = sorted({first, *range(end - width, first, -width)})
    with runtime.session(end):
        if first:
            runtime.forward(tokens[:, :first], 0, logits=None)
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            step = runtime.forward(tokens[:, start:stop], start, logits="last")
    assert step.logits is not None
    logits = step.logits[0, -1]
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(slots=True)
class Audit:
    """The result of an audit.

    `prompts`: the number of audited prompts. `tokens`: the number of compared tokens. `stats`: the statistics of the
    speculative decoding. `differences`: pairs of a prompt's index (from 0) and a difference in its text.
    """

    prompts: int = 0
    tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    differences: list[tuple[int, Difference]] = field(default_factory=list)

    @property
    def near_ties(self) -> int:
        """The number of differences that rounding explains."""
        return sum(difference.near_tie for _, difference in self.differences)

    @property
    def bugs(self) -> int:
        """The number of differences that rounding does not explain."""
        return len(self.differences) - self.near_ties

    def as_dict(self) -> dict[str, Any]:
        """Return all counts, statistics and differences, ready for JSON."""
        differences = [
            {"prompt": prompt, **dataclasses.asdict(difference), "near_tie": difference.near_tie}
            for prompt, difference in self.differences
        ]
        counts = {"prompts": self.prompts, "tokens": self.tokens, "near_ties": self.near_ties, "bugs": self.bugs}
        return {**counts, **self.stats.as_dict(), "differences": differences}


def audit(
    llm: LLM,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    on_prompt: Callable[[Audit], None] | None = None,
) -> Audit:
    """Decode every prompt without drafts and with `drafter`, and classify every difference.

    After a difference, speculative decoding restarts behind the token that differs, on the text of plain decoding.
    With a `temperature` above 0 both sample with `seed`, and their texts must be equal too. `on_prompt` receives the
    result so far after each prompt. Raises `SelfspecError` for an invalid option or prompt, and without prompts.
    """
    result = Audit()
    options = Options(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed if temperature > 0 else None)
    if not prompts:
        raise SelfspecError("audit: no prompts given; expected at least one")
    drafter = untaught(drafter)
    for number, prompt in enumerate(prompts):
        ids = llm.encode(prompt)
        text = llm.run(ids, options, drafter=PlainDrafter()).tokens
        sampler = llm.plan(ids, options).sampler
        done = 0
        while done < len(text):
            rest = dataclasses.replace(options, max_new_tokens=max_new_tokens - done)
            other = llm.run([*ids, *text[:done]], rest, drafter=drafter)
            result.stats.add(other.stats)
            difference = first_difference(llm.runtime, ids, text, [*text[:done], *other.tokens], sampler=sampler)
            if difference is None:
                break
            result.differences.append((number, difference))
            done = difference.index + 1
        result.prompts += 1
        result.tokens += len(text)
        if on_prompt is not None:
            on_prompt(result)
    return result


@dataclass(frozen=True)
class Comparison:
    """The results of decoding one prompt without drafts, with a drafter, and by `transformers`' generate.

    `plain` and `draft`: the generations without drafts and with the drafter. `speedup`: of `draft` over `plain`, the
    median over rounds. `plain_first_token` and `first_token`: the seconds to the first token, medians over rounds.
    `rounds`: how often each method ran. `comparable`: whether the texts of `plain` and `draft` must be equal.
    `difference`: the first difference between these texts; None if they are equal or not comparable.
    """

    plain: Generation
    draft: Generation
    plain_tokens_per_second: float
    tokens_per_second: float
    transformers_tokens_per_second: float
    speedup: float
    plain_first_token: float
    first_token: float
    rounds: int
    comparable: bool
    difference: Difference | None

    @property
    def identical(self) -> bool | None:
        """Whether the tokens are equal; None if not `comparable`: other sampling only keeps the distribution equal."""
        return self.plain.tokens == self.draft.tokens if self.comparable else None

    def as_dict(self) -> dict[str, Any]:
        """Return speeds, statistics of plain decoding and the difference, ready for JSON; the texts are left out."""
        return {
            "identical": self.identical,
            "speedup": self.speedup,
            "plain_first_token_seconds": self.plain_first_token,
            "first_token_seconds": self.first_token,
            "rounds": self.rounds,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "transformers_tokens_per_second": self.transformers_tokens_per_second,
            "plain": self.plain.stats.as_dict(),
            "difference": None if self.difference is None else dataclasses.asdict(self.difference),
        }


def compare(
    llm: LLM,
    prompt: Prompt,
    drafter: Drafter,
    options: Options,
    *,
    rounds: int,
    plain_llm: LLM | None = None,
    as_loaded: LLM | None = None,
    on_warm: Callable[[str, Stats], None] = lambda name, stats: None,
    on_run: Callable[[str, int], None] = lambda name, prompt: None,
) -> Comparison:
    """Decode one prompt without drafts, with `drafter`, and by `transformers`, interleaved, `rounds` times each.

    `plain_llm` and `as_loaded`: copies of the model for plain decoding and for `transformers`, in the weight layouts
    that suit them (None: `llm`). `on_warm` and `on_run`: as in `interleave`, of the methods `plain`, `draft` and
    `transformers`.
    """
    last: dict[str, Generation] = {}
    planned = llm.plan(prompt, options)
    comparable = planned.sampler.greedy or planned.sampler.tied
    methods = {
        "plain": method(plain_llm or llm, PlainDrafter(), options, keep=lambda out: last.update(plain=out)),
        "draft": method(llm, drafter, options, keep=lambda out: last.update(draft=out)),
        "transformers": transformers_generate(as_loaded or llm, options),
    }
    runs = interleave(methods, [prompt], rounds=rounds, on_warm=on_warm, on_run=on_run)
    plain, draft = last["plain"], last["draft"]
    difference = None
    if comparable:
        difference = copies_difference(
            plain_llm or llm, llm, llm.encode(prompt), plain.tokens, draft.tokens, sampler=planned.sampler
        )
    return Comparison(
        plain=plain,
        draft=draft,
        plain_tokens_per_second=runs.total("plain").tokens_per_second,
        tokens_per_second=runs.total("draft").tokens_per_second,
        transformers_tokens_per_second=runs.total("transformers").tokens_per_second,
        speedup=runs.ratios("draft", "plain")[0],
        plain_first_token=_first_token(runs, "plain"),
        first_token=_first_token(runs, "draft"),
        rounds=rounds,
        comparable=comparable,
        difference=difference,
    )


def _first_token(runs: Runs, name: str) -> float:
    """Return the seconds to the first token of a method, the median over its runs of the first prompt."""
    return statistics.median(stats.log[0].seconds for stats in runs.stats[name][0])
