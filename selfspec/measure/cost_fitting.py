"""Measuring a `CostModel` in the loop itself: every round drafts under some skip set, then verifies, both timed.

So the figures include what the loop, the drafter and the sampler cost in addition to the forward passes, and caches are
in the state in which decoding leaves them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from selfspec.basics.machine import synchronise
from selfspec.controllers import FixedK
from selfspec.decoding.loop import decode
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.facts.costs import CostModel
from selfspec.facts.draft_path import DraftPath
from selfspec.facts.skip import SkipSet
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft
from selfspec.speculation.rules import find_rule
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

# Drafted tokens, and how often in one decoding: short drafts are common when decoding, and caches settle accordingly.
LENGTHS = {1: 6, 2: 5, 3: 4, 4: 3, 5: 2, 7: 2, 11: 1, 15: 1}
FITTED, FRESH = 10, 5  # random skip sets to fit to, and to test the fit on
ROUNDS = sum(LENGTHS.values())  # of one decoding: few, so that the context stays near the one asked for
SETTLING = 5  # rounds before them that are not counted, until caches have settled
LONGER = 4  # times longer where something disturbs the machine
DOUBTFUL = 0.1  # error on fresh skip sets


@dataclass(frozen=True, slots=True)
class _Sample:
    skip: SkipSet
    drafted: int
    draft: float  # seconds
    rest: float  # seconds of the round other than drafting: verification and the loop


class _Probe(PlainDrafter):
    """Drafts as it is told, and times itself."""

    drafts = True

    def __init__(self, drafter: LayerSkipDrafter) -> None:
        self.drafter = drafter
        self.length, self.seconds = 0, 0.0

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """A chain of `length` tokens."""
        start = time.perf_counter()
        drafts = [NO_DRAFT] * len(seqs)
        if self.length:
            self.drafter.controller = FixedK(self.length)
            drafts = self.drafter.propose(seqs, limits)
        synchronise(self.drafter.runtime.device)
        self.seconds = time.perf_counter() - start
        return drafts


@dataclass(frozen=True, slots=True)
class _Fit:
    """Seconds per draft, per draft step, and per attention and MLP that a draft step runs.

    `error`: the mean, over skip sets that were not fitted to, of the median relative error of their draft times.
    """

    start: float
    base: float
    attention: float
    mlp: float
    error: float

    @classmethod
    def of(cls, drafts: Mapping[tuple[SkipSet, int], float], fit_to: Sequence[SkipSet], layers: int) -> _Fit:
        """Least squares of the relative errors, bounded below by 0, with outliers counting less."""
        import numpy as np
        from scipy.optimize import least_squares

        known = {key: t for key, t in drafts.items() if key[0] in fit_to}
        scaled = np.array([_parts(*key, layers) for key in known], dtype=float) / np.array([*known.values()])[:, None]
        size = np.maximum(scaled.mean(axis=0), 1e-12)
        found = least_squares(
            lambda x: scaled @ (x / size) - 1, np.full(4, 0.25), bounds=(0, np.inf), loss="soft_l1", f_scale=0.05
        )
        figures = found.x / size
        ratios: dict[SkipSet, list[float]] = defaultdict(list)
        for key, seen in drafts.items():
            if key not in known:
                ratios[key[0]].append(float(figures @ _parts(*key, layers)) / seen)
        error = statistics.mean(abs(statistics.median(of) - 1) for of in ratios.values())
        start, base, attention, mlp = (float(x) for x in figures)
        return cls(start, base, attention, mlp, error)


def _parts(skip: SkipSet, k: int, layers: int) -> tuple[int, int, int, int]:
    """How many times each of a `_Fit`'s four figures is paid for drafting `k` tokens under `skip`."""
    return 1, k, k * (layers - len(skip.attention)), k * (layers - len(skip.mlp))


