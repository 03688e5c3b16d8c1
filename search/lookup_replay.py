"""Prompt lookup on a trace: the draft passes that lookup tokens save.

A lookup depends on the text alone. Therefore it is repeated at every start (draft position) as decoding would do it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from selfspec.proposers.chain import ProposerChain
from selfspec.types.costs import CostModel

from .replay import Replay
from .target_text import TargetText
from .trace import Trace


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
