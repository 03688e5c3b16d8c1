"""Search strategies over 2L bits, behind one ask/tell interface. They know nothing of models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

from selfspec.errors import SelfspecError
from selfspec.skip import SkipSet


class Strategy(Protocol):
    """Proposes skip sets and learns their scores. Every `ask` is followed by one `tell` of its answer."""

    def ask(self) -> SkipSet:
        """The next skip set to try."""

    def tell(self, skip: SkipSet, score: float) -> None:
        """The score of the set last asked for; higher is better."""


class TPE:
    """Optuna's tree-structured Parzen estimator over one binary variable for each sub-layer."""

    def __init__(self, layers: int, *, seed: int, warm: tuple[SkipSet, ...] = ()) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._layers = layers
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        for skip in warm:
            self._study.enqueue_trial({f"bit{i:03d}": int(bit) for i, bit in enumerate(skip.bits(layers))})
        self._trial: Any = None

    def ask(self) -> SkipSet:
        """A set drawn where good sets are dense."""
        self._trial = self._study.ask()
        bits = [self._trial.suggest_int(f"bit{i:03d}", 0, 1) for i in range(2 * self._layers)]
        return SkipSet.from_bits(bits)

    def tell(self, skip: SkipSet, score: float) -> None:
        """Record the score."""
        self._study.tell(self._trial, score)


class SkOpt:
    """scikit-optimize's Gaussian process over [0, 1]^2L, bypassing where above 0.5: Draft & Verify's own kind."""

    def __init__(self, layers: int, *, seed: int, warm: tuple[SkipSet, ...] = ()) -> None:
        from skopt import Optimizer

        self._layers = layers
        self._warm = list(warm)
        self._optimizer = Optimizer([(0.0, 1.0)] * (2 * layers), "GP", n_initial_points=10, random_state=seed)

    def ask(self) -> SkipSet:
        """A warm start while there are some, then the point that the process finds most promising."""
        if self._warm:
            return self._warm.pop(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return SkipSet.from_bits([value > 0.5 for value in self._optimizer.ask()])

    def tell(self, skip: SkipSet, score: float) -> None:
        """Record the score of the corner that was evaluated, not of the point asked for."""
        corner = [float(bit) for bit in skip.bits(self._layers)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library warns of repeated points and of its own dependencies
            self._optimizer.tell(corner, -score)


STRATEGIES: dict[str, Callable[..., Strategy]] = {"tpe": TPE, "skopt": SkOpt}


def make_strategy(name: str, layers: int, *, seed: int, warm: tuple[SkipSet, ...] = ()) -> Strategy:
    """A strategy by name, for a model of `layers` layers; `warm` sets are tried first, in order.

    Raises `SelfspecError` for an unknown name.
    """
    check_strategy(name)
    return STRATEGIES[name](layers, seed=seed, warm=warm)


def check_strategy(name: str) -> None:
    """Raise `SelfspecError` when there is no strategy of that name."""
    if name not in STRATEGIES:
        raise SelfspecError(f"strategy '{name}' is not known; known: {', '.join(STRATEGIES)}")
