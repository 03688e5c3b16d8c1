"""Measurement of a `CostModel` in the decoding loop: each round drafts along a path, then verifies, both timed.

The costs therefore include the loop, the drafter and the sampler besides the forward passes, and the CPU caches are in
the state that they have during decoding.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import get_args

import torch

from selfspec.basics.machine import synchronise
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.llm.llm import LLM
from selfspec.llm.local_costs import RoundSample
from selfspec.measure.cost_sweeps import (
    EFFORTS,
    ROUND_STEPS,
    WIDE,
    WIDE_STEPS,
    Sweep,
    effort_within,
    fit_context,
    lower_quartile,
    pace,
)
from selfspec.runtime.base import Runtime
from selfspec.speculation.sampling import Sampler
from selfspec.types.costs import CostModel, ModeCosts
from selfspec.types.draft_path import FULL, LOW, DraftPath, HeadMode, Mode, SkipSet, as_path

DISTURBED_FACTOR = 4  # how many times longer to measure if other processes disturb the timing
DOUBTFUL = 0.1  # relative error on paths left out of the fit above which the measurement goes on for longer
FIRST = ((0.2, 0.7), (0.75, 0.2), (0.5, 0.75))  # shares of (attention, MLP) sub-layers that the first paths skip
UNIFORM = 4  # weight in the fit of a path whose attention sub-layers have one quantised mode, and so the MLPs
FURTHER = 4096  # keys by which the two contexts differ at which the cost of a key is measured
ROWS = 8  # tokens of the verification pass whose cost for each key in the KV cache is measured
OTHERS = 0.3  # probability that a sub-layer of a random path draws its mode separately


@dataclass(frozen=True, slots=True)
class _Fit:
    """Fitted seconds: `start` per draft, `base` per draft step, and `prices` per sub-layer that runs.

    `prices`: (attention, MLP) for each mode, `full` first. `error`: the median relative error of the draft times of a
    path left out of the fit, as the mean over these paths; None if no path was left out.
    """

    start: float
    base: float
    prices: tuple[tuple[float, float], ...]
    error: float | None

    @classmethod
    def from_draft_times(
        cls,
        drafts: Mapping[tuple[DraftPath, int], float],
        fit_to: Sequence[DraftPath],
        modes: Sequence[Mode],
        layers: int,
        *,
        uniform: Collection[DraftPath] = (),
    ) -> _Fit:
        """Fit non-negative costs by least squares of the relative errors, with a soft L1 loss against outliers.

        `drafts`: the measured seconds of drafting k tokens along a path, by (path, k). `fit_to`: the paths to fit to,
        of which those in `uniform` weigh `UNIFORM` times as much; the error is measured on the other paths.
        """
        import numpy as np
        from scipy.optimize import least_squares

        known = {key: t for key, t in drafts.items() if key[0] in fit_to}
        rows = np.array([_parts(*key, modes, layers) for key in known], dtype=float)
        scaled = rows / np.array([*known.values()])[:, None]
        scaled = np.repeat(scaled, [UNIFORM if path in uniform else 1 for path, _ in known], axis=0)
        size = np.maximum(scaled.mean(axis=0), 1e-12)
        solution = least_squares(
            lambda x: scaled @ (x / size) - 1,
            np.full(len(size), 1 / len(size)),
            bounds=(0, np.inf),
            loss="soft_l1",
            f_scale=0.05,
        )
        figures = solution.x / size
        ratios: dict[DraftPath, list[float]] = defaultdict(list)
        for key, measured in drafts.items():
            if key not in known:
                ratios[key[0]].append(float(figures @ _parts(*key, modes, layers)) / measured)
        errors = [abs(statistics.median(path_ratios) - 1) for path_ratios in ratios.values()]
        start, base, *each = (float(x) for x in figures)
        prices = tuple(zip(each[::2], each[1::2], strict=True))
        return cls(start, base, prices, statistics.mean(errors) if errors else None)

    def through(
        self, path: DraftPath, drafts: Mapping[tuple[DraftPath, int], float], modes: Sequence[Mode], layers: int
    ) -> _Fit:
        """Return the fit with `base` shifted by the median error per draft step along `path`."""
        figures = (self.start, self.base, *(x for pair in self.prices for x in pair))

        def off(k: int, measured: float) -> float:
            parts = _parts(path, k, modes, layers)
            return (measured - sum(n * x for n, x in zip(parts, figures, strict=True))) / k

        steps = [off(k, measured) for (other_path, k), measured in drafts.items() if other_path == path]
        return replace(self, base=max(self.base + statistics.median(steps), 0.0)) if steps else self


def _parts(path: DraftPath, k: int, modes: Sequence[Mode], layers: int) -> tuple[int, ...]:
    """Return how often each cost of a `_Fit` (start, base, prices) counts in drafting `k` tokens along `path`."""
    path_modes = path.modes(layers)
    counts = (k * part.count(mode) for mode in modes for part in (path_modes[:layers], path_modes[layers:]))
    return (1, k, *counts)


def measure_costs(
    runtime: Runtime,
    *,
    context: int = 128,
    sampler: Sampler | None = None,
    seconds: float = 2.0,
    within: float = math.inf,
    seed: int = 0,
    modes: Collection[Mode] = ("full", "skip"),
    on_decoding: Callable[[int, int], None] = lambda done, total: None,
) -> CostModel:
    """Time draft steps along random paths and verification passes of several widths, and fit the cost model.

    For each two quantised modes, equal or not, the paths include one with all attention in the first mode and all MLPs
    in the second. These weigh more in the fit, and the fit is calibrated on the first of them: searched paths are close
    to them, and weights that exceed the CPU cache cost more than the few weights that random paths read.

    `context`: the number of keys in the KV cache; it is reduced if the model's context is too short. `sampler`: the
    sampler of the timed decodings (None: greedy). `seconds`: the least time to measure, longer if other processes
    disturb the timing; every path is timed at least once. `within`: the most seconds to measure; a short time reduces
    the number of rounds and paths. `modes`: the modes in which sub-layers of the paths may run. `on_decoding(done,
    total)` reports progress, in decodings. Raises `BusyError` while the runtime has a stream.
    """
    sampler = sampler or Sampler()
    context, lengths = fit_context(runtime, context)
    rng = random.Random(seed)
    begun = time.perf_counter()
    running = _running(modes)
    effort = effort_within(within, *pace(runtime, context, sampler, rng), further=further_paths(modes))
    heads = {mode: _head_seconds(runtime, mode) for mode in running}
    shares = iter(FIRST)
    low = [mode for mode in running if mode != "full"]
    pairs = sorted(product(low, low), key=lambda pair: pair[0] != pair[1])
    corners = [DraftPath.from_modes([a] * runtime.layers + [b] * runtime.layers, head=low[0]) for a, b in pairs]
    drawn = effort.fitted + effort.fresh - len(corners)
    paths = corners + [_random_path(runtime.layers, running, rng, next(shares, None)) for _ in range(drawn)]
    drafters = [LayerSkipDrafter(runtime, path, FixedK(1)) for path in paths]
    sweep = Sweep(runtime, context, sampler, lengths, rng, effort)
    done, sweeps = 0, 0
    while True:
        for _ in sweep.over(drafters):
            done += 1
            on_decoding(done, effort.decodings * (sweeps + 1))
        sweeps += 1
        drafts = {  # corrected to a head in full precision
            (path, k): t + k * (heads["full"] - heads[path.head])
            for (path, k), t in _quiet_drafts(sweep.samples).items()
        }
        fit = _Fit.from_draft_times(drafts, paths[: effort.fitted], running, runtime.layers, uniform=corners)
        spent = time.perf_counter() - begun
        doubtful = _disturbed(sweep.plain) or (fit.error or 0.0) > DOUBTFUL
        late = spent * (sweeps + 1) / sweeps > within
        if late or spent >= seconds * (DISTURBED_FACTOR if doubtful else 1):
            if corners:
                fit = fit.through(corners[0], drafts, running, runtime.layers)
            prices: dict[Mode, ModeCosts] = {
                mode: ModeCosts(attention=attention, mlp=mlp, head=heads[mode])
                for mode, (attention, mlp) in zip(running, fit.prices, strict=True)
            }
            return _model(sweep, fit, prices, _path_in(low[0] if low else "full", runtime.layers))


def further_paths(modes: Collection[Mode]) -> int:
    """Return the number of further paths that `measure_costs` fits to because of the quantised modes among `modes`."""
    return 3 * (len(_running(modes)) - 1)


def _path_in(mode: HeadMode, layers: int) -> DraftPath:
    """Return the path with every sub-layer and the head in a mode."""
    return DraftPath.from_modes([mode] * (2 * layers), head=mode)


def _running(modes: Collection[Mode]) -> list[HeadMode]:
    return [mode for mode in get_args(HeadMode) if mode in ("full", *modes)]


def measure_path_costs(
    runtime: Runtime,
    path: DraftPath | SkipSet,
    *,
    context: int = 128,
    sampler: Sampler | None = None,
    decodings: int = 3,
    seed: int = 0,
) -> CostModel:
    """Measure the costs of one path: `base` is its whole draft step, `attention` and `mlp` are 0.

    Times `decodings` decodings along the path and as many plain decodings. Other arguments: as in `measure_costs`.
    Raises `BusyError` while the runtime has a stream.
    """
    context, lengths = fit_context(runtime, context)
    drafter = LayerSkipDrafter(runtime, path, FixedK(1))
    sweep = Sweep(runtime, context, sampler or Sampler(), lengths, random.Random(seed), EFFORTS[0])
    for _ in range(decodings):
        list(sweep.over([drafter]))
    drafts = {k: t for (_, k), t in _quiet_drafts(sweep.samples).items()}
    start, base = _line(drafts)
    error = statistics.mean(abs((start + k * base) / t - 1) for k, t in drafts.items())
    nothing: dict[Mode, ModeCosts] = {"full": ModeCosts(attention=0.0, mlp=0.0, head=_head_seconds(runtime))}
    return _model(sweep, _Fit(start, base, (), error), nothing, as_path(path))


def path_costs_seconds(step: float, prompt: float, *, decodings: int = 3) -> float:
    """Return the seconds that `measure_path_costs` is expected to take.

    `step`: the seconds of a plain decode step. `prompt`: the seconds of a prefill, each at the context to measure at.
    """
    effort = EFFORTS[0]
    plain = 2 * effort.rounds
    sweeps = decodings * ((effort.settling + effort.rounds) * ROUND_STEPS + plain + 2)  # 2: after the prefills
    along = 0.5 * (2 * plain + WIDE_STEPS * effort.rounds)  # passes along the path, each taken as half a plain step
    wide = 1.8 * plain  # half as many passes over `ROWS` tokens, at two contexts
    passes = 3.5 * plain + along + wide  # longer at the further context
    return (sweeps + passes) * step + (2 * decodings + 5) * prompt


def _line(times: Mapping[int, float]) -> tuple[float, float]:
    """Return the seconds per draft and per drafted token, fitted by non-negative least squares of the relative errors.

    `times`: the measured seconds by draft length.
    """
    import numpy as np
    from scipy.optimize import nnls

    scaled = np.array([(1 / t, k / t) for k, t in times.items()])
    start, base = nnls(scaled, np.ones(len(scaled)))[0]
    return float(start), float(base)


def _model(sweep: Sweep, fit: _Fit, prices: Mapping[Mode, ModeCosts], path: DraftPath) -> CostModel:
    """Return the cost model from a timed sweep, its fit and the costs by mode.

    `path`: the path along which draft steps over several tokens are timed.
    """
    from scipy.optimize import isotonic_regression

    runtime, context, samples = sweep.runtime, sweep.context, sweep.samples
    repeats = 2 * sweep.effort.rounds
    forward = forward_seconds(runtime, context, repeats=repeats)
    # The mean over steps of each step's time, as the first steps of a decoding are slower.
    plain = statistics.mean(lower_quartile(step) for step in zip(*sweep.plain, strict=True))
    overhead = max(plain - forward, 0.0)
    single_row = plain - overhead  # a lower bound for wider passes, whose measured times may be disturbed
    lengths = sorted({sample.drafted for sample in samples})
    wider_rows = [
        max(single_row, lower_quartile([s.rest for s in samples if s.drafted == k]) + fit.start - overhead)
        for k in lengths
    ]
    verify = [float(x) for x in isotonic_regression([single_row, *wider_rows]).x]  # monotone in the width
    full = _per_key(runtime, context, FULL, repeats)
    wider = {
        mode: _wider(runtime, context, _path_in(mode, runtime.layers), sweep.effort.rounds)
        for mode in LOW
        if mode in prices
    }
    return CostModel(
        context=context,
        base=fit.base,
        attention=prices["full"].attention,
        mlp=prices["full"].mlp,
        attention_per_key=full,
        low_per_key=_per_key(runtime, context, path, repeats) if path.low_precision else None,
        row_per_key=max(_per_key(runtime, context, FULL, repeats // 2, rows=ROWS) - full, 0.0) / (ROWS - 1),
        widths=[1, *(k + 1 for k in lengths)],
        verify=verify,
        round=overhead,
        prefill=_prefill_seconds(runtime, context) / context,
        head=prices["full"].head,
        wider=next(iter(wider.values())) if wider else _wider(runtime, context, path, sweep.effort.rounds),
        low={mode: prices[mode].model_copy(update={"wider": shares}) for mode, shares in wider.items()},
        error=None if fit.error is None else round(fit.error, 4),
    )


def _quiet_drafts(samples: Sequence[RoundSample]) -> dict[tuple[DraftPath, int], float]:
    """Return the lower quartile of the seconds of drafting k tokens along a path, by (path, k)."""
    durations: dict[tuple[DraftPath, int], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.drafted:
            durations[sample.path, sample.drafted].append(sample.draft)
    return {key: lower_quartile(times) for key, times in durations.items()}


def _random_path(
    layers: int, modes: Sequence[HeadMode], rng: random.Random, shares: tuple[float, float] | None = None
) -> DraftPath:
    """Return a path that skips up to 3/4 of the attention and of the MLP sub-layers.

    The sub-layers that run have mostly the same mode. Attention and MLP sub-layers are drawn independently, so that the
    fit can separate their costs. `shares`: the shares of (attention, MLP) sub-layers to skip (None: random).
    """
    chosen: list[Mode] = []
    for part in range(2):
        most = layers * 3 // 4
        count = rng.randint(0, most) if shares is None else min(round(shares[part] * layers), most)
        skipped = {*rng.sample(range(layers), count)}
        mostly = rng.choice(modes)
        others = [rng.choice(modes) if rng.random() < OTHERS else mostly for _ in range(layers)]
        chosen += ["skip" if i in skipped else mode for i, mode in enumerate(others)]
    return DraftPath.from_modes(chosen, head=rng.choice(modes))


def _disturbed(plain: Sequence[Sequence[float]]) -> bool:
    """Return whether other processes disturb the timing.

    They do if, of the faster half of the plain decodings, the slowest takes over 10% longer than the fastest. `plain`:
    the seconds of each step of each plain decoding.
    """
    half = sorted(map(lower_quartile, plain))[: max(2, (len(plain) + 1) // 2)]
    return half[-1] > 1.1 * half[0]


def forward_seconds(
    runtime: Runtime, context: int, *, rows: int = 1, repeats: int = 48, path: DraftPath = FULL
) -> float:
    """Return the seconds of a forward pass over `rows` tokens with `context` keys in the KV cache, after a warm-up.

    `path`: the draft path to run (default: the full model). `repeats`: the number of timed passes. Raises
    `BusyError` while the runtime has a stream.
    """
    tokens = torch.zeros((1, rows), dtype=torch.long, device=runtime.device)
    compiled = None if path == FULL else runtime.compile(path)
    with runtime.session(context + rows):
        if runtime.stateful and context:  # else every pass would read the context again, to know its state
            runtime.forward(tokens.new_zeros(1, context), 0, logits=None)
            runtime.cache.commit(0, range(context - 1))
        return _timed(lambda: runtime.forward(tokens, context, path=compiled), runtime, repeats)


def masked_seconds(runtime: Runtime, context: int, rows: int, *, repeats: int = 2) -> float:
    """Return the seconds of a pass over `rows` tokens that each read `context` keys and themselves, after a warm-up.

    Raises `BusyError` while the runtime has a stream.
    """
    tokens = torch.zeros((1, rows), dtype=torch.long, device=runtime.device)
    own = torch.eye(rows, dtype=torch.bool, device=runtime.device)
    mask = torch.cat([own.new_ones(rows, context), own], dim=1)[None]
    with runtime.session(context + rows):
        call = partial(runtime.forward, tokens, torch.full_like(tokens, context), slots=context, mask=mask, logits=None)
        return _timed(call, runtime, repeats)


def fastest_plain(llms: Sequence[LLM]) -> LLM:
    """Return the copy of a model with the fastest plain decode step, timed on all copies in turn, three times.

    `llms`: copies of the same model in different weight layouts, which were chosen by timing the matrix products of a
    few layers once. Plain decoding is the baseline of every speedup, so it must run on the fastest layout. Raises
    `BusyError` while a copy has a stream.
    """
    if len(llms) == 1:
        return llms[0]
    seconds = [math.inf] * len(llms)
    for _ in range(3):
        for i, llm in enumerate(llms):
            keys = min(128, llm.runtime.skeleton.context - 1)
            seconds[i] = min(seconds[i], forward_seconds(llm.runtime, keys, repeats=8))
    return llms[seconds.index(min(seconds))]


def _wider(runtime: Runtime, context: int, path: DraftPath, repeats: int) -> list[float]:
    """Return the time of a draft step over 2, 3, .. tokens relative to a draft step over one token, non-decreasing."""
    import numpy as np

    widths = [rows for rows in WIDE if rows <= max(runtime.skeleton.context - context, 1)]
    times = _in_turn(
        [partial(forward_seconds, runtime, context, rows=rows, repeats=-(-repeats // 3), path=path) for rows in widths]
    )
    shares = [time / times[0] for time in accumulate(times, max)]
    between = np.interp(range(2, widths[-1] + 1), widths, shares)
    return [round(float(share), 3) for share in between]


def _prefill_seconds(runtime: Runtime, context: int) -> float:
    """Return the seconds of a full forward pass over `context` tokens without the LM head."""
    tokens = torch.zeros((1, context), dtype=torch.long, device=runtime.device)
    with runtime.session(context):
        return _timed(lambda: runtime.forward(tokens, 0, logits=None), runtime, 5)


@torch.inference_mode()
def _head_seconds(runtime: Runtime, mode: HeadMode = "full") -> float:
    """Return the seconds of the LM head over one token in a mode: in full, or with int8 or int4 weights."""
    x = torch.zeros((1, runtime.skeleton.sizes.hidden), dtype=runtime.dtype, device=runtime.device)
    compiled = runtime.compile(DraftPath(head=mode))
    return _timed(lambda: compiled.head(x), runtime, 24)


def _in_turn(timers: Sequence[Callable[[], float]]) -> list[float]:
    """Return the least of three times of each timer; all take turns, as what disturbs lasts, and only lengthens."""
    times = [[timer() for timer in timers] for _ in range(3)]
    return [min(of_one) for of_one in zip(*times, strict=True)]


def _timed(call: Callable[[], object], runtime: Runtime, repeats: int) -> float:
    """Return the lower quartile of the seconds of `repeats` calls, leaving out the first quarter as a warm-up."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        synchronise(runtime.device)
        times.append(time.perf_counter() - start)
    return lower_quartile(times[repeats // 4 :])


def _per_key(runtime: Runtime, context: int, path: DraftPath, repeats: int, *, rows: int = 1) -> float:
    """Return the seconds by which one more key in the KV cache slows down one attention sub-layer along a path.

    `rows`: the number of tokens in the pass.
    """
    far = min(context + FURTHER, runtime.skeleton.context - rows)
    if far <= context:
        return 0.0
    near, beyond = _in_turn(
        [
            partial(forward_seconds, runtime, keys, rows=rows, repeats=-(-repeats // 3), path=path)
            for keys in (context, far)
        ]
    )
    attentions = sum(mode != "skip" for mode in path.modes(runtime.layers)[: runtime.layers])
    return max(beyond - near, 0.0) / (far - context) / max(attentions, 1)
