"""Fine-tuning a model so that it can exit early: the recipe of LayerSkip (Elhoushi et al. 2404.16710).

It changes the model: what comes out is the fine-tuned model's text, not the one's that it began as.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfspec.llm.llm import LLM
from selfspec.measure.cost_fitting import forward_seconds
from selfspec.models.families import parts_of
from selfspec.profile.draft_spec import LayerSkipSpec, ProposerSpec
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import Runtime
from selfspec.training.distill import CONTEXT, REPEATS, DistillLearner, drafted_layers, write_model
from selfspec.training.options import Loss
from selfspec.training.texts import TrainingText
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, Mode

DROPPED = 0.1  # the chance that a text goes around the last layer
SCALE = 0.2  # of an early exit's weight in the loss
EVERY = 8  # of so many exits, one has its turn in a step


def dropped(layers: int, most: float = DROPPED) -> list[float]:
    """The chance that a text goes around each layer: none for the first, rising exponentially to `most`."""
    return [most * (math.exp(i * math.log(2) / max(layers - 1, 1)) - 1) for i in range(layers)]


def weights(layers: int, exits: Sequence[int], drafting: int) -> list[float]:
    """What the loss of each exit counts for, of those that have their turn: one together.

    Exits are layers that are left, from 0. As in the paper, e(l) = .2 (0 + 1 + .. + l), and L - 1 more for the last
    (without its own .2 L - .2); but the one that drafts take counts L - 1 more too.
    """
    last = layers - 1
    raw = [SCALE * sum(range(min(layer + 1, last))) + last * (layer in (drafting, last)) for layer in exits]
    total = sum(raw)
    return [of / total for of in raw] if total > 0 else [1 / len(raw)] * len(raw)


class LayerSkipLearner(DistillLearner):
    """A copy of the model under training, so that its head reads what leaves its early layers, too.

    Each step, some texts go around some layers, the later the likelier, and the loss is that of the last layer, of the
    one after which drafts exit, and of every eighth of the others by turns: how far their distributions are from the
    model's that it began as (the paper holds them against the next token). `layers`: after which drafts exit, a fifth
    when left out.
    """

    rate = 1e-3

    def __init__(self, runtime: Runtime, *, layers: int | None, loss: Loss, seed: int) -> None:
        super().__init__(runtime, student=None, layers=runtime.layers, loss=loss, seed=seed)
        self.exit = drafted_layers(runtime, layers)
        self._chances = dropped(runtime.layers)
        self._steps = 0

    def loss(self, windows: Sequence[TrainingText]) -> Tensor:
        """Over windows of one length."""
        ids = torch.stack([window.tokens for window in windows]).to(self.runtime.device)
        with torch.no_grad():
            log_p = self.runtime.model(ids, use_cache=False).logits.float().log_softmax(-1)
        last = self.runtime.layers - 1
        exits = sorted({*range(self._steps % EVERY, last, EVERY), self.exit - 1, last})
        self._steps += 1
        streams = self._streams(ids, self._chances)
        total = torch.zeros((), device=ids.device)
        for layer, weight in zip(exits, weights(last + 1, exits, self.exit - 1), strict=True):
            if weight > 0:
                log_q = self._logits(streams[layer]).log_softmax(-1)
                total = total + weight * self._loss(log_p, log_q).sum(-1).mean()
        return total

    def _streams(self, ids: Tensor, chances: Sequence[float] | None = None) -> list[Tensor]:
        """What leaves each layer, `[B, n, D]`; `chances`: that a text goes around it."""
        left: list[Tensor] = []

        def after(number: int) -> Any:
            def hook(_layer: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
                stream: Tensor = out[0] if isinstance(out, tuple) else out
                if chances is not None and chances[number] > 0:
                    around = torch.rand(len(ids), 1, 1, device=stream.device) < chances[number]
                    stream = torch.where(around, given[0], stream)
                left.append(stream)
                return (stream, *out[1:]) if isinstance(out, tuple) else stream

            return hook

        layers = parts_of(self.student).layers
        hooks = [layer.module.register_forward_hook(after(i)) for i, layer in enumerate(layers)]
        try:
            self.student.base_model(ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return left

    def _logits(self, stream: Tensor) -> Tensor:
        parts = parts_of(self.student)
        logits: Tensor = parts.head.module(parts.norm(stream))
        return (logits if parts.logits is None else parts.logits(logits)).float()

    @torch.no_grad()
    def _agrees(self, text: TrainingText) -> Tensor:
        """At which places of the answer the exit's best token is the last layer's."""
        streams = self._streams(text.tokens[None].to(self.runtime.device))
        of = slice(text.answer - 1, -1)
        early, last = (self._logits(streams[i][0, of]).argmax(-1) for i in (self.exit - 1, -1))
        return (early == last).cpu()


@torch.no_grad()
def perplexity(model: Any, texts: Sequence[TrainingText]) -> float:
    """Of the answers of texts, by a `transformers` model."""
    total, count = 0.0, 0
    for text in texts:
        ids = text.tokens[None].to(model.device)
        log_p = model(ids, use_cache=False).logits[0, text.answer - 1 : -1].float().log_softmax(-1)
        said = ids[0, text.answer :, None]
        total -= float(log_p.gather(-1, said).sum())
        count += len(said)
    return math.exp(total / max(count, 1))


def write_layerskip(
    llm: LLM, learner: LayerSkipLearner, out: Path, unseen: Sequence[TrainingText]
) -> tuple[Path, Path, dict[str, Any]]:
    """Write the fine-tuned model to the folder `out` / layerskip, and a profile of it that drafts by an early exit.

    What runs while drafting does so in full, or in 8 bits where that took less here. Also tells the perplexity of
    held-out answers before and after.
    """
    told = {"perplexity": [perplexity(of, unseen) for of in (llm.model, learner.student)], "exit": learner.exit}
    folder, profile = out / "layerskip", out / "layerskip.yaml"
    write_model(learner.student, llm.tokenizer, folder)
    runtime = Runtime(learner.student)
    ways: tuple[Literal["full", "int8"], ...] = ("full", "int8")
    paths = [early_exit(runtime.layers, learner.exit, way) for way in ways]
    path = min(paths, key=lambda of: forward_seconds(runtime, CONTEXT, repeats=REPEATS, path=of))
    draft = LayerSkipSpec.of(path, ControllerSpec(name="rate"), proposers=[ProposerSpec()])
    identity = runtime.skeleton.identity.model_copy(update={"name": folder.name})
    write_profile(Profile(model=identity, draft=draft), profile)
    return folder, profile, told


def early_exit(layers: int, kept: int, way: Literal["full", "int8"]) -> DraftPath:
    """Of a model with `layers` layers, the path that leaves after `kept` of them."""
    run: list[Mode] = [way] * kept
    bypassed: list[Mode] = ["skip"] * (layers - kept)
    return DraftPath.of([*run, *bypassed, *run, *bypassed], head=way)
