"""Strategies that change one variable at a time: greedy elimination, and climbing from the best path so far."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from selfspec.types.draft_path import DraftPath

from .space import Point, Space

Gains = tuple[tuple[float, ...], ...]
"""For each variable and each of its modes, the score gained (or lost) if a base path changes in this mode alone."""


class Climb:
    """Strategy that tries the paths of `queue`, then single changes of the best path so far.

    The change whose last trial gained most (or lost least) is tried first; `gains` holds the gains known before. When
    every single change of the best path has been tried, random changes of two or three variables follow. No path is
    proposed twice while an untried path is found near the best path.
    """

    def __init__(self, space: Space, *, seed: int, queue: Sequence[DraftPath] = (), gains: Gains = ()) -> None:
        self._space = space
        self._random = random.Random(seed)
        self._queue = [space.point(path) for path in queue]
        self._gains = _table(space, gains)  # the gain of each mode when it was last tried
        changes = [(i, c) for i, modes in enumerate(space.choices) for c in range(len(modes))]
        self._order = self._random.sample(changes, len(changes))  # the order of equally promising changes
        self._scores: dict[Point, float] = {}
        self._best: Point | None = None
        self._from: tuple[Point, int] | None = None  # the base point and the variable of the last single change

    def ask(self) -> DraftPath:
        """Return the next path of the queue, or, if the queue is empty, an untried change of the best path."""
        self._from = None
        while self._queue:
            point = self._queue.pop(0)
            if point not in self._scores:
                return self._space.path(point)
        return self._space.path(self._near(self._best or (0,) * len(self._space)))

    def tell(self, path: DraftPath, score: float) -> None:
        """Record the score of `path`, and the gain of the change that led to `path`."""
        point = self._space.point(path)
        if self._from is not None:
            base, i = self._from
            gains = self._gains[i]
            gains[point[i]] = gains[base[i]] + score - self._scores.get(base, score)
        self.learn(path, score)

    def learn(self, path: DraftPath, score: float) -> None:
        """Record the score of `path`, which may become the best path."""
        point = self._space.point(path)
        self._scores[point] = score
        if self._best is None or score > self._scores[self._best]:
            self._best = point

    def _near(self, base: Point) -> Point:
        def promise(change: tuple[int, int]) -> float:
            i, choice = change
            return self._gains[i][choice] - self._gains[i][base[i]]

        for i, choice in sorted(self._order, key=promise, reverse=True):
            if choice != base[i] and (point := changed(base, (i, choice))) not in self._scores:
                self._from = (base, i)
                return point
        for _ in range(50):
            places = self._random.sample(range(len(base)), min(len(base), self._random.choice((2, 2, 3))))
            point = changed(base, *((i, self._other(i, base[i])) for i in places))
            if point not in self._scores:
                return point
        return tuple(self._random.randrange(len(modes)) for modes in self._space.choices)

    def _other(self, i: int, choice: int) -> int:
        """Return at random a choice of variable `i` other than `choice`."""
        return (choice + 1 + self._random.randrange(len(self._space.choices[i]) - 1)) % len(self._space.choices[i])


class Greedy:
    """Greedy elimination to the end, lazily (Minoux 1978), then climbing from the best path so far.

    The elimination starts with everything in the base mode (`Space.base`), and tries the change of one variable to a
    cheaper mode with the highest expected gain: the gain when the change was last tried, at first by `gains`. The
    change is kept if it gains at least as much as every other change is expected to.
    """

    def __init__(self, space: Space, *, seed: int, gains: Gains = ()) -> None:
        self._space = space
        self._climb = Climb(space, seed=seed, gains=gains)
        self._base = space.start
        self._score: float | None = None
        table = _table(space, gains)
        self._promise = {change: table[change[0]][change[1]] for change in cheaper_changes(space, self._base)}
        self._tried: tuple[int, int] | None = None

    @property
    def base(self) -> DraftPath:
        """The path with the changes that were kept so far."""
        return self._space.path(self._base)

    @property
    def done(self) -> bool:
        """Whether the elimination is over, because no change to a cheaper mode is left."""
        return not self._promise

    def ask(self) -> DraftPath:
        """Return the base path, then the base path with the most promising change; after the elimination, climb."""
        if self._score is None:
            return self.base
        if not self._promise:
            return self._climb.ask()
        self._tried = max(self._promise, key=lambda change: self._promise[change])
        return self._space.path(changed(self._base, self._tried))

    def tell(self, path: DraftPath, score: float) -> None:
        """Keep the change that was tried if no other change is expected to gain more."""
        self._climb.tell(path, score)
        if self._score is None or self._tried is None:
            self._score = score
            return
        gain = score - self._score
        self._promise[self._tried] = gain
        if self._promise and gain >= max(self._promise.values()):
            variable, choice = self._tried
            self._base, self._score = changed(self._base, self._tried), score
            self._promise = {
                change: promise
                for change, promise in self._promise.items()
                if change[0] != variable or change[1] > choice
            }
        self._tried = None

    def learn(self, path: DraftPath, score: float) -> None:
        """Record the score for the climbing that follows the elimination."""
        self._climb.learn(path, score)


def cheaper_changes(space: Space, base: Point) -> Iterator[tuple[int, int]]:
    """Yield every change of one variable to a cheaper mode, as the variable's number and the choice."""
    for i, (modes, now) in enumerate(zip(space.choices, base, strict=True)):
        yield from ((i, choice) for choice in range(now + 1, len(modes)))


def changed(point: Point, *changes: tuple[int, int]) -> Point:
    """Return `point` with `changes`, each a pair of the variable's number and its new choice."""
    new = list(point)
    for i, choice in changes:
        new[i] = choice
    return tuple(new)


def _table(space: Space, gains: Gains) -> list[list[float]]:
    return [list(row) for row in gains] or [[0.0] * len(row) for row in space.choices]
