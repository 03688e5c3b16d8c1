"""Search strategies over the draft modes of sub-layers, behind one ask/tell interface, some of them climbing."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import DraftPath

from .space import Point, Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


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
    """Yield each change of a variable of `base` to a cheaper mode, as (i, c): variable i gets `space.choices[i][c]`."""
    for i, (modes, now) in enumerate(zip(space.choices, base, strict=True)):
        yield from ((i, choice) for choice in range(now + 1, len(modes)))


def changed(point: Point, *changes: tuple[int, int]) -> Point:
    """Return `point` with `changes`, each a pair (i, c): variable i gets its choice c."""
    new = list(point)
    for i, choice in changes:
        new[i] = choice
    return tuple(new)


def _table(space: Space, gains: Gains) -> list[list[float]]:
    return [list(row) for row in gains] or [[0.0] * len(row) for row in space.choices]


@dataclass(frozen=True)
class Problem:
    """The input of a strategy: the space, a seed, and the results of the preparation.

    `warm`: paths to try first, in order. `gains`: for each variable and each of its modes, the score gained (or lost)
    by this mode alone. `programme`: paths found by dynamic programming (see `warm_starts.programme`), one for each
    budget of skipped cost, the most promising first.
    """

    space: Space
    seed: int = 0
    warm: tuple[DraftPath, ...] = ()
    gains: Gains = ()
    programme: tuple[DraftPath, ...] = ()


class Strategy(Protocol):
    """Proposes draft paths and learns their scores. One `tell` answers every `ask`; `learn` takes further scores."""

    def ask(self) -> DraftPath:
        """Return the next path to try."""

    def tell(self, path: DraftPath, score: float) -> None:
        """Record the score of the path that `ask` last returned; higher is better."""

    def learn(self, path: DraftPath, score: float) -> None:
        """Record the score of a path that another worker proposed; allowed before or after any `ask` or `tell`."""


class OptunaSampler:
    """A strategy by a sampler of Optuna, with a parameter for each variable of the space.

    `make(optuna.samplers, seed)` returns the sampler. A variable of two modes is the integer 0 or 1. A variable of more
    modes is categorical, or, with `ordered`, the mode's number in the order of cost, for samplers that need numbers.
    """

    def __init__(self, problem: Problem, make: Callable[[Any, int], Any], *, ordered: bool = False) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = problem.space
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna marks some samplers as experimental
            sampler = make(optuna.samplers, problem.seed)
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._distributions: dict[str, BaseDistribution] = {
            f"variable{i:03d}": optuna.distributions.IntDistribution(0, len(modes) - 1)
            if ordered or len(modes) == 2
            else optuna.distributions.CategoricalDistribution(range(len(modes)))
            for i, modes in enumerate(self._space.choices)
        }
        for path in problem.warm:
            self._study.enqueue_trial(self._named(path))
        self._trial: Any = None

    def _named(self, path: DraftPath) -> dict[str, int]:
        return dict(zip(self._distributions, self._space.point(path), strict=True))

    def ask(self) -> DraftPath:
        """Return the path that the sampler suggests."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._trial = self._study.ask(self._distributions)
            return self._space.path([self._trial.params[name] for name in self._distributions])

    def tell(self, path: DraftPath, score: float) -> None:
        """Record the score of the path that `ask` last returned."""
        self._study.tell(self._trial, score)

    def learn(self, path: DraftPath, score: float) -> None:
        """Add the path as a completed trial."""
        import optuna

        known = optuna.trial.create_trial(value=score, params=self._named(path), distributions=self._distributions)
        self._study.add_trial(known)


class SkOpt:
    """The strategy of Draft & Verify: scikit-optimize's Gaussian process over [0, 1]^n, n variables.

    The interval of a variable is split evenly among its modes, the most expensive mode lowest and skip highest.
    """

    def __init__(self, problem: Problem) -> None:
        from skopt import Optimizer

        self._space = problem.space
        self._warm = list(problem.warm)
        self._optimizer = Optimizer(
            [(0.0, 1.0)] * len(self._space), "GP", n_initial_points=10, random_state=problem.seed
        )

    def ask(self) -> DraftPath:
        """Return the next warm start; without further warm starts, the path of the optimiser's next point."""
        if self._warm:
            return self._warm.pop(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked = zip(self._optimizer.ask(), self._space.choices, strict=True)
            return self._space.path(
                [min(math.ceil(value * len(modes)) - 1, len(modes) - 1) if value > 0 else 0 for value, modes in asked]
            )

    def tell(self, path: DraftPath, score: float) -> None:
        """Record the score at the modes of `path`, not at the point in their intervals that the optimiser asked for."""
        point = zip(self._space.point(path), self._space.choices, strict=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # skopt warns of repeated points and of its own dependencies
            self._optimizer.tell([number / (len(modes) - 1) for number, modes in point], -score)

    learn = tell


def _climb(problem: Problem) -> Strategy:
    return Climb(problem.space, seed=problem.seed, queue=problem.warm, gains=problem.gains)


def _programme(problem: Problem) -> Strategy:
    return Climb(problem.space, seed=problem.seed, queue=problem.programme or problem.warm, gains=problem.gains)


def _gp(samplers: Any, seed: int) -> Any:
    return samplers.GPSampler(seed=seed, deterministic_objective=True)


def _cmaes(samplers: Any, seed: int) -> Any:
    return samplers.CmaEsSampler(seed=seed, with_margin=True, warn_independent_sampling=False)


STRATEGIES: dict[str, Callable[[Problem], Strategy]] = {
    "tpe": lambda p: OptunaSampler(p, lambda samplers, seed: samplers.TPESampler(seed=seed)),
    "cmaes": lambda p: OptunaSampler(p, _cmaes, ordered=True),
    "gp": lambda p: OptunaSampler(p, _gp),
    "skopt": SkOpt,
    "random": lambda p: OptunaSampler(p, lambda samplers, seed: samplers.RandomSampler(seed=seed)),
    "greedy": lambda p: Greedy(p.space, seed=p.seed, gains=p.gains),
    "dp": _programme,
    "climb": _climb,
}


def make_strategy(name: str, problem: Problem) -> Strategy:
    """Make a strategy by name. Raises `SelfspecError` for an unknown name."""
    check_strategy(name)
    return STRATEGIES[name](problem)


def check_strategy(name: str) -> None:
    """Raise `SelfspecError` if `name` is not the name of a strategy."""
    if name not in STRATEGIES:
        raise SelfspecError(f"strategy '{name}' is not known; known: {', '.join(STRATEGIES)}")
