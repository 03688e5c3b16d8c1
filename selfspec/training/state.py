"""The checkpoint of a training in one file; an interrupted training resumes from it."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import kind, write_bytes
from selfspec.runtime.base import Runtime
from selfspec.training.texts import TrainingText

_log = logging.getLogger("selfspec")


class Fittable(Protocol):
    """A learner that `fit` trains by gradient steps."""

    runtime: Runtime

    @property
    def net(self) -> nn.Module:
        """The trainable weights."""

    @property
    def depth(self) -> int:
        """The number of draft steps that are trained together."""

    def loss(self, windows: Sequence[TrainingText]) -> Tensor:
        """Return the loss over windows of one length."""

    def acceptance(self, texts: Sequence[TrainingText]) -> list[float]:
        """Return, for each draft position, the fraction of drafts that match the text up to and including it."""


@dataclass(slots=True)
class Progress:
    """The progress of a training: gradient steps, seconds, and the best held-out result so far.

    `best`: tokens per verification pass on held-out texts. `acceptance`: by draft position, as of `best`. `history`:
    pairs of seconds and tokens per pass, one for each evaluation.
    """

    steps: int = 0
    seconds: float = 0.0
    best: float = 0.0
    acceptance: list[float] = field(default_factory=list)
    history: list[tuple[float, float]] = field(default_factory=list)


_PROGRESS = TypeAdapter(Progress)
_ENTRIES = ("config", "net", "optimizer", "best", "progress")  # of a checkpoint


class State:
    """The checkpoint of a training in one file: weights, optimiser state, best weights, and progress.

    A checkpoint at `path` is loaded if it was written with the same `config`, and can be read.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.progress = Progress()
        self._config = config
        self._checkpoint: dict[str, Any] = {}
        if kind(path) == "file":
            try:
                checkpoint = torch.load(path, weights_only=True)
                if checkpoint["config"] == config:
                    progress = _PROGRESS.validate_python(checkpoint["progress"])
                    self._checkpoint = {name: checkpoint[name] for name in _ENTRIES}
                    self.progress = progress
            except Exception:  # damaged, or of another version
                _log.warning("%s: the checkpoint cannot be resumed; fitting starts again", path)

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return bool(self._checkpoint)

    def into(self, learner: Fittable, optimizer: torch.optim.Optimizer) -> None:
        """Load weights and optimiser state from the checkpoint, if there is one. Raises `SelfspecError` as `_load`."""
        if self.resumable:
            self._load(learner.net, "net")
            self._load(optimizer, "optimizer")

    def best_into(self, learner: Fittable) -> None:
        """Load the best weights so far into the learner. Raises `SelfspecError` as `_load`."""
        self._load(learner.net, "best")

    def _load(self, target: nn.Module | torch.optim.Optimizer, name: str) -> None:
        """Load an entry of the checkpoint. Raises `SelfspecError` if the entry is not of this training."""
        try:
            target.load_state_dict(self._checkpoint[name])
        except Exception as error:  # a damaged or foreign checkpoint can raise anything
            raise SelfspecError(
                f"{self.path}: the checkpoint does not fit this training ({reason(error)}); delete it to start anew"
            ) from None

    def save(self, learner: Fittable, optimizer: torch.optim.Optimizer, acceptance: list[float]) -> None:
        """Write the checkpoint atomically, keeping the weights with the best `acceptance` of held-out texts."""
        done = self.progress
        brings = 1 + sum(acceptance)
        done.history.append((done.seconds, brings))
        if brings >= done.best or "best" not in self._checkpoint:
            done.best, done.acceptance = brings, acceptance
            self._checkpoint["best"] = {name: t.detach().clone() for name, t in learner.net.state_dict().items()}
        self._checkpoint |= {
            "config": self._config,
            "net": learner.net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "progress": {name: getattr(done, name) for name in Progress.__slots__},
        }
        buffer = io.BytesIO()
        torch.save(self._checkpoint, buffer)
        write_bytes(self.path, buffer.getvalue())
