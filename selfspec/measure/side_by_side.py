"""Comparison of one prompt's decoding without drafts, with a drafter, and by `transformers`' generate."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from selfspec.drafters import PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.llm.stream import Generation
from selfspec.measure.audit import Difference, first_difference
from selfspec.measure.timing import Runs, interleave, method, transformers_generate
from selfspec.speculation.drafter import Drafter
from selfspec.text.prompt import Prompt


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
) -> Comparison:
    """Decode one prompt without drafts, with `drafter`, and by `transformers`, interleaved, `rounds` times each.

    `plain_llm` and `as_loaded`: copies of the model for plain decoding and for `transformers`, in the weight layouts
    that suit them (None: `llm`).
    """
    last: dict[str, Generation] = {}
    planned = llm.plan(prompt, options)
    comparable = planned.sampler.greedy or planned.sampler.tied
    methods = {
        "plain": method(plain_llm or llm, PlainDrafter(), options, keep=lambda out: last.update(plain=out)),
        "draft": method(llm, drafter, options, keep=lambda out: last.update(draft=out)),
        "transformers": transformers_generate(as_loaded or llm, options),
    }
    runs = interleave(methods, [prompt], rounds=rounds)
    plain, draft = last["plain"], last["draft"]
    difference = None
    if comparable:
        difference = first_difference(
            llm.runtime, llm.encode(prompt), plain.tokens, draft.tokens, sampler=planned.sampler
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
