"""The generation of training texts with its progress, and the checkpoint from which a training resumes."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import cached_file, kind, write_bytes
from selfspec.llm.llm import LLM
from selfspec.llm.prompt_encoding import fit_prompt
from selfspec.runtime.base import Runtime
from selfspec.text.prompt_template import Prompt
from selfspec.training.options import TrainOptions
from selfspec.training.texts import TextStore, TrainingText, beginnings, make, synthetic_beginning

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

    def forget(self) -> None:
        """Delete the checkpoint, to begin anew; one of another training stays until this one saves its own."""
        if self.resumable:
            self.path.unlink(missing_ok=True)
        self._checkpoint, self.progress = {}, Progress()

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


MAKING = 0.4  # share of the time that is spent on generating texts
MOST_TEXTS = 100_000


class TrainingCallbacks(Protocol):
    """Callbacks of a training's progress."""

    def stage(self, name: str, total: float | None) -> None:
        """Begin the stage `name`; `total`: the value of `done` at which the stage is complete (None: unknown)."""

    def step(self, done: float, message: str) -> None:
        """Report that `done` of the stage's `total` is complete; `message` describes the progress."""


class SilentTraining:
    """Training callbacks that do nothing."""

    def stage(self, name: str, total: float | None) -> None:
        """Ignore the stage."""

    def step(self, done: float, message: str) -> None:
        """Ignore the progress."""


def folder_of(llm: LLM, prompts: Sequence[Prompt] | None, chat: bool, options: TrainOptions) -> Path:
    """Return the folder that caches the texts; its name depends on everything that the texts depend on.

    Texts whose time is limited may be cut short, and are no others'.
    """
    digest = None if prompts is None else hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
    what = {
        "version": 2,
        "model": llm.identity.model_dump(mode="json", exclude={"name"}),
        "dtype": str(llm.runtime.dtype),
        "prompts": digest,
        "chat": chat,
        "room": options.max_new_tokens,
        "seed": options.seed,
    }
    if options.texts is None:
        what["limited"] = "by time"
    return cached_file("texts", what).with_suffix("")


def make_texts(
    llm: LLM,
    texts: TextStore,
    prompts: Sequence[Prompt] | None,
    chat: bool,
    options: TrainOptions,
    callbacks: TrainingCallbacks,
) -> None:
    """Generate training texts into `texts`: `options.texts` many, or as many as the time limit allows."""
    seconds = 60 * options.minutes * MAKING
    own, encoded = None, None
    if prompts is None:
        config = llm.model.config
        own = synthetic_beginning(llm.tokenizer, llm.runtime.skeleton.ends, getattr(config, "bos_token_id", None))
    else:
        max_new_tokens = options.max_new_tokens
        encoded = [llm.encode(fit_prompt(llm, text, max_new_tokens, chat=chat)) for text in prompts]
    callbacks.stage("making texts", seconds if options.texts is None else options.texts)
    begun, tokens = time.perf_counter(), 0

    def count(new: int) -> None:
        nonlocal tokens
        tokens += new
        done = time.perf_counter() - begun if options.texts is None else len(texts)
        callbacks.step(done, f"{len(texts)} texts, {tokens:,} new tokens")

    make(
        llm.runtime,
        texts,
        beginnings(encoded, own, seed=options.seed),
        max_new_tokens=options.max_new_tokens,
        most=options.texts or MOST_TEXTS,
        keep_going=lambda: options.texts is not None or time.perf_counter() - begun < seconds,
        on_tokens=count,
        rows=options.batch_size,
    )
