"""Round costs measured once on this runtime, by which the guard decides about seeded sequences, and their timing.

The measured costs are kept, because draft lengths of a seeded sequence must not depend on later timings.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from selfspec.basics.files import cached_file, read_cached, table_of, write_cached
from selfspec.basics.machine import clock, synchronise
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.drafters.registry import draft_path
from selfspec.engine.engine import decode
from selfspec.models.families import is_lean, parts_of
from selfspec.models.native_library import timing_key
from selfspec.profile.schema import Profile
from selfspec.runtime.base import Runtime
from selfspec.runtime.device_rounds import RoundPlan
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft
from selfspec.speculation.rules import find_rule
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PayoffModel
from selfspec.types.draft_path import DraftPath


@dataclass(frozen=True, slots=True)
class RoundSample:
    """Timed round: draft path, number of drafted tokens, seconds of drafting (`draft`) and of all else (`rest`)."""

    path: DraftPath
    drafted: int
    draft: float
    rest: float  # verification and the loop


class Probe(PlainDrafter):
    """Drafter that drafts `length` tokens with `drafter` in each round, and records the `seconds` of drafting."""

    drafts = True

    def __init__(self, drafter: LayerSkipDrafter) -> None:
        self.drafter = drafter
        self.length, self.seconds = 0, 0.0

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return an autoregressive draft of `length` tokens for each sequence."""
        start = clock()
        drafts = [NO_DRAFT] * len(seqs)
        if self.length:
            self.drafter.controller = FixedK(self.length)
            drafts = self.drafter.propose(seqs, limits)
        synchronise(self.drafter.runtime.device)
        self.seconds = clock() - start
        return drafts

    def plan_round(self, seqs: Sequence[SequenceState], limit: Limit, *, ahead: bool) -> RoundPlan | None:
        """Return None: rounds run on the host, where they can be timed in parts."""
        return None


def timed_rounds(
    runtime: Runtime,
    context: int,
    sampler: Sampler,
    drafter: LayerSkipDrafter,
    plan: Sequence[int],
    draw: random.Random,
) -> list[RoundSample]:
    """Decode a random prompt with the draft lengths in `plan`, and time each round except the first.

    The first round, before those of `plan`, is the prefill, which also emits a token. `context`: the prompt's length in
    tokens. CPU caches take several rounds to settle: a decode step without a draft can take 1.6 times as long after a
    wide pass. Raises `BusyError` while the runtime has a stream.
    """
    vocabulary = runtime.skeleton.identity.vocabulary or 2
    longest = 2 + sum(length + 1 for length in plan)  # the cache holds no more than these rounds can emit
    max_new_tokens = min(longest, runtime.skeleton.context - context)
    seq = SequenceState([draw.randrange(vocabulary) for _ in range(context)], max_new_tokens, sampler)
    probe, samples = Probe(drafter), []
    rounds = decode(runtime, probe, seq, rule=find_rule(None, sampler))
    try:
        for number, probe.length in enumerate([0, *plan]):
            start = clock()
            next(rounds)
            synchronise(runtime.device)
            elapsed = clock() - start
            if number:
                samples.append(RoundSample(drafter.path, probe.length, probe.seconds, elapsed - probe.seconds))
    finally:
        rounds.close()
    return samples


KEYS = 32  # prompt length in tokens
PLAIN, LENGTHS = 4, (7, 1, 15, 3)  # a sweep times PLAIN rounds without drafts, then a round of each draft length
SWEEPS, SECONDS = 3, 2.0  # maximum number of sweeps, and the seconds after which no further sweep starts
GRAIN = 20  # costs are rounded up to multiples of 1/20, so that a repeated measurement gives the same values

Shares = dict[str, dict[int, float]]
"""Costs in units of a round without drafts: `{"round": {rows: cost}, "draft": {1: cost}}`.

`round`: a round that verifies `rows` rows, without its draft steps. `draft`: one draft step.
"""