def measure_costs(
    runtime: Runtime, *, context: int = 128, sampler: Sampler | None = None, seconds: float = 2.0, seed: int = 0
) -> CostModel:
    """Time draft steps under random skip sets and verifications of several widths, and fit the cost model.

    `context`: keys in the cache; less where the model's own context leaves no room. `sampler`: how tokens will be
    chosen. Goes on for `seconds` at least, longer where the machine is disturbed, and until every width was seen with
    every skip set. Raises `BusyError` while the runtime has a stream.
    """
    sampler = sampler or Sampler()
    context, lengths = _fitting(runtime, context)
    draw = random.Random(seed)
    skips = [_random_skip(runtime.layers, draw) for _ in range(FITTED + FRESH)]
    drafters = [LayerSkipDrafter(runtime, skip, FixedK(1)) for skip in skips]
    samples: list[_Sample] = []
    decodings: list[list[float]] = []
    begun = time.perf_counter()
    while True:
        _sweep(runtime, context, sampler, drafters, lengths, draw, samples, decodings)
        fit = _Fit.of(_quiet_drafts(samples), skips[:FITTED], runtime.layers)
        spent = time.perf_counter() - begun
        doubtful = _disturbed(decodings) or fit.error > DOUBTFUL
        if spent >= seconds * (LONGER if doubtful else 1):
            return _model(runtime, context, samples, decodings, fit, lengths)


def measure_skip_costs(
    runtime: Runtime,
    skip: SkipSet,
    *,
    context: int = 128,
    sampler: Sampler | None = None,
    vocabulary: Sequence[int] | None = None,
    decodings: int = 3,
    seed: int = 0,
) -> CostModel:
    """`measure_costs` for one skip set: `base` is the whole of its draft step, `attention` and `mlp` are 0.

    `vocabulary`: the only tokens that are drafted. Times `decodings` decodings under it and as many plain ones. Raises
    `BusyError` while the runtime has a stream.
    """
    sampler, draw = sampler or Sampler(), random.Random(seed)
    context, lengths = _fitting(runtime, context)
    samples: list[_Sample] = []
    plain: list[list[float]] = []
    drafter = LayerSkipDrafter(runtime, DraftPath(skip, None if vocabulary is None else tuple(vocabulary)), FixedK(1))
    for _ in range(decodings):
        _sweep(runtime, context, sampler, [drafter], lengths, draw, samples, plain)
    drafts = {k: t for (_, k), t in _quiet_drafts(samples).items()}
    start, base = _line(drafts)
    error = statistics.mean(abs((start + k * base) / t - 1) for k, t in drafts.items())
    return _model(runtime, context, samples, plain, _Fit(start, base, 0.0, 0.0, error), lengths)


def _line(times: Mapping[int, float]) -> tuple[float, float]:
    """Seconds per draft and per token of it, neither below 0, by least squares of the relative errors."""
    import numpy as np
    from scipy.optimize import nnls

    scaled = np.array([(1 / t, k / t) for k, t in times.items()])
    start, base = nnls(scaled, np.ones(len(scaled)))[0]
    return float(start), float(base)


def _fitting(runtime: Runtime, context: int) -> tuple[int, list[int]]:
    """The context asked for, or less, and the draft lengths, that leave room for a decoding."""
    limit = runtime.skeleton.context
    longest = max(LENGTHS) + 1
    context = max(1, min(context, limit - (ROUNDS + SETTLING) * longest))
    return context, [k for k in LENGTHS if (ROUNDS + SETTLING) * (k + 1) + context <= limit] or [1]


def _model(
    runtime: Runtime,
    context: int,
    samples: Sequence[_Sample],
    decodings: Sequence[Sequence[float]],
    fit: _Fit,
    lengths: Sequence[int],
) -> CostModel:
    """The cost model of what was timed."""
    forward = forward_seconds(runtime, context)
    # Step by step, so that what a decoding takes to settle counts as it does when decoding.
    plain = statistics.mean(quiet(step) for step in zip(*decodings, strict=True))
    overhead = max(plain - forward, 0.0)
    one = plain - overhead  # more rows than one cost no less, though on a disturbed machine it may look so
    verify = [max(one, quiet([s.rest for s in samples if s.drafted == k]) + fit.start - overhead) for k in lengths]
    return CostModel(
        context=context,
        base=fit.base,
        attention=fit.attention,
        mlp=fit.mlp,
        attention_per_key=_per_key(runtime, context, forward),
        widths=[1, *(k + 1 for k in lengths)],
        verify=[one, *verify],
        round=overhead,
        prefill=_prefill_seconds(runtime, context) / context,
        head=_head_seconds(runtime),
        error=round(fit.error, 4),
    )


def quiet(times: Sequence[float]) -> float:
    """The lower quartile: what something takes while nothing else disturbs the machine."""
    return max(min(times), statistics.quantiles(times, n=4)[0]) if len(times) > 1 else times[0]


