"""The loop: the only one. Plain decoding is the drafter that proposes nothing.

Knows nothing of files, tokenizers and profiles; stop strings come in as a callable on tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from selfspec.facts.limits import WIDEST_DRAFT
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.drafts import NO_DRAFT, Outcome, SequenceState
from selfspec.speculation.rules import Rule
from selfspec.speculation.step import Step


def decode(
    runtime: Runtime,
    drafter: Drafter,
    seq: SequenceState,
    *,
    rule: Rule,
    stop: Callable[[int], bool] | None = None,
    first_plain: bool = False,
) -> Generator[Outcome]:
    """Decode one sequence, a round at a time; each yielded `Outcome` holds the tokens that the round emitted.

    Ends at an end-of-sequence token, when `seq.room` is used up, or when `stop`, called once for each emitted
    token in order, says so; nothing is emitted after that. With `first_plain` the first round drafts nothing, so
    that the first token comes as soon as plain decoding's. Raises `BusyError` when the runtime has a stream.
    """
    with runtime.session(len(seq.tokens) + seq.room + WIDEST_DRAFT):
        begun = False
        try:
            prefill = _prefill(runtime, seq, drafter.hidden)
            begun = True
            drafter.begin(seq, prefill)
            drafting = not first_plain
            while seq.room:
                draft = drafter.propose([seq])[0] if drafting and seq.room > 1 else NO_DRAFT
                draft = draft if runtime.trees else draft.backbone()
                start = len(seq.tokens) - 1
                tokens, positions, mask = draft.layout(seq.tokens[-1], start, device=runtime.device)
                step = runtime.forward(
                    tokens, positions, slots=start, mask=mask, rows=_row(seq), hidden=drafter.hidden
                )  # [1, 1 + m, V]
                assert step.logits is not None
                scores = seq.sampler.scores(step.logits[0], draft.prefixes(seq.tokens))
                path, following = rule(draft, scores, seq.sampler, len(seq.tokens))
                runtime.cache.commit(seq.row, path)
                emitted = _emit(seq, [*(draft.tokens[node] for node in path), following], stop)
                outcome = Outcome(draft, path, emitted, step)
                drafter.observe(seq, outcome)
                drafting = True
                yield outcome
        finally:
            if begun:
                drafter.end(seq)


def _row(seq: SequenceState) -> slice:
    return slice(seq.row, seq.row + 1)


def _prefill(runtime: Runtime, seq: SequenceState, hidden: Sequence[int]) -> Step:
    """Write the prompt's keys, but the last token's, which the first round writes like any round."""
    tokens = torch.tensor([seq.tokens[:-1]], dtype=torch.long, device=runtime.device)
    if not tokens.numel():
        return Step(None)
    step = runtime.forward(tokens, 0, rows=_row(seq), logits=None, hidden=hidden)
    runtime.cache.commit(seq.row, range(tokens.shape[1] - 1))
    return step


def _emit(seq: SequenceState, tokens: Sequence[int], stop: Callable[[int], bool] | None) -> tuple[int, ...]:
    """Append `tokens` to the sequence up to and including the first that ends it."""
    emitted: list[int] = []
    for token in tokens[: seq.room]:
        emitted.append(token)
        ended = token in seq.ends
        if (stop is not None and stop(token)) or ended:
            seq.room = len(emitted)
            break
    seq.tokens += emitted
    seq.room -= len(emitted)
    return tuple(emitted)