def local_payoff(runtime: Runtime, profile: Profile) -> PayoffModel | None:
    """Return a profile's payoff model with the round and draft-step costs of this runtime.

    The profile's costs may come from another machine and weight layout. Rounds are timed here once for each model,
    machine and draft path, and the costs are cached on disk: draft lengths, and so seeded texts, do not vary with later
    timings. If the context is too short for timing, returns the profile's payoff model, or None for a profile without
    costs. Raises `BusyError` while the runtime is generating.
    """
    payoff, path = profile.payoff, profile.path
    file = _file(runtime, path)
    known = _validated(read_cached(file))
    if known is None:
        known = measure_shares(runtime, draft_path(runtime, profile.layer_skip, profile))
        if not known:
            return payoff if profile.costs else None
        write_cached(file, known)
    rounds = tuple(_interpolate(known["round"], rows) for rows in range(len(payoff.rounds)))
    payoff = replace(payoff, context=min(KEYS, runtime.skeleton.context // 4))
    if not path.cheaper:
        return replace(payoff, rounds=rounds)
    draft_cost, wider = known["draft"][1], payoff.wider or (payoff.draft,)
    return replace(
        payoff, rounds=rounds, draft=draft_cost, wider=tuple(draft_cost * share / wider[0] for share in wider)
    )


def measure_shares(runtime: Runtime, path: DraftPath) -> Shares:
    """Time rounds in the decoding loop; return the median shares of a plain round; empty if the context is too short.

    Raises `BusyError` while the runtime has a stream.
    """
    draw, drafter = random.Random(0), LayerSkipDrafter(runtime, path, FixedK(1))
    keys = min(KEYS, runtime.skeleton.context // 4)
    max_new_tokens = runtime.skeleton.context - keys - 2
    lengths = [*LENGTHS]
    while lengths and PLAIN + sum(length + 1 for length in lengths) > max_new_tokens:
        lengths.remove(max(lengths))
    if not lengths:
        return {}
    plan = [0] * PLAIN + lengths
    rest, drafts = defaultdict[int, list[float]](list), list[float]()
    begun = time.perf_counter()
    for _ in range(SWEEPS):
        for sample in timed_rounds(runtime, keys, Sampler(temperature=1.0, seed=0), drafter, plan, draw):
            rest[1 + sample.drafted].append(sample.rest + (0.0 if sample.drafted else sample.draft))
            drafts += [sample.draft / sample.drafted] if sample.drafted else []
        if time.perf_counter() - begun > SECONDS:
            break
    plain_seconds = statistics.median(rest[1])
    return {
        "round": {rows: _round_up(statistics.median(seconds) / plain_seconds) for rows, seconds in rest.items()},
        "draft": {1: _round_up(statistics.median(drafts) / plain_seconds)},
    }


def _round_up(share: float) -> float:
    return math.ceil(round(share * GRAIN, 6)) / GRAIN


def _interpolate(shares: Mapping[int, float], rows: int) -> float:
    """Return the cost of a round that verifies `rows` rows, at least 1, by linear interpolation or extrapolation.

    `shares`: the measured costs by number of rows.
    """
    known = sorted(shares.items())
    high = next((i for i in range(1, len(known)) if known[i][0] > rows), len(known) - 1)
    (a, x), (b, y) = known[high - 1], known[high]
    return max(x + (y - x) * (max(rows, a) - a) / (b - a), 1.0)


def _file(runtime: Runtime, path: DraftPath) -> Path:
    """Return the file that caches the costs for this model, path, thread count and machine."""
    groups = parts_of(runtime.model).layers[0].groups if is_lean(runtime.model) else ()
    linears = [module for group in groups for module in group.modules]
    layouts = [type(m).__name__ + (str(m.weight.stride()) if isinstance(m, nn.Linear) else "") for m in linears]
    key = [
        *timing_key(runtime.device),
        str(runtime.dtype),
        repr(runtime.skeleton.identity),
        layouts,
        repr(path),
    ]
    return cached_file("costs", key)


def _validated(data: Any) -> Shares | None:
    """Return costs read from JSON in the form that `measure_shares` returns; None if the data is not of that form."""
    shares = table_of(data)
    sound = shares and set(shares) == {"round", "draft"} and {1, 2} <= set(shares["round"]) and 1 in shares["draft"]
    return shares if sound else None