def _quiet_drafts(samples: Sequence[_Sample]) -> dict[tuple[SkipSet, int], float]:
    """Seconds of drafting k tokens under a skip set."""
    found: dict[tuple[SkipSet, int], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.drafted:
            found[sample.skip, sample.drafted].append(sample.draft)
    return {key: quiet(times) for key, times in found.items()}


def _random_skip(layers: int, draw: random.Random) -> SkipSet:
    """Up to three quarters of attention and of MLP sub-layers, independently, so that the fit can tell them apart."""
    return SkipSet(*(tuple(draw.sample(range(layers), draw.randint(0, layers * 3 // 4))) for _ in range(2)))


def _sweep(
    runtime: Runtime,
    context: int,
    sampler: Sampler,
    drafters: Sequence[LayerSkipDrafter],
    lengths: Sequence[int],
    draw: random.Random,
    samples: list[_Sample],
    plain: list[list[float]],
) -> None:
    """A decoding with every drafter, lengths in random order, plain decoding in between.

    Adds to the samples of the former, and to the seconds of every step of the latter.
    """
    for number, drafter in enumerate(drafters):
        if number % 3 == 0:
            steps = _rounds(runtime, context, sampler, drafter, [0] * 2 * ROUNDS, draw)
            plain.append([step.rest for step in steps])
        plan = [k for k in lengths for _ in range(LENGTHS[k])]
        draw.shuffle(plan)
        rounds = _rounds(runtime, context, sampler, drafter, [*plan[:SETTLING], *plan], draw)
        samples += rounds[SETTLING:]


def _disturbed(plain: Sequence[Sequence[float]]) -> bool:
    """Whether the quieter half of the plain decodings differ: something else uses the machine."""
    half = sorted(map(quiet, plain))[: max(2, (len(plain) + 1) // 2)]
    return half[-1] > 1.1 * half[0]


def _rounds(
    runtime: Runtime,
    context: int,
    sampler: Sampler,
    drafter: LayerSkipDrafter,
    plan: Sequence[int],
    draw: random.Random,
) -> list[_Sample]:
    """Decode a random prompt, drafting the numbers of tokens in `plan`; the round with the prompt's pass is left out.

    Caches take several rounds to settle: on a CPU, a plain step after a wide pass was seen to take 1.6 times as long.
    """
    vocabulary = runtime.skeleton.identity.vocabulary or 2
    room = runtime.skeleton.context - context
    seq = SequenceState([draw.randrange(vocabulary) for _ in range(context)], room, sampler)
    probe, samples = _Probe(drafter), []
    rounds = decode(runtime, probe, seq, rule=find_rule(None, sampler))
    try:
        for number, probe.length in enumerate([0, *plan]):
            start = time.perf_counter()
            next(rounds)
            synchronise(runtime.device)
            whole = time.perf_counter() - start
            if number:
                samples.append(_Sample(drafter.path.skip, probe.length, probe.seconds, whole - probe.seconds))
    finally:
        rounds.close()
    return samples


def forward_seconds(runtime: Runtime, context: int, *, rows: int = 1, repeats: int = 48) -> float:
    """Seconds of a bare forward of `rows` rows over `context` keys and themselves, once caches have settled.

    Raises `BusyError` while the runtime has a stream.
    """
    tokens = torch.zeros((1, rows), dtype=torch.long, device=runtime.device)
    with runtime.session(context + rows):
        return _timed(lambda: runtime.forward(tokens, context), runtime, repeats)


def _prefill_seconds(runtime: Runtime, context: int) -> float:
    """A full forward over `context` tokens without the head."""
    tokens = torch.zeros((1, context), dtype=torch.long, device=runtime.device)
    with runtime.session(context):
        return _timed(lambda: runtime.forward(tokens, 0, logits=None), runtime, 5)


@torch.inference_mode()
def _head_seconds(runtime: Runtime) -> float:
    """The head over one row."""
    x = torch.zeros((1, runtime.skeleton.sizes.hidden), dtype=runtime.dtype, device=runtime.device)
    return _timed(lambda: runtime.skeleton.head(x), runtime, 24)


def _timed(call: Callable[[], object], runtime: Runtime, repeats: int) -> float:
    """Seconds of a call, the first quarter of them left out."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        synchronise(runtime.device)
        times.append(time.perf_counter() - start)
    return quiet(times[repeats // 4 :])


def _per_key(runtime: Runtime, context: int, near: float) -> float:
    """What one more key costs one attention sub-layer."""
    far = min(context + 1024, runtime.skeleton.context - 1)
    if far <= context:
        return 0.0
    return max(forward_seconds(runtime, far) - near, 0.0) / (far - context) / runtime.layers
