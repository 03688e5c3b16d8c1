"""Decoding of a single sequence as a generator."""

from __future__ import annotations

from collections.abc import Callable, Generator

from selfspec.engine.engine import Engine
from selfspec.runtime.base import Runtime
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
    reuse: bool = False,
) -> Generator[Outcome]:
    """Decode one sequence, a round at a time; each yielded `Outcome` holds the tokens that the round emitted.

    Ends at an end-of-sequence token, when `seq.remaining` is 0, or when `stop` returns True; no token is emitted after
    that. `stop` is called once for each emitted token in order. `rule` and `stop`, if set, replace `seq.rule` and
    `seq.stop`. With `reuse`, a cached prefix, left by an earlier sequence with `reuse`, is not prefilled again. The
    first round emits the token that follows the prompt, without a draft or a pass of its own. Raises `BusyError` while
    another generation uses the runtime.
    """
    seq.rule, seq.stop = rule or seq.rule, stop or seq.stop
    with Engine(runtime, drafter, reuse=reuse) as engine:
        engine.join(seq)
        while seq.remaining:
            ((_, outcome),) = engine.step()
            yield outcome
