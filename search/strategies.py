"""Search strategies over the draft modes of sub-layers, behind one ask/tell interface."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import DraftPath

from .climbing import Climb, Gains, Greedy
from .space import Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


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
