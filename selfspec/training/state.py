"""How far a fit has come, in one file: killed at any point, it goes on from there."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from selfspec.basics.files import kind, write_bytes
from selfspec.runtime.forward import Runtime
from selfspec.training.texts import TrainingText

_log = logging.getLogger("selfspec")


class Fittable(Protocol):
    """What is fitted by steps."""

    runtime: Runtime

    @property
    def net(self) -> nn.Module:
        """Its weights."""

    @property
    def depth(self) -> int:
        """Steps of a draft that are fitted together."""

    def loss(self, windows: Sequence[TrainingText]) -> Tensor:
        """Of windows of one length."""

    def acceptance(self, texts: Sequence[TrainingText]) -> list[float]:
        """For each place of a draft, how often all of it up to there is what a text goes on with."""


@dataclass(slots=True)
class Progress:
    """How far fitting has come. `best`: held-out tokens a pass; `history`: of them, by seconds of fitting."""

    steps: int = 0
    seconds: float = 0.0
    best: float = 0.0
    acceptance: list[float] = field(default_factory=list)
    history: list[tuple[float, float]] = field(default_factory=list)


class State:
    """What is kept of a fit: weights, the optimiser, the best weights, and progress, in one file."""

    def __init__(self, path: Path, told: dict[str, Any]) -> None:
        self.path = path
        self.progress = Progress()
        self._told = told
        self._held: dict[str, Any] = {}
        if kind(path) == "file":
            try:
                held = torch.load(path, weights_only=True)
                if held["told"] == told:
                    self._held = held
                    self.progress = Progress(**held["progress"])
            except Exception:  # torn, or of another version
                _log.warning("%s cannot be gone on from; fitting begins anew", path)

    @property
    def begun(self) -> bool:
        """Whether there is anything to go on from."""
        return bool(self._held)

    def into(self, learner: Fittable, optimizer: torch.optim.Optimizer) -> None:
        """Go on from what is kept."""
        if self.begun:
            learner.net.load_state_dict(self._held["net"])
            optimizer.load_state_dict(self._held["optimizer"])

    def best_into(self, learner: Fittable) -> None:
        """The best weights that were seen."""
        learner.net.load_state_dict(self._held["best"])

    def keep(self, learner: Fittable, optimizer: torch.optim.Optimizer, acceptance: list[float]) -> None:
        """Write it all, whole or not at all."""
        done = self.progress
        brings = 1 + sum(acceptance)
        done.history.append((done.seconds, brings))
        if brings >= done.best or "best" not in self._held:
            done.best, done.acceptance = brings, acceptance
            self._held["best"] = {name: t.detach().clone() for name, t in learner.net.state_dict().items()}
        self._held |= {
            "told": self._told,
            "net": learner.net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "progress": {name: getattr(done, name) for name in Progress.__slots__},
        }
        buffer = io.BytesIO()
        torch.save(self._held, buffer)
        write_bytes(self.path, buffer.getvalue())
