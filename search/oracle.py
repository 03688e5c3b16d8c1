"""The oracle bound: how fast drafting under a skip set could be if every draft ended exactly where it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.api import LLM
from selfspec.controllers import FixedK
from selfspec.costs import CostModel
from selfspec.skip import SkipSet
from selfspec.text import Prompt

from .continuations import Decoding, continue_prompts
from .replay import Replay
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Bound:
    """What perfect stopping gives on a trace: times plain decoding's speed, and its tokens per round."""

    speedup: float
    tokens_per_round: float


def oracle_bound(traces: Sequence[Trace], costs: CostModel, draft: float) -> Bound:
    """The least time in which chains drafted at `draft` seconds a token decode the texts, by dynamic programming.

    From every start the draft may end after any of its tokens; those that a longer one would lose are never drafted.
    The prompt's pass is left out.
    """
    tokens = rounds = 0
    seconds = 0.0
    for trace in traces:
        best: list[tuple[float, int]] = [(0.0, 0)] * (trace.tokens + 1)  # seconds and rounds from each start on
        for start in reversed(range(len(trace.runs))):
            options = []
            for k in range(min(trace.runs[start], trace.tokens - start) + 1):
                later, more = best[min(start + k + 1, trace.tokens)]
                options.append((costs.round + k * draft + costs.verification(k + 1) + later, more + 1))
            best[start] = min(options)
        seconds += best[0][0]
        rounds += best[0][1]
        tokens += trace.tokens
    return Bound(tokens * costs.plain / seconds, tokens / rounds)


def oracle(
    llm: LLM,
    skip: SkipSet,
    costs: CostModel,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    *,
    depth: int = 12,
    vocabulary: Sequence[int] = (),
    seed: int = 0,
) -> Bound:
    """`oracle_bound` of a skip set on the model's own continuations of `prompts`.

    `depth`: the most tokens of a draft; `vocabulary`: the only ones that are drafted, none means all. Sampled drafts
    are accepted by rule `token`; `block` may accept a little more.
    """
    texts = continue_prompts(
        llm, [llm.check(prompt, decoding.max_new_tokens) for prompt in prompts], decoding, seed=seed
    )
    with Replay(llm.model, texts, sampler=decoding.sampler(), depth=depth, candidates=1, seed=seed) as replay:
        traces = replay.trace(skip, [FixedK(depth)], vocabulary=vocabulary)
    return oracle_bound(traces, costs, costs.draft(skip, llm.runtime.layers))
