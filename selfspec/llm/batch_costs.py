"""Measurement of the seconds that rounds take on this runtime, by the number of sequences and of drafted tokens."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from selfspec.basics.machine import clock, synchronise
from selfspec.controllers import FixedK
from selfspec.drafters import PlainDrafter
from selfspec.drafters.autoregressive import ChainDrafter
from selfspec.engine.engine import Engine
from selfspec.proposers.base import ProposerChain
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import DelegatingDrafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.costs import PassCosts

KEYS = 8  # prompt length in tokens
PLAN = (0, 0, 3, 0, 3, 1)  # draft lengths of the timed rounds, after one warm-up round
SWEEPS, SECONDS = 3, 2 / 3  # most sweeps over all numbers of sequences, and the seconds after which none starts


class _Timed(DelegatingDrafter):
    """Drafter that lets `drafter` draft `length` tokens in each round, and records the `seconds` of drafting.

    Its rounds run on the host, where they can be timed in parts.
    """

    def __init__(self, drafter: ChainDrafter, runtime: Runtime) -> None:
        super().__init__(drafter)
        self.runtime = runtime
        self.length, self.seconds = 0, 0.0

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return an autoregressive draft of `length` tokens for each sequence; shorter if the drafter stops early."""
        start, drafts = clock(), [NO_DRAFT] * len(seqs)
        if self.length:
            drafts = self.drafter.propose(
                seqs, [limit._replace(depth=min(limit.depth, self.length)) for limit in limits]
            )
        synchronise(self.runtime.device)
        self.seconds = clock() - start
        return drafts


class _Round(NamedTuple):
    """Timed round: number of verified tokens and of draft passes, seconds of drafting, and seconds of all else."""

    verified: int
    passes: int
    drafting: float
    rest: float


def measure_round_costs(runtime: Runtime, drafter: ChainDrafter | None) -> PassCosts:
    """Time rounds with 1, 2, 4, .. sequences, as far as rows and memory allow; return the costs of passes in seconds.

    Without a drafter, or if the context is too short for drafts, draft passes are assumed to cost as much as full
    passes. Raises `BusyError` while the runtime has a stream.
    """
    draw, most = random.Random(0), runtime.rows
    counts = sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})
    verify, draft = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    plan: tuple[int, ...] = PLAN if drafter is not None else (0, 0, 0)
    if KEYS + len(plan) + 2 * sum(plan) + 2 > runtime.skeleton.context:
        plan = (0,)
    begun = clock()
    with _by_length(drafter):
        for sweep in range(SWEEPS):
            if sweep and clock() - begun > SECONDS:
                break
            for count in counts:
                for done in _rounds(runtime, drafter, count, plan, draw):
                    verify[done.verified].append(done.rest)
                    if done.passes:
                        draft[count].append(done.drafting / done.passes)
    # Disturbances only lengthen a measurement, so the minimum is the best estimate; they may last as long as a sweep.
    full = {tokens: min(seconds) for tokens, seconds in verify.items()}
    paths = {tokens: min(seconds) for tokens, seconds in draft.items()}
    return PassCosts.from_measurements(full, paths or full, most=max(full))


@contextmanager
def _by_length(drafter: ChainDrafter | None) -> Iterator[None]:
    """Draft by length alone, without proposers and batch scheduler, inside the context; then restore all three."""
    if drafter is None:
        yield
        return
    saved = drafter.controller, drafter.proposer_chain, drafter.load
    try:
        drafter.controller, drafter.proposer_chain, drafter.load = FixedK(max(PLAN)), ProposerChain(), None
        yield
    finally:
        drafter.controller, drafter.proposer_chain, drafter.load = saved


def _rounds(
    runtime: Runtime, drafter: ChainDrafter | None, count: int, plan: Sequence[int], draw: random.Random
) -> list[_Round]:
    """Time rounds of `count` sequences of random tokens, with the draft lengths in `plan`, after a warm-up round.

    Nothing is timed if the KV cache does not hold as many.
    """
    vocabulary = runtime.skeleton.identity.vocabulary or 2
    max_new_tokens = len(plan) + 2 * sum(plan) + 3
    probe = None if drafter is None else _Timed(drafter, runtime)
    samples = []
    with Engine(runtime, probe or PlainDrafter()) as engine:
        for _ in range(count):
            tokens = [draw.randrange(vocabulary) for _ in range(KEYS)]
            seq = SequenceState(tokens, max_new_tokens, Sampler())
            if not engine.admit(seq):
                return []
            engine.prefill(seq)
        engine.step()  # the first tokens, which take no pass
        for i, length in enumerate((0, *plan)):
            if probe is not None:
                probe.length, probe.seconds = length, 0.0
            start = clock()
            drafts = [outcome.draft for _, outcome in engine.step()]
            synchronise(runtime.device)
            took, drafting = clock() - start, 0.0 if probe is None else probe.seconds
            verified, passes = sum(1 + len(draft) for draft in drafts), max((d.depth for d in drafts), default=0)
            if i and len(drafts) == count:
                samples.append(_Round(verified, passes, drafting, took - drafting))
    return samples
