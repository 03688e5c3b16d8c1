"""The oracle bound: the speed of drafting along a path if every draft ended at the best position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.controllers import FixedK, make_controller
from selfspec.drafters import make_proposer_chain
from selfspec.drafters.registry import draft_path
from selfspec.llm.llm import LLM
from selfspec.profile.schema import Profile
from selfspec.text.prompt import Prompt
from selfspec.types.costs import CostModel
from selfspec.types.draft_work import LOOKUP_WORK

from .continuations import DecodingSettings, continue_prompts
from .controller_grid import deepest
from .lookup_replay import with_lookup_tokens
from .replay import Replay
from .trace import Trace


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
    *,
    seed: int = 0,
) -> Bound:
    """Return the oracle bound of a profile on the model's own continuations of `prompts`.

    Drafts are as long as the profile's controller allows; sampled drafts are accepted by rule `block`.
    """
    texts = continue_prompts(
        llm, [llm.check(prompt, decoding.max_new_tokens) for prompt in prompts], decoding, seed=seed
    )
    described = profile.layer_skip
    depth = deepest([make_controller(described.controller, profile.payoff)])
    candidates = described.candidates
    with Replay(
        llm.model,
        texts,
        sampler=decoding.sampler(),
        depth=depth,
        candidates=candidates,
        seed=seed,
        base_runtime=llm.runtime,
    ) as replay:
        traces = replay.trace(draft_path(llm.runtime, described, profile), [FixedK(depth)])
        traces = with_lookup_tokens(
            replay, traces, make_proposer_chain(profile.local_proposers(described), costs.wider, replay.vocabulary)
        )
    draft = costs.draft(profile.path, llm.runtime.layers)
    return oracle_bound(traces, costs, draft, candidates=candidates)
