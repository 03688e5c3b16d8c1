"""The oracle bound: how fast drafting under a skip set could be if every draft ended exactly where it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.controllers import FixedK, make_controller
from selfspec.facts.costs import CostModel
from selfspec.llm.llm import LLM
from selfspec.profile.schema import Profile
from selfspec.text.prompt import Prompt

from .continuations import Decoding, continue_prompts
from .playing import deepest
from .replay import Replay
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Bound:
    """What perfect stopping gives on a trace: times plain decoding's speed, and its tokens per round."""

    speedup: float
    tokens_per_round: float


def oracle_bound(traces: Sequence[Trace], costs: CostModel, draft: float, *, candidates: int = 1) -> Bound:
    """The least time in which drafts at `draft` seconds a token decode the texts, by dynamic programming.

    From every start the draft may end after any of its tokens; wrong ones, which would only be lost, are not drafted.
    But where the right token is among the `candidates` for the first wrong one's place (the drafted one counted), the
    draft may also go that far, with the candidates up to the right one. The prompt's pass is left out.
    """
    tokens = rounds = 0
    seconds = 0.0
    for trace in traces:
        best: list[tuple[float, int]] = [(0.0, 0)] * (trace.tokens + 1)  # seconds and rounds from each start on
        for start in reversed(range(len(trace.runs))):
            run, rank = trace.runs[start], trace.ranks[start]
            ways = [(k, k + 1, k + 1) for k in range(min(run, trace.tokens - start) + 1)]  # drafted, rows, tokens
            if 1 <= rank < candidates:
                ways.append((run + 1, 2 + run + rank, run + 2))
            options = []
            for drafted, rows, emitted in ways:
                later, more = best[min(start + emitted, trace.tokens)]
                options.append((costs.round + drafted * draft + costs.verification(rows) + later, more + 1))
            best[start] = min(options)
        seconds += best[0][0]
        rounds += best[0][1]
        tokens += trace.tokens
    return Bound(tokens * costs.plain / seconds, tokens / rounds)


def oracle(
    llm: LLM, profile: Profile, costs: CostModel, prompts: Sequence[Prompt], decoding: Decoding, *, seed: int = 0
) -> Bound:
    """The `oracle_bound` of a profile on the model's own continuations of `prompts`, for drafts as long as it allows.

    Sampled drafts are accepted by rule `block`.
    """
    texts = continue_prompts(
        llm, [llm.check(prompt, decoding.max_new_tokens) for prompt in prompts], decoding, seed=seed
    )
    described = profile.layer_skip
    depth = deepest([make_controller(described.controller, profile.outlook)])
    candidates = described.candidates
    with Replay(
        llm.model, texts, sampler=decoding.sampler(), depth=depth, candidates=candidates, seed=seed, like=llm.runtime
    ) as replay:
        traces = replay.trace(profile.path, [FixedK(depth)])
    draft = costs.draft(profile.path, llm.runtime.layers)
    return oracle_bound(traces, costs, draft, candidates=candidates)
