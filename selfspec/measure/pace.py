"""The speed of a model's passes on this machine, and the time that a run of a method is expected to take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from selfspec.measure.cost_fitting import forward_seconds, masked_seconds
from selfspec.runtime.base import Runtime
from selfspec.types.stats import Stats

WIDE, SLOW = 64, 0.1  # rows of the wide pass to time; seconds of a step from which a narrower pass is timed


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a model's passes, in seconds.

    `step`: a pass over one row, and `row`: each further row of a pass, with an empty KV cache. `step_per_key` and
    `row_per_key`: what each key in the KV cache adds to the two. `masked`: the factors by which `step` and `row` grow
    where each row has an attention mask of its own, with many keys in the KV cache.
    """

    step: float
    row: float
    step_per_key: float = 0.0
    row_per_key: float = 0.0
    masked: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def from_runtime(cls, runtime: Runtime, context: int, *, masks: bool = False) -> Pace:
        """Time passes with one key and with `context` keys in the KV cache: for about two seconds, or six passes.

        `masks`: also time a pass with attention masks. Raises `BusyError` while the runtime has a stream.
        """
        limit = runtime.skeleton.context
        context = max(1, min(context, limit - min(WIDE, limit // 2)))
        pace = cls.through(_timed(runtime, 1), _timed(runtime, context))
        return replace(pace, masked=_factors(runtime, context, pace)) if masks and runtime.trees else pace

    def replay(self, context: float) -> Pace:
        """Return the speed with `context` keys of passes whose rows have attention masks of their own."""
        pace, (step, row) = self.at(context), self.masked
        return Pace(step * pace.step, row * pace.row)

    @classmethod
    def through(cls, near: tuple[int, float, float], far: tuple[int, float, float]) -> Pace:
        """Return the speed by two timings `(keys, step, row)`, between which it is linear in the number of keys."""
        (few, *_), (many, *_) = near, far
        step_per_key, row_per_key = (
            max(b - a, 0.0) / max(many - few, 1) for a, b in zip(near[1:], far[1:], strict=True)
        )
        return cls(
            max(near[1] - few * step_per_key, 0.0), max(near[2] - few * row_per_key, 0.0), step_per_key, row_per_key
        )

    def at(self, context: float) -> Pace:
        """Return the speed with `context` keys in the KV cache, as a speed that is the same for every further key."""
        return Pace(self.step + context * self.step_per_key, self.row + context * self.row_per_key)

    def rows(self, count: float) -> float:
        """Return the seconds of a pass over `count` rows that all read the same keys."""
        return self.step + max(count - 1, 0) * self.row

    def prefill(self, length: int) -> float:
        """Return the seconds of the pass over a prompt of `length` tokens, each of which reads the tokens before it."""
        return self.rows(length) + self.row_per_key * length**2 / 2

    def decode(self, length: int, new: int) -> float:
        """Return the seconds of plain decoding of `new` tokens after a prompt of `length` tokens."""
        return self.prefill(length) + max(new - 1, 0) * self.at(length + new / 2).step

    def like(self, run: Stats, length: int, other: int, new: int) -> float:
        """Return the seconds that a run of `new` tokens after `other` tokens is expected to take.

        `run`: a run of the same method after a prompt of `length` tokens. The time to its first token grows as a
        prefill does, and the time of each later token as a plain step does.
        """
        first = run.log[0].seconds
        further = run.tokens - run.log[0].tokens
        step = self.at(other + new / 2).step
        scale = (run.seconds - first) / further / self.at(length + run.tokens / 2).step if further else 1.0
        return first * self.prefill(other) / self.prefill(length) + max(new - 1, 0) * scale * step


def _timed(runtime: Runtime, context: int) -> tuple[int, float, float]:
    """Return `context`, the seconds of a pass over one row, and those of each further row, with `context` keys."""
    step = forward_seconds(runtime, context, repeats=2)
    step = forward_seconds(runtime, context, repeats=6) if step < SLOW else step
    rows = _rows(runtime, context, step)
    wide = forward_seconds(runtime, context, rows=rows, repeats=4 if step < SLOW else 1)
    return context, step, max(wide - step, 0.0) / (rows - 1)


def _factors(runtime: Runtime, context: int, pace: Pace) -> tuple[float, float]:
    """Return `Pace.masked`, at least 1 each, from passes with masks over a few and over many rows."""
    local = pace.at(context)
    many = _rows(runtime, context, local.step)
    few = max(1, many // 8)
    short, long = (masked_seconds(runtime, context, rows) for rows in (few, many))
    row = max(long - short, 0.0) / (many - few)
    step = short - (few - 1) * row
    return max(step / local.step, 1.0), max(row / local.row, 1.0) if local.row else 1.0


def _rows(runtime: Runtime, context: int, step: float) -> int:
    return max(2, min(WIDE if step < SLOW else WIDE // 4, runtime.skeleton.context - context))
