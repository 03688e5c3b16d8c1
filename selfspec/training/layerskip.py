"""Fine-tuning of a model for early exit with the recipe of LayerSkip (Elhoushi et al. 2404.16710).

It changes the model: the output text is that of the fine-tuned model, not that of the original one.
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
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.training.distill import CONTEXT, REPEATS, DistillLearner, drafted_layers, write_model
from selfspec.training.options import Loss
from selfspec.training.texts import TrainingText
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, Mode

DROPPED = 0.1  # layer dropout of the last layer
SCALE = 0.2  # scale of an early exit's weight in the loss
EVERY = 8  # each training step trains one in this many exits


def dropped(layers: int, most: float = DROPPED) -> list[float]:
    """Return each layer's dropout probability: 0 for the first, rising exponentially to `most` for the last."""
    return [most * (math.exp(i * math.log(2) / max(layers - 1, 1)) - 1) for i in range(layers)]


def weights(layers: int, exits: Sequence[int], drafting: int) -> list[float]:
    """Return the loss weights of a step's exits; they sum to one.

    `exits` are indices from 0 of layers after which the head is applied; `drafting` is the exit used for drafting. As
    in the paper, exit l of L layers has the weight .2 (0 + 1 + .. + l), and the last exit .2 (0 + .. + L - 2) + L - 1.
    Unlike in the paper, L - 1 is added for the exit for drafting, too. Then the weights are divided by their sum.
    """
    last = layers - 1
    raw = [SCALE * sum(range(min(layer + 1, last))) + last * (layer in (drafting, last)) for layer in exits]
    total = sum(raw)
    return [weight / total for weight in raw] if total > 0 else [1 / len(raw)] * len(raw)


class LayerSkipLearner(DistillLearner):
    """Fine-tunes a copy of the model so that its head can also read the hidden states of early layers.

    In each training step, layer dropout skips layers for some of the texts, later layers more often. The loss is a
    weighted sum over the last layer, the exit for drafting, and one in eight exits in rotation, of the divergence from
    the original model's distributions (the paper uses the next token as the target). `layers`: the number of layers
    before the exit for drafting (None: a fifth of the model's layers).
    """

    rate = 1e-3

    def __init__(self, runtime: Runtime, *, layers: int | None, loss: Loss, seed: int) -> None:
        super().__init__(runtime, student=None, layers=runtime.layers, loss=loss, seed=seed)
        self.exit = drafted_layers(runtime, layers)
        self._chances = dropped(runtime.layers)
        self.steps = 0

    def loss(self, windows: Sequence[TrainingText]) -> Tensor:
        """Return the weighted loss of this step's exits, over windows of one length."""
        ids, log_p = self._targets(windows)
        last = self.runtime.layers - 1
        exits = sorted({*range(self.steps % EVERY, last, EVERY), self.exit - 1, last})
        self.steps += 1
        streams = self._streams(ids, self._chances)
        total = torch.zeros((), device=ids.device)
        for layer, weight in zip(exits, weights(last + 1, exits, self.exit - 1), strict=True):
            if weight > 0:
                log_q = self._logits(streams[layer]).log_softmax(-1)
                total = total + weight * self._loss(log_p, log_q).sum(-1).mean()
        return total

    def _streams(self, ids: Tensor, chances: Sequence[float] | None = None) -> list[Tensor]:
        """Return each layer's output `[B, n, D]`; `chances`: each layer's dropout probability (None: no dropout)."""
        left: list[Tensor] = []

        def after(number: int) -> Any:
            def hook(_layer: nn.Module, inputs: tuple[Any, ...], out: Any) -> Any:
                stream: Tensor = out[0] if isinstance(out, tuple) else out
                if chances is not None and chances[number] > 0:
                    around = torch.rand(len(ids), 1, 1, device=stream.device) < chances[number]
                    stream = torch.where(around, inputs[0], stream)
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
        """Return for each token of the answer whether the exit and the last layer have the same most likely token."""
        streams = self._streams(text.tokens[None].to(self.runtime.device))
        span = slice(text.answer - 1, -1)
        early, last = (self._logits(streams[i][0, span]).argmax(-1) for i in (self.exit - 1, -1))
        return (early == last).cpu()


@torch.no_grad()
def perplexity(model: Any, texts: Sequence[TrainingText]) -> float:
    """Return the perplexity of the texts' answers by a `transformers` model."""
    total, count = 0.0, 0
    for text in texts:
        ids = text.tokens[None].to(model.device)
        log_p = model(ids, use_cache=False).logits[0, text.answer - 1 : -1].float().log_softmax(-1)
        targets = ids[0, text.answer :, None]
        total -= float(log_p.gather(-1, targets).sum())
        count += len(targets)
    return math.exp(total / max(count, 1))


def write_layerskip(
    llm: LLM, learner: LayerSkipLearner, out: Path, held_out_texts: Sequence[TrainingText]
) -> tuple[Path, Path, dict[str, Any]]:
    """Write the fine-tuned model to the folder `out` / layerskip, and a profile of it that drafts by early exit.

    The draft path runs in full precision, or in int8 if that is faster on this machine. Returns the folder,
    the profile's path, and a record with the perplexity of held-out answers before and after fine-tuning.
    """
    record = {
        "perplexity": [perplexity(variant, held_out_texts) for variant in (llm.model, learner.student)],
        "exit": learner.exit,
    }
    folder, profile = out / "layerskip", out / "layerskip.yaml"
    write_model(learner.student.to(learner.dtype), llm.tokenizer, folder)
    runtime = LeanRuntime(learner.student)
    ways: tuple[Literal["full", "int8"], ...] = ("full", "int8")
    paths = [early_exit(runtime.layers, learner.exit, mode) for mode in ways]
    path = min(paths, key=lambda variant: forward_seconds(runtime, CONTEXT, repeats=REPEATS, path=variant))
    draft = LayerSkipSpec.from_path(path, ControllerSpec(name="rate"), proposers=[ProposerSpec()])
    identity = runtime.skeleton.identity.model_copy(update={"name": folder.name})
    write_profile(Profile(model=identity, draft=draft), profile)
    return folder, profile, record


def early_exit(layers: int, exit_layer: int, mode: Literal["full", "int8"]) -> DraftPath:
    """Return the draft path that runs the first `exit_layer` of a model's `layers` layers, and the head, in `mode`."""
    run: list[Mode] = [mode] * exit_layer
    skipped: list[Mode] = ["skip"] * (layers - exit_layer)
    return DraftPath.from_modes([*run, *skipped, *run, *skipped], head=mode)
