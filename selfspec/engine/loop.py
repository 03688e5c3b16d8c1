"""Decoding one sequence: an engine of one, as a generator."""

from __future__ import annotations

from collections.abc import Callable, Generator

from selfspec.engine.engine import Engine
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.rules import Rule
from selfspec.speculation.sequence import SequenceState


def decode(
    runtime: Runtime,
    drafter: Drafter,
    seq: SequenceState,
    *,
    rule: Rule | None = None,
    stop: Callable[[int], bool] | None = None,
    first_plain: bool = False,
    reuse: bool = False,
) -> Generator[Outcome]:
    """Decode one sequence, a round at a time; each yielded `Outcome` holds the tokens that the round emitted.

    Ends at an end-of-sequence token, when `seq.room` is used up, or when `stop`, called once for each emitted
    token in order, says so; nothing is emitted after that. `rule` and `stop` replace the sequence's own. With
    `first_plain` the first round drafts nothing, so that the first token comes as soon as plain decoding's. With
    `reuse` only what follows of the beginning that it shares with the last sequence that reused is read. Raises
    `BusyError` when the runtime has a stream.
    """
    seq.rule, seq.stop = rule or seq.rule, stop or seq.stop
    with Engine(runtime, drafter, reuse=reuse) as engine:
        engine.join(seq, first_plain=first_plain)
        while seq.remaining:
            ((_, outcome),) = engine.step()
            yield outcome
