"""Search strategies over what may be skipped, behind one ask/tell interface. They know nothing of models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from selfspec.basics.errors import SelfspecError
from selfspec.facts.skip import SkipSet

from .climbing import Climb, Greedy
from .space import Space


@dataclass(frozen=True)
class Problem:
    """What a strategy is given: the space, a seed, and what is known beforehand.

    `warm`: sets to try first, in order. `gains`: for each variable, the score gained (or lost) by skipping it alone.
    `programme`: sets of the dynamic programme, one for each budget, the likeliest first.
    """

    space: Space
    seed: int = 0
    warm: tuple[SkipSet, ...] = ()
    gains: tuple[float, ...] = ()
    programme: tuple[SkipSet, ...] = ()


class Strategy(Protocol):
    """Proposes skip sets and learns their scores. Every `ask` is answered by one `tell`, other sets by `learn`."""

    def ask(self) -> SkipSet:
        """The next skip set to try."""

    def tell(self, skip: SkipSet, score: float) -> None:
        """The score of the set last asked for; higher is better."""

    def learn(self, skip: SkipSet, score: float) -> None:
        """The score of a set that another proposed; between `tell` and `ask`, or between `ask` and `tell`."""


class OptunaSampler:
    """One of Optuna's samplers over one binary variable for each of the space's."""

    def __init__(self, problem: Problem, make: Callable[[Any, int], Any]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = problem.space
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # samplers that Optuna calls experimental
            sampler = make(optuna.samplers, problem.seed)
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._names = [f"bit{i:03d}" for i in range(len(self._space))]
        for skip in problem.warm:
            point = zip(self._names, self._space.bits(skip), strict=True)
            self._study.enqueue_trial({name: int(bit) for name, bit in point})
        self._trial: Any = None

    def ask(self) -> SkipSet:
        """What the sampler suggests."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._trial = self._study.ask()
            return self._space.skip([self._trial.suggest_int(name, 0, 1) for name in self._names])

    def tell(self, skip: SkipSet, score: float) -> None:
        """Record the score."""
        self._study.tell(self._trial, score)

    def learn(self, skip: SkipSet, score: float) -> None:
        """Add it as a trial."""
        import optuna

        point = dict(zip(self._names, map(int, self._space.bits(skip)), strict=True))
        bit = optuna.distributions.IntDistribution(0, 1)
        known = optuna.trial.create_trial(value=score, params=point, distributions=dict.fromkeys(point, bit))
        self._study.add_trial(known)


class SkOpt:
    """scikit-optimize's Gaussian process over [0, 1]^n, bypassing where above 0.5: Draft & Verify's own kind."""

    def __init__(self, problem: Problem) -> None:
        from skopt import Optimizer

        self._space = problem.space
        self._warm = list(problem.warm)
        self._optimizer = Optimizer(
            [(0.0, 1.0)] * len(self._space), "GP", n_initial_points=10, random_state=problem.seed
        )

    def ask(self) -> SkipSet:
        """A warm start while there are some, then the point that the process finds most promising."""
        if self._warm:
            return self._warm.pop(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._space.skip([value > 0.5 for value in self._optimizer.ask()])

    def tell(self, skip: SkipSet, score: float) -> None:
        """Record the score of the corner that was evaluated, not of the point asked for."""
        corner = [float(bit) for bit in self._space.bits(skip)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library warns of repeated points and of its own dependencies
            self._optimizer.tell(corner, -score)

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
    "cmaes": lambda p: OptunaSampler(p, _cmaes),
    "gp": lambda p: OptunaSampler(p, _gp),
    "skopt": SkOpt,
    "random": lambda p: OptunaSampler(p, lambda samplers, seed: samplers.RandomSampler(seed=seed)),
    "greedy": lambda p: Greedy(p.space, seed=p.seed, gains=p.gains),
    "dp": _programme,
    "climb": _climb,
}


def make_strategy(name: str, problem: Problem) -> Strategy:
    """A strategy by name. Raises `SelfspecError` for an unknown name."""
    check_strategy(name)
    return STRATEGIES[name](problem)


def check_strategy(name: str) -> None:
    """Raise `SelfspecError` when there is no strategy of that name."""
    if name not in STRATEGIES:
        raise SelfspecError(f"strategy '{name}' is not known; known: {', '.join(STRATEGIES)}")
