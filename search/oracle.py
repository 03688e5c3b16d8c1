"""Bounds and savings on a trace: the oracle bound, and the draft passes that lookup tokens save.

A lookup depends on the text alone. Therefore it is repeated at every start (draft position) as decoding would do it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from selfspec.controllers import FixedK, make_controller
from selfspec.drafters import make_proposer_chain
from selfspec.drafters.registry import draft_path
from selfspec.llm.llm import LLM
from selfspec.profile.schema import Profile
from selfspec.proposers.base import ProposerChain
from selfspec.text.prompt_template import Prompt
from selfspec.types.costs import CostModel
from selfspec.types.draft_work import LOOKUP_WORK

from .continuations import DecodingSettings, continue_prompts
from .replay import Replay
from .replay_state import TargetText
from .trace import Trace, deepest


def with_lookup_tokens(replay: Replay, traces: Sequence[Trace], chain: ProposerChain) -> list[Trace]:
    """Return the traces with the fields `passes` and `free`, which hold the effects of the lookup tokens of `chain`.

    If `chain` has no proposers, the traces are returned unchanged.
    """
    if not chain.proposers:
        return [*traces]
    return [_add_lookup_tokens(t, trace, chain, replay.ends) for t, trace in zip(replay.texts, traces, strict=True)]


def _add_lookup_tokens(text: TargetText, trace: Trace, chain: ProposerChain, ends: Collection[int]) -> Trace:
    reading, passes, free = chain.new_state(), [], []
    for start, drafted in enumerate(trace.drafted):
        position, remaining = text.prompt_length + start, trace.remaining - start - 1
        reading.read(text.tokens[:position])
        passes.append(reading.passes(drafted, remaining))
        proposal = reading.lookup(remaining, ends)
        same = [a == b for a, b in zip(proposal.tokens, text.tokens[position:], strict=False)]
        free.append((proposal.chances, same.index(False) if False in same else len(same)))
    return replace(trace, passes=passes, free=free)


def spared(traces: Sequence[Trace], costs: CostModel) -> float:
    """Return the share of a draft step that lookup tokens save for each drafted token, on average.

    The average is over the tokens of every draft up to and including its first wrong token.
    """
    price = costs.passes(1.0)
    tokens = seconds = 0.0
    for trace in traces:
        for drafted, run, passes in zip(trace.drafted, trace.runs, trace.passes, strict=bool(trace.passes)):
            taken = min(run + 1, len(drafted))
            tokens += taken
            seconds += sum(price[width - 1] for index, width in passes if index < taken)
    return max(1 - seconds / tokens, 0.0) if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """Speedup over plain decoding, and tokens per round, if every draft ended at the best position."""

    speedup: float
    tokens_per_round: float


def oracle_bound(traces: Sequence[Trace], costs: CostModel, draft: float, *, candidates: int = 1) -> Bound:
    """Return the speedup and the tokens per round of the fastest possible decoding of the traces' texts.

    `draft`: the seconds of a draft step. The least time is found by dynamic programming. Each draft may end after any
    of its right tokens; wrong tokens, which would be rejected, are not drafted. Passes that lookup tokens save are not
    counted. Right lookup tokens may also be verified without a draft step. If the right token is among the `candidates`
    for the first wrong token's position (the drafted token included), the draft may also extend to this position, with
    the candidates up to the right token. Prefill is not counted.
    """
    tokens = rounds = 0
    seconds, prices = 0.0, costs.call_costs(draft)
    for trace in traces:
        best: list[tuple[float, int]] = [(0.0, 0)] * (trace.tokens + 1)  # seconds and rounds from each start to the end
        for start in reversed(range(len(trace.runs))):
            run, rank = trace.runs[start], trace.ranks[start]
            left = trace.tokens - start
            possible_rounds = [
                (trace.work(start, k), k + 1, k + 1) for k in range(min(run, left) + 1)
            ]  # work, rows, tokens
            if 1 <= rank < candidates:
                possible_rounds.append((trace.work(start, run + 1), 2 + run + rank, run + 2))
            if trace.free:
                possible_rounds += [(LOOKUP_WORK, n + 1, n + 1) for n in range(1, min(trace.free[start][1], left) + 1)]
            options = []
            for work, rows, emitted in possible_rounds:
                later, more = best[min(start + emitted, trace.tokens)]
                options.append((costs.seconds({(work, rows): 1}, prices) + later, more + 1))
            best[start] = min(options)
        seconds += best[0][0]
        rounds += best[0][1]
        tokens += trace.tokens
    return Bound(tokens * costs.plain / seconds, tokens / rounds)


def oracle(
    llm: LLM,
    profile: Profile,
    costs: CostModel,
    prompts: Sequence[Prompt],
    decoding: DecodingSettings,
) -> Bound:
    """Return the oracle bound of a profile on the model's own continuations of `prompts`.

    Drafts are as long as the profile's controller allows; sampled drafts are accepted by rule `block`.
    """
    texts = continue_prompts(llm, [llm.check(prompt, decoding.max_new_tokens) for prompt in prompts], decoding)
    described, costs = profile.layer_skip, costs.along(profile.path)
    depth = deepest([make_controller(described.controller, profile.payoff)])
    candidates = described.candidates
    with Replay(
        llm.model,
        texts,
        sampler=decoding.sampler(),
        depth=depth,
        candidates=candidates,
        base_runtime=llm.runtime,
    ) as replay:
        traces = replay.trace(draft_path(llm.runtime, described, profile), [FixedK(depth)])
        traces = with_lookup_tokens(
            replay, traces, make_proposer_chain(profile.local_proposers(described), costs.wider, replay.vocabulary)
        )
    draft = costs.draft(profile.path, llm.runtime.layers)
    return oracle_bound(traces, costs, draft, candidates=candidates)
