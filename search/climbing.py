"""Strategies that change one thing at a time: greedy elimination, and climbing from the best set known."""

from __future__ import annotations

import random
from collections.abc import Sequence

from selfspec.facts.skip import SkipSet

from .space import Space


class Climb:
    """Tries the sets of a queue, then single changes of the best set known, the most promising first.

    A change that helped, or hurt little, when it was last tried is tried sooner. When every single change of the best
    set was tried, pairs of them are, at random. Nothing is proposed twice while there is anything new nearby.
    """

    def __init__(self, space: Space, *, seed: int, queue: Sequence[SkipSet] = (), gains: Sequence[float] = ()) -> None:
        self._space = space
        self._random = random.Random(seed)
        self._queue = [space.bits(skip) for skip in queue]
        self._gains = list(gains) or [0.0] * len(space)  # of setting each variable, in score, when it was last tried
        self._order = self._random.sample(range(len(space)), len(space))  # of variables that promise the same
        self._scores: dict[tuple[bool, ...], float] = {}
        self._best: tuple[bool, ...] | None = None
        self._from: tuple[tuple[bool, ...], int] | None = None  # the base and the variable of a single change

    def ask(self) -> SkipSet:
        """The next set."""
        self._from = None
        while self._queue:
            bits = self._queue.pop(0)
            if bits not in self._scores:
                return self._space.skip(bits)
        return self._space.skip(self._near(self._best or (False,) * len(self._space)))

    def tell(self, skip: SkipSet, score: float) -> None:
        """Record the score, and what the change brought."""
        bits = self._space.bits(skip)
        if self._from is not None:
            base, changed = self._from
            gain = score - self._scores.get(base, score)
            self._gains[changed] = gain if bits[changed] else -gain
        self.learn(skip, score)

    def learn(self, skip: SkipSet, score: float) -> None:
        """Record the score."""
        bits = self._space.bits(skip)
        self._scores[bits] = score
        if self._best is None or score > self._scores[self._best]:
            self._best = bits

    def _near(self, base: tuple[bool, ...]) -> tuple[bool, ...]:
        def promise(i: int) -> float:
            return -self._gains[i] if base[i] else self._gains[i]

        for i in sorted(self._order, key=promise, reverse=True):
            if (bits := _flip(base, i)) not in self._scores:
                self._from = (base, i)
                return bits
        for _ in range(50):
            bits = _flip(base, *self._random.sample(range(len(base)), min(len(base), self._random.choice((2, 2, 3)))))
            if bits not in self._scores:
                return bits
        return tuple(self._random.random() < 0.5 for _ in base)


class Greedy:
    """Greedy elimination to the end, lazily (Minoux 1978), then climbing from the best set seen.

    Begins with nothing skipped, and tries the variable whose skipping promises the highest gain. If what it brings is
    no less than any other promises, it stays skipped; otherwise what it brought is what it promises from now on.
    """

    def __init__(self, space: Space, *, seed: int, gains: Sequence[float] = ()) -> None:
        self._space = space
        self._climb = Climb(space, seed=seed, gains=gains)
        self._base = (False,) * len(space)
        self._score: float | None = None
        self._promise = dict(enumerate(gains or [0.0] * len(space)))
        self._tried: int | None = None

    @property
    def base(self) -> SkipSet:
        """What has been eliminated."""
        return self._space.skip(self._base)

    @property
    def done(self) -> bool:
        """Whether everything has been eliminated."""
        return not self._promise

    def ask(self) -> SkipSet:
        """The base, then the base with the most promising variable."""
        if self._score is None:
            return self.base
        if not self._promise:
            return self._climb.ask()
        self._tried = max(self._promise, key=lambda i: self._promise[i])
        return self._space.skip(_flip(self._base, self._tried))

    def tell(self, skip: SkipSet, score: float) -> None:
        """Keep the variable skipped if no other promises more than it brought."""
        self._climb.tell(skip, score)
        if self._score is None or self._tried is None:
            self._score = score
            return
        gain = score - self._score
        self._promise[self._tried] = gain
        if self._promise and gain >= max(self._promise.values()):
            self._base, self._score = _flip(self._base, self._tried), score
            del self._promise[self._tried]
        self._tried = None

    def learn(self, skip: SkipSet, score: float) -> None:
        """Record the score for the climbing that follows the elimination."""
        self._climb.learn(skip, score)


def _flip(bits: tuple[bool, ...], *places: int) -> tuple[bool, ...]:
    return tuple(bit != (i in places) for i, bit in enumerate(bits))
